"""A case: a pattern from the rest of torch, and what the recording of it must give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import persample
from persample.testing import LossFn, oracle, relative_error

Rows = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far an answer is from the truth; ``refused``: a further question, refused by right."""

    error: float
    tolerance: float = 1e-10
    question: str = ""
    refused: persample.PersampleError | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table: under which heading, which pattern, and how it is tried."""

    heading: str
    pattern: str
    right: bool
    run: Callable[[], Outcome]


class Missing(Exception):
    """A package that the case needs is not installed."""


class Wrong(AssertionError):
    """A number that is not the truth, silently: the worst outcome."""


class Cases:
    """The cases of one heading."""

    def __init__(self, heading: str) -> None:
        self.heading = heading
        self.all: list[Case] = []

    def right(self, pattern: str, *args: Any) -> Callable[[Any], Any]:
        """Register a function that returns an outcome (with ``args``, if any)."""
        return self._add(pattern, True, args)

    def refused(self, pattern: str, *args: Any) -> Callable[[Any], Any]:
        """Register a function that persample must refuse."""
        return self._add(pattern, False, args)

    def _add(self, pattern: str, right: bool, args: Any) -> Callable[[Any], Any]:
        def add(run: Callable[..., Outcome]) -> Callable[..., Outcome]:
            whole = functools.partial(run, *args)
            self.all.append(Case(self.heading, pattern, right, whole))
            return run

        return add


def verdict(case: Case) -> str:
    """Try a case: the text of its cell in the table."""
    torch.manual_seed(0)
    try:
        outcome = case.run()
    except persample.PersampleError as error:
        if case.right:
            raise
        if not error.fix:
            raise Wrong(f"refused without a way out: {error}") from error
        return f"refused: {error.fix}"
    if not outcome.error <= outcome.tolerance:
        raise Wrong(f"{case.heading}, {case.pattern}: off by {outcome.error:.1e}")
    assert case.right, f"{case.pattern} was to be refused"
    if outcome.refused is None:
        return "right"
    return f"right; {outcome.question} refused: {outcome.refused.fix}"


# ---------------------------------------------------------------------- ways to try


def net() -> nn.Sequential:
    """A small network in double precision, the same every time."""
    torch.manual_seed(0)
    layers = nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)
    return nn.Sequential(*layers).double()


def data(*shape: int) -> Tensor:
    """The same numbers every time."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(7)
    return torch.randn(shape or (4, 5), generator=generator, dtype=torch.float64)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    """One loss per sample."""
    return model(x).flatten(1).square().sum(1)


def alone(
    model: nn.Module,
    batch: Any = None,
    loss: LossFn = squares,
    *,
    tolerance: float = 1e-10,
    after: bool = False,
    **options: Any,
) -> Outcome:
    """Record, and compare with one sample at a time; ``after``: backward outside the block."""
    batch = data() if batch is None else batch
    expected = oracle(model, loss, batch)
    with persample.record(model, **options) as tape:
        losses = loss(model, batch)
        if not after:
            tape.backward(losses)
    if after:
        tape.backward(losses)
    return Outcome(answers(tape, expected), tolerance)


def answers(tape: persample.Tape, expected: Rows) -> float:
    """The largest error of norms (whole and by parameter), the clipped sum and gradients."""
    each = torch.stack([g.flatten(1).double().norm(dim=1) for g in _real(expected).values()])
    norms = each.norm(dim=0)
    top = float(norms.max()) or 1.0
    errors = [float((tape.norms() - norms).abs().max()) / top]
    errors += [
        float((mine - theirs).abs().max()) / top
        for mine, theirs in zip(tape.parameter_norms().values(), each, strict=True)
    ]
    bound = float(norms.median())
    c = (bound / norms.clamp(min=1e-300)).clamp(max=1)
    sums = {name: torch.tensordot(c.to(g.dtype), g, 1) for name, g in expected.items()}
    errors.append(relative_error(tape.clipped_sum(bound), sums))
    if tape._forms is not None:
        errors.append(relative_error(tape.grads(), expected))
    return max(errors, key=lambda e: e if e == e else float("inf"))


def _real(rows: Rows) -> Rows:
    return {k: torch.view_as_real(g) if g.is_complex() else g for k, g in rows.items()}


def gradients(model: nn.Module) -> Rows:
    """Every trainable parameter's ``.grad``, zeros where there is none."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def sums(rows: Rows) -> Rows:
    """Σᵢ gᵢ."""
    return {name: g.sum(0) for name, g in rows.items()}


def refusal(question: Callable[[], Any]) -> persample.PersampleError:
    """The error of a question that must be refused."""
    try:
        question()
    except persample.PersampleError as error:
        return error
    raise Wrong("a question was answered that must be refused")
