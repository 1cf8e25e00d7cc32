"""Kernels of equal results, tried on the processor at hand: outer products, and zeros.

Which of two kernels is faster can differ by a factor of two between processors. They are tried
once per process, dtype and number of threads, when the first large result is asked for: products on
memory of their own, zeros on the result. Only kernels that round alike compete, so a choice changes
no number and no bound.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Product = Callable[..., Tensor]
Class = tuple[torch.dtype | None, int]
LARGE = 1 << 24  # elements of a result below which a broadcast product is taken untried
_TRIAL = 1 << 23  # elements that a trial writes, several times
_ROUNDS = 5
_GAIN = 0.9  # another kernel than the first must be faster by this: a trial is noisy
BROADCAST, MATRIX = "broadcast product", "matrix product"
_KERNELS: dict[str, Product] = {BROADCAST: torch.mul, MATRIX: torch.bmm}
_chosen: dict[Class, str] = {}
_CLEARED = 1 << 23  # bytes below which memory is cleared by stores, untried


def _by_system(out: Tensor) -> None:
    """As the C library does it: on some processors, memory is not read first."""
    ctypes.memset(out.data_ptr(), 0, out.nbytes)


_CLEARING: dict[str, Callable[[Tensor], Any]] = {"stores": Tensor.zero_, "memset": _by_system}


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """New zeros; how much memory is cleared fastest by one thread is tried on the first."""
    size = math.prod(shape) * dtype.itemsize
    if size < _CLEARED or device.type != "cpu" or torch.get_num_threads() > 1:
        return torch.zeros(shape, dtype=dtype, device=device)
    out = torch.empty(shape, dtype=dtype, device=device)
    if type(out) is not Tensor:  # a mode made it: there may be no memory
        return out.zero_()
    found = _chosen.get((None, 1))
    if found is None:
        _chosen[None, 1] = _fastest(_CLEARING, out)
    else:
        _CLEARING[found](out)
    return out


def outer_products(column: Tensor, row: Tensor, out: Tensor | None = None) -> Tensor:
    """Columns (n, …, a, 1) times rows (n, …, 1, b): every number is one product."""
    return _KERNELS[outer_kernel(column, row)](column, row, out=out)


def outer_kernel(column: Tensor, row: Tensor) -> str:
    """The kernel that serves these factors."""
    if column.numel() * row.shape[-1] <= LARGE or not _may_try(column):
        return BROADCAST
    key = (column.dtype, torch.get_num_threads())
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _tried(column.dtype, column.shape[-2], row.shape[-1])
    return found


def _may_try(column: Tensor) -> bool:
    """Whether a matrix product gives the same numbers, and the same kernel need not run every time.

    Below the highest precision a matrix product may round its factors first.
    """
    return (
        column.dim() == 3
        and column.device.type == "cpu"
        and column.dtype in (torch.float32, torch.float64)
        and torch.get_float32_matmul_precision() == "highest"
        and not torch.are_deterministic_algorithms_enabled()
    )


def _tried(dtype: torch.dtype, a: int, b: int) -> str:
    """The faster kernel, into one buffer."""
    n = max(1, _TRIAL // (a * b))
    out = torch.zeros(n, a, b, dtype=dtype, device="cpu")
    return _fastest(_KERNELS, out.new_ones(n, a, 1), out.new_ones(n, 1, b), out=out)


def _fastest(kernels: Mapping[str, Callable[..., Any]], *args: Tensor, **kwargs: Tensor) -> str:
    """The first kernel, unless another takes clearly less time; they run in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    # other processes' time does not count, where no threads wait for each other
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for _ in range(_ROUNDS):
        for name, kernel in kernels.items():
            start = clock()
            kernel(*args, **kwargs)
            seconds[name].append(clock() - start)
    first, *others = kernels
    best = {name: min(seconds[name]) for name in others} | {first: _GAIN * min(seconds[first])}
    return min(best, key=best.__getitem__)
