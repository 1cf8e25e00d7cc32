"""Attacks by custom functions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .base import (
    EITHER,
    EXACT,
    REFUSED,
    Case,
    N,
    Table,
    lin,
    on_hidden,
    on_module,
    rand,
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


def _first_column(h: Tensor) -> Tensor:
    h = h.clone()
    h[:, 0] = h[:, 1] * 2
    return h


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


class Exp(torch.autograd.Function):
    """Its backward wants its own result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


class MeanExp(Exp):
    """The same, but the backward uses the mean of its result over samples."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y.mean(0)


class Product(torch.autograd.Function):
    """Returns gradients of both factors, whether they are wanted or not."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad * b, grad * a


class Sign(torch.autograd.Function):
    """A weight made binary; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return w.sign() * w.abs().mean(1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (w,) = ctx.saved_tensors
        return grad * (w.abs() <= 1)


class ScaledByMean(torch.autograd.Function):
    """A weight times the mean sample."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return w * x.mean(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x.mean(0), None


class ScaledByNumpy(ScaledByMean):
    """The same by numpy."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(w.detach().numpy() * x.numpy().mean(0))


FUNCTIONS: Table = {
    "its own result": (EXACT, lambda m, x: m.k(Exp.apply(m.l(x)))),
    "its own result, of a function": (EXACT, lambda m, x: Exp.apply(Double.apply(m.l(x)))),
    "the mean of its own result": (REFUSED, lambda m, x: MeanExp.apply(m.l(x))),
    "a product": (EXACT, lambda m, x: m.k(Product.apply(m.l(x), m.k(x)))),
    "a product with the input": (EXACT, lambda m, x: m.k(Product.apply(m.l(x), x))),
    "a product with the parameter": (EXACT, lambda m, x: Product.apply(x, m.w)),
    "a product of parameters": (EXACT, lambda m, x: x @ Product.apply(m.w, m.l.weight)),
    "a binary weight": (EXACT, lambda m, x: m.l(x) @ Sign.apply(m.w)),
    "a binary weight, twice": (EXACT, lambda m, x: m.l(x @ Sign.apply(m.w)) @ Sign.apply(2 * m.w)),
    "a weight and the mean sample": (REFUSED, lambda m, x: x @ ScaledByMean.apply(m.w, x)),
    "a weight and the mean by numpy": (REFUSED, lambda m, x: x @ ScaledByNumpy.apply(m.w, x)),
    "elementwise": (EITHER, lambda m, x: Double.apply(m.l(x))),
    "gradient reversal": (EITHER, lambda m, x: Reverse.apply(m.l(x)) * 2),
    "crossed backward": (REFUSED, lambda m, x: CrossedBackward.apply(m.l(x))),
    "crossed backward, twice": (
        EITHER,
        lambda m, x: CrossedBackward.apply(CrossedBackward.apply(m.l(x))),
    ),
    "reversed, written to in place": (EXACT, lambda m, x: Reverse.apply(m.l(x).relu_())),
    "reversed, a part written to": (EXACT, lambda m, x: Reverse.apply(_first_column(m.l(x)))),
    "crossed, written to in place": (
        REFUSED,
        lambda m, x: CrossedBackward.apply(m.l(x).relu_()),
    ),
    "normed backward": (REFUSED, lambda m, x: NormedBackward.apply(m.l(x))),
    "centered": (REFUSED, lambda m, x: Centered.apply(m.l(x))),
    "of the raw input": (EITHER, lambda m, x: m.l(Centered.apply(x))),
    "of a parameter": (EXACT, lambda m, x: x @ Double.apply(m.w)),
    "takes a parameter": (EXACT, lambda m, x: Linear.apply(x, m.w)),
    "takes a parameter, mean input": (REFUSED, lambda m, x: MeanLinear.apply(x, m.w)),
    "takes a derived parameter": (EXACT, lambda m, x: Linear.apply(m.l(x), m.w * 2)),
    "takes parameters, twice": (
        EXACT,
        lambda m, x: Linear.apply(Linear.apply(x, m.w).tanh(), m.w * 2),
    ),
    "parameter on the left": (REFUSED, lambda m, x: Linear.apply(m.w, m.l(x))),
    "in place": (EITHER, lambda m, x: InPlace.apply(m.l(x) * 1)),
    "two outputs, the first": (EITHER, lambda m, x: TwoOutputs.apply(m.l(x))[0]),
    "two outputs, the transpose": (REFUSED, lambda m, x: TwoOutputs.apply(m.l(x))[1]),
    "two outputs, both": (REFUSED, lambda m, x: torch.mul(*TwoOutputs.apply(m.l(x)))),
}


class NumpyFlip(torch.autograd.Function):
    """Reverses the samples by numpy, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy()[::-1].copy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(grad.numpy()[::-1].copy())


class NumpyCenter(torch.autograd.Function):
    """Subtracts the mean over samples by numpy, forwards and backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        a = x.detach().numpy()
        return torch.from_numpy(a - a.mean(0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        g = grad.numpy()
        return torch.from_numpy(g - g.mean(0))


class Setup(torch.autograd.Function):
    """The newer style; multiplies by the transpose of what was saved."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x * x.T * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (grad * x.T + (grad * x).T) * ctx.scale, None


class SavedMean(torch.autograd.Function):
    """Elementwise forwards; backwards it uses the mean of the saved samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * x.mean(0)


class SharedGradient(torch.autograd.Function):
    """Elementwise forwards; backwards every sample gets the mean gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad.mean(0, keepdim=True).expand_as(grad)


@torch.library.custom_op("attacks::center", mutates_args=())
def center(x: Tensor) -> Tensor:
    """A registered operator that mixes."""
    return x - x.mean(0)


@torch.library.custom_op("attacks::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    """A registered operator that does not mix."""
    return x * 2


center.register_autograd(lambda ctx, grad: grad - grad.mean(0))


twice.register_autograd(lambda ctx, grad: grad * 2)


class Enabled(torch.autograd.Function):
    """Its result has a history before it is its own; its backward crosses samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad.flip(0)


ON_HIDDEN: Table = {
    "gradients enabled in forward": (REFUSED, lambda h: Enabled.apply(h).tanh()),
    "numpy in a function": (REFUSED, lambda h: h * NumpyFlip.apply(h)),
    "numpy mean in a function": (REFUSED, lambda h: NumpyCenter.apply(h)),
    "function with setup": (REFUSED, lambda h: Setup.apply(h, 2.0)),
    "mean of saved samples": (EITHER, lambda h: SavedMean.apply(h)),
    "shared gradient": (REFUSED, lambda h: SharedGradient.apply(h)),
    "registered operator": (EITHER, lambda h: twice(h)),
    "registered operator, mixing": (REFUSED, lambda h: center(h)),
    "registered operator by name": (REFUSED, lambda h: torch.ops.attacks.center(h)),
}


def cases() -> Iterator[Case]:
    """All of this file."""
    parts = {"l": lin(), "k": lin(seed=2), "w": 0.8 * rand(N, N, seed=6)}
    uses = on_module("function", FUNCTIONS, rand(N, N), **parts)
    return chain(uses, on_hidden("function", ON_HIDDEN))
