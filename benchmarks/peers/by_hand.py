"""The same answers by module hooks, written for these models alone: what is left without safety.

Nothing is followed, proven, bounded, released or kept for a second question: parameters are frozen,
hooks hand each layer's input and output gradient to its formula, and of several formulas the
fastest on this machine is taken after a trial. A step cannot be expected to be far below.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from persample.recording.recurrent import padded_lstm

from ..models.case import Case
from .answers import Grads, coefficients
from .formulas import Answer, Formula, Sum, formulas, gram_linear
from .peer import Steps, twin


class Step:
    """One model, one question: ``norms`` alone, or the clipped sum after them."""

    def __init__(self, case: Case, bound: float, *, sums: bool) -> None:
        copied = twin(case[0])
        self.net, self.case, self.bound, self.sums = copied.net, case, bound, sums
        self.shapes = copied.shapes
        self.names: dict[int, dict[str, str]] = {}
        known: dict[int, str] = {}
        for path, module in self.net.named_modules():
            own = {k: p for k, p in module.named_parameters(recurse=False) if p.requires_grad}
            for key, parameter in own.items():
                true = known.setdefault(id(parameter), f"{path}.{key}")
                self.names.setdefault(id(module), {})[key] = copied.names.get(true, true)
            if isinstance(module, nn.LSTM):
                module.forward = self.unrolled(module)  # type: ignore[method-assign, assignment]
            elif own:
                module.register_forward_hook(self.hook)
        used = [name for names in self.names.values() for name in names.values()]
        self.tied = {name for name in used if used.count(name) > 1}
        self.net.requires_grad_(False)
        self.chosen: dict[int, Formula] = {}
        self.begin()

    def begin(self) -> None:
        """Forget the step before."""
        self.squares: list[Tensor] = []
        self.weighted: list[tuple[str, Sum]] = []
        self.head: tuple[Tensor, Tensor] | None = None

    def hook(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        """Listen to a layer's output."""
        if not out.requires_grad:
            out.requires_grad_()
        a = args[0].detach()
        out.register_hook(lambda g: self.take(module, a, g))

    def take(self, module: nn.Module, a: Tensor, g: Tensor) -> None:
        """Answer for one layer."""
        formula = self.chosen.get(id(module))
        if formula is None:
            formula = self.chosen[id(module)] = self.fastest(module, a, g)
        self.add(self.names[id(module)], formula(module, a, g))
        if self.names[id(module)]["weight"] in self.tied:
            self.cross(a, g)

    def add(self, names: dict[str, str], answer: Answer) -> None:
        """Remember a layer's answer."""
        self.squares.append(answer[0])
        if self.sums:
            self.weighted += [(names[key], each) for key, each in answer[1].items()]

    def cross(self, a: Tensor, g: Tensor) -> None:
        """2 ⟨head, embedding⟩ of a table that is both."""
        if self.head is None:
            self.head = a, g
            return
        factor, gradient = self.head
        picked = torch.gather(gradient, 2, a.unsqueeze(1).expand(-1, gradient.shape[1], -1))
        self.squares.append(torch.bmm(factor, g.mT).mul_(picked).sum((1, 2)).mul_(2))

    def fastest(self, module: nn.Module, a: Tensor, g: Tensor) -> Formula:
        """Try every formula on this layer."""
        best, least = None, float("inf")
        for formula in formulas(module, g):
            for _ in range(3):
                start = time.perf_counter()
                _, sums = formula(module, a, g)
                if self.sums:
                    for each in sums.values():
                        each(g.new_ones(len(g)))
                spent = time.perf_counter() - start
                if spent < least:
                    best, least = formula, spent
        assert best is not None
        return best

    def unrolled(self, module: nn.LSTM) -> Any:
        """The forward of an LSTM by a time loop that hands its gate gradients out."""
        names, weights = self.names[id(module)], dict(module.named_parameters())
        layer = nn.Linear(1, 1)  # of its kind

        def taken(x: Tensor, before: Tensor, delta: Tensor) -> None:
            for kind, a in (("ih", x), ("hh", before)):
                found = gram_linear(layer, a, delta)
                self.add({key: names[f"{key}_{kind}_l0"] for key in ("weight", "bias")}, found)

        def forward(x: Tensor) -> tuple[Tensor, None]:
            both = weights["bias_ih_l0"] + weights["bias_hh_l0"]
            wide = x if x.requires_grad else x.detach().requires_grad_()
            given = (weights["weight_ih_l0"], weights["weight_hh_l0"], both)
            out: Tensor = Unrolled.apply(wide, *given, taken)
            return out, None

        return forward

    def run(self) -> Any:
        """One step."""
        self.begin()
        _, x, y, loss = self.case
        loss(self.net(x), y).sum().backward()
        norms = torch.stack(self.squares).sum(0).clamp_(min=0).sqrt_()
        if not self.sums:
            return norms
        c, found = coefficients(norms, self.bound), Grads()
        for name, each in self.weighted:
            value = each(c)
            found[name] = found[name].add_(value) if name in found else value
        return {name: value.view(self.shapes[name]) for name, value in found.items()}


class Unrolled(torch.autograd.Function):
    """A layer of an LSTM, (n, t, i) to (n, t, h)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, into: Tensor, weight: Tensor, both: Tensor, sink: Any) -> Any:
        """Project all inputs, then go through time."""
        n, t, _ = x.shape
        rows = x.transpose(0, 1).reshape(n * t, -1)
        gates = torch.addmm(both, rows, into.t()).view(t, n, -1)
        start = x.new_zeros(n, weight.shape[1])
        out, before, _, _, kept = padded_lstm.forward(range(t), gates, start, start, weight)
        ctx.save_for_backward(x, into, weight, before, *kept)
        ctx.sink = sink
        return out.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Through time; inputs, states and gate gradients go to the sink."""
        x, into, weight, before, *kept = ctx.saved_tensors
        n, t, _ = x.shape
        out = grads[0].transpose(0, 1).contiguous()
        zero = x.new_zeros(n, weight.shape[1])
        delta, _, _ = padded_lstm.backward(range(t), (out, zero, zero), weight, tuple(kept))
        by_sample = delta.transpose(0, 1).contiguous()
        ctx.sink(x.detach(), before.transpose(0, 1), by_sample)
        return (by_sample.flatten(0, 1) @ into).view(n, t, -1), None, None, None, None


def by_hand(case: Case, bound: float) -> Steps:
    """Both questions."""
    return {
        "norms": Step(case, bound, sums=False).run,
        "clipped sum": Step(case, bound, sums=True).run,
    }
