"""What torch itself offers: expanded weights, ``torch.func`` and a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..models.case import Case
from .answers import Grads, coefficients, rows_clipped, rows_norms, trained
from .peer import Steps, clear, from_rows, peer, twin


@peer("expanded weights")
def expanded(case: Case, bound: float) -> Steps:
    """torch.nn.utils' private system."""
    from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

    copied = twin(case[0])
    _, x, y, loss = case

    def grads() -> Grads:
        clear(copied.net, "grad_sample")  # what a failed step may have left
        call = call_for_per_sample_grads(copied.net, batch_size=len(x), loss_reduction="sum")
        loss(call(x), y).sum().backward()
        return copied.collect("grad_sample")

    return from_rows(grads, bound)


def one_sample_gradient(case: Case) -> tuple[Callable[..., Any], Grads]:
    """The gradient of one sample as a function of (parameters, x, y)."""
    net, _, _, loss = case

    def one(parameters: Grads, x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(net, parameters, (x[None],))
        return loss(out, y[None])[0]

    return torch.func.grad(one), {name: p.detach() for name, p in trained(case).items()}


@peer("vmap(grad)")
def vmapped(case: Case, bound: float) -> Steps:
    """torch.func over the whole batch."""
    gradient, parameters = one_sample_gradient(case)
    over = torch.func.vmap(gradient, in_dims=(None, 0, 0))
    return from_rows(lambda: over(parameters, case[1], case[2]), bound)


@peer("vmap(grad), chunked")
def chunked(case: Case, bound: float) -> Steps:
    """torch.func over a quarter of the batch at a time, so that little is alive at once."""
    gradient, parameters = one_sample_gradient(case)
    over = torch.func.vmap(gradient, in_dims=(None, 0, 0))
    size = max(1, len(case[1]) // 4)
    parts = list(zip(case[1].split(size), case[2].split(size), strict=True))

    def grads() -> Grads:
        found = [over(parameters, x, y) for x, y in parts]
        return {name: torch.cat([part[name] for part in found]) for name in parameters}

    def clipped() -> Grads:
        total: Grads = {}
        for x, y in parts:
            for name, value in rows_clipped(over(parameters, x, y), bound).items():
                total[name] = total[name] + value if name in total else value
        return total

    return {
        "grads": grads,
        "norms": lambda: torch.cat([rows_norms(over(parameters, x, y)) for x, y in parts]),
        "clipped sum": clipped,
    }


@peer("loop")
def loop(case: Case, bound: float) -> Steps:
    """One sample after the other."""
    net, xs, ys, loss = case
    named = trained(case)

    def one(i: int) -> Grads:
        value = loss(net(xs[i : i + 1]), ys[i : i + 1]).sum()
        found = torch.autograd.grad(
            value, list(named.values()), allow_unused=True, materialize_grads=True
        )
        return dict(zip(named, found, strict=True))

    def norm(grads: Grads) -> Tensor:
        return torch.stack([g.norm() for g in grads.values()]).norm()

    def grads() -> Grads:
        rows = [one(i) for i in range(len(xs))]
        return {name: torch.stack([row[name] for row in rows]) for name in named}

    def clipped() -> Grads:
        total = {name: torch.zeros_like(p, requires_grad=False) for name, p in named.items()}
        for i in range(len(xs)):
            row = one(i)
            c = float(coefficients(norm(row), bound))
            for name, value in row.items():
                total[name].add_(value, alpha=c)
        return total

    return {
        "grads": grads,
        "norms": lambda: torch.stack([norm(one(i)) for i in range(len(xs))]),
        "clipped sum": clipped,
    }
