"""Attacks through autograd and around the recorder: hooks, functions, checkpoints, scripts."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .attacks_base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Net,
    Table,
    case,
    lin,
    on_hidden,
    on_module,
    rand,
    row_losses,
)


class Double(torch.autograd.Function):
    """Elementwise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Reverse(torch.autograd.Function):
    """The identity; its backward reverses the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class CrossedBackward(torch.autograd.Function):
    """The identity; its backward gives each sample the gradient of another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(0)


class NormedBackward(torch.autograd.Function):
    """The identity; its backward divides by the norm over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / grad.norm()


class Centered(torch.autograd.Function):
    """Forward and backward subtract the mean over samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad - grad.mean(0)


class Linear(torch.autograd.Function):
    """A matrix product with a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.T, x.T @ grad


class MeanLinear(Linear):
    """The same, but the parameter's gradient uses the mean input."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.T, x.mean(0).expand_as(x).T @ grad


class InPlace(torch.autograd.Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class TwoOutputs(torch.autograd.Function):
    """Returns the tensor and its transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.T.clone()

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        return 2 * a + b.T


FUNCTIONS: Table = {
    "elementwise": (EITHER, lambda m, x: Double.apply(m.l(x))),
    "gradient reversal": (EITHER, lambda m, x: Reverse.apply(m.l(x)) * 2),
    "crossed backward": (REFUSED, lambda m, x: CrossedBackward.apply(m.l(x))),
    "crossed backward, twice": (
        EITHER,
        lambda m, x: CrossedBackward.apply(CrossedBackward.apply(m.l(x))),
    ),
    "normed backward": (REFUSED, lambda m, x: NormedBackward.apply(m.l(x))),
    "centered": (REFUSED, lambda m, x: Centered.apply(m.l(x))),
    "of the raw input": (EITHER, lambda m, x: m.l(Centered.apply(x))),
    "of a parameter": (EITHER, lambda m, x: x @ Double.apply(m.w)),
    "takes a parameter": (EITHER, lambda m, x: Linear.apply(x, m.w)),
    "takes a parameter, mean input": (EITHER, lambda m, x: MeanLinear.apply(x, m.w)),
    "takes a derived parameter": (EITHER, lambda m, x: Linear.apply(m.l(x), m.w * 2)),
    "parameter on the left": (REFUSED, lambda m, x: Linear.apply(m.w, m.l(x))),
    "in place": (EITHER, lambda m, x: InPlace.apply(m.l(x) * 1)),
    "two outputs, the first": (EITHER, lambda m, x: TwoOutputs.apply(m.l(x))[0]),
    "two outputs, the transpose": (REFUSED, lambda m, x: TwoOutputs.apply(m.l(x))[1]),
    "two outputs, both": (REFUSED, lambda m, x: torch.mul(*TwoOutputs.apply(m.l(x)))),
}


def hooked(h: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    """The tensor, with a hook on its gradient."""
    h = h * 1
    h.register_hook(hook)
    return h * h


HOOKS: Table = {
    "reads": (EXACT, lambda m, x: hooked(m.l(x), lambda g: None)),
    "scales": (EITHER, lambda m, x: hooked(m.l(x), lambda g: 2 * g)),
    "crosses samples": (REFUSED, lambda m, x: hooked(m.l(x), lambda g: g.flip(0))),
    "sums over samples": (REFUSED, lambda m, x: hooked(m.l(x), lambda g: g.sum(0).expand_as(g))),
    "norm of the batch": (REFUSED, lambda m, x: hooked(m.l(x), lambda g: g / g.norm())),
    "clips by sample": (
        EITHER,
        lambda m, x: hooked(m.l(x), lambda g: g / g.norm(dim=1, keepdim=True).clamp(min=1.0)),
    ),
    "clips by the largest": (REFUSED, lambda m, x: hooked(m.l(x), lambda g: g / g.abs().max())),
    "on the output of a parameter": (
        REFUSED,
        lambda m, x: hook_output(m.l(x), lambda g: g.roll(1, 0)),
    ),
    "on a derived parameter": (EITHER, lambda m, x: x @ hooked(m.w, lambda g: 3 * g)),
    "clips a derived parameter": (
        EITHER,
        lambda m, x: x @ hooked(m.w, lambda g: g / g.norm()),
    ),
    "on a parameter": (EITHER, lambda m, x: on_parameter(m, lambda g: 3 * g) or x @ m.w),
    "clips a parameter": (EITHER, lambda m, x: on_parameter(m, lambda g: g / g.norm()) or x @ m.w),
    "on a grad_fn": (REFUSED, lambda m, x: on_node(m.l(x) * 1)),
    "on a grad_fn, prehook": (REFUSED, lambda m, x: on_node_before(m.l(x) * 1)),
    "saved tensors crossed": (EITHER, lambda m, x: saved_crossed(m, x)),
    "saved tensors packed": (EXACT, lambda m, x: saved_packed(m, x)),
    "saved on cpu": (EXACT, lambda m, x: saved_on_cpu(m, x)),
    "multi-grad": (EITHER, lambda m, x: multi_grad(m.l(x) * 1)),
}


def hook_output(h: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    """A hook directly on the output of a layer."""
    h.register_hook(hook)
    return h * h


def on_parameter(m: nn.Module, hook: Callable[[Tensor], Tensor]) -> None:
    """A hook on the parameter itself."""
    m.w.register_hook(hook)


def on_node(h: Tensor) -> Tensor:
    """A hook on the node that made a tensor."""
    h.grad_fn.register_hook(lambda ins, outs: tuple(None if g is None else g.flip(0) for g in ins))
    return h * h


def on_node_before(h: Tensor) -> Tensor:
    """A pre-hook on the node that made a tensor."""
    h.grad_fn.register_prehook(lambda grads: tuple(g.flip(0) for g in grads))
    return h * h


def saved_crossed(m: nn.Module, x: Tensor) -> Tensor:
    """What backward sees of the forward comes from other samples."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.flip(0)):
        return m.k(m.l(x).tanh())


def saved_packed(m: nn.Module, x: Tensor) -> Tensor:
    """What backward needs is stored elsewhere meanwhile."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (t * 1,), lambda p: p[0]):
        return m.k(m.l(x).tanh())


def saved_on_cpu(m: nn.Module, x: Tensor) -> Tensor:
    """Offloading."""
    with torch.autograd.graph.save_on_cpu():
        return m.k(m.l(x).tanh())


def multi_grad(h: Tensor) -> Tensor:
    """A hook that only looks."""
    g = h * 2
    torch.autograd.graph.register_multi_grad_hook((h, g), lambda grads: None)
    return g * h


def module_hooks() -> Iterator[Case]:
    """Hooks on modules."""
    table: dict[str, tuple[str, Callable[[nn.Module], Any]]] = {
        "forward mixes": (
            REFUSED,
            lambda l: l.register_forward_hook(lambda m, a, out: out - out.mean(0)),
        ),
        "forward scales": (EXACT, lambda l: l.register_forward_hook(lambda m, a, out: out * 2)),
        "pre-hook crosses the input": (
            EITHER,
            lambda l: l.register_forward_pre_hook(lambda m, a: (a[0].flip(0),)),
        ),
        "backward reads": (
            EITHER,
            lambda l: l.register_full_backward_hook(lambda m, gi, go: None),
        ),
        "backward crosses": (
            REFUSED,
            lambda l: l.register_full_backward_hook(lambda m, gi, go: (gi[0].flip(0),)),
        ),
        "backward pre-hook crosses": (
            REFUSED,
            lambda l: l.register_full_backward_pre_hook(lambda m, go: (go[0].flip(0),)),
        ),
        "backward pre-hook scales": (
            EITHER,
            lambda l: l.register_full_backward_pre_hook(lambda m, go: (go[0] * 2,)),
        ),
    }
    for name, (expectation, register) in table.items():
        layer = lin(seed=2)
        register(layer)
        body = lambda m, x: m.k(m.l(x).tanh()) * 2
        yield case(f"module hook: {name}", expectation, body, l=lin(), k=layer)


CHECKPOINTS: Table = {
    "non-reentrant": (EXACT, lambda m, x: checkpoint(block, m, x, use_reentrant=False)),
    "non-reentrant, first": (
        EXACT,
        lambda m, x: m.l(checkpoint(block, m, x, use_reentrant=False)),
    ),
    "non-reentrant, last": (
        EXACT,
        lambda m, x: checkpoint(block, m, m.l(x), use_reentrant=False),
    ),
    "non-reentrant, twice": (
        EXACT,
        lambda m, x: checkpoint(
            block, m, checkpoint(block, m, x, use_reentrant=False), use_reentrant=False
        ),
    ),
    "non-reentrant, nested": (
        EITHER,
        lambda m, x: checkpoint(
            lambda z: checkpoint(block, m, z, use_reentrant=False), m.l(x), use_reentrant=False
        ),
    ),
    "non-reentrant, mixing": (
        REFUSED,
        lambda m, x: checkpoint(lambda z: z - z.mean(0), m.l(x), use_reentrant=False),
    ),
    "non-reentrant, a parameter only": (
        EXACT,
        lambda m, x: x @ checkpoint(lambda w: w.tanh() @ w, m.w, use_reentrant=False),
    ),
}


def block(m: nn.Module, x: Tensor) -> Tensor:
    """What is recomputed."""
    return m.k(torch.tanh(x @ m.w)).tanh()


def reentrant() -> Iterator[Case]:
    """The old kind of checkpoint, which runs its own backward."""
    table: Table = {
        "reentrant, first": (
            EITHER,
            lambda m, x: m.l(checkpoint(block, m, x + 0 * m.w[0], use_reentrant=True)),
        ),
        "reentrant, last": (
            EITHER,
            lambda m, x: checkpoint(block, m, m.l(x), use_reentrant=True),
        ),
        "reentrant, mixing": (
            REFUSED,
            lambda m, x: checkpoint(lambda z: z - z.mean(0), m.l(x), use_reentrant=True),
        ),
        "reentrant, sequential": (
            EITHER,
            lambda m, x: checkpoint_sequential([m.k, m.l], 2, m.l(x), use_reentrant=True),
        ),
    }
    return on_module("checkpoint", table, rand(N, N), l=lin(), k=lin(seed=2), w=rand(N, N))


@torch.jit.script
def scripted(h: Tensor) -> Tensor:
    """Compiled by TorchScript."""
    return h * 2


@torch.jit.script
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


def elsewhere(function: Callable[[], Tensor]) -> Tensor:
    """The result of a function run by another thread."""
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def unseen(function: Callable[[], Tensor]) -> Tensor:
    """The result of a function that no torch function mode sees."""
    with torch._C.DisableTorchFunction():
        return function()


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
        script = torch.jit.script(Plain(mixing))
        yield Case(f"jit: scripted, {name}", script, x, row_losses, expectation)
        traced = torch.jit.trace(Plain(mixing), x)
        yield Case(f"jit: traced, {name}", traced, x, row_losses, expectation)
        inner = Net(lambda m, x: m.k(m.l(x)), l=script, k=lin(seed=3))
        yield Case(f"jit: inside, {name}", inner, x, row_losses, expectation)
        compiled = torch.compile(Plain(mixing), backend="eager")
        yield Case(f"compile: {name}", compiled, x, row_losses, expectation)


def cases() -> Iterator[Case]:
    """All of this file."""
    parts = {"l": lin(), "k": lin(seed=2), "w": 0.8 * rand(N, N, seed=6)}
    return chain(
        on_module("function", FUNCTIONS, rand(N, N), **parts),
        on_module("hook", HOOKS, rand(N, N), **parts),
        module_hooks(),
        on_module("checkpoint", CHECKPOINTS, rand(N, N), **parts),
        reentrant(),
        on_hidden("hidden", HIDDEN),
        on_module("opaque", OPAQUE, rand(N, N), **parts),
        states(),
    )
