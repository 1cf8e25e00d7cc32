"""What is asked of forms, and what may not be asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UsageError
from .forms import Form, kept_sketch


class Sum:
    """A running total over parameters, float32 at least, on the first device seen."""

    __slots__ = ("value",)

    def __init__(self, *shape: int, device: torch.device) -> None:
        self.value = torch.zeros(shape, dtype=torch.float32, device=device)

    def add(self, part: Tensor) -> None:
        """One parameter's part."""
        self.value = self.value + part.to(self.value.device)


def added(parts: Mapping[str, Tensor], n: int, device: torch.device) -> Tensor:
    """Σ over parameters, in the widest dtype: a fresh tensor."""
    values = list(parts.values())
    if values and all(v.dtype is values[0].dtype and v.device == device for v in values):
        return torch.stack(values).sum(0)
    total = Sum(n, device=device)
    for value in values:
        total.add(value)
    return total.value


def projected(name: str, form: Form, dim: int, seed: int) -> Tensor:
    """One parameter's sketch: (n, dim)."""
    shape = torch.Size((*form.shape, 2)) if form.dtype.is_complex else form.shape
    if not shape.numel():
        return torch.zeros(form.n, dim, device=form.device)
    return form.project(kept_sketch(name, shape, dim, seed, form.device))


def expect_direction(
    direction: Mapping[str, Tensor], names: Iterable[str], selected: Mapping[str, Tensor]
) -> None:
    """Refuse a direction that does not fit the parameters asked for."""
    if not isinstance(direction, Mapping):
        raise UsageError(f"a direction is a dictionary of names, got {type(direction).__name__}")
    wanted = list(names)
    if set(direction) != set(wanted):
        odd = sorted(set(direction) ^ set(wanted))
        raise UsageError(
            f"the direction must have the recorded parameters' names: {odd[:4]}",
            fix="leave none out and add none; select with params=",
        )
    for name in wanted:
        if not isinstance(direction[name], Tensor):
            raise UsageError(f"{name}: a direction holds tensors, got {direction[name]!r}")
        if direction[name].shape != selected[name].shape:
            raise UsageError(
                f"{name}: direction {tuple(direction[name].shape)}, parameter "
                f"{tuple(selected[name].shape)}"
            )


def expect_projection(dim: object, seed: object) -> tuple[int, int]:
    """Refuse what is not a positive dimension and an integer seed."""
    if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
        raise UsageError(f"dim must be a positive integer, got {dim!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UsageError(f"seed must be an integer, got {seed!r}")
    return dim, seed


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The simple gradient noise scale and its parts.

    ``value`` is tr Σ / |G|². ``sq_gradient`` estimates |G|² without bias, so that of one small batch
    may be negative. Over several steps, average ``trace`` and ``sq_gradient`` separately and divide
    then: the ratio of averages is the estimate, not the average of ratios.
    """

    value: float
    trace: float
    sq_gradient: float
    n: int


def noise_scale(sq_norms: Tensor, mean_sq: float, n: int) -> NoiseScale:
    """From m = meanᵢ‖gᵢ‖² and N = ‖meanᵢ gᵢ‖²: |G|² = (nN − m)/(n−1), tr Σ = n(m − N)/(n−1)."""
    if n < 2:
        raise UsageError("the noise scale needs at least two samples")
    m = float(sq_norms.double().mean())
    gradient = (n * mean_sq - m) / (n - 1)
    trace = n * (m - mean_sq) / (n - 1)
    value = trace / gradient if gradient else float("inf")
    return NoiseScale(value, trace, gradient, n)
