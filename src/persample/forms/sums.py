"""Answers as sums over parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import Form, kept_sketch


class Sum:
    """A running total over parameters, float32 at least, on the first device seen."""

    __slots__ = ("value",)

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.value = torch.zeros(shape, dtype=torch.float32, device=device)

    def add(self, *parts: Tensor) -> None:
        """The parts of some parameters."""
        for part in parts:
            self.value = self.value + part.to(self.value.device)


def project_parameter(name: str, form: Form, dim: int, seed: int) -> Tensor:
    """One parameter's sketch: (n, dim)."""
    shape = torch.Size((*form.shape, 2)) if form.dtype.is_complex else form.shape
    return form.project(kept_sketch(name, shape, dim, seed, form.device))


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The simple gradient noise scale and its parts.

    ``value`` is tr Σ / |G|². ``sq_gradient`` estimates |G|² without bias, so a small batch may give
    a negative number. Over several steps, average ``trace`` and ``sq_gradient`` separately and
    divide then: the ratio of averages is the estimate, not the average of ratios.
    """

    value: float
    trace: float
    sq_gradient: float
    n: int


def variance_from_moments(moments: tuple[Tensor, Tensor], n: int) -> Tensor:
    """The unbiased variance from Σᵢ gᵢ and Σᵢ |gᵢ|² in double precision: most may cancel."""
    first, second = moments
    return (second - first.abs().square() / n).clamp_(min=0) / (n - 1)
