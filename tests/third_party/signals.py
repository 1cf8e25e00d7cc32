"""Images, sound, series, molecules and sentences of more packages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Fn

from .subject import N, Subject, Table, first_tensor, squares

TABLE = Table("signals and molecules")


def _image(channels: int = 3, size: int = 16) -> Tensor:
    return torch.randn(N, channels, size, size)


def _first(net: nn.Module, batch: Any) -> Subject:
    """The first tensor that a model returns."""
    model = Fn(lambda s, *x: first_tensor(s.net(*x)).flatten(1)[:, :16], net=net)
    return Subject(model, squares, batch)


# ---------------------------------------------------------------------- sound and spheres


@TABLE.package("asteroid-filterbanks")("free filters", "FreeFB")
@TABLE.package("asteroid-filterbanks")("sinc filters", "ParamSincFB")
@TABLE.package("asteroid-filterbanks")("analytic filters", "AnalyticFreeFB")
def filters(name: str) -> Subject:
    import asteroid_filterbanks as fb

    bank = fb.Encoder(getattr(fb, name)(n_filters=8, kernel_size=9, stride=4))
    model = nn.Sequential(bank, nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.randn(2, 1, 40))
    return Subject(model, squares, torch.randn(N, 1, 40))


@TABLE.package("torch-harmonics")("spectral convolution on the sphere")
def sphere() -> Subject:
    import torch_harmonics as th

    net = th.SpectralConvS2((8, 16), (8, 16), 2, 3, bias=True)
    return Subject(net, squares, torch.randn(N, 2, 8, 16))


@TABLE.package("torch-harmonics")("attention on the sphere")
def sphere_attention() -> Subject:
    import torch_harmonics as th

    return Subject(th.AttentionS2(4, 2, (6, 12), (6, 12)), squares, torch.randn(N, 4, 6, 12))


@TABLE.package("torch-harmonics")("discrete-continuous convolution")
def sphere_kernel() -> Subject:
    import torch_harmonics as th

    net = th.DiscreteContinuousConvS2(2, 3, (6, 12), (6, 12), 3, optimized_kernel=False)
    return Subject(net, squares, torch.randn(N, 2, 6, 12))


@TABLE.package("snac")("codec")
def codec() -> Subject:
    from snac import SNAC

    net = SNAC(
        encoder_dim=4, encoder_rates=[2, 2], latent_dim=None, decoder_dim=8, decoder_rates=[2, 2],
        attn_window_size=None, codebook_size=8, codebook_dim=4, vq_strides=[2, 1], noise=False,
    )  # fmt: skip
    return _first(net, (torch.randn(N, 1, 32),))


@TABLE.package("pytorch-wavelets")("wavelet features")
def wavelets() -> Subject:
    from pytorch_wavelets import DWTForward

    def f(s: Any, x: Tensor) -> Tensor:
        low, high = s.dwt(s.conv(x))
        return s.head(torch.cat([low.flatten(1), high[0].flatten(1)], 1))

    model = Fn(f, conv=nn.Conv2d(3, 2, 3, padding=1), dwt=DWTForward(J=1, wave="db1"),
               head=nn.LazyLinear(3))  # fmt: skip
    model(_image(size=8))
    return Subject(model, squares, _image(size=8))


# ---------------------------------------------------------------------- series


def _series() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 12), torch.ones(N, 12)


@TABLE.package("gluonts")("feed-forward")
def feed_forward() -> Subject:
    from gluonts.torch.model.simple_feedforward.module import SimpleFeedForwardModel

    return _first(SimpleFeedForwardModel(4, 12, [8]), (_series()[0],))


@TABLE.package("gluonts")("DLinear")
def d_linear() -> Subject:
    from gluonts.torch.model.d_linear.module import DLinearModel

    return _first(DLinearModel(4, 12, 8, kernel_size=5), _series())


@TABLE.package("gluonts")("PatchTST")
def patch_tst() -> Subject:
    from gluonts.torch.model.patch_tst.module import PatchTSTModel

    net = PatchTSTModel(4, 12, 4, 2, "end", 8, 2, 16, 0, 0.0, "relu", False, 1, "mean")
    return _first(net, _series())


@TABLE.package("gluonts")("DeepAR, log-likelihood")
def deep_ar() -> Subject:
    from gluonts.torch.model.deepar.module import DeepARModel

    net = DeepARModel("D", 6, 3, 1, 1, 1, [3], num_layers=1, hidden_size=8, dropout_rate=0.0,
                      lags_seq=[1, 2])  # fmt: skip

    long = 8
    batch = (
        torch.randint(0, 3, (N, 1)), torch.randn(N, 1), torch.randn(N, long, 1),
        torch.rand(N, long) + 1, torch.ones(N, long), torch.randn(N, 3, 1), torch.rand(N, 3),
    )  # fmt: skip

    model = Fn(lambda s, *b: s.net.log_prob(*b)[:, None], net=net)
    return Subject(model, squares, batch)


# ---------------------------------------------------------------------- images


@TABLE.package("pytorchcv")("resnet", "resnet20_cifar10")
@TABLE.package("pytorchcv")("resnet, squeezed and excited", "seresnet20_cifar10")
@TABLE.package("pytorchcv")("resnet, attention between layers", "diaresnet20_cifar10")
@TABLE.package("pytorchcv")("resnet, shaken", "shakeshakeresnet20_2x16d_cifar10")
def zoo(name: str) -> Subject:
    from pytorchcv.model_provider import get_model

    net = get_model(name)
    return Subject(net, squares, _image(size=32)[:2], n=2)


@TABLE.package("dynamic-network-architectures")("U-Net")
def unet() -> Subject:
    from dynamic_network_architectures.architectures.unet import PlainConvUNet

    net = PlainConvUNet(
        1, 2, (4, 8), nn.Conv2d, 3, (1, 2), 1, 2, 1, norm_op=nn.InstanceNorm2d,
        norm_op_kwargs={"affine": True}, nonlin=nn.LeakyReLU,
    )  # fmt: skip
    return Subject(net, squares, _image(1, 8))


@TABLE.package("open_clip_torch", "open_clip")("vision transformer", False)
@TABLE.package("open_clip_torch", "open_clip")("vision transformer, attentional pool", True)
def vision(pooled: bool) -> Subject:
    from open_clip.transformer import VisionTransformer

    net = VisionTransformer(
        8, 4, 8, 1, 2, 2.0, attentional_pool=pooled, attn_pooler_queries=3, attn_pooler_heads=2,
        output_dim=4,
    )  # fmt: skip
    return _first(net, (_image(size=8),))


@TABLE.package("open_clip_torch", "open_clip")("text transformer", "argmax", False)
@TABLE.package("open_clip_torch", "open_clip")(
    "text transformer, its own class token", "last", True
)
def text(pool: str, token: bool) -> Subject:
    from open_clip.transformer import TextTransformer

    net = TextTransformer(
        context_length=7, vocab_size=16, width=8, heads=2, layers=1,
        output_dim=4, embed_cls=token, pool_type=pool, pad_id=0,
    )  # fmt: skip
    return _first(net, (torch.randint(1, 16, (N, 6 if token else 7)),))


@TABLE.package("lightly")("DINO head", "DINOProjectionHead", 8, 8, 4, 6)
@TABLE.package("lightly")("MoCo head", "MoCoProjectionHead", 8, 8, 4)
@TABLE.package("lightly")("SwaV prototypes", "SwaVPrototypes", 8, 5)
def head(name: str, *sizes: int) -> Subject:
    from lightly.models import modules

    return Subject(nn.Sequential(nn.Linear(6, 8), getattr(modules, name)(*sizes)), squares,
                   torch.randn(N, 6))  # fmt: skip


@TABLE.package("lightly")("negative cosine similarity, of each pair")
def similarity() -> Subject:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        a, b = batch
        p, z = model(a), model(b).detach()
        return -nn.functional.cosine_similarity(p, z, dim=1)

    return Subject(model, loss, (torch.randn(N, 6), torch.randn(N, 6)))


@TABLE.package("rectified-flow-pytorch")("U-Net of a flow")
def flow() -> Subject:
    from rectified_flow_pytorch import Unet

    net = Unet(8, dim_mults=(1, 2), attn_dim_head=4, attn_heads=2)
    return _first(net, (_image(size=8), torch.rand(N)))


@TABLE.package("video-diffusion-pytorch")("U-Net over frames")
def video() -> Subject:
    from video_diffusion_pytorch import Unet3D

    net = Unet3D(8, dim_mults=(1, 2), attn_heads=2, attn_dim_head=16)
    return _first(net, (torch.randn(N, 3, 3, 8, 8), torch.rand(N)))


# ---------------------------------------------------------------------- molecules, sentences


@TABLE.package("torchani")("energies of molecules", False)
@TABLE.package("torchani")("energies of molecules, padded", True)
def molecules(padded: bool) -> Subject:
    import torchani

    aev = torchani.AEVComputer("ani1x", "ani1x", 2)
    nets = {k: torchani.nn.AtomicNetwork((aev.out_dim, 8, 1)) for k in "HC"}
    ani = torchani.nn.ANINetworks(nets)

    def f(s: Any, kinds: Tensor, places: Tensor) -> Tensor:
        return s.ani(kinds, s.aev(kinds, places))[:, None]

    kinds = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]])
    if padded:
        kinds[1:3, 3] = -1
    return Subject(Fn(f, aev=aev, ani=ani), squares, (kinds, torch.randn(N, 4, 3)))


@TABLE.package("se3-transformer-pytorch")("SE(3) transformer")
def equivariant() -> Subject:
    from se3_transformer_pytorch import SE3Transformer

    net = SE3Transformer(dim=4, heads=2, depth=1, dim_head=4, num_degrees=2, num_neighbors=3,
                         valid_radius=10)  # fmt: skip
    batch = (torch.randn(N, 5, 4), torch.randn(N, 5, 3), torch.ones(N, 5, dtype=torch.bool))
    return _first(net, batch)


@TABLE.package("sentence-transformers")("pooling of tokens", "mean")
@TABLE.package("sentence-transformers")("pooling of tokens, weighted", "weightedmean")
@TABLE.package("sentence-transformers")("pooling of tokens, largest", "max")
@TABLE.package("sentence-transformers")("pooling of tokens, last", "lasttoken")
def sentences(kind: str) -> Subject:
    from sentence_transformers.models import CNN, Dense, Pooling

    def f(s: Any, x: Tensor, mask: Tensor) -> Tensor:
        found = {"token_embeddings": s.e(x), "attention_mask": mask}
        return s.dense(s.pool(s.cnn(found)))["sentence_embedding"]

    model = Fn(f, e=nn.Embedding(16, 8), cnn=CNN(8, 4, [1, 3]), pool=Pooling(8, kind),
               dense=Dense(8, 4))  # fmt: skip
    mask = (torch.arange(6) < torch.tensor([6, 3, 1, 4])[:, None]).long()
    return Subject(model, squares, (torch.randint(0, 16, (N, 6)), mask))


@TABLE.package("sinabs")("leaky neurons", "LIF", {"tau_mem": 5.0})
@TABLE.package("sinabs")("neurons without leak", "IAF", {})
@TABLE.package("sinabs")("leaky sums", "ExpLeak", {"tau_mem": 5.0})
def spikes(name: str, more: dict[str, Any]) -> Subject:
    from sinabs import layers

    net = getattr(layers, name)(**more)

    def f(s: Any, x: Tensor) -> Tensor:
        s.net.reset_states()
        return s.b(s.net(s.a(x)))

    return Subject(Fn(f, a=nn.Linear(5, 6), net=net, b=nn.Linear(6, 3)), squares,
                   torch.randn(N, 7, 5))  # fmt: skip


@TABLE.package("pytorch-lifestream", "ptls")("events of clients", "gru")
@TABLE.package("pytorch-lifestream", "ptls")("events of clients, LSTM", "lstm")
def events(kind: str) -> Subject:
    from ptls.data_load import PaddedBatch
    from ptls.nn import RnnEncoder, TrxEncoder

    trx = TrxEncoder({"code": {"in": 6, "out": 4}}, {"amount": "identity"}, use_batch_norm=False)
    rnn = RnnEncoder(trx.output_size, 6, kind, is_reduce_sequence=True)

    def f(s: Any, code: Tensor, amount: Tensor, lengths: Tensor) -> Tensor:
        return s.rnn(s.trx(PaddedBatch({"code": code, "amount": amount}, lengths)))

    batch = (torch.randint(1, 6, (N, 5)), torch.randn(N, 5), torch.tensor([5, 2, 3, 5]))
    return Subject(Fn(f, trx=trx, rnn=rnn), squares, batch)
