"""More sequence models: linear and routed attention, memories, state spaces, reversible layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Fn

from .attention import LINES, SMALL, TEXT, added, tokens, vectors
from .subject import N, Subject, Table, squares

TABLE = Table("memories and reversible layers")
add = added(TABLE)
LONG = {"depth": 1, "max_seq_len": 16, **TEXT, **SMALL}

add("linear-attention-transformer", "linear_attention_transformer", "LinearAttentionTransformerLM",
    tokens(16), **LONG)  # fmt: skip
add("linear-attention-transformer", "linear_attention_transformer", "LinearAttentionTransformerLM",
    tokens(16), causal=True, blindspot_size=1, reversible=True, called="reversible",
    **LONG)  # fmt: skip
add("product-key-memory", "product_key_memory", "PKM", LINES, dim=8, heads=2, num_keys=4, topk=2,
    dim_head=4)  # fmt: skip
add("routing-transformer", "routing_transformer", "RoutingTransformerLM", tokens(16),
    window_size=8, causal=True, n_local_attn_heads=2, reversible=True,
    called="local attention, reversible", **LONG)  # fmt: skip
add("h-transformer-1d", "h_transformer_1d", "HTransformer1D", tokens(16), block_size=4,
    **LONG)  # fmt: skip
add("h-transformer-1d", "h_transformer_1d", "HTransformer1D", tokens(16), block_size=4, causal=True,
    reversible=True, called="causal, reversible", **LONG)  # fmt: skip
add("perceiver-ar-pytorch", "perceiver_ar_pytorch", "PerceiverAR", tokens(16),
    cross_attn_seq_len=8, depth=1, max_seq_len=16, heads=2, dim_head=64, **TEXT)  # fmt: skip
add("feedback-transformer-pytorch", "feedback_transformer_pytorch", "FeedbackTransformer",
    tokens(8), depth=2, mem_len=4, seq_len=2, **TEXT, **SMALL)  # fmt: skip
add("charformer-pytorch", "charformer_pytorch", "GBST", tokens(12), max_block_size=3,
    downsample_factor=3, **TEXT)  # fmt: skip
add("native-sparse-attention-pytorch", "native_sparse_attention_pytorch", "SparseAttention",
    vectors((16, 8)), dim=8, sliding_window_size=4, compress_block_size=4,
    compress_block_sliding_stride=2, selection_block_size=4, num_selected_blocks=2, causal=True,
    **SMALL)  # fmt: skip
add("mixture-of-attention", "mixture_of_attention", "MixtureOfAttention", vectors((12, 8)), dim=8,
    num_routed_queries=4, num_routed_key_values=4, num_experts=2, use_triton=False,
    flash_attn=False, **SMALL)  # fmt: skip
add("siren-pytorch", "siren_pytorch", "SirenNet", vectors((3,)), dim_in=3, dim_hidden=8, dim_out=2,
    num_layers=2, w0_initial=3.0)  # fmt: skip


# ---------------------------------------------------------------------- layers of their own


@TABLE.package("hyper-connections")("two streams")
def streams() -> Subject:
    from hyper_connections import get_init_and_expand_reduce_stream_functions

    init, expand, reduce = get_init_and_expand_reduce_stream_functions(2)
    first = init(dim=8, branch=nn.Linear(8, 8), layer_index=0)
    second = init(dim=8, branch=nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), layer_index=1)

    def f(s: Any, x: Tensor) -> Tensor:
        return reduce(s.second(s.first(expand(x))))

    return Subject(Fn(f, first=first, second=second), squares, torch.randn(N, 5, 8))


@TABLE.package("memcnn")("additive coupling, run again in backward", True)
@TABLE.package("memcnn")("additive coupling, inverted in backward", False)
def invertible(kept: bool) -> Subject:
    import memcnn

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.conv(x))

    inner = memcnn.AdditiveCoupling(Half(), Half())
    middle = memcnn.InvertibleModuleWrapper(inner, keep_input=kept, num_bwd_passes=100)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), middle, nn.Flatten(), nn.Linear(64, 3))
    return Subject(model, squares, torch.randn(N, 3, 4, 4))


@TABLE.package("pytorch-revgrad")("a reversed gradient")
def reversed_gradient() -> Subject:
    from pytorch_revgrad import RevGrad

    model = nn.Sequential(nn.Linear(5, 8), RevGrad(alpha=0.5), nn.Linear(8, 3))
    return Subject(model, squares, torch.randn(N, 5))


@TABLE.package("xlstm")("mLSTM", False)
@TABLE.package("xlstm")("mLSTM and sLSTM", True)
def xlstm(both: bool) -> Subject:
    import xlstm as x
    from xlstm.blocks.mlstm.layer import mLSTMLayerConfig
    from xlstm.blocks.slstm.layer import sLSTMLayerConfig

    mlstm = x.mLSTMBlockConfig(
        mlstm=mLSTMLayerConfig(conv1d_kernel_size=2, qkv_proj_blocksize=2, num_heads=2)
    )
    slstm = x.sLSTMBlockConfig(
        slstm=sLSTMLayerConfig(backend="vanilla", num_heads=2, conv1d_kernel_size=2),
        feedforward=x.FeedForwardConfig(proj_factor=1.3, act_fn="gelu"),
    )
    config = x.xLSTMBlockStackConfig(
        mlstm_block=mlstm, slstm_block=slstm if both else None, context_length=6, num_blocks=2,
        embedding_dim=8, slstm_at=[1] if both else [],
    )  # fmt: skip
    return Subject(x.xLSTMBlockStack(config), squares, torch.randn(N, 6, 8))


@TABLE.package("torchscale")("retentive network")
def retentive() -> Subject:
    from torchscale.architecture.config import RetNetConfig
    from torchscale.architecture.retnet import RetNetDecoder

    config = RetNetConfig(
        vocab_size=16, decoder_embed_dim=8, decoder_value_embed_dim=16, decoder_ffn_embed_dim=16,
        decoder_retention_heads=2, decoder_layers=1, dropout=0.0,
    )  # fmt: skip
    model = RetNetDecoder(config, embed_tokens=nn.Embedding(16, 8))
    return Subject(Fn(lambda s, x: s.net(x)[0], net=model), squares, torch.randint(0, 16, (N, 6)))


@TABLE.package("torchscale")("encoder, sub-layer norm")
def encoder() -> Subject:
    from torchscale.architecture.config import EncoderConfig
    from torchscale.architecture.encoder import Encoder

    config = EncoderConfig(
        vocab_size=16, encoder_embed_dim=8, encoder_attention_heads=2, encoder_ffn_embed_dim=16,
        encoder_layers=2, rel_pos_buckets=4, max_rel_pos=8, subln=True,
    )  # fmt: skip
    net = Encoder(config)
    model = Fn(
        lambda s, x: s.net(None, token_embeddings=s.l(x))["encoder_out"], net=net, l=nn.Linear(6, 8)
    )
    return Subject(model, squares, torch.randn(N, 5, 6))


@TABLE.package("litgpt")("GPT, grouped queries", "LayerNorm", "GptNeoxMLP")
@TABLE.package("litgpt")("Llama", "RMSNorm", "LLaMAMLP")
@TABLE.package("litgpt")("experts", "RMSNorm", "LLaMAMoE")
def litgpt(norm: str, mlp: str) -> Subject:
    from litgpt import GPT, Config

    more = {"n_expert": 3, "n_expert_per_token": 2} if mlp == "LLaMAMoE" else {}
    config = Config(
        block_size=12, n_layer=2, n_embd=8, n_head=4, n_query_groups=2, vocab_size=16,
        padding_multiple=16, norm_class_name=norm, mlp_class_name=mlp, intermediate_size=12,
        rotary_percentage=1.0, **more,
    )  # fmt: skip
    return Subject(GPT(config), squares, torch.randint(0, 16, (N, 9)))
