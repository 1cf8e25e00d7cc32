"""Diffusion, autoencoders, quantisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .subject import N, Subject, Table, squares

TABLE = Table("generative")
denoising = TABLE.package("denoising-diffusion-pytorch")
diffusers = TABLE.package("diffusers")
quantize = TABLE.package("vector-quantize-pytorch")
vae = TABLE.package("pythae")


def images(model: nn.Module, size: int = 16, channels: int = 3) -> Subject:
    return Subject(model, squares, torch.randn(N, channels, size, size))


@denoising("Unet")
def denoising_unet() -> Subject:
    from denoising_diffusion_pytorch import Unet

    model = Unet(
        dim=8, dim_mults=(1, 2), channels=3, attn_heads=2, attn_dim_head=4, flash_attn=False
    )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, noise, time = batch
        return (model(x, time) - noise).square().flatten(1).mean(1)

    batch = torch.randn(N, 3, 16, 16), torch.randn(N, 3, 16, 16), torch.randint(0, 10, (N,))
    return Subject(model, loss, batch)


@denoising("Unet1D")
def denoising_line() -> Subject:
    from denoising_diffusion_pytorch import Unet1D

    model = Unet1D(dim=8, dim_mults=(1, 2), channels=2)
    return Subject(model, squares, (torch.randn(N, 2, 16), torch.randint(0, 10, (N,))))


@diffusers("UNet2DModel", "UNet2DModel")
@diffusers("UNet2DConditionModel", "UNet2DConditionModel")
@diffusers("DiTTransformer2DModel", "DiTTransformer2DModel")
@diffusers("AutoencoderKL", "AutoencoderKL")
@diffusers("PixArtTransformer2DModel", "PixArtTransformer2DModel")
def diffusion(name: str) -> Subject:
    import diffusers

    kind = getattr(diffusers, name)
    pixels, time = torch.randn(N, 4, 8, 8), torch.randint(0, 10, (N,))
    blocks: dict[str, Any] = {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16),
        "layers_per_block": 1, "norm_num_groups": 4,
    }  # fmt: skip
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8,
             "patch_size": 2, "in_channels": 4, "out_channels": 4}  # fmt: skip
    if name == "UNet2DModel":
        down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
        model = kind(**blocks, down_block_types=down, up_block_types=up, attention_head_dim=4)
        batch: Any = pixels, time
    elif name == "UNet2DConditionModel":
        model = kind(**blocks, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                     up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
                     cross_attention_dim=6)  # fmt: skip
        batch = pixels, time, torch.randn(N, 5, 6)
    elif name == "DiTTransformer2DModel":
        model = kind(**heads, num_embeds_ada_norm=10, norm_num_groups=4)
        batch = pixels, time, torch.randint(0, 9, (N,))
    elif name == "AutoencoderKL":
        blocks.pop("sample_size")
        model = kind(**blocks, down_block_types=("DownEncoderBlock2D",) * 2,
                     up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=2)  # fmt: skip
        return images(model, 8, 4)
    else:
        model = kind(**heads, cross_attention_dim=16, caption_channels=6, norm_num_groups=4,
                     use_additional_conditions=False)  # fmt: skip
        batch = pixels, torch.randn(N, 5, 6), time

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, *rest = batch
        out = model(x, *rest, return_dict=False)[0]
        return out[:, :4].square().flatten(1).mean(1)

    return Subject(model, loss, batch)


@quantize("VectorQuantize in an autoencoder", "VectorQuantize")
@quantize("FSQ in an autoencoder", "FSQ")
@quantize("LFQ in an autoencoder", "LFQ")
@quantize("ResidualVQ in an autoencoder", "ResidualVQ")
@quantize("SimVQ in an autoencoder", "SimVQ")
def quantised(name: str) -> Subject:
    import vector_quantize_pytorch as vq

    made = {
        "VectorQuantize": lambda: vq.VectorQuantize(dim=8, codebook_size=6),
        "FSQ": lambda: vq.FSQ(levels=[4] * 8),
        "LFQ": lambda: vq.LFQ(dim=8, codebook_size=16, entropy_loss_weight=0.0),
        "ResidualVQ": lambda: vq.ResidualVQ(dim=8, codebook_size=6, num_quantizers=2),
        "SimVQ": lambda: vq.SimVQ(dim=8, codebook_size=6),
    }[name]()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.quantise, self.decode = nn.Linear(6, 8), made, nn.Linear(8, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.decode(self.quantise(self.encode(x))[0])

    return Subject(Net(), squares, torch.randn(N, 5, 6))


@vae("VAE", "VAE")
@vae("BetaVAE", "BetaVAE")
@vae("AE", "AE")
@vae("VQVAE", "VQVAE")
def autoencoder(name: str) -> Subject:
    from pythae import models

    config = getattr(models, f"{name}Config")(input_dim=(1, 4, 4), latent_dim=3)
    model = getattr(models, name)(config)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        z = model.encoder(x).embedding
        return model.decoder(z).reconstruction.flatten(1).square().mean(1)

    return Subject(model, loss, torch.rand(N, 1, 4, 4))
