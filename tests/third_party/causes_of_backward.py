"""Custom functions whose backward runs the model again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Fn

from .cause import cause, subject
from .subject import N, Subject


class Adjoint(torch.autograd.Function):
    """One step of an ordinary differential equation whose backward differentiates the model."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.field = field
        with torch.no_grad():
            out = x + 0.1 * field(x)
        ctx.save_for_backward(x, *parameters)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            out = x + 0.1 * ctx.field(x)
            found = torch.autograd.grad(out, (x, *parameters), grads[0], allow_unused=True)
        return None, *found


class Flattened(Adjoint):
    """All gradients in one vector, as solvers keep their state."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        _, *found = Adjoint.backward(ctx, *grads)
        state = torch.cat([grad.flatten() for grad in found])
        state = torch.stack([torch.zeros_like(state), state - 0.1 * state])[1] / 0.9
        parts = state.split([grad.numel() for grad in found])
        return None, *(part.view(grad.shape) for part, grad in zip(parts, found, strict=True))


def solved(kind: Any) -> Subject:
    """A layer behind the step."""

    def f(s: Any, x: Tensor) -> Tensor:
        return s.b(kind.apply(s.field, x, *s.field.parameters()))

    field = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 5))
    return subject(Fn(f, field=field, b=nn.Linear(5, 2)), torch.randn(N, 5))


@cause("an adjoint: a custom backward differentiates the model")
def adjoint() -> Subject:
    return solved(Adjoint)


@cause("an adjoint that keeps all gradients in one vector")
def flattened() -> Subject:
    return solved(Flattened)
