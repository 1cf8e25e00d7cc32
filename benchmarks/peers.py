"""The libraries that are compared: each gives a function per question it can answer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import persample

from .answers import Grads, coefficients, rows_clipped, rows_norms, trained
from .case import Case
from .language import LanguageModel
from .pretrained import Logits
from .vision import BatchedVisionTransformer, VisionTransformer

Steps = dict[str, Callable[[], Any]]
Peer = Callable[[Case, float], Steps]
PEERS: dict[str, Peer] = {}
OWN = ("persample", "persample, fresh", "persample, lean")


def peer(name: str) -> Callable[[Peer], Peer]:
    """Register a peer under a name."""

    def register(build: Peer) -> Peer:
        PEERS[name] = build
        return build

    return register


@dataclass
class Twin:
    """A copy of the model as a library of module hooks needs it.

    The mathematics is the same; the plain step that everything is divided by stays the original.
    """

    net: nn.Module
    shapes: dict[str, torch.Size]
    names: dict[str, str] = field(default_factory=dict)  # where they differ from the original's

    def collect(self, attribute: str) -> Grads:
        """What a library left on the parameters, under the original names and in their shapes."""
        found: Grads = {}
        for name, p in self.net.named_parameters():
            value = getattr(p, attribute, None) if p.requires_grad else None
            if value is not None:
                true = self.names.get(name, name)
                if value.shape[value.dim() - p.dim() :] == p.shape:
                    value = value.reshape(*value.shape[: value.dim() - p.dim()], *self.shapes[true])
                found[true] = value
        clear(self.net, attribute)
        return found


def twin(net: nn.Module) -> Twin:
    """A copy that looks tokens and positions up once per sample, in embeddings."""
    shapes = {name: p.shape for name, p in net.named_parameters()}
    net = copy.deepcopy(net)
    if isinstance(net, (LanguageModel, Logits)):
        net.batched = True
    if isinstance(net, VisionTransformer):
        names = {"token.weight": "token", "positions.weight": "positions"}
        return Twin(BatchedVisionTransformer(net), shapes, names)
    return Twin(net, shapes)


def clear(net: nn.Module, *attributes: str) -> None:
    """Drop ``.grad`` and what a library left on the parameters."""
    for parameter in net.parameters():
        parameter.grad = None
        for attribute in attributes:
            if hasattr(parameter, attribute):
                setattr(parameter, attribute, None)


def from_rows(grads: Callable[[], Grads], bound: float) -> Steps:
    """All questions from materialised gradients."""
    return {
        "grads": grads,
        "norms": lambda: rows_norms(grads()),
        "clipped sum": lambda: rows_clipped(grads(), bound),
    }


@peer("plain")
def plain(case: Case, bound: float) -> Steps:
    """An ordinary forward and backward: what everything is divided by."""
    net, x, y, loss = case

    def step() -> None:
        loss(net(x), y).sum().backward()
        clear(net)

    return {"step": step}


def recorded(case: Case, **options: Any) -> persample.Tape:
    """One recorded step."""
    net, x, y, loss = case
    with persample.record(net, **options) as tape:
        tape.backward(loss(net(x), y))
    return tape


@peer("persample")
def own(case: Case, bound: float) -> Steps:
    """The tape, with buffers reused for grads, and three questions of one tape."""
    buffers: Grads = {}

    def grads() -> Grads:
        buffers.update(recorded(case).grads(out=buffers or None))
        return buffers

    def three() -> None:
        tape = recorded(case)
        tape.norms()
        tape.clipped_sum(bound)
        tape.project(64, seed=0)

    return {
        "grads": grads,
        "norms": lambda: recorded(case).norms(),
        "clipped sum": lambda: recorded(case).clipped_sum(bound),
        "three questions": three,
    }


@peer("persample, fresh")
def fresh(case: Case, bound: float) -> Steps:
    """Grads into fresh memory, as every peer gives them."""
    return {"grads": lambda: recorded(case).grads()}


@peer("persample, lean")
def lean(case: Case, bound: float) -> Steps:
    """Nothing kept, a second backward for the sum."""
    once, rows = persample.Ahead(again=False), persample.Ahead(grads=True, again=False)
    return {
        "grads": lambda: recorded(case, lean=rows).grads(),
        "norms": lambda: recorded(case, lean=once).norms(),
        "clipped sum": lambda: recorded(case, lean=True).clipped_sum(bound),
    }


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
