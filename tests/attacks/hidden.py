"""Attacks by code that the recorder cannot see."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Net,
    Table,
    elsewhere,
    lin,
    on_hidden,
    on_module,
    rand,
    row_losses,
    script,
    unseen,
)
from .functions import Double


@script
def scripted(h: Tensor) -> Tensor:
    """Compiled by TorchScript."""
    return h * 2


@script
def scripted_mixing(h: Tensor) -> Tensor:
    """Compiled by TorchScript; mixes."""
    return h - h.mean(0)


class Plain(nn.Module):
    """A layer that TorchScript accepts."""

    def __init__(self, mixing: bool = False) -> None:
        super().__init__()
        self.l, self.mixing = lin(), mixing

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        return h - h.mean(0) if self.mixing else h.tanh()


def vmapped(function: Callable[[Tensor], Tensor], h: Tensor, dim: int = 0) -> Tensor:
    """A function of every row or column."""
    return torch.func.vmap(function, in_dims=dim, out_dims=dim)(h)


HIDDEN: Table = {
    "jit function": (EITHER, lambda h: scripted(h)),
    "jit function, mixing": (REFUSED, lambda h: scripted_mixing(h)),
    "vmap of rows": (EITHER, lambda h: vmapped(lambda r: r.softmax(0), h)),
    "vmap of columns": (REFUSED, lambda h: vmapped(lambda r: r.softmax(0), h, 1)),
    "thread": (EITHER, lambda h: elsewhere(lambda: h * 2)),
    "thread, mixing": (REFUSED, lambda h: elsewhere(lambda: h - h.mean(0))),
    "disabled": (EITHER, lambda h: unseen(lambda: h * 2)),
    "disabled, mixing": (REFUSED, lambda h: unseen(lambda: h.T)),
    "disabled, written": (REFUSED, lambda h: hidden_add(h * 1)),
    "numpy and no gradient": (
        EITHER,
        lambda h: h * torch.from_numpy(h.detach().numpy()[::-1].copy()),
    ),
    "pickled": (EITHER, lambda h: h * copy.deepcopy(h.detach().flip(0))),
    "shallow copy": (EITHER, lambda h: copy.copy(h) * 2),
    "shallow copy of a transpose": (EITHER, lambda h: copy.copy(h.T) * 2),
    "dlpack": (EITHER, lambda h: h * torch.from_dlpack(h.detach().T.contiguous())),
    "subclass": (EITHER, lambda h: h * h.detach().as_subclass(nn.Parameter).flip(0)),
    "aten transpose": (REFUSED, lambda h: torch.ops.aten.t(h)),
    "aten view": (REFUSED, lambda h: torch.ops.aten.permute(h, [1, 0])),
    "aten softmax": (REFUSED, lambda h: torch.ops.aten._softmax(h, 0, False)),
    "autocast off": (EXACT, lambda h: autocast_off(h)),
    "grad mode toggled": (EXACT, lambda h: toggled(h)),
    "inference mode": (EITHER, lambda h: h * inference(h)),
    "many temporaries": (EXACT, lambda h: temporaries(h)),
    "temporaries of other layouts": (REFUSED, lambda h: temporaries(h) * temporaries(h.T)),
    "device context": (EXACT, lambda h: on_device(h)),
    "a mode of the user": (EITHER, lambda h: user_mode(h)),
    "cond": (EITHER, lambda h: torch.cond(h.sum() > 0, lambda z: z * 2, lambda z: z * 3, (h,))),
    "functional jvp": (
        EITHER,
        lambda h: torch.func.jvp(torch.tanh, (h,), (torch.ones_like(h),))[1],
    ),
    "func grad per sample": (EITHER, lambda h: torch.func.grad(lambda z: z.pow(3).sum())(h)),
    "func grad, mixing": (REFUSED, lambda h: torch.func.grad(lambda z: z.sum().pow(3))(h)),
    "autograd.grad, mixing": (REFUSED, lambda h: h + slope(h, lambda z: z.sum().pow(3))),
    "autograd.grad": (EITHER, lambda h: h + slope(h, lambda z: z.pow(3).sum())),
    "autograd jacobian": (
        EITHER,
        lambda h: torch.autograd.functional.jacobian(
            lambda z: z.pow(2).sum(1), h, create_graph=True
        ).sum(1),
    ),
}


def autocast_off(h: Tensor) -> Tensor:
    """Autocast, disabled."""
    with torch.autocast("cpu", enabled=False):
        return h * 2


def hidden_add(h: Tensor) -> Tensor:
    """A write that no torch function mode sees."""
    unseen(lambda: h.add_(h.flip(0)))
    return h * 2


def on_device(h: Tensor) -> Tensor:
    """Inside another torch function mode."""
    with torch.device("cpu"):
        return h * 2


def toggled(h: Tensor) -> Tensor:
    """Gradients on inside of gradients off."""
    with torch.no_grad(), torch.enable_grad():
        return h * h


def inference(h: Tensor) -> Tensor:
    """A tensor of inference mode, cloned outside."""
    with torch.inference_mode():
        out = h.flip(0) * 2
    return out.clone()


def temporaries(h: Tensor) -> Tensor:
    """Tensors that die at once, so that their identities are used again."""
    for _ in range(40):
        _ = h.T * 2
        del _
        keep = h * 1
    return keep


class Passing(torch.overrides.TorchFunctionMode):
    """Passes every call on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def user_mode(h: Tensor) -> Tensor:
    """Below a mode of the user's own."""
    with Passing():
        return h * 2


def slope(h: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """The derivative of a function of everything, differentiable again."""
    return torch.autograd.grad(function(h), h, create_graph=True)[0]


def opaque(m: nn.Module, x: Tensor) -> Tensor:
    """A use of a parameter for which no rule exists: samples are columns of a right-hand side."""
    return torch.linalg.solve(m.w, x.T).T


OPAQUE: Table = {
    "added": (EITHER, lambda m, x: m.l(x) + opaque(m, x)),
    "alone": (EITHER, opaque),
    "one row": (REFUSED, lambda m, x: m.l(x) * opaque(m, x)[:1]),
    "through a thread": (EITHER, lambda m, x: m.l(x) * after(opaque(m, x), elsewhere)),
    "through disabled code": (EITHER, lambda m, x: m.l(x) * after(opaque(m, x), unseen)),
    "through vmap": (EITHER, lambda m, x: m.l(x) * vmapped(lambda r: r * 2, opaque(m, x))),
    "through a jit function": (EITHER, lambda m, x: m.l(x) * scripted(opaque(m, x))),
    "through a custom function": (EITHER, lambda m, x: m.l(x) * Double.apply(opaque(m, x))),
    "through func.grad": (
        EITHER,
        lambda m, x: m.l(x) * torch.func.grad(lambda z: z.pow(3).sum())(opaque(m, x)),
    ),
    "through a buffer": (EITHER, lambda m, x: m.l(x) * torch.zeros_like(x).copy_(opaque(m, x))),
    "mixed samples through vmap": (
        REFUSED,
        lambda m, x: m.l(x) * vmapped(lambda r: r * 2, m.w @ m.l(x)),
    ),
    "mixed samples through jit": (REFUSED, lambda m, x: m.l(x) * scripted(m.w @ m.l(x))),
    "mixed raw samples through vmap": (
        EITHER,
        lambda m, x: m.l(x) * vmapped(lambda r: r * 2, m.w @ x),
    ),
    "mixed raw samples through jit": (EITHER, lambda m, x: m.l(x) * scripted(m.w @ x)),
    "as a plain number": (EITHER, lambda m, x: m.l(x) * opaque(m, x).sum().item()),
}


def after(h: Tensor, where: Callable[[Callable[[], Tensor]], Tensor]) -> Tensor:
    """Doubled where the recorder may not see it."""
    return where(lambda: h * 2)


def penalty(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """The gradient of the output by the input, per sample."""
    x = batch[0].detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).square()


def mixed_penalty(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """The gradient of a product of outputs by the input."""
    x = batch[0].detach().clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).tanh().sum().square(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).square()


class Running(nn.Module):
    """A buffer of running statistics, used at once, and a hidden state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.l, self.kind = lin(), kind
        self.mean = nn.Buffer(torch.ones(N, dtype=torch.float64))
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x)
        if self.kind == "mean":
            self.mean = 0.9 * self.mean + 0.1 * h.mean(0)
        if self.kind == "detached mean":
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        if self.kind == "attribute":
            self.state = h
            h = self.state.flip(0) * self.state
        if self.kind == "count":
            self.mean = self.mean + 1
        return h * self.mean


def twice(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Two calls; the buffer lives on."""
    return row_losses(model, batch) + row_losses(model, batch)


def states() -> Iterator[Case]:
    """Gradient penalties, buffers, compiled models."""
    x = (rand(N, N),)
    smooth = Net(lambda m, x: m.k(m.l(x).tanh()), l=lin(), k=lin(seed=2))
    yield Case("penalty: per sample", smooth, x, penalty, EITHER)
    yield Case("penalty: mixing", smooth, x, mixed_penalty, REFUSED)
    for kind, expectation in (
        ("mean", REFUSED),
        ("detached mean", EITHER),
        ("attribute", REFUSED),
        ("count", EXACT),
    ):
        yield Case(f"buffer: {kind}", Running(kind), x, row_losses, expectation)
        yield Case(f"buffer: {kind}, two calls", Running(kind), x, twice, expectation)
    for mixing in (False, True):
        name, expectation = ("mixing", REFUSED) if mixing else ("plain", EITHER)
        compiled_script = script(Plain(mixing))
        yield Case(f"jit: scripted, {name}", compiled_script, x, row_losses, expectation)
        traced = torch.jit.trace(Plain(mixing), x)
        yield Case(f"jit: traced, {name}", traced, x, row_losses, expectation)
        inner = Net(lambda m, x: m.k(m.l(x)), l=compiled_script, k=lin(seed=3))
        yield Case(f"jit: inside, {name}", inner, x, row_losses, expectation)
        compiled = torch.compile(Plain(mixing), backend="eager")
        yield Case(f"compile: {name}", compiled, x, row_losses, expectation)


def cases() -> Iterator[Case]:
    """All of this file."""
    parts = {"l": lin(), "w": 0.8 * rand(N, N, seed=6)}
    return chain(
        on_hidden("hidden", HIDDEN),
        on_module("opaque", OPAQUE, rand(N, N), **parts),
        states(),
    )
