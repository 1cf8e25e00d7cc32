"""A model of another package with data and a loss, and the table in which it is a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import persample
from persample.testing import LossFn, take

N = 4  # samples in a batch
Pick = Callable[[Sequence[int]], Any]


@dataclass(slots=True)
class Subject:
    """A model, one loss per sample, and a batch of ``n`` samples.

    ``pick`` makes a batch of chosen samples where rows are not samples (graphs). ``options`` are
    those of ``persample.record`` for a batch; ``prepare`` is what a user does first in the block.
    """

    model: nn.Module
    loss: LossFn
    batch: Any
    n: int = N
    pick: Pick | None = None
    options: Callable[[Any], dict[str, Any]] = field(default=lambda batch: {})
    prepare: Callable[[persample.Tape, Any], Any] = field(default=lambda tape, batch: None)
    limit: str = ""  # a stated limit by which samples interact unseen

    def chosen(self, samples: Sequence[int]) -> Any:
        """A batch of these samples, which may occur several times."""
        if self.pick is not None:
            return self.pick(samples)
        return take(self.batch, torch.tensor(samples), self.n)


@dataclass(frozen=True, slots=True)
class Row:
    """One model of one package; ``package`` is the name for pip, ``module`` the one to import."""

    package: str
    module: str
    name: str
    build: Callable[[], Subject]


class Table:
    """The rows of one domain."""

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self.rows: list[Row] = []

    def package(self, package: str, module: str = "") -> Callable[..., Any]:
        """A decorator for builders of this package's models, with arguments if any."""
        imported = module or package.replace("-", "_")

        def named(name: str, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
            def add(build: Callable[..., Subject]) -> Callable[..., Subject]:
                row = Row(package, imported, name, lambda: build(*args, **kwargs))
                self.rows.append(row)
                return build

            return add

        return named


# ---------------------------------------------------------------------- losses


def first_tensor(out: Any) -> Tensor:
    """The first floating tensor of a model's output."""
    if isinstance(out, Tensor):
        return out
    values = out.values() if isinstance(out, dict) else out
    for value in values:
        if isinstance(value, (Tensor, tuple, list, dict)):
            return first_tensor(value)
    raise TypeError(f"no tensor in {type(out).__name__}")


def squares(model: nn.Module, batch: Any) -> Tensor:
    """The mean square of each sample's output, whose axis 0 holds the samples."""
    out = first_tensor(model(*batch) if isinstance(batch, tuple) else model(batch))
    if out.is_complex():
        out = torch.view_as_real(out)
    return (out - 0.3).flatten(1).square().mean(1)
