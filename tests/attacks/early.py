"""Attacks by what is computed from constants before the model is called, and differentiated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .base import EXACT, REFUSED, Case, N, Net, Script, lin, rand
from .inner import Crossed, slope
from .rows import Pair, both

Program = Callable[[Any, Tensor, Tensor], Tensor]
FIXED, ORDER = rand(N, N, seed=8), torch.arange(N).flip(0)


def network() -> Net:
    """Two layers, whose slope is not constant."""
    return Net(lambda m, z: m.k(m.l(z).tanh()), l=lin(), k=lin(seed=2))


def joined(x: Tensor, t: Tensor) -> Tensor:
    return torch.cat([x, t], 1)


def residual(u: Tensor, *by: Tensor) -> Tensor:
    """Squares of a value and of its slopes."""
    return sum((slope(u, x).square().sum(1) for x in by), u.square().sum(1))


def beside(other: Callable[[Tensor], Tensor]) -> Program:
    """Something else is computed from the tensor by which the gradient is taken."""

    def program(m: Any, x: Tensor, t: Tensor) -> Tensor:
        held = other(x)
        return residual(m(joined(x, t)) * held, x)

    return program


def second(m: Any, x: Tensor, t: Tensor) -> Tensor:
    u = m(joined(x, t))
    return slope(slope(u, x), x).square().sum(1) + slope(u, t).square().sum(1)


def hooked(m: Any, x: Tensor, t: Tensor) -> Tensor:
    z = joined(x, t)
    z.register_hook(lambda grad: grad.flip(0))
    return residual(m(z), x)


def hooked_leaf(m: Any, x: Tensor, t: Tensor) -> Tensor:
    z = joined(x, t)
    x.register_hook(lambda grad: grad.flip(0))
    return residual(m(z), x)


def after_other_data(m: Any, x: Tensor, t: Tensor) -> Tensor:
    mixed = m(FIXED).T @ x
    return residual(m(joined(x, t)) * mixed.sum(), x)


def of_parameters(m: Any, x: Tensor, t: Tensor) -> Tensor:
    mixed = (m.l.weight @ x).sum()
    return residual(m(joined(x, t)) * mixed, x)


def ramps(x: Tensor) -> Tensor:
    return (x * (1 - x)).sum(1, keepdim=True)


PROGRAMS: dict[str, tuple[str, Program]] = {
    "joined": (EXACT, lambda m, x, t: residual(m(joined(x, t)), x, t)),
    "second derivatives": (EXACT, second),
    "scaled": (EXACT, lambda m, x, t: residual(m(joined(2 * x - 1, t.sin())), x, t)),
    "features": (EXACT, lambda m, x, t: residual(m((joined(x, t) @ FIXED).cos()), x, t)),
    "multiplied, before": (EXACT, beside(ramps)),
    "multiplied, after": (EXACT, lambda m, x, t: residual(m(joined(x, t)) * ramps(x), x)),
    "by the joined tensor": (
        EXACT, lambda m, x, t: residual(m(1.0 * joined(x, t).requires_grad_()), x)),
    "two calls": (
        EXACT, lambda m, x, t: residual(m(joined(x, t)) + m(joined(x, 0 * t)), x, t)),
    "centred": (REFUSED, lambda m, x, t: residual(m(joined(x - x.mean(0), t)), x)),
    "turned": (REFUSED, lambda m, x, t: residual(m(joined(x.flip(0), t)), x)),
    "multiplied by rows": (REFUSED, lambda m, x, t: residual(m(FIXED @ joined(x, t)), x)),
    "transposed": (REFUSED, lambda m, x, t: residual(m(joined(x, t).T), x)),
    "turned beside": (REFUSED, beside(lambda x: x.flip(0).sum(1, keepdim=True))),
    "a sum beside": (REFUSED, beside(lambda x: x.square().sum())),
    "a custom function beside": (
        REFUSED, beside(lambda x: Crossed.apply(x).sum(1, keepdim=True))),  # type: ignore[no-untyped-call]
    "a custom function after": (
        REFUSED,
        lambda m, x, t: residual(m(joined(x, t)) * Crossed.apply(x).sum(1, keepdim=True), x)),
    "a custom function before": (
        REFUSED, lambda m, x, t: residual(m(joined(Crossed.apply(x), t)), x)),
    "a hook": (REFUSED, hooked),
    "a hook on the leaf": (REFUSED, hooked_leaf),
    "in another order beside": (REFUSED, beside(lambda x: x[ORDER].sum(1, keepdim=True))),
    "after other data": (REFUSED, after_other_data),
    "with parameters": (REFUSED, of_parameters),
}  # fmt: skip


def fresh(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_()


def cases() -> Iterator[Case]:
    """Points that the loss makes ready to be differentiated by."""
    batch = rand(N, 2), rand(N, 2, seed=4)
    for name, (expectation, program) in PROGRAMS.items():

        def losses(model: Any, batch: Any, program: Program = program) -> Tensor:
            return program(model, fresh(batch[0]), fresh(batch[1]))

        yield Case(f"early: {name}", network(), batch, losses, expectation)


def of_leaves(program: Program) -> Pair:
    """The same, by points that were ready before the block."""
    model, x, t = network(), fresh(rand(N, 2)), fresh(rand(N, 2, seed=4))
    return both(model, lambda: program(model, x, t))


def scripts() -> Iterator[Script]:
    """Leaves from before the block."""
    for name, (expectation, program) in PROGRAMS.items():
        run = lambda program=program: of_leaves(program)
        yield Script(f"early leaves: {name}", run, expectation)
