"""Networks for images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .subject import N, Subject, Table, squares

TABLE = Table("vision")
vit = TABLE.package("vit-pytorch")
efficient = TABLE.package("efficientnet_pytorch")
monai = TABLE.package("monai")
mixer = TABLE.package("mlp-mixer-pytorch")
lambdas = TABLE.package("lambda-networks")
timm = TABLE.package("timm")
smp = TABLE.package("segmentation-models-pytorch")
facenet = TABLE.package("facenet-pytorch")
brevitas = TABLE.package("brevitas")
metric = TABLE.package("pytorch-metric-learning")
unet = TABLE.package("x-unet")


def images(model: nn.Module, size: int = 16, channels: int = 3) -> Subject:
    return Subject(model, squares, torch.randn(N, channels, size, size))


SHAPE: dict[str, Any] = {
    "image_size": 16, "patch_size": 8, "num_classes": 3, "dim": 16, "depth": 2, "heads": 2,
    "mlp_dim": 16,
}  # fmt: skip


@vit("ViT", "vit.ViT", {})
@vit("SimpleViT", "simple_vit.SimpleViT", {})
@vit("DeepViT", "deepvit.DeepViT", {})
@vit("CaiT", "cait.CaiT", {"cls_depth": 1})
@vit("ViT for small data", "vit_for_small_dataset.ViT", {})
@vit("ParallelViT", "parallel_vit.ViT", {})
@vit(
    "patch merger",
    "vit_with_patch_merger.ViT",
    {"patch_merge_layer": 1, "patch_merge_num_tokens": 2},
)
@vit("SimpleViT, register tokens", "simple_vit_with_register_tokens.SimpleViT", {})
@vit("SimpleViT, query-key norm", "simple_vit_with_qk_norm.SimpleViT", {})
@vit("SimpleViT, FFT", "simple_vit_with_fft.SimpleViT", {"freq_patch_size": 8})
@vit("normalized ViT", "normalized_vit.nViT", {"dim_head": 8})
@vit("rotary ViT", "rvt.RvT", {})
@vit("learnable memory", "learnable_memory_vit.ViT", {})
def vision(path: str, more: dict[str, Any]) -> Subject:
    import importlib

    module, name = path.split(".")
    kind = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)
    return images(kind(**{**SHAPE, **more}))


HYBRIDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "CCT": ("cct", 16, {
        "img_size": 16, "embedding_dim": 16, "num_layers": 2, "num_heads": 2, "n_conv_layers": 1,
        "kernel_size": 3, "stochastic_depth_rate": 0.0, "dropout_rate": 0.0,
        "attention_dropout": 0.0,
    }),
    "CvT": ("cvt", 32, {
        "s1_emb_dim": 8, "s2_emb_dim": 8, "s3_emb_dim": 8, "s2_depth": 1, "s3_depth": 1,
        "s2_heads": 2, "s3_heads": 2, "s1_mlp_mult": 1, "s2_mlp_mult": 1, "s3_mlp_mult": 1,
    }),
    "MobileViT": ("mobile_vit", 32, {
        "image_size": (32, 32), "dims": [8, 12, 16], "channels": [8] * 11, "patch_size": (1, 1),
        "depths": (1, 1, 1),
    }),
    "MaxViT": ("max_vit", 32, {
        "dim": 8, "dim_conv_stem": 8, "depth": (1, 1), "window_size": 4, "dim_head": 4,
    }),
    "NesT": ("nest", 16, {
        "image_size": 16, "patch_size": 2, "dim": 8, "heads": 2, "num_hierarchies": 2,
        "block_repeats": (1, 1),
    }),
    "PiT": ("pit", 16, {
        "image_size": 16, "patch_size": 4, "dim": 8, "depth": (1, 1), "heads": 2, "mlp_dim": 8,
    }),
    "LeViT": ("levit", 32, {
        "image_size": 32, "stages": 2, "dim": (8, 16), "depth": 1, "heads": 2, "mlp_mult": 1,
    }),
    "RegionViT": ("regionvit", 64, {
        "dim": (8, 8, 16, 16), "depth": (1, 1, 1, 1), "window_size": 2,
    }),
    "XCiT": ("xcit", 16, {
        **SHAPE, "cls_depth": 1, "dim_head": 8, "local_patch_kernel_size": 3,
    }),
    "ScalableViT": ("scalable_vit", 16, {
        "dim": 8, "heads": (1, 1), "depth": (1, 1), "ssa_dim_key": (4, 4),
        "reduction_factor": (2, 1), "window_size": (2, None),
    }),
    "TwinsSVT": ("twins_svt", 16, {
        "s1_emb_dim": 8, "s1_global_k": 2, "s1_local_patch_size": 2, "s2_emb_dim": 8,
        "s2_global_k": 2, "s2_local_patch_size": 1, "s3_emb_dim": 8, "s3_depth": 1,
        "s3_global_k": 1, "s3_local_patch_size": 1, "s4_emb_dim": 8, "s4_global_k": 1,
        "s1_patch_size": 4, "s2_patch_size": 2, "s3_patch_size": 1, "s4_patch_size": 1,
    }),
}  # fmt: skip


def hybrid(name: str) -> Subject:
    import importlib

    module, size, shape = HYBRIDS[name]
    kind = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)
    return images(kind(**{"num_classes": 3, **shape}), size)


for _name in HYBRIDS:
    vit(_name, _name)(hybrid)


@vit("NaViT, lists of images of every size")
def navit() -> Subject:
    from vit_pytorch.na_vit import NaViT

    model = NaViT(image_size=16, patch_size=4, num_classes=3, dim=16, depth=1, heads=2, mlp_dim=16,
                  dropout=0.0, emb_dropout=0.0)  # fmt: skip
    pictures = [torch.randn(3, 4 * h, 4 * w) for h, w in ((2, 3), (4, 2), (3, 3), (1, 4))]

    def pick(rows: Any) -> Any:
        chosen = [pictures[i] for i in rows]
        return [chosen[:2], chosen[2:]] if len(chosen) > 2 else [chosen]

    return Subject(model, squares, pick(range(N)), pick=pick, options=lambda batch: {"n": N})


@efficient("EfficientNet")
def efficientnet() -> Subject:
    from efficientnet_pytorch import EfficientNet

    blocks = ["r1_k3_s11_e1_i32_o8_se0.25", "r1_k3_s22_e2_i8_o8_se0.25"]
    from efficientnet_pytorch.utils import BlockDecoder, GlobalParams

    shape = GlobalParams(
        width_coefficient=None, depth_coefficient=None, image_size=16, dropout_rate=0.0,
        num_classes=3, batch_norm_momentum=0.9, batch_norm_epsilon=1e-3, drop_connect_rate=0.0,
        depth_divisor=8, min_depth=None, include_top=True,
    )  # fmt: skip
    return images(EfficientNet(BlockDecoder.decode(blocks), shape))


@monai("UNet", "UNet")
@monai("SegResNet", "SegResNet")
@monai("UNETR", "UNETR")
@monai("SwinUNETR", "SwinUNETR")
@monai("DenseNet121 small", "DenseNet")
@monai("AttentionUnet", "AttentionUnet")
def medical(name: str) -> Subject:
    from monai.networks import nets

    made = {
        "UNet": lambda: nets.UNet(2, 1, 2, (4, 8, 8), (2, 2), norm="instance", num_res_units=1),
        "SegResNet": lambda: nets.SegResNet(2, 8, 1, 2, blocks_down=(1, 1), blocks_up=(1,)),
        "UNETR": lambda: nets.UNETR(1, 2, (32, 32), feature_size=4, hidden_size=16, mlp_dim=16,
                                    num_heads=2, spatial_dims=2),
        "SwinUNETR": lambda: nets.SwinUNETR(1, 2, feature_size=12, spatial_dims=2,
                                            depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1)),
        "DenseNet": lambda: nets.DenseNet(2, 1, 2, 8, 4, (2, 2)),
        "AttentionUnet": lambda: nets.AttentionUnet(2, 1, 2, (4, 8), (2,)),
    }[name]()  # fmt: skip
    return images(made, 64 if name == "SwinUNETR" else 32, 1)


@mixer("MLPMixer")
def mlp_mixer() -> Subject:
    from mlp_mixer_pytorch import MLPMixer

    return images(MLPMixer(image_size=16, channels=3, patch_size=8, dim=8, depth=2, num_classes=3))


@lambdas("LambdaLayer")
def lambda_layer() -> Subject:
    from lambda_networks import LambdaLayer

    return images(LambdaLayer(dim=8, dim_out=8, n=8, dim_k=4, heads=2), 8, 8)


@unet("XUnet")
def x_unet() -> Subject:
    from x_unet import XUnet

    model = XUnet(
        dim=8, nested_unet_depths=(1, 0), dim_mults=(1, 2), num_blocks_per_stage=(1, 1), channels=3,
        num_self_attn_per_stage=(0, 1), attn_heads=2, attn_dim_head=4,
    )  # fmt: skip
    return images(model)


TIMM: dict[str, dict[str, Any]] = {
    "swinv2_tiny_window8_256": {
        "img_size": 32, "patch_size": 2, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2),
        "window_size": 4,
    },
    "swin_tiny_patch4_window7_224": {
        "img_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4,
    },
    "swinv2_cr_tiny_224": {
        "img_size": 32, "embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 4,
    },
    "beit_base_patch16_224": {
        "img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2,
        "use_rel_pos_bias": True,
    },
    "convnext_atto": {"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1)},
    "vit_tiny_patch16_224": {
        "img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2,
    },
    "deit3_small_patch16_224": {
        "img_size": 32, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2,
    },
    "resnetv2_50": {"layers": (1, 1), "channels": (16, 16), "stem_chs": 8},
    "ghostnet_050": {}, "mobilenetv3_small_050": {}, "tf_efficientnetv2_b0": {},
}  # fmt: skip


def image_model(name: str) -> Subject:
    import timm

    size = 64 if name == "convnext_atto" else 32
    return images(timm.create_model(name, num_classes=3, **TIMM[name]), size)


for _name in TIMM:
    timm(_name, _name)(image_model)


@smp("Unet", "Unet")
@smp("FPN", "FPN")
@smp("DeepLabV3", "DeepLabV3")
@smp("Linknet", "Linknet")
@smp("MAnet", "MAnet")
def segmentation(name: str) -> Subject:
    import segmentation_models_pytorch

    kind = getattr(segmentation_models_pytorch, name)
    more: dict[str, Any] = {}
    if name in ("Unet", "MAnet"):
        more = {"decoder_channels": (16, 8, 8), "encoder_depth": 3}
    model = kind("timm-mobilenetv3_small_minimal_100", encoder_weights=None, classes=2, **more)
    return images(model, 64)


@facenet("Inception blocks")
def inception() -> Subject:
    from facenet_pytorch.models import inception_resnet_v1 as net

    return images(
        nn.Sequential(nn.Conv2d(3, 256, 1), net.Block35(0.17), nn.AdaptiveAvgPool2d(1)), 6
    )


@brevitas("quantised layers")
def quantised() -> Subject:
    import brevitas.nn as qnn

    model = nn.Sequential(
        qnn.QuantConv2d(3, 4, 3, weight_bit_width=4), qnn.QuantReLU(bit_width=4), nn.Flatten(),
        qnn.QuantLinear(4 * 36, 3, bias=True, weight_bit_width=4),
    )  # fmt: skip
    return images(model, 8)


@metric("triplet margin loss, over the batch")
def triplets() -> Subject:
    from pytorch_metric_learning import losses

    criterion = losses.NTXentLoss()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        found = model(x).flatten(1)
        labels = torch.arange(len(x)) // 2
        return criterion(found, labels).expand(len(x)) + 0 * found.sum(1)

    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 5))
    return Subject(model, loss, torch.randn(N, 3, 8, 8))
