"""Measured peak memory of a step, and the largest batch that fits."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from ..api import record
from ..errors import UsageError
from ..inputs.batch_samples import batch_size, following, resolved, take
from ..tape.explain import readable
from ..testing import LossFn

LARGEST = 512 << 20  # a measurement does not go beyond this many bytes
UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Meter(TorchDispatchMode):
    """Bytes of tensors that operators make and that are alive, and their peak.

    What an operator needs inside itself is not seen, nor what existed before.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # a recorder would take this for the user's reading
            before = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
            out = func(*args, **(kwargs or {}))
            for tensor in _tensors(out):
                storage = tensor.untyped_storage()
                if id(storage) not in before and id(storage) not in self._seen:
                    self._add(storage)
        return out

    def _add(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()
        self._seen[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._seen.pop(key, 0)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class Peak:
    """Peak bytes of one kind of step: at n, and as fixed + each · n for the largest n measured."""

    name: str
    at_n: int
    fixed: float
    each: float
    measured: int

    def largest(self, memory: int, model: int) -> int:
        """The largest batch whose peak, with the model itself, stays within ``memory``."""
        if self.each <= 0:
            return 0
        return max(0, int((memory - model - self.fixed) / self.each))


@dataclass(frozen=True, slots=True)
class Memory:
    """Peaks of a plain step and of recorded ones."""

    n: int
    model: int
    limit: int
    peaks: tuple[Peak, ...]

    def __str__(self) -> str:
        lines = [
            f"memory: the model takes {readable(self.model)}; measured peaks beyond it, and the "
            "largest batch that fits (estimated)"
        ]
        rows = [
            (
                "step",
                f"at n = {self.n}",
                "per sample",
                "measured to",
                f"n in {readable(self.limit)}",
            )
        ]
        for p in self.peaks:
            largest = f"{p.largest(self.limit, self.model):,}"
            sizes = (readable(p.at_n), readable(p.each), f"n = {p.measured:,}")
            rows.append((p.name, *sizes, largest))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines += [
            "  ".join(
                cell.rjust(w) if k else cell.ljust(w)
                for k, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join(lines)


def measure(
    model: nn.Module, loss_fn: LossFn, batch: Any, *, limit: int | None = None, **options: Any
) -> Memory:
    """Run each kind of step on ever larger batches until its peak grows by a fixed size per sample.

    The batch is repeated to make larger ones.
    """
    dim = options.get("dim", 0)
    n = batch_size(batch, dim)
    options = following(options, batch)
    if isinstance(options.get("n"), int):
        options["n"] = lambda which: batch_size(which, dim)  # of larger batches, too
    if n < 1:
        raise UsageError(
            "memory cannot be measured on an empty batch", fix="pass a batch of one sample or more"
        )
    device = next(model.parameters()).device
    limit = limit or _available(device)

    def tape(which: Any) -> Any:
        with record(model, **resolved(options, which)) as made:
            made.backward(loss_fn(model, which))
        return made

    def plain(which: Any) -> None:
        wanted = [p for p in model.parameters() if p.requires_grad]
        torch.autograd.grad(loss_fn(model, which).sum(), wanted, allow_unused=True)

    steps: dict[str, Callable[[Any], Any]] = {
        "plain step": plain,
        "norms()": lambda which: tape(which).norms(),
        "clipped_sum(C)": lambda which: tape(which).clipped_sum(1.0),
        "grads()": lambda which: tape(which).grads(),
    }

    def resized(size: int) -> Any:
        return batch if size == n else take(batch, torch.arange(size) % n, n, dim)

    budget = min(limit // 8, LARGEST)
    peaks = tuple(
        _line(name, lambda size, step=step: _peak(step, resized(size), device), n, budget)  # type: ignore[misc]
        for name, step in steps.items()
    )
    held = [*model.parameters(), *model.buffers()]
    size = sum(t.numel() * t.element_size() for t in held)
    return Memory(n, size, limit, peaks)


def _line(name: str, peak: Callable[[int], int], n: int, budget: int) -> Peak:
    """Double the batch until the slope settles: a peak is a maximum of lines, hence convex."""
    first = peak(n)
    if 2 * first > budget and n > 1:
        each = (first - peak(n // 2)) / (n - n // 2)
        return Peak(name, first, max(0.0, first - each * n), each, n)
    size, last, each = n, first, 0.0
    for _ in range(6):
        found = peak(2 * size)
        before, each = each, (found - last) / size
        size, last = 2 * size, found
        if abs(each - before) <= 0.02 * each or 2 * found > budget:
            break
    return Peak(name, first, max(0.0, last - each * size), each, size)


def _peak(step: Callable[[Any], Any], batch: Any, device: torch.device) -> int:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        kept = step(batch)
        peak = int(torch.cuda.max_memory_allocated(device)) - int(before)
        del kept
        return peak
    with Meter() as meter:
        kept = step(batch)
    del kept
    return int(meter.peak)


def _available(device: torch.device) -> int:
    """All memory of the device, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def parse_size(text: str) -> int:
    """``8GiB``, ``512M`` or a number of bytes."""
    plain = text.strip().lower().removesuffix("b").removesuffix("i")
    unit = plain[-1:] if plain[-1:] in "kmgt" else ""
    try:
        value = float(plain.removesuffix(unit)) * UNITS[unit]
    except ValueError:
        value = -1.0
    if not 0 < value < 1 << 60:
        raise UsageError(f"{text!r} is not an amount of memory", fix="write 8GiB or 512MiB")
    return int(value)
