"""Norms of many forms at once: products that several share, and what rounding leaves in doubt."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

from .fast.product_cache import share_products
from .form import Form
from .outer import Outer
from .rounding import Unsure, bound_norms, doubts, recompute_doubtful


def sq_norms(forms: Mapping[str, Form]) -> dict[str, Tensor]:
    """‖gᵢ‖² of every form; all doubts are read back at once."""
    with _shared_products(forms):
        found = {name: form.estimated() for name, form in forms.items()}
    unsure = [name for name, (norms, scale) in found.items() if scale is not norms]
    if unsure:
        for name, doubt in zip(unsure, doubts([found[n] for n in unsure]), strict=True):
            if doubt:
                recompute_doubtful(*found[name], forms[name].exactly)
    return {name: norms for name, (norms, _) in found.items()}


def sq_bounds(forms: Mapping[str, Form]) -> dict[str, Tensor]:
    """Certified bounds of ‖gᵢ‖²; products of positions of all forms are looked at together."""
    found: dict[str, Tensor] = {}
    unsure: dict[tuple[torch.dtype, torch.device], dict[str, Unsure]] = {}
    with _shared_products(forms):
        for name, form in forms.items():
            norms = form.unsure()
            if norms is None:
                found[name] = form.measured()[1]
            else:
                unsure.setdefault((norms.found.dtype, norms.found.device), {})[name] = norms
        for group in unsure.values():
            for name, (bounds, _) in zip(group, bound_norms(list(group.values())), strict=True):
                found[name] = bounds
    return found


def _shared_products(forms: Mapping[str, Form]) -> contextlib.AbstractContextManager[None]:
    """Keep products of positions that several parameters have in common."""
    outer = [f for f in forms.values() if isinstance(f, Outer) and f.t > 1]
    return share_products(factor for form in outer for factor in form.given)
