"""What is asked of forms: one function per question, over a dictionary of parameters' forms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UsageError
from .forms import Form, Sketch

Named = Mapping[str, Form]


def _dtype(forms: Named) -> torch.dtype:
    double = any(f.dtype in (torch.float64, torch.complex128) for f in forms.values())
    return torch.float64 if double else torch.float32


def _zeros(forms: Named, *shape: int) -> Tensor:
    first = next(iter(forms.values()), None)
    return torch.zeros(shape, dtype=_dtype(forms), device=None if first is None else first.device)


def added(parts: Mapping[str, Tensor], n: int, device: torch.device) -> Tensor:
    """Σ over parameters, in the widest dtype."""
    total = torch.zeros(n, dtype=torch.float32, device=device)
    for value in parts.values():
        total = total + value.to(device)
    return total


def gram(forms: Named, others: Named, n: int, m: int) -> Tensor:
    """⟨gᵢ, hⱼ⟩ over all parameters: (n, m)."""
    total = _zeros(forms, n, m)
    for name, form in forms.items():
        total += form.dots(others[name]).to(total.dtype).to(total.device)
    return total


def dots(forms: Named, direction: Mapping[str, Tensor], n: int) -> Tensor:
    """⟨gᵢ, V⟩ over all parameters: (n,)."""
    total = _zeros(forms, n)
    for name, form in forms.items():
        total += form.dot(direction[name].detach()).to(total.dtype).to(total.device)
    return total


def project(forms: Named, dim: int, seed: int, n: int) -> Tensor:
    """Sketches of all parameters, added: (n, dim)."""
    total = _zeros(forms, n, dim)
    for name, form in forms.items():
        shape = torch.Size((*form.shape, 2)) if form.dtype.is_complex else form.shape
        if shape.numel():
            sketch = Sketch(name, shape, dim, seed, form.device)
            total += form.project(sketch).to(total.dtype).to(total.device)
    return total


@dataclass(frozen=True, slots=True)
class NoiseScale:
    """The simple gradient noise scale and its parts.

    ``value`` is tr Σ / |G|². Over several steps, average ``trace`` and ``sq_gradient`` separately
    and divide then: the ratio of averages is the estimate, not the average of ratios.
    """

    value: float
    trace: float
    sq_gradient: float
    n: int


def noise_scale(sq_norms: Tensor, mean_sq: float, n: int) -> NoiseScale:
    """M = meanᵢ‖gᵢ‖², N = ‖meanᵢ gᵢ‖²: |G|² = (nN − m)/(n−1), tr Σ = (m − N)/(1 − 1/n)."""
    if n < 2:
        raise UsageError("the noise scale needs at least two samples")
    m, big = float(sq_norms.double().mean()), mean_sq
    gradient = (n * big - m) / (n - 1)
    trace = (m - big) / (1 - 1 / n)
    value = trace / gradient if gradient else float("inf")
    return NoiseScale(value, trace, gradient, n)
