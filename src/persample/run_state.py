"""Under which conditions an operator ran: what it saved, random numbers, buffers, autocast."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Autocast = tuple[tuple[str, torch.dtype], ...]  # one kind of device at most


def fingerprint(tensors: Sequence[Tensor], *, again: bool) -> Tensor | None:
    """Sums of what is saved, where hooks (checkpointing, offloading) decide what comes back.

    ``again``: in a backward pass. What checkpointing computes again is asked for by the first
    node alone, which has its sums.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or (again and hooks[0].__module__ == checkpoint.__module__):
        return None
    with torch.no_grad():
        return sums(tensors)


def sums(tensors: Sequence[Tensor]) -> Tensor:
    """One number per tensor; nothing waits for the device."""
    sums = [_sum(t) for t in tensors]
    return torch.stack([s.to(sums[0].device) for s in sums]) if sums else torch.zeros(0)


def _sum(tensor: Tensor) -> Tensor:
    """A sum that changes when rows change places: every row has a weight of its own."""
    value = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
    value = value.detach().to_dense()
    # sums in double precision take several times as long, and are not there on every device
    exact = not value.is_floating_point() and value.device.type != "mps"
    dtype = torch.float64 if exact else torch.promote_types(value.dtype, torch.float32)
    rows = value.sum(-1, dtype=dtype) if value.dim() > 1 else value.to(dtype)
    found = _weigh(rows.flatten())
    return found if value.dim() != 2 else found + _weigh(value.sum(0, dtype=dtype))


def _weigh(rows: Tensor) -> Tensor:
    """The golden ratio's multiples lie apart: no two weights agree."""
    dtype = torch.float32 if rows.device.type == "mps" else torch.float64
    places = torch.arange(rows.numel(), dtype=dtype, device=rows.device)
    return torch.dot(rows.to(dtype), places.mul_(0.6180339887).frac_().add_(1))


def comes_back(expected: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Whether what was saved is what was given back: a truth value on its device."""
    found = sums(tensors).to(expected.device)
    if found.shape != expected.shape:
        return torch.zeros((), dtype=torch.bool, device=expected.device)
    return torch.isclose(found, expected, rtol=1e-6, atol=0.0, equal_nan=True).all()


def equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape hold the same numbers, or none at the same places."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


class RandomState:
    """The random generators' state before an operator that draws numbers."""

    __slots__ = ("cpu", "cuda")

    def __init__(self, device: torch.device) -> None:
        self.cpu = torch.get_rng_state()
        self.cuda = (device, torch.cuda.get_rng_state(device)) if device.type == "cuda" else None

    def changed(self) -> bool:
        """Whether numbers were drawn since."""
        if not torch.equal(self.cpu, torch.get_rng_state()):
            return True
        return self.cuda is not None and not torch.equal(
            self.cuda[1], torch.cuda.get_rng_state(self.cuda[0])
        )

    def restore(self) -> None:
        """Go back to the stored state (inside fork_rng)."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda[1], self.cuda[0])


class Buffers:
    """A model's buffers: many change whenever it runs (running statistics, counters)."""

    def __init__(self, model: nn.Module) -> None:
        self._before = [
            (module, name, buffer, None if buffer is None else buffer.detach().clone())
            for module in model.modules()
            if not isinstance(module, torch.jit.ScriptModule)
            for name, buffer in module._buffers.items()
        ]

    def restore(self) -> None:
        """Put the same tensors back, with the values that they had."""
        with torch.no_grad():
            for module, name, buffer, value in self._before:
                module._buffers[name] = buffer
                if (
                    buffer is not None
                    and value is not None
                    and not buffer.is_meta
                    and not torch.equal(buffer, value)
                ):
                    buffer.copy_(value)


def current_autocast(device: torch.device) -> Autocast:
    """Autocast settings that a replay must reproduce."""
    if not torch._C._is_any_autocast_enabled() or not torch.is_autocast_enabled(device.type):
        return ()
    return ((device.type, torch.get_autocast_dtype(device.type)),)


def uncast() -> contextlib.AbstractContextManager[Any]:
    """Autocast is for the caller's operators: what is computed from gradients keeps its dtype."""
    if torch._C._is_any_autocast_enabled():
        return torch._C._DisableAutocast()
    return contextlib.nullcontext()


def recast(settings: Autocast) -> contextlib.AbstractContextManager[Any]:
    """Autocast as it was."""
    for kind, dtype in settings:
        return torch.autocast(kind, dtype=dtype)
    return contextlib.nullcontext()


_UNITS = 64  # of rounding that gradients may carry from others


def tolerance(dtype: torch.dtype) -> float:
    """Deviation, relative to the largest entry, that rounding alone can explain.

    Half precision is compared to a tenth: a gradient given to the wrong sample is off by more.
    """
    return min(0.1, float(200 * torch.finfo(dtype).eps ** 0.75))


def noise(dtype: torch.dtype) -> float:
    """Rounding of the largest gradients, relative to them: it is all that some parameters have.

    A bias before a normalisation has no gradient but what rounding leaves of others that cancel.
    """
    return min(tolerance(dtype), _UNITS * torch.finfo(dtype).eps)


def largest(values: Tensor) -> float:
    """The largest entry of a gradient."""
    return float(values.abs().max()) if values.numel() else 0.0
