"""Normalising flows and differential equations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .subject import N, Subject, Table, squares

TABLE = Table("flows and differential equations")
zuko = TABLE.package("zuko")
nflows = TABLE.package("nflows")
normflows = TABLE.package("normflows")
freia = TABLE.package("FrEIA")
diffeq = TABLE.package("torchdiffeq")
cde = TABLE.package("torchcde")
dyn = TABLE.package("torchdyn")


def data(width: int = 4) -> Tensor:
    return torch.randn(N, width)


# ---------------------------------------------------------------------- zuko


@zuko("MAF", "MAF", {})
@zuko("NSF", "NSF", {"bins": 4})
@zuko("NICE", "NICE", {})
@zuko("NAF", "NAF", {"signal": 4, "network": {"hidden_features": (8,)}})
@zuko("UNAF", "UNAF", {"signal": 4, "network": {"hidden_features": (8,)}})
@zuko("SOSPF", "SOSPF", {})
@zuko("BPF", "BPF", {})
@zuko("GF", "GF", {})
@zuko("CNF", "CNF", {})
@zuko("NCSF", "NCSF", {})
def flow(name: str, more: dict[str, Any]) -> Subject:
    import zuko

    model = getattr(zuko.flows, name)(4, context=2, hidden_features=(8,), **more) \
        if name not in ("GF",) else zuko.flows.GF(4, context=2, hidden_features=(8,))  # fmt: skip

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return -model(batch[1]).log_prob(batch[0])

    limit = "steps are as long as a number of the whole batch says, taken by .item()"
    return Subject(model, loss, (data() / 2, data(2)), limit=limit if name == "CNF" else "")


@zuko("MAF without context", "MAF")
@zuko("NSF without context", "NSF")
@zuko("GMM without context", "GMM")
def unconditional(name: str) -> Subject:
    import zuko

    more: dict[str, Any] = {} if name == "GMM" else {"hidden_features": (8,)}
    model = getattr(zuko.flows, name)(4, **more)
    return Subject(model, lambda model, x: -model().log_prob(x), data())


# ---------------------------------------------------------------------- nflows, normflows


@nflows("masked autoregressive", "affine")
@nflows("neural spline", "spline")
@nflows("real NVP", "coupling")
@nflows("LU linear", "lu")
@nflows("SVD linear", "svd")
def transform(name: str) -> Subject:
    from nflows import distributions, flows, transforms
    from nflows.nn.nets import ResidualNet

    made = {
        "affine": lambda: transforms.MaskedAffineAutoregressiveTransform(4, 8),
        "spline": lambda: transforms.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(
            4, 8, num_bins=4, tails="linear", tail_bound=3.0
        ),
        "coupling": lambda: transforms.AffineCouplingTransform(
            torch.tensor([1, 0, 1, 0]), lambda i, o: ResidualNet(i, o, hidden_features=8)
        ),
        "lu": lambda: transforms.LULinear(4),
        "svd": lambda: transforms.SVDLinear(4, num_householder=2),
    }[name]
    parts = [made(), transforms.ReversePermutation(4), made()]
    model = flows.Flow(transforms.CompositeTransform(parts), distributions.StandardNormal([4]))
    return Subject(model, lambda model, x: -model.log_prob(x), data())


@normflows("planar", "Planar")
@normflows("radial", "Radial")
@normflows("masked affine", "MaskedAffineFlow")
@normflows("real NVP", "AffineCouplingBlock")
@normflows("spline coupling", "CoupledRationalQuadraticSpline")
@normflows("autoregressive spline", "AutoregressiveRationalQuadraticSpline")
@normflows("residual", "Residual")
@normflows("invertible affine", "InvertibleAffine")
def normalising(name: str) -> Subject:
    import normflows as nf

    def made() -> nn.Module:
        if name in ("Planar", "Radial"):
            more = {"act": "leaky_relu"} if name == "Planar" else {}
            return getattr(nf.flows, name)((4,), **more)
        if name == "MaskedAffineFlow":
            mask = torch.tensor([1.0, 0, 1, 0])
            return nf.flows.MaskedAffineFlow(mask, nf.nets.MLP([4, 8, 4]), nf.nets.MLP([4, 8, 4]))
        if name == "AffineCouplingBlock":
            return nf.flows.AffineCouplingBlock(nf.nets.MLP([2, 8, 4]))
        if name == "Residual":
            net = nf.nets.LipschitzMLP([4, 8, 4], lipschitz_const=0.9)
            return nf.flows.Residual(net, n_exact_terms=3, reduce_memory=False)
        if name == "InvertibleAffine":
            return nf.flows.InvertibleAffine(4)
        return getattr(nf.flows, name)(4, 1, 8, num_bins=4)

    class Forward(nn.Module):
        """Planar and radial flows have a closed form in this direction only."""

        def __init__(self) -> None:
            super().__init__()
            self.flows = nn.ModuleList([made(), made()])

        def forward(self, z: Tensor) -> Tensor:
            total = z.new_zeros(len(z))
            for flow in self.flows:
                z, log_det = flow(z)
                total = total + log_det
            return z.square().sum(1) - total

    if name in ("Planar", "Radial"):
        return Subject(Forward(), lambda model, x: model(x), data())
    model = nf.NormalizingFlow(nf.distributions.DiagGaussian(4), [made(), made()])
    return Subject(model, lambda model, x: -model.log_prob(x), data())


@freia("GLOW coupling", "GLOWCouplingBlock")
@freia("real NVP coupling", "RNVPCouplingBlock")
@freia("GIN coupling", "GINCouplingBlock")
@freia("all in one", "AllInOneBlock")
@freia("NICE coupling", "NICECouplingBlock")
def invertible(name: str) -> Subject:
    import FrEIA.framework as ff
    import FrEIA.modules as fm

    def subnet(i: int, o: int) -> nn.Module:
        return nn.Sequential(nn.Linear(i, 8), nn.ReLU(), nn.Linear(8, o))

    model = ff.SequenceINN(4)
    for _ in range(2):
        model.append(getattr(fm, name), subnet_constructor=subnet)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        z, log_det = model(x)
        return 0.5 * z.square().sum(1) - log_det

    return Subject(model, loss, data())


# ---------------------------------------------------------------------- differential equations


class Field(nn.Module):
    """A vector field."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, t: Any, x: Tensor) -> Tensor:
        return self.net(x)


class Solved(nn.Module):
    """A neural ordinary differential equation with a read-out."""

    def __init__(self, solve: Any) -> None:
        super().__init__()
        self.field, self.head, self.solve = Field(), nn.Linear(4, 2), solve

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.solve(self.field, x))


@diffeq("fixed steps", "odeint", {"method": "rk4", "options": {"step_size": 0.25}})
@diffeq("midpoint", "odeint", {"method": "midpoint"})
@diffeq("adjoint, fixed steps", "odeint_adjoint", {"method": "rk4", "options": {"step_size": 0.25}})
@diffeq("adaptive steps", "odeint", {"method": "dopri5"})
def ode(name: str, more: dict[str, Any]) -> Subject:
    import torchdiffeq

    solve = getattr(torchdiffeq, name)

    def run(field: Any, x: Tensor) -> Tensor:
        return solve(field, x, torch.tensor([0.0, 1.0]), **more)[-1]

    return Subject(Solved(run), squares, data())


@dyn("NeuralODE, autograd", "autograd")
@dyn("NeuralODE, adjoint", "adjoint")
def neural_ode(sensitivity: str) -> Subject:
    from torchdyn.core import NeuralODE

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
            self.ode = NeuralODE(net, sensitivity=sensitivity, solver="rk4", return_t_eval=False)
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.ode(x, torch.linspace(0, 1, 3))[-1])

    return Subject(Net(), squares, data())


@cde("neural controlled differential equation", False)
@cde("neural controlled differential equation, adjoint", True)
def controlled(adjoint: bool) -> Subject:
    import torchcde

    class Vector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(5, 15)

        def forward(self, t: Any, z: Tensor) -> Tensor:
            return self.net(z).tanh().view(-1, 5, 3)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.initial, self.func, self.head = nn.Linear(3, 5), Vector(), nn.Linear(5, 2)

        def forward(self, coefficients: Tensor) -> Tensor:
            path = torchcde.CubicSpline(coefficients)
            start = self.initial(path.evaluate(path.interval[0]))
            found = torchcde.cdeint(
                path, self.func, start, path.interval, adjoint=adjoint, method="rk4",
                options={"step_size": 1.0},
            )  # fmt: skip
            return self.head(found[:, -1])

    batch = torchcde.natural_cubic_coeffs(torch.randn(N, 5, 3))
    return Subject(Net(), squares, batch)
