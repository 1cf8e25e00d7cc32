"""Attacks by gradients that a model takes inside forward, and computes with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .base import EITHER, EXACT, REFUSED, Case, N, Table, lin, on_module, rand, seeded

Field = Callable[[Any, Tensor], Tensor]


def entered(x: Tensor) -> Tensor:
    """A tensor by which gradients can be taken."""
    return x.clone().requires_grad_()


def slope(value: Tensor, x: Tensor, seed: Tensor | None = None, **more: Any) -> Tensor:
    """The gradient of the sum, to be differentiated again."""
    seed = torch.ones_like(value) if seed is None else seed
    return torch.autograd.grad(value, x, seed, create_graph=True, **more)[0]


def forced(energy: Field) -> Field:
    """The energy of every sample, and its forces."""

    def body(m: Any, x: Tensor) -> Tensor:
        x = entered(x)
        value = energy(m, x)
        return slope(value, x).flatten(1) + value.flatten(1).sum(1, keepdim=True)

    return body


class Cube(torch.autograd.Function):
    """Data only; its backward can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 3 * grads[0] * ctx.saved_tensors[0] ** 2


class Crossed(torch.autograd.Function):
    """Its backward gives every sample the gradient of another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].flip(0)


class Scaled(torch.autograd.Function):
    """Takes a parameter beside data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] * w, (grads[0] * x).sum(0)


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.l(x)
    h.mul_(m.w)
    h.add_(m.w)
    return h.tanh()


def checkpointed(m: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda h: m.k(torch.tanh(m.l(h))), x, use_reentrant=False).square()


def attended(m: Any, x: Tensor) -> Tensor:
    h = x.view(N, 2, 2)
    return m.attention(h, h, h, need_weights=True)[0].square()


def alone(m: Any, x: Tensor) -> Tensor:
    return torch.stack([m.l(row).tanh() for row in x])


ENERGIES: Table = {
    "two layers": (EXACT, lambda m, x: m.k(torch.tanh(m.l(x)))),
    "the same layer twice": (EXACT, lambda m, x: m.l(torch.tanh(m.l(x)))),
    "a product of two layers": (EXACT, lambda m, x: m.l(x) * m.k(x)),
    "the same data twice": (EXACT, lambda m, x: torch.addcmul(m.w, x, x) * torch.mul(x, m.w)),
    "a weight made of parameters": (EXACT, lambda m, x: F.linear(x, m.l.weight * m.w.exp()).tanh()),
    "a transposed weight": (EXACT, lambda m, x: (x @ m.l.weight.t() @ m.l.weight).tanh()),
    "einsum": (EXACT, lambda m, x: torch.einsum("bi,ji,bk->bjk", x, m.l.weight, x).tanh()),
    "bilinear": (EXACT, lambda m, x: F.bilinear(x, x.tanh(), m.w3)),
    "prelu": (EXACT, lambda m, x: F.prelu(m.l(x), m.w[:1]).square()),
    "power": (EXACT, lambda m, x: (x.square() + 1) ** m.w),
    "layer norm": (EXACT, lambda m, x: F.layer_norm(x, (N,), m.w, m.w).square()),
    "group norm": (EXACT, lambda m, x: F.group_norm(x, 2, m.w, m.w).square()),
    "convolution": (EXACT, lambda m, x: m.conv(x[:, None]).tanh()),
    "attention": (EXACT, attended),
    "in place": (EXACT, in_place),
    "in place with a result": (EXACT, lambda m, x: m.l(x).square().mul_(m.w).sin()),
    "distance": (EXACT, lambda m, x: (x[:, None] - m.l.weight).norm(dim=-1)),
    "a recurrent cell": (EXACT, lambda m, x: m.cell(x, m.l(x)).square()),
    "checkpointing": (EITHER, checkpointed),
    "rows one at a time": (EXACT, alone),
    "a custom function of data": (EXACT, lambda m, x: Cube.apply(m.l(x))),
    "a custom function of a parameter": (EITHER, lambda m, x: Scaled.apply(m.l(x), m.w).tanh()),
    "a custom function that crosses samples": (REFUSED, lambda m, x: Crossed.apply(m.l(x)).tanh()),
    "a frozen layer": (EXACT, lambda m, x: m.frozen(m.l(x).tanh()).square()),
    "a class token": (EXACT, lambda m, x: torch.cat([m.w.expand(N, 1, N), x[:, None]], 1).prod(1)),
    "a mean over the batch": (REFUSED, lambda m, x: m.l(x) - m.l(x).mean(0)),
    "another sample": (REFUSED, lambda m, x: m.l(x) * m.l(x).flip(0)),
    "batch statistics": (REFUSED, lambda m, x: F.batch_norm(m.l(x), None, None, training=True)),
    "a mean without gradient": (REFUSED, lambda m, x: m.l(x) - m.l(x).detach().mean(0)),
    "a maximum over the batch": (REFUSED, lambda m, x: m.l(x).amax(0, keepdim=True)),
}  # fmt: skip


def penalty(m: Any, x: Tensor) -> Tensor:
    x = entered(x)
    return (slope(m.l(x).tanh(), x).norm(dim=1, keepdim=True) - 1).square()


def laplacian(m: Any, x: Tensor) -> Tensor:
    x = entered(x)
    first = slope(m.k(m.l(x).tanh()), x)
    return sum((slope(first[:, k], x)[:, k : k + 1] for k in range(N)), start=first)


def third(m: Any, x: Tensor) -> Tensor:
    x = entered(x)
    value = m.l(x).tanh()
    for _ in range(3):
        value = slope(value.square(), x) + 0.1 * value
    return value


def batched(m: Any, x: Tensor) -> Tensor:
    x = entered(x)
    seeds = torch.eye(N, dtype=x.dtype).unsqueeze(1).expand(N, N, N)
    found = slope(m.l(x).tanh(), x, seeds, is_grads_batched=True)
    return found.diagonal(dim1=0, dim2=2)


def crossed_seeds(m: Any, x: Tensor) -> Tensor:
    x = entered(x)
    value = m.l(x).tanh()
    seeds = torch.stack([value.roll(k, 0) for k in range(N)])
    return slope(value, x, seeds, is_grads_batched=True).sum(0)


def descent(m: Any, x: Tensor) -> Tensor:
    """Energy-based inference: steps down the slope of a learned energy."""
    z = entered(x)
    for _ in range(3):
        z = z - 0.1 * slope(m.l(torch.cat([z[:, :2], x[:, 2:]], 1)).tanh().square(), z)
    return z


def hidden(m: Any, x: Tensor, *, prepared: bool) -> Tensor:
    h = m.l(x).tanh()
    h = h.requires_grad_() if prepared else h
    return slope(m.k(h).tanh(), h)


def equilibrium(m: Any, x: Tensor) -> Tensor:
    """A fixed point whose backward solves for the gradient by further vector-Jacobian products."""
    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(30):
            z = 0.2 * torch.tanh(m.l(z) + x)
    z = 0.2 * torch.tanh(m.l(z) + x)
    at = z.clone().detach().requires_grad_()
    again = 0.2 * torch.tanh(m.l(at) + x)

    def solve(grad: Tensor) -> Tensor:
        found = grad
        for _ in range(30):
            found = torch.autograd.grad(again, at, found, retain_graph=True)[0] + grad
        return found

    if z.requires_grad:
        z.register_hook(solve)
    return z


def by_time(m: Any, x: Tensor) -> Tensor:
    t = torch.ones((), dtype=x.dtype, requires_grad=True)
    return m.l(x) * slope(m.k(x * t).tanh(), t)


def by_own_time(m: Any, x: Tensor) -> Tensor:
    t = x.new_ones(len(x), 1).requires_grad_()
    return slope(m.k(x * t).tanh(), t)


def inner_step(m: Any, x: Tensor) -> Tensor:
    weight = m.l.weight
    (found,) = torch.autograd.grad(m.l(x).square().sum(), weight, create_graph=True)
    return F.linear(x, weight - 0.1 * found)


def seeded_by(function: Callable[[Any, Tensor], Tensor]) -> Field:
    """The gradient of a sum weighted by a function of the samples."""

    def body(m: Any, x: Tensor) -> Tensor:
        x = entered(x)
        return slope(m.l(x).tanh(), x, function(m, x))

    return body


def first_order(m: Any, x: Tensor) -> Tensor:
    x = entered(x)
    (found,) = torch.autograd.grad(m.l(x).tanh().sum(), x, retain_graph=True)
    return m.k(found) + m.l(x)


def mixed_scale(m: Any, x: Tensor) -> Tensor:
    x = entered(x)
    value = m.l(x).tanh()
    return m.k(slope(value / value.detach().abs().mean(), x))


def hooked(m: Any, x: Tensor, *, mixing: bool) -> Tensor:
    x = entered(x)
    h = m.l(x).tanh()
    h.register_hook(lambda g: g - g.mean(0) if mixing else 2 * g)
    return slope(m.k(h).square(), x)


def by_constant(f: Callable[[Any, Tensor, Tensor], Tensor]) -> Field:
    """By a constant with as many rows as there are samples."""

    def body(m: Any, x: Tensor) -> Tensor:
        constant = entered(torch.linspace(-1, 1, N * N, dtype=x.dtype).view(N, N))
        return slope(f(m, x, constant).tanh(), constant)

    return body


def row_by_row(m: Any, x: Tensor, constant: Tensor) -> Tensor:
    return torch.stack([m.k(c) * m.l(row) for c, row in zip(constant, x, strict=True)])


def in_another_order(m: Any, x: Tensor, constant: Tensor) -> Tensor:
    out: Tensor = m.k(constant.flip(0)) * m.l(x)
    return out


PROGRAMS: Table = {
    "gradient penalty": (EXACT, penalty),
    "laplacian": (EXACT, laplacian),
    "three times": (EXACT, third),
    "all seeds at once": (EXACT, batched),
    "seeds of all samples at once": (REFUSED, crossed_seeds),
    "energy-based inference": (EXACT, descent),
    "by a hidden tensor": (EXACT, lambda m, x: hidden(m, x, prepared=True)),
    "by a hidden tensor, unprepared": (REFUSED, lambda m, x: hidden(m, x, prepared=False)),
    "an equilibrium": (EITHER, equilibrium),
    "by a number that all samples share": (REFUSED, by_time),
    "by a number for each sample": (EITHER, by_own_time),
    "by a parameter": (REFUSED, inner_step),
    "by a constant of each sample": (EXACT, by_constant(lambda m, x, c: m.k(c) * m.l(x))),
    "by a constant in a loop": (EXACT, by_constant(row_by_row)),
    "by a constant that all samples share": (REFUSED, by_constant(lambda m, x, c: m.l(x) @ m.k(c))),
    "by a constant in another order": (EITHER, by_constant(in_another_order)),
    "seeds that are constant": (EXACT, seeded_by(lambda m, x: torch.full_like(x, 0.5))),
    "seeds of the samples": (EXACT, seeded_by(lambda m, x: m.k(x))),
    "seeds of other samples": (REFUSED, seeded_by(lambda m, x: m.k(x).flip(0))),
    "seeds of all samples": (REFUSED, seeded_by(lambda m, x: m.k(x).mean(0).expand(N, N))),
    "seeds of parameters": (REFUSED, seeded_by(lambda m, x: m.l.weight.tanh())),
    "a first derivative as data": (EXACT, first_order),
    "scaled by a number of the batch": (REFUSED, mixed_scale),
    "a hook": (EXACT, lambda m, x: hooked(m, x, mixing=False)),
    "a hook that mixes": (REFUSED, lambda m, x: hooked(m, x, mixing=True)),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """Energies and their forces; other programs."""
    frozen = lin(seed=9)
    frozen.requires_grad_(False)
    parts = {
        "l": lin(), "k": lin(seed=3), "w": rand(N, seed=4), "w3": rand(2, N, N, seed=5),
        "conv": seeded(nn.Conv1d(1, 2, 3)), "frozen": frozen,
        "attention": seeded(nn.MultiheadAttention(2, 1, batch_first=True)),
        "cell": seeded(nn.GRUCell(N, N)),
    }  # fmt: skip
    energies = {name: (expected, forced(f)) for name, (expected, f) in ENERGIES.items()}
    return chain(
        on_module("inner energy", energies, rand(N, N), **parts),
        on_module("inner", PROGRAMS, rand(N, N), **parts),
    )
