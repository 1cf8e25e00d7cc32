"""Attacks by parametrized, shared, frozen and complex parameters, and parameters as inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, weight_norm
from torch.nn.utils.parametrize import register_parametrization

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Net,
    Table,
    case,
    ints,
    lin,
    on_module,
    rand,
    row_losses,
    seeded,
    spread,
)


class Scaled(nn.Module):
    """A parametrization."""

    def forward(self, w: Tensor) -> Tensor:
        return w * w.abs().mean()


def parametrized() -> Iterator[Case]:
    """Weights that are computed from other parameters at every access."""
    makers = {
        "weight_norm": lambda: parametrizations.weight_norm(lin()),
        "old weight_norm": lambda: weight_norm(lin()),
        "orthogonal": lambda: parametrizations.orthogonal(lin()),
        "orthogonal by householder": lambda: parametrizations.orthogonal(
            lin(), orthogonal_map="householder"
        ),
        "own": lambda: register_parametrization(lin(), "weight", Scaled()),
        "spectral_norm, eval": lambda: parametrizations.spectral_norm(lin()).eval(),
    }
    for name, make in makers.items():
        yield case(f"parametrized: {name}", EXACT, lambda m, x: m.l(x), l=make())
    body = lambda m, x: m.l(x)
    layer = parametrizations.spectral_norm(lin())
    yield case("parametrized: spectral_norm, train", EITHER, body, l=layer)
    yield case("parametrized: cached", EITHER, cached_twice, l=parametrizations.weight_norm(lin()))


def cached_twice(m: nn.Module, x: Tensor) -> Tensor:
    """A parametrized weight, computed once and used twice."""
    with nn.utils.parametrize.cached():
        return m.l(m.l(x).relu())


def shared() -> Iterator[Case]:
    """The same parameter in several places."""
    embedding = seeded(nn.Embedding(N, N))
    tokens = ints(N, N, seed=5)
    tied = lambda m, t: F.linear(m.e(t), m.e.weight)
    yield case("tied: embedding and output", EXACT, tied, tokens, e=embedding)
    a, b = lin(), lin(seed=2)
    b.weight = a.weight
    yield case("tied: two layers", EXACT, lambda m, x: m.b(m.a(x).relu()), a=a, b=b)
    twice = lambda m, x: m.b(m.l(x).relu())
    yield case("tied: one module, two names", EXACT, twice, l=(one := lin()), b=one)
    loop = lambda m, x: m.l(m.l(m.l(x).tanh()).tanh())
    yield case("tied: reused in a loop", EXACT, loop)
    yield case("tied: two inputs", EXACT, lambda m, x: m.l(x) * m.l(x.flip(1)))
    yield case("tied: crossed inputs", EITHER, lambda m, x: m.l(x) * m.l(x.flip(0)))
    siamese = lambda m, x, y: F.pairwise_distance(*m.l(torch.cat([x, y])).chunk(2))
    yield case("tied: siamese", EXACT, siamese, rand(N, N), rand(N, N, seed=2))
    grouped = lambda m, x, y: m.l(torch.cat([x, y])).view(N, 2, N).prod(1)
    yield case("tied: siamese, grouped wrongly", REFUSED, grouped, rand(N, N), rand(N, N, seed=2))


def freeze(module: nn.Module) -> nn.Module:
    """No gradient for the module's parameters."""
    return module.requires_grad_(False)


def real_and_complex(weight: Tensor) -> Iterator[Case]:
    """Real parameters that become complex, complex ones that become real."""
    real = {"w": rand(N, N)}
    both = lambda m, x: (x * torch.complex(m.w[0], m.w[1])).abs()
    yield case("complex: made of two rows", EXACT, both, **real)
    cast = lambda m, x: (x * m.w[0].to(torch.complex128) * (1 + 2j)).abs()
    yield case("complex: cast", EXACT, cast, **real)
    yield case("complex: modulus", EITHER, lambda m, x: x * m.w[0].abs(), w=weight)
    yield case("complex: real part", EITHER, lambda m, x: x * m.w[0].real, w=weight)


def special() -> Iterator[Case]:
    """Frozen, complex, scalar, empty and listed parameters."""
    frozen = lambda m, x: m.k(m.l(x).relu())
    yield case("frozen: first layer", EXACT, frozen, l=freeze(lin()), k=lin(seed=2))
    yield case("frozen: last layer", EXACT, frozen, l=lin(), k=freeze(lin(seed=2)))
    mixing = lambda m, x: m.k(m.l(x) - m.l(x).mean(0))
    yield case("frozen: mixing before", EITHER, mixing, l=freeze(lin()), k=lin(seed=2))
    after = lambda m, x: (lambda h: h - m.k(h).mean(0))(m.l(x))
    yield case("frozen: mixing after", REFUSED, after, l=lin(), k=freeze(lin(seed=2)))
    weight = torch.complex(rand(N, N), rand(N, N, seed=4))
    product = lambda m, x: (x.to(torch.complex128) @ m.w).abs()
    yield case("complex: matrix", EITHER, product, w=weight)
    conj = lambda m, x: (m.l(x).to(torch.complex128) @ m.w.conj().T).real
    yield case("complex: conjugate", EITHER, conj, l=lin(), w=weight)
    rotated = lambda m, x: torch.fft.ifft(torch.fft.fft(x) * m.w[0]).imag
    yield case("complex: filter", EITHER, rotated, w=weight)
    yield from real_and_complex(weight)
    scalar = lambda m, x: m.l(x) * m.s.exp()
    yield case("scalar parameter", EXACT, scalar, l=lin(), s=rand(1)[0])
    empty = lambda m, x: m.l(x) + m.e.sum()
    yield case("empty parameter", EXACT, empty, l=lin(), e=rand(0, 3))
    listed = lambda m, x: sum(x @ w for w in m.p)
    parts = nn.ParameterList([rand(N, N), rand(N, N, seed=1)])
    yield case("parameter list", EXACT, listed, p=parts)
    expanded = Net(lambda m, x: x @ m.w, w=rand(1, 1).expand(N, N).contiguous())
    yield Case("constant parameter", expanded, (rand(N, N),), row_losses, EXACT)


def contaminated(m: nn.Module, x: Tensor, how: str) -> Tensor:
    """A derived parameter into which samples are written."""
    weight, h = m.w * 1, m.l(x)
    if how == "row":
        weight[0] = h[0]
    if how == "all":
        weight.add_(h)
    if how == "copy":
        weight.copy_(h)
    if how == "raw row":
        weight[0] = x[0]
    if how == "column":
        weight[:, 1] = h[:, 1]
    if how == "where":
        weight = torch.where(weight > 0, weight, h)
    return x @ weight


def no_grad_use(m: nn.Module, x: Tensor) -> Tensor:
    """A parameter used where no gradient is wanted."""
    with torch.no_grad():
        scale = x @ m.w
    return scale * m.l(x)


def no_grad_weight(m: nn.Module, x: Tensor) -> Tensor:
    """A derived parameter without gradient, and the same with gradient."""
    with torch.no_grad():
        fixed = m.w * 2
    return (x @ fixed) * (x @ m.w)


def asked(m: nn.Module, x: Tensor) -> Tensor:
    """Code that asks its parameters."""
    factor = 2 if m.w.requires_grad and m.w.is_leaf and isinstance(m.w, nn.Parameter) else 3
    derived = 5 if (m.w * 1).requires_grad else 7
    return factor * derived * (x @ m.w)


def grad_of_output(m: nn.Module, x: Tensor) -> Tensor:
    """Asks the result of a use."""
    h = x @ m.w
    return h * (2 if h.requires_grad and h.grad_fn is not None else 3)


def left_use_asked(m: nn.Module, x: Tensor) -> Tensor:
    """Asks the result of a use that mixes."""
    h = m.w @ x
    return m.l(x) * (2 if h.requires_grad else 3)


USES: Table = {
    "a sample's row in a weight": (REFUSED, lambda m, x: contaminated(m, x, "row")),
    "samples added to a weight": (REFUSED, lambda m, x: contaminated(m, x, "all")),
    "samples copied to a weight": (REFUSED, lambda m, x: contaminated(m, x, "copy")),
    "samples' column in a weight": (REFUSED, lambda m, x: contaminated(m, x, "column")),
    "samples in a weight by where": (REFUSED, lambda m, x: contaminated(m, x, "where")),
    "raw sample in a weight": (EITHER, lambda m, x: contaminated(m, x, "raw row")),
    "use without gradient": (EXACT, no_grad_use),
    "weight without gradient": (EXACT, no_grad_weight),
    "parameters asked": (EXACT, asked),
    "result asked": (EXACT, grad_of_output),
    "mixing result asked": (EITHER, left_use_asked),
    "weight in a python list": (
        EXACT,
        lambda m, x: sum(x[:, i : i + 1] * w for i, w in enumerate(m.w)),
    ),
    "weight unbound": (EXACT, lambda m, x: torch.stack([x @ w for w in m.w.unbind(1)], 1)),
    "weight unbound, stacked first": (REFUSED, lambda m, x: torch.stack([x @ w for w in m.w])),
    "weight split and joined": (EXACT, lambda m, x: x @ torch.cat(m.w.split(1)[::-1])),
    "weight in place of a buffer": (EXACT, lambda m, x: x @ torch.zeros(N, N).double().copy_(m.w)),
    "weight reinterpreted": (EXACT, lambda m, x: x @ m.w.view(2, 8).T.reshape(N, N)),
    "weight through item": (EXACT, lambda m, x: (x @ m.w) * m.w[0, 0].item()),
    "setattr of a derived weight": (EXACT, lambda m, x: derived_attribute(m, x)),
    "data_ptr of another": (EITHER, lambda m, x: x @ m.w.data.requires_grad_() + x @ m.w),
    "alias of the weight": (EXACT, lambda m, x: x @ m.w.view_as(m.w) + x @ m.w[:]),
}


def derived_attribute(m: nn.Module, x: Tensor) -> Tensor:
    """A weight computed into an attribute, as hooks of weight norm do."""
    object.__setattr__(m, "derived", m.w / m.w.norm())
    return x @ m.derived + x @ m.derived.T


def params_as_inputs() -> Iterator[Case]:
    """A parameter arrives as an argument; it has n rows."""
    bodies: dict[str, tuple[str, Callable[[nn.Module], Tensor]]] = {
        "itself": (EITHER, lambda m: m.w),
        "derived": (EITHER, lambda m: m.w * 2),
        "transposed": (EITHER, lambda m: m.w.T),
        "bias": (EITHER, lambda m: m.l.bias),
        "detached": (EITHER, lambda m: m.w.detach()),
    }
    for name, (expectation, pick) in bodies.items():
        model = Net(lambda m, x, w: m.l(x) * w, l=lin(), w=rand(N, N, seed=6))
        loss = lambda model, batch, pick=pick: spread(model(batch[0], pick(model)))
        yield Case(f"argument: {name}", model, (rand(N, N),), loss, expectation)
        product = Net(lambda m, x, w: m.l(x) @ w, l=lin(), w=rand(N, N, seed=6))
        right = lambda model, batch, pick=pick: spread(model(batch[0], pick(model)))
        yield Case(f"argument: {name}, multiplied", product, (rand(N, N),), right, expectation)


def cases() -> Iterator[Case]:
    """All of this file."""
    parts = {"l": lin(), "w": 0.8 * rand(N, N, seed=6)}
    uses = on_module("use", USES, rand(N, N), **parts)
    return chain(parametrized(), shared(), special(), uses, params_as_inputs())
