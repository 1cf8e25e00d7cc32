"""What the caller of ``persample.record`` asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Ahead:
    """Questions that a lean recording answers during its first backward pass, besides the norms.

    What is not named here costs a backward pass of its own when asked; the answers are the same.

    >>> import torch, persample
    >>> model = torch.nn.Linear(3, 2)
    >>> with persample.record(model, lean=persample.Ahead(projection=(16, 0))) as tape:
    ...     tape.backward(model(torch.randn(4, 3)).square().sum(1))
    >>> tape.project(16, seed=0).shape
    torch.Size([4, 16])

    Attributes:
        direction: For :meth:`Tape.dots`.
        projection: (dim, seed) for :meth:`Tape.project`.
        moments: For :meth:`Tape.second_moment` and :meth:`Tape.variance`.
        grads: For :meth:`Tape.grads`, which hands the rows out without keeping them.
        again: False promises that no further pass follows: the graph is freed while the first one
            passes, as any backward does.
    """

    direction: Mapping[str, Tensor] | None = None
    projection: tuple[int, int] | None = None
    moments: bool = False
    grads: bool = False
    again: bool = True


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one recording.

    ``rows``: bytes of rows that may be kept between norms and a sum; None is a share of the tape's.
    ``rules`` are the user's own, by operator name. ``native``: parameters stay in the graph, which
    ``verify`` and ``loop`` need. ``special``: uses do not run the usual way.
    """

    dim: int
    verify: bool
    loop: bool
    ahead: Ahead | None
    positions: bool
    budget: int
    rows: int | None
    rules: Mapping[str, Callable[..., Any]]
    same_samples: bool
    grad: bool
    native: bool = field(init=False)
    lean: bool = field(init=False)
    special: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "native", self.verify or self.loop)
        object.__setattr__(self, "lean", self.ahead is not None)
        object.__setattr__(self, "special", self.native or bool(self.rules))
