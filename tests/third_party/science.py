"""Kolmogorov-Arnold networks, equivariance, kernels, other numbers, physics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .subject import N, Subject, Table, squares

TABLE = Table("science")
kan = TABLE.package("pykan", "kan")
e3 = TABLE.package("e3nn")
egnn = TABLE.package("egnn-pytorch")
points = TABLE.package("point-transformer-pytorch")
gp = TABLE.package("gpytorch")
pyro = TABLE.package("pyro-ppl", "pyro")
complexes = TABLE.package("complexPyTorch")
cvnn = TABLE.package("torchcvnn")
hyperbolic = TABLE.package("geoopt")
sde = TABLE.package("torchsde")
gvp = TABLE.package("geometric-vector-perceptron")
pina = TABLE.package("pina-mathlab", "pina")
dnc = TABLE.package("dnc")
operators = TABLE.package("neuraloperator", "neuralop")


def rows(model: nn.Module, width: int = 4) -> Subject:
    return Subject(model, squares, torch.randn(N, width))


@kan("KAN")
def kolmogorov() -> Subject:
    from kan import KAN

    model = KAN(width=[4, 5, 2], grid=3, k=3, auto_save=False, save_act=False)
    return rows(model)


@kan("KAN, multiplications", [4, [3, 2], 2])
def multiplied(width: list[Any]) -> Subject:
    from kan import MultKAN

    return rows(MultKAN(width=width, grid=3, k=3, auto_save=False, save_act=False))


@e3("equivariant layers")
def equivariant() -> Subject:
    from e3nn import o3
    from e3nn.nn import Gate

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            middle = o3.Irreps("4x0e + 2x1o")
            gates = o3.Irreps("2x0e")
            self.gate = Gate("4x0e", [torch.tanh], gates, [torch.sigmoid], "2x1o")
            self.first = o3.FullyConnectedTensorProduct(
                "2x0e + 1x1o", "1x0e + 1x1o", self.gate.irreps_in
            )
            self.last = o3.Linear(middle, "3x0e")

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.last(self.gate(self.first(x, y)))

    return Subject(Net(), squares, (torch.randn(N, 5), torch.randn(N, 4)))


@egnn("EGNN")
def equivariant_graph() -> Subject:
    from egnn_pytorch import EGNN

    model = EGNN(dim=8, m_dim=4)
    return Subject(model, squares, (torch.randn(N, 5, 8), torch.randn(N, 5, 3)))


@egnn("EGNN network, nearest neighbours")
def equivariant_network() -> Subject:
    from egnn_pytorch import EGNN_Network

    model = EGNN_Network(
        num_tokens=6, num_positions=5, dim=8, depth=2, num_nearest_neighbors=3, norm_coors=True
    )
    return Subject(model, squares, (torch.randint(0, 6, (N, 5)), torch.randn(N, 5, 3)))


@points("PointTransformerLayer")
def point_transformer() -> Subject:
    from point_transformer_pytorch import PointTransformerLayer

    model = PointTransformerLayer(dim=8, pos_mlp_hidden_dim=8, attn_mlp_hidden_mult=2)
    return Subject(model, squares, (torch.randn(N, 6, 8), torch.randn(N, 6, 3)))


@points("MultiheadPointTransformerLayer, neighbours")
def point_neighbours() -> Subject:
    from point_transformer_pytorch import MultiheadPointTransformerLayer

    model = MultiheadPointTransformerLayer(dim=8, heads=2, dim_head=4, pos_mlp_hidden_dim=8,
                                           attn_mlp_hidden_mult=2, num_neighbors=3)  # fmt: skip
    return Subject(model, squares, (torch.randn(N, 6, 8), torch.randn(N, 6, 3)))


@gp("kernel against inducing points", "RBFKernel")
@gp("Matern kernel against inducing points", "MaternKernel")
def kernel(name: str) -> Subject:
    import gpytorch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = getattr(gpytorch.kernels, name)(ard_num_dims=3)
            self.points, self.head = nn.Parameter(torch.randn(5, 3)), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.kernel(x, self.points).to_dense())

    return Subject(Net(), squares, torch.randn(N, 3))


@pyro("PyroModule network")
def pyro_network() -> Subject:
    from pyro.nn import DenseNN

    return rows(DenseNN(4, [8, 8], [3]))


@pyro("autoregressive network", "AutoRegressiveNN")
@pyro("conditional autoregressive network", "ConditionalAutoRegressiveNN")
def autoregressive(name: str) -> Subject:
    import pyro.nn

    if name == "AutoRegressiveNN":
        return Subject(pyro.nn.AutoRegressiveNN(4, [8]), squares, torch.randn(N, 4))
    return Subject(pyro.nn.ConditionalAutoRegressiveNN(4, 2, [8]), squares,
                   (torch.randn(N, 4), torch.randn(N, 2)))  # fmt: skip


@pyro("spline flow's log_prob", "spline_autoregressive")
@pyro("affine coupling's log_prob", "affine_coupling")
@pyro("planar flow's log_prob", "planar")
@pyro("sylvester flow's log_prob", "sylvester")
def transformed(name: str) -> Subject:
    from pyro.distributions import transforms

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            more = {"count_bins": 4, "hidden_dims": [8]} if name == "spline_autoregressive" else {}
            self.transform = getattr(transforms, name)(4, **more)

        def forward(self, x: Tensor) -> Tensor:
            y = self.transform(x)
            return y.square().sum(-1) - self.transform.log_abs_det_jacobian(x, y)

    return Subject(Net(), lambda model, x: model(x), torch.randn(N, 4))


@complexes("complex network")
def complex_network() -> Subject:
    from complexPyTorch.complexLayers import ComplexConv2d, ComplexLinear, ComplexReLU

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act, self.out = (
                ComplexConv2d(2, 4, 3),
                ComplexReLU(),
                ComplexLinear(16, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            z = self.act(self.conv(torch.complex(x, x.flip(1))))
            return self.out(z.flatten(1)).abs()

    return Subject(Net(), squares, torch.randn(N, 2, 4, 4))


@cvnn("complex attention")
def complex_attention() -> Subject:
    import torchcvnn.nn as c

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = nn.Linear(4, 8, dtype=torch.complex64)
            self.attention = c.MultiheadAttention(8, 2, batch_first=True)
            self.act = c.modReLU()

        def forward(self, x: Tensor) -> Tensor:
            z = self.inside(torch.complex(x, -x))
            return self.act(self.attention(z, z, z)).abs()

    return Subject(Net(), squares, torch.randn(N, 5, 4))


@hyperbolic("distance to points of the Poincaré ball")
def poincare() -> Subject:
    import geoopt

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ball = geoopt.PoincareBall()
            self.points = geoopt.ManifoldParameter(0.1 * torch.randn(5, 3), manifold=self.ball)
            self.into = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            z = self.ball.expmap0(0.3 * self.into(x))
            return self.ball.dist(z.unsqueeze(1), self.points)

    return rows(Net())


@sde("stochastic differential equation")
def stochastic() -> Subject:
    import torchsde

    class Field(nn.Module):
        noise_type, sde_type = "diagonal", "ito"

        def __init__(self) -> None:
            super().__init__()
            self.drift, self.diffusion = nn.Linear(4, 4), nn.Linear(4, 4)

        def f(self, t: Any, y: Tensor) -> Tensor:
            return self.drift(y).tanh()

        def g(self, t: Any, y: Tensor) -> Tensor:
            return 0.1 * self.diffusion(y).sigmoid()

        def forward(self, x: Tensor) -> Tensor:
            noise = torchsde.BrownianInterval(
                0.0, 1.0, size=tuple(x.shape), dtype=x.dtype, entropy=3
            )
            return torchsde.sdeint(
                self, x, torch.tensor([0.0, 1.0]), dt=0.25, bm=noise, method="euler"
            )[-1]

    return rows(Field())


@gvp("GVP")
def vector_perceptron() -> Subject:
    from geometric_vector_perceptron import GVP

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = GVP(dim_vectors_in=3, dim_vectors_out=2, dim_feats_in=4, dim_feats_out=5)

        def forward(self, x: Tensor, v: Tensor) -> Tensor:
            feats, vectors = self.net((x, v))
            return torch.cat([feats, vectors.flatten(1)], 1)

    return Subject(Net(), squares, (torch.randn(N, 4), torch.randn(N, 3, 3)))


@pina("FeedForward", "FeedForward")
def physics(name: str) -> Subject:
    import pina.model

    return rows(getattr(pina.model, name)(4, 2, inner_size=8))


@dnc("DNC")
def memory() -> Subject:
    from dnc import DNC

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = DNC(input_size=4, hidden_size=8, nr_cells=5, cell_size=3, read_heads=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x, reset_experience=True)[0]

    return Subject(Net(), squares, torch.randn(N, 4, 4))


def images(model: nn.Module, size: int, channels: int) -> Subject:
    return Subject(model, squares, torch.randn(N, channels, size, size))


@operators("FNO")
def fourier() -> Subject:
    from neuralop.models import FNO

    return images(
        FNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2), 8, 1
    )


@operators("TFNO", "TFNO")
@operators("UNO", "UNO")
def tensor_fourier(name: str) -> Subject:
    from neuralop import models

    if name == "TFNO":
        model = models.TFNO(n_modes=(4, 4), in_channels=1, out_channels=1, hidden_channels=8,
                            n_layers=2, factorization="tucker", rank=0.5)  # fmt: skip
    else:
        model = models.UNO(1, 1, 8, uno_out_channels=[8, 8], uno_n_modes=[[4, 4], [4, 4]],
                           uno_scalings=[[1.0, 1.0], [1.0, 1.0]], n_layers=2,
                           channel_mlp_skip="linear")  # fmt: skip
    return images(model, 8, 1)
