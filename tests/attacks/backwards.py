"""Attacks by what code does with gradients in backward: numbers, other libraries, engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .base import EITHER, EXACT, REFUSED, Case, case, lin

Change = Callable[[Tensor, Tensor], Tensor]


def inner(x: Tensor, grad: Tensor, across: int) -> Tensor:
    """The gradient of a softmax by ``.grad`` of a leaf."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        y = leaf.softmax(across)
    y.backward(grad)
    found = leaf.grad
    assert found is not None
    return found


def by_engine(x: Tensor, grad: Tensor, across: int) -> Tensor:
    """The same by ``torch.autograd.grad``."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        y = leaf.softmax(across)
    return torch.autograd.grad(y, leaf, grad)[0]


CHANGES: dict[str, tuple[str, Change]] = {
    "an array": (REFUSED, lambda g, x: g + torch.from_numpy(g.numpy() - g.numpy().mean(0))),
    "a norm": (REFUSED, lambda g, x: g / (1 + g.norm().item())),
    "a float": (REFUSED, lambda g, x: g / max(1e-3, float(g.norm()))),
    "a condition": (REFUSED, lambda g, x: g / 2 if g.norm() > 0.1 else g * 1),
    "a list": (REFUSED, lambda g, x: g * sum(g.flatten().tolist())),
    "a comparison": (REFUSED, lambda g, x: g * (2 if torch.equal(g, g.flip(0)) else 3)),
    "a count": (REFUSED, lambda g, x: g / (1 + int(g.abs().sum(1).argmax()))),
    "a size": (REFUSED, lambda g, x: g / len(g.nonzero())),
    "dlpack": (REFUSED, lambda g, x: g + torch.from_dlpack(g.detach()).mean(0)),
    "vmap": (REFUSED, lambda g, x: g + torch.vmap(lambda v: v.cumsum(0), 1, 1)(g)),
    "func.vjp": (
        REFUSED,
        lambda g, x: g + torch.func.vjp(lambda h: h.softmax(0), x.detach())[1](g)[0],
    ),
    "func.jvp": (
        REFUSED,
        lambda g, x: g + torch.func.jvp(lambda h: h.softmax(0), (x.detach(),), (g,))[1],
    ),
    "a leaf's gradient": (REFUSED, lambda g, x: g + inner(x, g, 0)),
    "a leaf's gradient by sample": (EXACT, lambda g, x: g + inner(x, g, 1)),
    "seeds of other samples": (REFUSED, lambda g, x: inner(x, g.flip(0), 1)),
    "autograd.grad": (REFUSED, lambda g, x: g + by_engine(x, g, 0)),
    "autograd.grad by sample": (EXACT, lambda g, x: g + by_engine(x, g, 1)),
    "functional.vjp": (
        REFUSED,
        lambda g, x: g * torch.autograd.functional.vjp(lambda h: h.softmax(0), x.detach(), g)[1],
    ),
    "a look": (EXACT, lambda g, x: (g.norm().item(), g)[1]),
    "a look for nan": (EXACT, lambda g, x: torch.zeros_like(g) if g.isnan().any() else g),
    "a clip of each sample": (EXACT, lambda g, x: g / g.norm(dim=1, keepdim=True).clamp(min=1)),
}


def function_of(change: Change) -> Any:
    """A custom function whose backward makes this change."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return change(grad, ctx.saved_tensors[0])

    return Changed


def by_hook(change: Change) -> Callable[[nn.Module, Tensor], Tensor]:
    """A model in which a tensor hook makes this change."""

    def body(m: nn.Module, x: Tensor) -> Tensor:
        h = m.l(x)
        h.register_hook(lambda g: change(g, h.detach()))
        return m.k(h)

    return body


def recomputed(listens: bool) -> Any:
    """A custom function that recomputes; parameters get gradients if its backward says so."""

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
            ctx.module = module
            ctx.save_for_backward(x)
            with torch.no_grad():
                return module(x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.module(leaf)
            if not listens:
                return torch.autograd.grad(y, leaf, grad)[0], None
            y.backward(grad)
            return leaf.grad, None

    return Recomputed


def implicit(m: nn.Module, x: Tensor) -> Tensor:
    """A fixed point whose hook solves for the gradient, as deep equilibrium models do."""
    z = torch.zeros_like(x)
    with torch.no_grad():
        for _ in range(30):
            z = (0.2 * m.l(z) + x).tanh()
    z = (0.2 * m.l(z) + x).tanh()
    start = z.detach().requires_grad_()
    step = (0.2 * m.l(start) + x).tanh()

    def solve(grad: Tensor) -> Tensor:
        found = grad
        for _ in range(30):
            found = torch.autograd.grad(step, start, found, retain_graph=True)[0] + grad
        return found

    z.register_hook(solve)
    return m.k(z)


def parts() -> dict[str, nn.Module]:
    return {"l": lin(), "k": lin(seed=3)}


def functions() -> Iterator[Case]:
    """Custom functions and hooks."""
    for name, (expectation, change) in CHANGES.items():
        made = function_of(change)
        body = lambda m, x, made=made: m.k(made.apply(m.l(x)))
        yield case(f"backward of a function: {name}", expectation, body, **parts())
        expectation = EITHER if expectation == EXACT else expectation
        yield case(f"backward in a hook: {name}", expectation, by_hook(change), **parts())


def engines() -> Iterator[Case]:
    """Back-propagation inside backward."""
    for listens in (True, False):
        made = recomputed(listens)
        body = lambda m, x, made=made: m.k(made.apply(m.l(x), m.k))
        yield case(f"recomputed, parameters listen: {listens}", EXACT, body, **parts())
    yield case("an implicit gradient in a hook", EXACT, implicit, **parts())


def cases() -> Iterator[Case]:
    """All of them."""
    return chain(functions(), engines())
