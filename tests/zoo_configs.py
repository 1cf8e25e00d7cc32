"""Sizes that make any configuration small, and what single architectures need besides."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

_SIZES = """
64 vocab_size max_position_embeddings n_positions n_ctx max_seq_len max_source_positions
64 max_target_positions pronunciation_vocab_size shape_vocab_size vocab_size_per_layer_input
64 entity_vocab_size max_encoder_position_embeddings max_decoder_position_embeddings mamba_d_ssm
64 ngram_vocab_size_base num_hash_buckets max_2d_position_embeddings src_vocab_size tgt_vocab_size
32 hidden_size d_model n_embd dim emb_dim embedding_size word_embed_proj_dim image_size hidden_dim
32 hidden_size_global projection_dim output_dim attention_hidden_size encoder_hidden_size
32 pooler_hidden_size decoder_hidden_size out_hidden_size backbone_hidden_size d_latents
2 num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers
2 num_encoder_layers depth encoder_depth num_layers_per_stack num_self_attends_per_block
2 num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
2 attention_heads swa_num_attention_heads num_self_attention_heads num_cross_attention_heads
2 num_encoder_attention_heads num_decoder_attention_heads index_n_heads linear_num_heads
1 num_key_value_heads kv_n_heads num_kv_heads swa_num_key_value_heads first_k_dense_replace
1 num_dense_layers decoder_sparse_step encoder_sparse_step prefix_dense_sliding_window_pattern
48 intermediate_size encoder_ffn_dim decoder_ffn_dim d_ff ffn_dim n_inner d_inner dff dim_ff
48 ffn_hidden_size mlp_dim intermediate_size_mlp block_ff_dim
16 mamba_head_dim mamba_d_head
16 head_dim d_kv attention_head_dim kv_channels d_head dim_head swa_head_dim global_head_dim
16 linear_head_dim index_head_dim embed_dim aspp_out_channels
4 num_experts num_local_experts n_routed_experts moe_num_experts num_latents num_random_blocks
2 num_experts_per_tok moe_topk moe_k num_experts_per_token top_k_experts moe_top_k
16 moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_size
16 kv_lora_rank q_lora_rank o_lora_rank qk_nope_head_dim v_head_dim hidden_size_per_layer_input
16 pronunciation_embed_dim shape_embed_dim router_hidden_size moe_shared_expert_intermediate_size
16 entity_emb_size input_embedding_size output_embedding_size expert_ffn_hidden_size
16 groups_width stem_out_channels class_expand classifier_proj_size downsample_hidden_size
16 ple_embed_dim hc_lowrank d_rel num_mel_bins state_size ssm_state_size mamba_d_state
8 sliding_window attention_window local_attention sliding_window_size qk_rope_head_dim rotary_dim
8 laurel_rank patch_size linear_key_head_dim linear_value_head_dim index_topk attention_chunk_size
8 lsh_attn_chunk_length local_attn_chunk_length num_conv_pos_embeddings intra_bottleneck_size
8 mamba_dt_rank time_step_rank max_length
2 linear_num_key_heads linear_num_value_heads num_codebooks n_group num_expert_group
4 mamba_n_heads mamba_num_heads n_mamba_heads attention_head_size zero_expert_num
4 chunk_size mamba_chunk_size window_size
1 pad_token_id mamba_ngroups topk_group mamba_n_groups n_groups
0 bos_token_id
2 eos_token_id decoder_start_token_id forced_eos_token_id
"""
SIZES: dict[str, int] = {
    word: int(line.split()[0]) for line in _SIZES.strip().splitlines() for word in line.split()[1:]
}
SEQUENCES: dict[str, tuple[int, ...]] = {
    "depths": (2,),
    "depth": (1,),
    "hidden_sizes": (16, 32),
    "embed_dims": (16, 32),
    "embed_dim": (16, 32),
    "num_attention_heads": (1, 2),
    "num_heads": (1, 2),
    "conv_dim": (16,),
    "tdnn_dim": (16,),
    "neck_hidden_sizes": (8, 16),
    "base_attn_unit_dims": (16, 32),
    "n_attn_blocks": (1,),
    "stage_in_channels": (16,),
    "stage_mid_channels": (8,),
    "stage_out_channels": (16,),
    "stage_num_blocks": (1,),
    "stage_numb_of_layers": (2,),
    "num_block_repeats": (1,),
    "mlp_ratios": (2,),
}
FIXED: dict[str, Any] = {
    "use_cache": False,
    "apply_spec_augment": False,
    "router_jitter_noise": 0.0,
    "num_labels": 3,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
    "num_kv_shared_layers": 0,
    "image_token_id": 3,
    "image_token_index": 3,
}
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")
FEATURES = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel")
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_WINDOWS = {"patch_size": 4, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4}
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
_RESNET = {
    "model_type": "resnet",
    "embedding_size": 16,
    "hidden_sizes": [16, 16, 32, 32],
    "depths": [1, 1, 1, 1],
    "out_features": ["stage4"],
}
_DETECTOR = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": _RESNET,
    "num_queries": 5,
}
_FOUR = {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]}
OVERRIDES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 24, "time_stride": 4, "frequency_stride": 4},
    "beit": _FOUR,
    "bit": {"num_groups": 4},
    "blip-2": {"num_query_tokens": 16},
    "blt": {"encoder_hash_byte_group_vocab": 64, "encoder_hash_byte_group_size": [3, 4]},
    "codegen": {"n_head": 4, "rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}
    },
    "conditional_detr": _DETECTOR,
    "convnext": {"patch_size": 4, "image_size": 64},
    "convnextv2": {"patch_size": 4, "image_size": 64},
    "cvt": {"depth": [1, 2, 3]},
    "data2vec-vision": _FOUR,
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "deformable_detr": _DETECTOR,
    "detr": _DETECTOR,
    "diffllama": {"num_key_value_heads": 2},
    "donut-swin": _WINDOWS,
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    "esmc": {"num_key_value_heads": 2},
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma3n_text": {"intermediate_size": 48},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hgnet_v2": {"stem_channels": [3, 16, 16], "hidden_sizes": [16] * 4},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "levit": {"patch_size": 16, "image_size": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "markuplm": {"xpath_unit_hidden_size": 4, "max_depth": 5},
    "mobilenet_v1": {"depth_multiplier": 0.25},
    "mobilenet_v2": {"depth_multiplier": 0.25},
    "mobilevit": {"patch_size": 2, "image_size": 64},
    "mobilevitv2": {"patch_size": 2, "image_size": 64, "width_multiplier": 0.25},
    "qwen4_exp": {"text_config": _INDEXER},
    "qwen4_exp_text": _INDEXER,
    "reformer": {
        "axial_pos_embds": False,
        "feed_forward_size": 48,
        "attn_layers": ["local", "lsh"],
        "num_buckets": 2,
        "hash_seed": 0,
        "lsh_attn_chunk_length": 4,
        "local_attn_chunk_length": 4,
    },
    "swin": _WINDOWS,
    "swinv2": _WINDOWS | {"pretrained_window_sizes": [0, 0]},
    "t5": {"decoder_start_token_id": 0},
    "table-transformer": _DETECTOR,
    "t5gemma2": {"encoder": {"mm_tokens_per_image": 4}},
    "textnet": {"image_size": 64},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "vjepa2": {"pred_hidden_size": 32, "pred_num_attention_heads": 2, "pred_num_hidden_layers": 2},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "attention_hidden_size": 64,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 32,
    },
    "zaya": {"num_experts_per_tok": 1},
}


def shrunk(default: PreTrainedConfig) -> dict[str, Any]:
    """Arguments for a small configuration like this one."""
    found: dict[str, Any] = {}
    for key, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            found[key] = {"model_type": value.model_type, **shrunk(value)}
        elif key in FIXED:
            found[key] = FIXED[key]
        elif key in SIZES and not isinstance(value, (list, tuple, bool)):
            found[key] = SIZES[key]
        elif key in SEQUENCES and isinstance(value, (list, tuple)):
            found[key] = [SEQUENCES[key][i % len(SEQUENCES[key])] for i in range(len(value))]
        elif "drop" in key and isinstance(value, float):
            found[key] = 0.0
        elif "drop" in key and isinstance(value, (list, tuple)) and 0.0 in value:
            found[key] = [0.0] * len(value)
    found.update(kinds_of_layers(default, found))
    if "kv_lora_rank" in found:  # latent attention: as many key heads as heads
        found.pop("head_dim", None)
        found["num_key_value_heads"] = 2
    return found


def kinds_of_layers(default: PreTrainedConfig, found: dict[str, Any]) -> dict[str, Any]:
    """A layer of each kind the architecture alternates between."""
    kinds = {
        key: list(dict.fromkeys(value))
        for key in LISTS
        if isinstance(value := vars(default).get(key), list)
    }
    if not kinds:
        return {}
    count = max(2, *map(len, kinds.values()))
    depth = {key: count for key in ("num_hidden_layers", "num_layers") if key in found}
    return {key: [k[i % len(k)] for i in range(count)] for key, k in kinds.items()} | depth


def merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """``base`` with ``extra`` in it, nested dictionaries entered."""
    result = dict(base)
    for key, value in extra.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result


def configuration(kind: str) -> PreTrainedConfig:
    """A small configuration of an architecture."""
    cls = CONFIG_MAPPING[kind]
    return cls(**merged(shrunk(cls()), OVERRIDES.get(kind, {})))


def has_experts(kind: str) -> bool:
    """Whether the architecture routes tokens to experts."""
    return not EXPERTS.isdisjoint(CONFIG_MAPPING[kind].__dataclass_fields__)
