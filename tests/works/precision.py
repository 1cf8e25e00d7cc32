"""Dtypes, memory formats and writes in place."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import persample
from persample.testing import oracle

from ..models import Fn, flat_loss, par
from .base import Cases, Outcome, alone, answers, data, net, squares

CASES = Cases("Precision, memory and writes in place")
DEVICE = torch.get_default_device().type
BF16, FP16 = 2e-2, 2e-3  # relative to the largest entry: a few units in the last place


def cast(dtype: torch.dtype, tolerance: float, around: bool) -> Outcome:
    """Autocast around the recording, or inside of it."""
    model = nn.Sequential(net(), nn.LayerNorm(3), nn.Linear(3, 3)).float()
    x = data(4, 7, 5).float()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=dtype):
            return model(x).float().square().sum((1, 2))

    expected = oracle(model, loss, x)
    if not around:
        return alone(model, x, loss, tolerance=tolerance)
    with torch.autocast(DEVICE, dtype=dtype), persample.record(model) as tape:
        tape.backward(model(x).float().square().sum((1, 2)))
    return Outcome(answers(tape, expected), tolerance)


CASES.right("bf16 autocast inside the recording", torch.bfloat16, BF16, False)(cast)
CASES.right("bf16 autocast around the recording", torch.bfloat16, BF16, True)(cast)
CASES.right("fp16 autocast inside the recording", torch.float16, FP16, False)(cast)
CASES.right("fp16 autocast around the recording", torch.float16, FP16, True)(cast)


@CASES.right("autocast with checkpointing inside")
def cast_checkpointed() -> Outcome:
    from torch.utils.checkpoint import checkpoint

    model = Fn(lambda s, x: checkpoint(s.m, x, use_reentrant=False), m=net()).float()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return model(x).float().square().sum(1)

    return alone(model, data().float(), loss, tolerance=BF16)


def half(dtype: torch.dtype, tolerance: float) -> Outcome:
    return alone(net().to(dtype), data().to(dtype), tolerance=tolerance)


CASES.right("a bf16 model", torch.bfloat16, BF16)(half)
CASES.right("an fp16 model", torch.float16, FP16)(half)


@CASES.right("a bf16 layer in a float32 model")
def mixed() -> Outcome:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.c(s.b(s.a(x).to(torch.bfloat16)).float())

    model = Fn(f, a=nn.Linear(5, 6), b=nn.Linear(6, 6).bfloat16(), c=nn.Linear(6, 2))
    return alone(model, data().float(), tolerance=BF16)


@CASES.right("loss scaling: tape.backward(losses, scale=scaler.get_scale())")
def scaled() -> Outcome:
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
    scaler.scale(torch.ones(()))  # creates the scale
    model, x = net(), data()
    expected = oracle(model, squares, x)
    errors = []
    for scale in (scaler.get_scale(), torch.tensor(scaler.get_scale()), 2.0**-8):
        with persample.record(model) as tape:
            tape.backward(squares(model, x), scale=scale)
        errors.append(answers(tape, expected))
    return Outcome(max(errors))


@CASES.right("loss scaling rescues fp16 gradients that would vanish")
def rescued() -> Outcome:
    def f(s: Any, x: Tensor) -> Tensor:
        h = s.c(s.m(x).unsqueeze(1)).flatten(1)
        return s.b(s.w(h), h)  # a derived weight, and an operator without a rule

    parts = {"m": net(), "w": parametrizations.weight_norm(nn.Linear(6, 4))}
    model = Fn(f, c=nn.Conv1d(1, 2, 1), b=nn.Bilinear(4, 6, 2), **parts).half()
    x = data().half()
    tiny = lambda model, x: squares(model, x) * 2.0**-24
    expected = oracle(model.double(), tiny, x.double())
    with persample.record(model.half()) as tape:
        tape.backward(squares(model, x) * 2.0**-24, scale=2.0**14)
    found = tape.parameter_norms()
    errors = [
        float((found[name] - g.flatten(1).norm(dim=1)).abs().max() / g.flatten(1).norm(dim=1).max())
        for name, g in expected.items()
    ]
    return Outcome(max(errors), 3e-2)


@CASES.right("channels_last model and input")
def channels_last() -> Outcome:
    layers = nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, groups=2)
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 2)).double()
    model = model.to(memory_format=torch.channels_last)
    return alone(model, data(4, 3, 6, 6).contiguous(memory_format=torch.channels_last))


def stored(x: Tensor) -> Outcome:
    return alone(net(), x)


CASES.right("an input that is a transposed view", data(5, 4).t())(stored)
CASES.right("an input that is a strided slice", data(8, 10)[::2, ::2])(stored)
CASES.right("an input that is expanded", data(1, 5).expand(4, 5))(stored)


@CASES.right("activations in place, and residuals added in place")
def inplace() -> Outcome:
    def f(s: Any, x: Tensor) -> Tensor:
        h = F.relu_(s.a(x))
        out = s.b(h)
        out += h
        return F.dropout(out, 0.0, inplace=True).mul_(0.5)

    return alone(Fn(f, a=nn.Linear(5, 6), b=nn.Linear(6, 6)).double())


@CASES.right("complex parameters")
def complex_parameters() -> Outcome:
    weight = nn.Parameter(torch.randn(5, 3, dtype=torch.cdouble))
    bias = nn.Parameter(torch.randn(3, dtype=torch.cdouble))
    model = Fn(lambda s, x: torch.view_as_real((x.cdouble() @ s.w) * s.b), w=weight, b=bias)
    return alone(model, data(), lambda m, x: flat_loss(m(x)))


@CASES.right("a Fourier layer: real parameters, complex data")
def fourier() -> Outcome:
    def f(s: Any, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(s.l(x)) * torch.view_as_complex(s.w)
        return torch.fft.irfft(spectrum, n=6)

    return alone(Fn(f, l=nn.Linear(5, 6), w=par(4, 2)).double())
