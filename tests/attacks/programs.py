"""Programs of users (distributions, Fourier layers, grids), and those that mix samples alike."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributions import (
    Dirichlet,
    Gamma,
    Gumbel,
    Laplace,
    MultivariateNormal,
    Normal,
    StudentT,
)
from torch.nn import functional as F

from .base import EXACT, REFUSED, Case, N, Table, case, lin, on_module, rand, seeded_losses


def lower(m: nn.Module) -> Tensor:
    """A triangular matrix of parameters."""
    return m.w.tril() + 3 * torch.eye(N, dtype=torch.float64)


DISTRIBUTIONS: Table = {
    "a normal of a parameter": (EXACT, lambda m, x: Normal(m.l(x), m.p.exp()).log_prob(x)),
    "a parameter as mean": (EXACT, lambda m, x: Normal(m.p, m.l(x).exp()).log_prob(x)),
    "entropies": (EXACT, lambda m, x: Normal(x, m.p.exp()).entropy() + m.l(x)),
    "three of them": (EXACT, lambda m, x: StudentT(m.p.exp() + 2, m.l(x), 1.0).log_prob(x)),
    "transformed": (EXACT, lambda m, x: Gumbel(m.l(x), m.p.exp()).log_prob(x)),
    "a triangular covariance": (
        EXACT,
        lambda m, x: MultivariateNormal(m.l(x), scale_tril=lower(m)).log_prob(x),
    ),
    "of the transposed batch": (REFUSED, lambda m, x: Normal(m.l(x), m.l(x).T.exp()).log_prob(x)),
}
DRAWS: Table = {
    "Laplace": (EXACT, lambda m, x: m.l(Laplace(m.l(x), m.p.exp()).rsample())),
    "gamma": (EXACT, lambda m, x: Gamma(m.l(x).exp(), m.p.exp()).rsample()),
    "Dirichlet": (EXACT, lambda m, x: Dirichlet(m.l(x).exp()).rsample()),
    "Dirichlet over samples": (REFUSED, lambda m, x: Dirichlet(m.l(x).T.exp()).rsample().T),
}


def solved(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(a, b, upper=False)


SOLVERS: Table = {
    "a side for each sample": (EXACT, lambda m, x: solved(lower(m), m.l(x).T).T),
    "a batch of such sides": (EXACT, lambda m, x: solved(lower(m)[None], m.l(x).T[None])[0].T),
    "from the right": (
        EXACT,
        lambda m, x: torch.linalg.solve_triangular(lower(m), m.l(x), upper=False, left=False),
    ),
    "samples as unknowns": (REFUSED, lambda m, x: solved(lower(m), m.l(x))),
    "by Cholesky factors": (EXACT, lambda m, x: torch.cholesky_solve(m.l(x).T, lower(m)).T),
    "Cholesky, samples as unknowns": (
        REFUSED,
        lambda m, x: torch.cholesky_solve(m.l(x), lower(m)),
    ),
    "a matrix of samples": (
        REFUSED,
        lambda m, x: solved(m.l(x).tril() + 3 * torch.eye(N).double(), m.w),
    ),
    "least squares": (
        EXACT,
        lambda m, x: torch.linalg.lstsq(m.l(cube(x)), cube(x)[..., :1]).solution,
    ),
    "least squares of vectors": (
        EXACT,
        lambda m, x: torch.linalg.lstsq(m.l(cube(x)), cube(x)[..., 0]).solution,
    ),
    "least squares over samples": (
        REFUSED,
        lambda m, x: torch.linalg.lstsq(m.l(x) + 3 * m.w, x).solution,
    ),
}


def sampled(image: Tensor, grid: Tensor) -> Tensor:
    return F.grid_sample(image, grid, align_corners=False)


GRIDS: Table = {
    "points of a learned image": (
        EXACT, lambda m, x: sampled(m.w[None, None], m.l(x).tanh().view(1, N, 2, 2))[0, 0],
    ),
    "points of a learned volume": (
        EXACT,
        lambda m, x: sampled(m.w[None, None, None], m.l(x)[:, :3].view(1, 1, 1, -1, 3)).flatten(),
    ),
    "samples as channels": (
        EXACT, lambda m, x: sampled(m.l(x).view(1, N, 2, 2), m.w.tanh().view(1, 2, 4, 2))[0],
    ),
    "samples as channels and as points": (
        REFUSED, lambda m, x: sampled(m.l(x).view(1, N, 2, 2), m.l(x).view(1, N, 2, 2))[0],
    ),
    "samples as pixels": (
        REFUSED, lambda m, x: sampled(m.l(x)[None, None], m.w.view(1, N, 2, 2))[0, 0],
    ),
}  # fmt: skip


def cube(x: Tensor) -> Tensor:
    """A well-conditioned matrix for each sample."""
    return x[:, :, None] * x[:, None] + 2 * torch.eye(N, dtype=torch.float64)


def blocks(m: nn.Module, x: Tensor) -> Tensor:
    """Two corners of a buffer are written: rows and columns between them hold nobody's zeros."""
    h = m.l(x)
    out = torch.zeros(N, 6, 6, dtype=torch.float64)
    out[:, :2, :2] = h.view(N, 2, 2)
    out[:, -2:, :2] = h.view(N, 2, 2).mT
    return torch.linalg.det(out + torch.eye(6, dtype=torch.float64)).unsqueeze(1) * h


def crossed_blocks(m: nn.Module, x: Tensor) -> Tensor:
    """The second corner is written with other samples' values."""
    h = m.l(x)
    out = torch.zeros(N, 6, 6, dtype=torch.float64)
    out[:, :2, :2] = h.view(N, 2, 2)
    out[:, -2:, :2] = h.view(N, 2, 2).flip(0)
    return out.sum((1, 2)).unsqueeze(1) * h


def spectrum(m: nn.Module, x: Tensor) -> Tensor:
    """A two-dimensional Fourier layer that keeps low frequencies of both signs."""
    f = torch.fft.rfft2(x)
    out = torch.zeros(N, 2, 4, 3, dtype=torch.complex128)
    out[:, :, :1, :2] = torch.einsum("ncxy,cdxy->ndxy", f[:, :, :1, :2], m.u)
    out[:, :, -1:, :2] = torch.einsum("ncxy,cdxy->ndxy", f[:, :, -1:, :2], m.v)
    return torch.fft.irfft2(out, s=(4, 4))


def layers() -> Iterator[Case]:
    """Buffers that are written in blocks."""
    yield case("program: corners of a buffer", EXACT, blocks)
    yield case("program: corners of other samples", REFUSED, crossed_blocks)
    weights = {k: torch.complex(rand(2, 2, 1, 2), rand(2, 2, 1, 2, seed=1)) for k in "uv"}
    yield case("program: Fourier layer", EXACT, spectrum, rand(N, 2, 4, 4), **weights)


def cases() -> Iterator[Case]:
    """All of them."""
    x = rand(N, N)
    parts = {"l": lin(), "p": rand(N, seed=4), "w": rand(N, N, seed=5)}
    return chain(
        on_module("distribution", DISTRIBUTIONS, x, **parts),
        (c._replace(loss_fn=seeded_losses) for c in on_module("draws", DRAWS, x, **parts)),
        on_module("solver", SOLVERS, x, **parts),
        on_module("grid", GRIDS, x, l=lin(), w=rand(N, N)),
        layers(),
    )
