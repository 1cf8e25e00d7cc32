"""Tensors that a module leaves in attributes of its own: auxiliary losses, codes, maps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution

from ..inputs.containers import leaves
from ..uses import SAMPLES, TensorStates
from ..uses.module_tree import modules_of

DEPTH = 3  # of objects in objects: distributions of distributions
_EVERY_MODULES = frozenset(vars(nn.Module()))


def kept_by(
    module: nn.Module, states: TensorStates, known: Iterable[Tensor]
) -> list[tuple[dict[str, Any], str, list[Tensor]]]:
    """Attributes that hold live tensors of a recording beside those that are ``known``."""
    seen = {id(tensor) for tensor in known}
    left = {
        key
        for key, mark in states.table.items()
        if key not in seen and isinstance(mark.state, SAMPLES) and _has_history(mark())
    }
    found: list[tuple[dict[str, Any], str, list[Tensor]]] = []
    for part in modules_of(module).modules if left else ():
        for name, value in vars(part).items():
            if name not in _EVERY_MODULES:
                depth = DEPTH if isinstance(value, Distribution) else 0
                tensors = [t for t in leaves(value, objects=depth) if id(t) in left]
                if tensors:
                    found.append((vars(part), name, tensors))
    return found


def _has_history(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.grad_fn is not None
