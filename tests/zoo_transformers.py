"""Small random models of every architecture that `transformers` can build, with batches for them.

Nothing is downloaded and no model is changed: configurations are the defaults with small sizes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.auto import modeling_auto

from tests.zoo_configs import FEATURES, configuration, has_experts

N = 4
PAD, EOS, IMAGE, FIRST = 1, 2, 3, 4
Batch = dict[str, Tensor]
LossFn = Callable[[nn.Module, Batch], Tensor]
Subject = tuple[nn.Module, LossFn, Batch]
Builder = Callable[[], Subject]


def randomised(model: nn.Module) -> nn.Module:
    """Weights large enough that every parameter matters, and no dropout."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def made(class_name: str, config: PreTrainedConfig, **options: str) -> nn.Module:
    """The unmodified model."""
    torch.manual_seed(0)
    cls = getattr(transformers, class_name)
    if not isinstance(config, cls.config_class):
        config = next(v for v in vars(config).values() if isinstance(v, cls.config_class))
    return randomised(cls._from_config(config, **options))


# ---------------------------------------------------------------------- batches


def lengths(t: int) -> Tensor:
    """Different numbers of valid tokens, the first sample full."""
    return torch.tensor([t, max(t - 3, 2), t - 1, max(t // 2, 2)])


def text(model: nn.Module, t: int) -> Batch:
    """Right-padded token ids, every sample ending in one end-of-sequence token."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(t)
    ids = torch.randint(FIRST, 60, (N, t), generator=generator)
    mask = torch.arange(t) < lengths(t)[:, None]
    ids = ids.masked_fill(~mask, PAD)
    ids[torch.arange(N), lengths(t) - 1] = EOS
    boxes = torch.randint(0, 60, (N, t, 4), generator=generator).sort(2).values[..., [0, 2, 1, 3]]
    return {"input_ids": ids, "attention_mask": mask.long(), "bbox": boxes}


def pair(model: nn.Module, t: int) -> Batch:
    """Source and target of a sequence-to-sequence model."""
    target = text(model, t + 1)
    return text(model, t) | {
        "decoder_input_ids": target["input_ids"],
        "decoder_attention_mask": target["attention_mask"],
    }


def choices(model: nn.Module, t: int) -> Batch:
    """Two candidate texts per sample."""
    one = text(model, t)
    return {k: torch.stack([v, v.roll(1, 0)], 1) for k, v in one.items() if k != "bbox"}


def noise(*shape: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator(torch.get_default_device()).manual_seed(sum(shape))
    )


def size_of(model: nn.Module, key: str, otherwise: int) -> int:
    """A size from the configuration, or from a part of it."""
    config: Any = model.config
    for part in (config, *(v for v in vars(config).values() if isinstance(v, PreTrainedConfig))):
        value = getattr(part, key, None)
        value = value[0] if isinstance(value, (list, tuple)) else value
        if isinstance(value, int):
            return value
    return otherwise


def image(model: nn.Module, t: int) -> Batch:
    side = size_of(model, "image_size", 32)
    if "pixel_values" not in inspect.signature(model.forward).parameters:
        return text(model, t)
    return {"pixel_values": noise(N, size_of(model, "num_channels", 3), side, side)}


def video(model: nn.Module, t: int) -> Batch:
    side, frames = size_of(model, "image_size", 32), size_of(model, "num_frames", 4)
    clip = noise(N, frames, size_of(model, "num_channels", 3), side, side)
    return {"pixel_values": clip, "pixel_values_videos": clip}


def audio(model: nn.Module, t: int) -> Batch:
    """A waveform, or features over time."""
    width = next((w for key in FEATURES if (w := size_of(model, key, 0))), 16)
    if model.main_input_name == "input_values":
        spectrum = model.config.model_type == "audio-spectrogram-transformer"
        wave = noise(N, model.config.max_length, width) if spectrum else noise(N, 320 * t + 400)
        return {"input_values": wave}
    frames = 2 * size_of(model, "max_source_positions", 16)
    channels_first = model.config.model_type == "whisper"
    return {"input_features": noise(N, width, frames) if channels_first else noise(N, 24, width)}


def long_audio(model: nn.Module, t: int) -> Batch:
    return audio(model, 4 * t)


def speech(model: nn.Module, t: int) -> Batch:
    """Sound in, text out."""
    return audio(model, t) | {"decoder_input_ids": text(model, t)["input_ids"]}


def mixture(model: nn.Module, t: int) -> Batch:
    """Whatever of text, images, sound and series a model takes."""
    steps = size_of(model, "context_length", 8)
    series = noise(N, steps, size_of(model, "num_input_channels", 1))
    return pair(model, t) | image(model, t) | audio(model, t) | {"past_values": series}


def picture_and_text(model: nn.Module, t: int) -> Batch:
    """Text that starts with as many image tokens as an image has features."""
    count = (size_of(model, "image_size", 32) // size_of(model, "patch_size", 8)) ** 2
    found = with_picture(model, t, count)
    try:
        with torch.no_grad():
            outputs(model, {"inputs": found})
    except ValueError as error:
        numbers = re.search(r"tokens: (\d+), features:? (\d+)", str(error))
        if numbers is None:
            raise
        found = with_picture(model, t, count * int(numbers[2]) // int(numbers[1]))
    return found


def with_picture(model: nn.Module, t: int, count: int) -> Batch:
    found = text(model, t)
    tokens = torch.full((N, count), IMAGE)
    found["input_ids"] = torch.cat([tokens, found["input_ids"]], 1)
    found["attention_mask"] = torch.cat([tokens // IMAGE, found["attention_mask"]], 1)
    return found | image(model, t)


# ---------------------------------------------------------------------- losses


def outputs(model: nn.Module, batch: Any) -> Any:
    """The model on those of the inputs that it takes."""
    taken = inspect.signature(model.forward).parameters
    return model(**{k: v for k, v in batch["inputs"].items() if k in taken})


def primary(output: Any) -> Tensor:
    """Logits, or the first floating tensor there is."""
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    return next(v for v in output.values() if isinstance(v, Tensor) and v.is_floating_point())


def dense(model: nn.Module, batch: Any) -> Tensor:
    """The mean square of everything a sample produces."""
    return primary(outputs(model, batch)).flatten(1).square().mean(1)


def token_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy over the valid tokens of each sample."""
    each = nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten() % logits.shape[-1], reduction="none"
    )
    mask = mask.to(logits.dtype)
    return (each.view(labels.shape) * mask).sum(1) / mask.sum(1)


def each_token(model: nn.Module, batch: Any) -> Tensor:
    logits = primary(outputs(model, batch))
    if logits.dim() != 3 or logits.shape[1] != batch["labels"].shape[1]:
        return logits.flatten(1).square().mean(1)
    return token_loss(logits, batch["labels"], batch["mask"])


def next_token(model: nn.Module, batch: Any) -> Tensor:
    logits = primary(outputs(model, batch))
    if logits.dim() != 3 or logits.shape[1] != batch["labels"].shape[1]:
        return logits.flatten(1).square().mean(1)
    return token_loss(logits[:, :-1], batch["labels"][:, 1:], batch["mask"][:, 1:])


def one_label(model: nn.Module, batch: Any) -> Tensor:
    logits = primary(outputs(model, batch))
    labels = batch["labels"].flatten(1)[:, 0] % logits.shape[-1]
    return nn.functional.cross_entropy(logits, labels, reduction="none")


def span(model: nn.Module, batch: Any) -> Tensor:
    """Start and end of an answer; one logit of each per token."""
    output = outputs(model, batch)
    if getattr(output, "start_logits", None) is None:
        return primary(output).flatten(1).square().mean(1)
    index = batch["labels"][:, :1] % 2
    start = output.start_logits.log_softmax(-1).gather(1, index).squeeze(1)
    end = output.end_logits.log_softmax(-1).gather(1, index).squeeze(1)
    return -(start + end) / 2


# ---------------------------------------------------------------------- cases

FAMILIES: dict[str, tuple[str, Callable[..., Batch], LossFn, dict[str, str]]] = {
    "causal": ("CAUSAL_LM", text, next_token, {}),
    "masked": ("MASKED_LM", text, each_token, {}),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM", pair, each_token, {}),
    "classify": ("SEQUENCE_CLASSIFICATION", text, one_label, {"attn_implementation": "eager"}),
    "tokens": ("TOKEN_CLASSIFICATION", text, each_token, {}),
    "questions": ("QUESTION_ANSWERING", text, span, {"attn_implementation": "eager"}),
    "choices": ("MULTIPLE_CHOICE", choices, one_label, {}),
    "images": ("IMAGE_CLASSIFICATION", image, one_label, {}),
    "segmentation": ("SEMANTIC_SEGMENTATION", image, dense, {}),
    "detection": ("OBJECT_DETECTION", image, dense, {}),
    "depth": ("DEPTH_ESTIMATION", image, dense, {}),
    "video": ("VIDEO_CLASSIFICATION", video, one_label, {}),
    "audio": ("AUDIO_CLASSIFICATION", audio, one_label, {}),
    "frames": ("AUDIO_FRAME_CLASSIFICATION", audio, dense, {}),
    "xvector": ("AUDIO_XVECTOR", long_audio, dense, {}),
    "ctc": ("CTC", audio, dense, {}),
    "speech": ("SPEECH_SEQ_2_SEQ", speech, each_token, {}),
    "towers": ("", mixture, dense, {}),
    "pictures": ("IMAGE_TEXT_TO_TEXT", picture_and_text, dense, {}),
    "experts": ("CAUSAL_LM", text, next_token, {"experts_implementation": "eager"}),
}


# Families of which only some architectures take these inputs.
SELECTED = {
    "towers": """aimv2 aimv2_vision_model altclip blip chinese_clip chinese_clip_vision_model clip
    clip_text_model clip_vision_model clipseg diffusion_gemma dinov3_convnext dinov3_vit dpr
    embedding_gemma2_text evolla flava groupvit higgs_audio_v2 idefics3_vision internvl_vision
    kosmos-2.5 lasr_encoder maskformer-swin metaclip_2 mlcd molmo2_text muse_glimmer_text
    nemotron3_5_asr nemotron3_5_transcribe_asr_audio nemotron3_diarization_audio
    nemotron_asr_streaming nemotron_asr_streaming_encoder owlv2 owlvit parakeet_encoder
    parakeet_rnnt parakeet_tdt patchtst patchtsmixer qianfan_ocr_vision qwen3_vl_moe_text
    qwen3_vl_text reformer sam3_lite_text_text_model sam3_vit_model sam_hq_vision_model
    sam_vision_model siglip siglip_vision_model smolvlm_vision tipsv2 tipsv2_text_model udop vilt
    vision-text-dual-encoder visual_bert vitdet""",
    "pictures": """aya_vision blip blip-2 deepseek_vl evolla florence2 gemma3 git got_ocr2 internvl
    kosmos-2.5 llava mistral4 ovis2 paligemma qianfan_ocr step3p7 t5gemma2 video_llava vipllava""",
}


def build(family: str, kind: str, class_name: str, t: int) -> Subject:
    """A model of this family with a batch and a loss for it."""
    _, inputs, loss_fn, options = FAMILIES[family]
    config = configuration(kind)
    model = made(class_name, config, **options)
    batch = inputs(model, t)
    ids = batch.get("decoder_input_ids", batch.get("input_ids", torch.arange(N)[:, None]))
    mask = batch.get("decoder_attention_mask", batch.get("attention_mask", torch.ones_like(ids)))
    return model, loss_fn, {"inputs": batch, "labels": ids, "mask": mask}


def kinds(family: str) -> dict[str, str]:
    """The architectures of a family and the class of each."""
    mapping = FAMILIES[family][0]
    prefix = f"MODEL_FOR_{mapping}" if mapping else "MODEL"
    names = getattr(modeling_auto, f"{prefix}_MAPPING_NAMES")
    found = {k: v if isinstance(v, str) else v[0] for k, v in names.items()}
    if family == "experts":
        found = {k: v for k, v in found.items() if has_experts(k)}
    if family in SELECTED:
        found = {k: found[k] for k in SELECTED[family].split() if k in found}
    return found


def cases() -> Iterator[tuple[str, str, Builder]]:
    """Every architecture of every family; every third has as many tokens as samples."""
    for family in FAMILIES:
        seen: set[str] = set()
        for kind, name in kinds(family).items():
            if name not in seen:
                t = N if len(seen) % 3 == 0 else 2 * N
                seen.add(name)
                yield family, kind, lambda f=family, k=kind, c=name, t=t: build(f, k, c, t)
