"""Programs of other packages: state, TorchScript, custom functions, writes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Fn, par

from .cause import NEEDLESS, cause, loop, subject
from .subject import N, Subject

# ---------------------------------------------------------------------- state of an earlier step


class Cell(nn.Module):
    """A recurrent cell that keeps its state; ``renew`` makes the next step's of it."""

    def __init__(self, renew: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.renew = renew
        self.into, self.loop = nn.Linear(5, 3), nn.Linear(3, 3)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 3) if self.state is None else self.renew(self.state)
        for _ in range(2):
            state = torch.tanh(self.into(x) + self.loop(state))
        self.state = state
        return state


def cell(renew: Callable[[Tensor], Tensor]) -> Subject:
    return subject(Cell(renew), torch.randn(N, 5))


@cause("zeros_like of the last step's state")
def zeros_like() -> Subject:
    return cell(torch.zeros_like)


@cause("new_zeros of the last step's state")
def new_zeros() -> Subject:
    return cell(lambda state: state.new_zeros(state.shape))


@cause("randn_like of the last step's state")
def randn_like() -> Subject:
    return cell(torch.randn_like)


@cause("detach of the last step's state")
def detach() -> Subject:
    return cell(Tensor.detach)


@cause("detach_ of the last step's state")
def detach_in_place() -> Subject:
    return cell(Tensor.detach_)


@cause("data of the last step's state")
def data() -> Subject:
    return cell(lambda state: state.data)


@cause("detach of a part of the last step's state")
def detach_view() -> Subject:
    return cell(lambda state: state[:, :3].detach())


@cause("the last step's state as the input of an RNN")
def stateful_lstm() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        state = None if s.state is None else tuple(v.detach() for v in s.state)
        out, s.state = s.rnn(x, state)
        return out

    return subject(Fn(f, rnn=nn.LSTM(5, 3, batch_first=True), state=None), torch.randn(N, 6, 5))


# ---------------------------------------------------------------------- TorchScript


def scripted(function: Callable[..., Tensor]) -> Any:
    """As under ``@torch.jit.script``, without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(function)


def _gelu(x: Tensor, scale: float) -> Tensor:
    y = x * 0.5 * (1.0 + torch.erf(x / 1.41421))
    return y * scale


def _gate(x: Tensor, bias: Tensor) -> Tensor:
    return torch.sigmoid(x + bias) * x


@cause("a function under torch.jit.script that meets data only")
def scripted_data() -> Subject:
    gelu = scripted(_gelu)

    def f(s: Any, x: Tensor) -> Tensor:
        return s.b(gelu(s.a(x), 0.7))

    return subject(Fn(f, a=nn.Linear(5, 4), b=nn.Linear(4, 3)), torch.randn(N, 5))


@cause("a function under torch.jit.script that is given a parameter")
def scripted_parameter() -> Subject:
    gate = scripted(_gate)

    def f(s: Any, x: Tensor) -> Tensor:
        return gate(s.a(x), s.bias)

    return subject(Fn(f, a=nn.Linear(5, 4), bias=par(4)), torch.randn(N, 5))


@cause("a traced function", NEEDLESS, "loop", loop)
def traced() -> Subject:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gate = torch.jit.trace(_gate, (torch.ones(1, 4), torch.ones(4)))

    def f(s: Any, x: Tensor) -> Tensor:
        return gate(s.a(x), s.bias)

    return subject(Fn(f, a=nn.Linear(5, 4), bias=par(4)), torch.randn(N, 5))


# ---------------------------------------------------------------------- writes


@cause("sibling views are written in place under no_grad")
def siblings() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        noise = torch.zeros_like(x)
        left, right = noise.chunk(2, 1)
        with torch.no_grad():
            left.copy_(x[:, :3])
            right.copy_(x[:, 3:].flip(1))
        return s.a(x) * s.b(noise)

    return subject(Fn(f, a=nn.Linear(6, 4), b=nn.Linear(6, 4)), torch.randn(N, 6))


@cause("views by split of a result are written in place under no_grad")
def split_views() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            parts = (x * 2).split(2, 1)
            for part in parts:
                part.mul_(0.5).add_(1)
        return s.a(torch.cat(parts, 1))

    return subject(Fn(f, a=nn.Linear(6, 4)), torch.randn(N, 6))


@cause("constants are written to a part of a view, and the view is used")
def constants_in_a_view() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        scores = s.a(x).view(len(x), 2, 3).unsqueeze(0)
        for i in range(len(x)):
            scores[:, i, 1:, 1:].fill_(-2.0)
        scores[..., 0].zero_()
        return s.b(scores.squeeze(0)).flatten(1)

    return subject(Fn(f, a=nn.Linear(5, 6), b=nn.Linear(3, 2)), torch.randn(N, 5))


@cause("constants are written to a part of a view under no_grad")
def constants_without_gradients() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        hidden = s.a(x) * 1
        with torch.no_grad():
            hidden.view(len(x), 2, 3)[:, 1:].zero_()
            hidden.detach()[:, :1].fill_(0.5)
        return s.b(hidden)

    return subject(Fn(f, a=nn.Linear(5, 6), b=nn.Linear(6, 2)), torch.randn(N, 5))


@cause("a parameter is cloned and partly zeroed before use")
def zeroed_part() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        bias = s.a.bias.clone()
        bias[2:4].zero_()
        return F.linear(x, s.a.weight, bias)

    return subject(Fn(f, a=nn.Linear(5, 6)), torch.randn(N, 5))


# ---------------------------------------------------------------------- custom functions


class Threshold(torch.autograd.Function):
    """A step with a surrogate gradient; autograd itself sums what is given for the threshold."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: Tensor) -> Tensor:
        ctx.save_for_backward(x, threshold)
        return (x > threshold).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, threshold = ctx.saved_tensors
        slope = grads[0] / (1 + (x - threshold).abs()) ** 2
        return slope, -slope


@cause("a custom function returns a broadcast gradient of a parameter")
def broadcast_gradient() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.b(Threshold.apply(s.a(x), s.threshold))

    model = Fn(f, a=nn.Linear(5, 4), b=nn.Linear(4, 3), threshold=par(4))
    return subject(model, torch.randn(N, 5))


@cause("a custom function returns a broadcast gradient of a scalar parameter")
def broadcast_gradient_scalar() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.b(Threshold.apply(s.a(x), s.threshold))

    model = Fn(f, a=nn.Linear(5, 4), b=nn.Linear(4, 3), threshold=nn.Parameter(torch.tensor(0.1)))
    return subject(model, torch.randn(N, 5))


@cause("a custom function of constants that have gradients")
def function_of_constants() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        state = torch.zeros(len(x), 4, dtype=x.dtype, requires_grad=True)
        spikes = Threshold.apply(state, torch.full((), 0.5))
        return s.a(x) * (1 - spikes)

    return subject(Fn(f, a=nn.Linear(5, 4)), torch.randn(N, 5))
