"""Layers and losses: sparse softmax, structured prediction, images and their likeness, filters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Fn

from .subject import N, Subject, Table, squares

TABLE = Table("layers and losses")
entmax = TABLE.package("entmax")
struct = TABLE.package("torch-struct")
kornia = TABLE.package("kornia")
piq = TABLE.package("piq")
likeness = TABLE.package("pytorch-msssim")
tcn = TABLE.package("pytorch-tcn")
julius = TABLE.package("julius")


def between(middle: Callable[[Tensor], Tensor]) -> Subject:
    """Two layers with a function between them."""
    model = Fn(lambda s, x: s.b(middle(s.a(x))), a=nn.Linear(5, 6), b=nn.Linear(6, 3))
    return Subject(model, squares, torch.randn(N, 5))


@entmax("sparsemax", "sparsemax")
@entmax("entmax15", "entmax15")
@entmax("entmax_bisect", "entmax_bisect")
@entmax("normmax_bisect", "normmax_bisect", alpha=2.0)
@entmax("budget_bisect", "budget_bisect", budget=2)
def sparse(name: str, **arguments: Any) -> Subject:
    import entmax

    return between(lambda h: getattr(entmax, name)(h, dim=-1, **arguments))


@entmax("Entmax15Loss", "Entmax15Loss")
@entmax("SparsemaxLoss", "SparsemaxLoss")
def sparse_loss(name: str) -> Subject:
    import entmax

    loss = getattr(entmax, name)(reduction="none")
    batch = torch.randn(N, 5), torch.randint(0, 6, (N,))
    return Subject(nn.Linear(5, 6), lambda model, b: loss(model(b[0]), b[1]), batch)


@struct("linear chain", "LinearChainCRF", (4, 3, 3))
@struct("dependency trees", "DependencyCRF", (5, 5))
def structured(name: str, shape: tuple[int, ...]) -> Subject:
    import torch_struct

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return getattr(torch_struct, name)(model(x).view(len(x), *shape)).partition

    return Subject(nn.Linear(5, int(torch.tensor(shape).prod())), loss, torch.randn(N, 5))


def image(f: Callable[..., Tensor], **parts: nn.Module) -> Subject:
    model = Fn(f, conv=nn.Conv2d(3, 4, 3), **parts)
    return Subject(model, squares, torch.randn(N, 3, 8, 8))


@kornia("affine warp by a network")
def warped() -> Subject:
    from kornia.geometry.transform import warp_affine

    def f(s: Any, x: Tensor) -> Tensor:
        turn = s.find(x.flatten(1)).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=x.dtype)
        return s.conv(warp_affine(x, turn, (8, 8)))

    return image(f, find=nn.Linear(192, 6))


@kornia("rotation by a network")
def rotated() -> Subject:
    from kornia.geometry.transform import rotate

    return image(lambda s, x: s.conv(rotate(x, s.find(x.flatten(1))[:, 0])), find=nn.Linear(192, 1))


@kornia("where a map is largest, softly")
def softly() -> Subject:
    from kornia.geometry.subpix import spatial_soft_argmax2d

    return image(lambda s, x: spatial_soft_argmax2d(s.conv(x)))


@kornia("quaternions")
def quaternions() -> Subject:
    from kornia.geometry.conversions import normalize_quaternion, quaternion_to_rotation_matrix

    return between(lambda h: quaternion_to_rotation_matrix(normalize_quaternion(h[:, :4]))[:, :2]
                   .flatten(1))  # fmt: skip


def compared(measure: Callable[[Tensor, Tensor], Tensor], size: int) -> Subject:
    """A convolution whose result is compared with another image."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return measure(model(batch[0]).sigmoid(), batch[1]).flatten(1).mean(1)

    batch = torch.rand(N, 3, size, size), torch.rand(N, 3, size, size)
    return Subject(nn.Conv2d(3, 3, 3, padding=1), loss, batch)


@kornia("structural likeness")
def kornia_ssim() -> Subject:
    from kornia.losses import ssim_loss

    return compared(lambda x, y: ssim_loss(x, y, 5, reduction="none"), 12)


@piq("gmsd", "gmsd")
@piq("vif_p", "vif_p")
@piq("fsim", "fsim")
@piq("haarpsi", "haarpsi")
@piq("mdsi", "mdsi")
@piq("srsim, scaled over the batch", "srsim")
@piq("dss", "dss")
@piq("ssim", "ssim")
def quality(name: str) -> Subject:
    import piq

    measure = getattr(piq, name)
    return compared(lambda x, y: measure(x, y, reduction="none")[:, None], 48)


@likeness("ssim")
def ssim() -> Subject:
    from pytorch_msssim import ssim

    return compared(
        lambda x, y: ssim(x, y, data_range=1, size_average=False, win_size=5)[:, None], 24
    )


@tcn("causal", causal=True)
@tcn("layer norm and skips", causal=False, use_norm="layer_norm", use_skip_connections=True)
def convolutions(**arguments: Any) -> Subject:
    from pytorch_tcn import TCN

    return Subject(TCN(3, [4, 4], kernel_size=3, **arguments), squares, torch.randn(N, 3, 12))


@julius("resampling and a filter")
def resampled() -> Subject:
    from julius import lowpass_filter, resample_frac

    model = Fn(lambda s, x: lowpass_filter(resample_frac(s.a(x), 3, 2), 0.2), a=nn.Linear(32, 32))
    return Subject(model, squares, torch.randn(N, 32))
