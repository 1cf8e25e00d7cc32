"""Vision networks written out in plain torch, small enough for an oracle, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

N, CLASSES = 4, 5
Norm = Callable[[int], nn.Module]
Subject = tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]


def group_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def conv(i: int, o: int, kernel: int, norm: Norm, *, stride: int = 1, groups: int = 1) -> nn.Module:
    """Convolution, normalisation, activation."""
    weight = nn.Conv2d(i, o, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(weight, norm(o), nn.SiLU())


class Pooled(nn.Sequential):
    """Layers, global pooling and a classifier."""

    def __init__(self, width: int, *layers: nn.Module) -> None:
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


class Residual(nn.Module):
    """Two convolutions around a shortcut, projected where the shape changes."""

    def __init__(self, i: int, o: int, norm: Norm, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(i, o, 3, stride, 1, bias=False), norm(o), nn.ReLU(inplace=True),
            nn.Conv2d(o, o, 3, 1, 1, bias=False), norm(o),
        )  # fmt: skip
        self.shortcut = nn.Identity() if i == o else nn.Conv2d(i, o, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        out += self.shortcut(x)
        return F.relu(out, inplace=True)


def resnet(norm: Norm) -> nn.Module:
    blocks = [Residual(8, 8, norm, 1), Residual(8, 16, norm, 2), Residual(16, 16, norm, 1)]
    return Pooled(16, conv(3, 8, 7, norm, stride=2), nn.MaxPool2d(3, 2, 1), *blocks)


class Dense(nn.Module):
    """Each layer sees the concatenation of all before it."""

    def __init__(self, channels: int, growth: int, layers: int) -> None:
        super().__init__()
        sizes = [channels + k * growth for k in range(layers)]
        self.layers = nn.ModuleList(
            nn.Sequential(group_norm(c), nn.ReLU(), nn.Conv2d(c, growth, 3, padding=1))
            for c in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


def densenet() -> nn.Module:
    transition = nn.Sequential(nn.Conv2d(20, 8, 1), nn.AvgPool2d(2))
    return Pooled(20, nn.Conv2d(3, 8, 3, padding=1), Dense(8, 4, 3), transition, Dense(8, 4, 3))


class Inverted(nn.Module):
    """Expansion, depthwise convolution, optional squeeze and excitation, projection."""

    def __init__(self, i: int, o: int, norm: Norm, stride: int, squeeze: bool) -> None:
        super().__init__()
        wide = 2 * i
        self.expand = conv(i, wide, 1, norm)
        self.depthwise = conv(wide, wide, 3, norm, stride=stride, groups=wide)
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 4, 1), nn.SiLU(), nn.Conv2d(4, wide, 1),
            nn.Sigmoid(),
        ) if squeeze else None  # fmt: skip
        self.project = nn.Sequential(nn.Conv2d(wide, o, 1, bias=False), norm(o))
        self.keep = i == o and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        out = self.depthwise(self.expand(x))
        if self.squeeze is not None:
            out = out * self.squeeze(out)
        out = self.project(out)
        return x + out if self.keep else out


def inverted(norm: Norm, squeeze: bool) -> nn.Module:
    blocks = [Inverted(8, 8, norm, 1, squeeze), Inverted(8, 16, norm, 2, squeeze)]
    return Pooled(32, conv(3, 8, 3, norm, stride=2), *blocks, conv(16, 32, 1, norm))


class ChannelsLast(nn.Module):
    """A layer norm over the channels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNextBlock(nn.Module):
    """Depthwise convolution and a perceptron over channels, scaled by a parameter."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.up, self.down = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        out = self.scale * self.down(F.gelu(self.up(out)))
        return x + out.permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    stem = nn.Sequential(nn.Conv2d(3, 8, 2, 2), ChannelsLast(8))
    down = nn.Sequential(ChannelsLast(8), nn.Conv2d(8, 16, 2, 2))
    return Pooled(16, stem, ConvNextBlock(8), down, ConvNextBlock(16))


class UNet(nn.Module):
    """Down, up again, and skip connections; one map of logits per image."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([conv(3, 8, 3, group_norm), conv(8, 16, 3, group_norm)])
        self.middle = conv(16, 16, 3, group_norm)
        self.rise = nn.ModuleList(
            [nn.ConvTranspose2d(16, 16, 2, 2), nn.ConvTranspose2d(8, 8, 2, 2)]
        )
        self.up = nn.ModuleList([conv(32, 8, 3, group_norm), conv(16, 8, 3, group_norm)])
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = layer(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for rise, layer in zip(self.rise, self.up, strict=True):
            x = layer(torch.cat([rise(x), kept.pop()], 1))
        return self.head(x)


class Attention(nn.Module):
    """Plain multi-head attention over tokens, with an optional additive bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-2, -1) / (c // self.heads) ** 0.5
        weights = (scores if bias is None else scores + bias).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, c))


class WindowBlock(nn.Module):
    """Attention in windows of a shifted image, with learned relative positions and a mask."""

    def __init__(self, width: int, heads: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift, self.heads = window, shift, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.table = nn.Parameter(0.1 * torch.randn((2 * window - 1) ** 2, heads))
        place = torch.stack(torch.meshgrid(*2 * [torch.arange(window)], indexing="ij")).flatten(1)
        away = (place[:, :, None] - place[:, None] + window - 1).permute(1, 2, 0)
        self.register_buffer("index", away[..., 0] * (2 * window - 1) + away[..., 1])
        region = (torch.arange(side) >= side - window).int() + (torch.arange(side) >= side - shift)
        zone = self.windows((3 * region[:, None] + region)[None, :, :, None]).squeeze(2)
        self.register_buffer("mask", -100.0 * (zone[:, None] != zone[:, :, None]).float())

    def windows(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        s = self.window
        return x.view(b, h // s, s, w // s, s, c).transpose(2, 3).reshape(-1, s * s, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        s = self.window
        inner = self.windows(torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2)))
        bias = self.table[self.index.flatten()].view(s * s, s * s, -1).permute(2, 0, 1)
        bias = (bias + self.mask[:, None]).repeat(b, 1, 1, 1) if self.shift else bias
        out = self.attention(inner, bias).view(b, h // s, w // s, s, s, c)
        out = out.transpose(2, 3).reshape(b, h, w, c)
        x = x + torch.roll(out, (self.shift, self.shift), (1, 2))
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """Patches, a plain and a shifted block, merging of patches, another block."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.blocks = nn.Sequential(WindowBlock(8, 2, 8, 4, 0), WindowBlock(8, 2, 8, 4, 2))
        self.merge = nn.Linear(32, 16)
        self.last = WindowBlock(16, 2, 4, 2, 1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch(x).permute(0, 2, 3, 1))
        corners = [x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]
        return self.head(self.last(self.merge(torch.cat(corners, -1))).mean((1, 2)))


class MixerBlock(nn.Module):
    """One perceptron over tokens, one over channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Sequential(nn.Linear(tokens, 8), nn.GELU(), nn.Linear(8, tokens))
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm2(x))


class Mixer(nn.Module):
    """As many tokens as there are samples in a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 8, 8)
        self.blocks = nn.Sequential(MixerBlock(4, 8), MixerBlock(4, 8))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


class ViT(nn.Module):
    """A class token and positions that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=pre)
            for pre in (True, False)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of one label per image or per pixel."""
    images, labels = batch
    logits = model(images)
    each = F.cross_entropy(logits, labels if logits.dim() == 2 else labels[:, None, None].expand(
        -1, *logits.shape[2:]), reduction="none")  # fmt: skip
    return each.flatten(1).mean(1) if each.dim() > 1 else each


MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet-groupnorm": lambda: resnet(group_norm),
    "resnet-batchnorm": lambda: resnet(nn.BatchNorm2d),
    "densenet": densenet,
    "efficientnet": lambda: inverted(group_norm, True),
    "mobilenet": lambda: inverted(nn.BatchNorm2d, False),
    "convnext": convnext,
    "unet": UNet,
    "swin": Swin,
    "mixer": Mixer,
    "vit": ViT,
}


def build(make: Callable[[], nn.Module]) -> Subject:
    """A network, the loss and a batch."""
    torch.manual_seed(0)
    model = make()
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    images = torch.randn(N, 3, 16, 16, generator=generator)
    return model, loss, (images, torch.arange(N) % CLASSES)


def cases() -> Iterator[tuple[str, str, Callable[[], Subject]]]:
    """Family, name and builder."""
    for name, make in MODELS.items():
        yield "plain vision", name, lambda make=make: build(make)
