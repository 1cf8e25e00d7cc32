"""Where :func:`persample.private.replay` looks into a training, and holds it in place."""

from __future__ import annotations

from torch import Tensor

from .users import Part


class Observer:
    """Sees every step of a training; this one changes nothing."""

    def drawn(self, step: int, units: Tensor) -> Tensor:
        """The units of a step's batch."""
        return units

    def recording(self, part: Part) -> None:
        """A micro-batch is about to be recorded."""

    def weights(self, part: Part) -> Tensor | None:
        """What each unit of a micro-batch counts, at most 1; None for 1 each."""
        return None

    def summed(self, step: int, sums: dict[str, Tensor]) -> None:
        """The sums of a step, before noise."""

    def released(self, step: int, grads: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradients that the optimizer gets."""
        return grads
