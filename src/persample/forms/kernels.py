"""Kernels of equal results, tried on the processor at hand: products, and zeros.

Which of two kernels is faster can differ by a factor of two between processors. They are tried
once per process, dtype and number of threads, when the first large result is asked for: products on
memory of their own, zeros on the result. Outer products and zeros are the same numbers by either.
Matrix products are rounded otherwise, within the same bounds; so another library than the one that
torch's own matrix products use has to be faster by far, which it is in every process or in none.
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
Class = tuple[torch.dtype | str | None, int]  # and the number of threads
LARGE = 1 << 24  # elements of a result below which a broadcast product is taken untried
_TRIAL = 1 << 23  # elements that a trial writes, several times
_ROUNDS = 5
_GAIN = 0.9  # another kernel than the first must be faster by this: a trial is noisy
_FAR = 0.7  # where it rounds otherwise: no trial may come out the other way
_SIDE = 384  # of the matrices of such a trial
_SIZES = 128  # of products by oneDNN, which keeps about a megabyte for each
BROADCAST, MATRIX, ONEDNN = "broadcast product", "matrix product", "matrix product by oneDNN"
_KERNELS: dict[str, Product] = {BROADCAST: torch.mul, MATRIX: torch.bmm}
_chosen: dict[Class, str] = {}
_sizes: set[tuple[int, int, int]] = set()
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


def _in_full_precision() -> bool:
    """Whether the caller lets no product round its factors first."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # it was set by another interface of torch's
        return False


def _may_try(column: Tensor) -> bool:
    """Whether a matrix product gives the same numbers, and the same kernel need not run every time.

    Below the highest precision a matrix product may round its factors first.
    """
    return (
        column.dim() == 3
        and column.device.type == "cpu"
        and column.dtype in (torch.float32, torch.float64)
        and _in_full_precision()
        and not torch.are_deterministic_algorithms_enabled()
    )


def by_onednn(one: Tensor, two: Tensor) -> Tensor:
    """⟨row i, row j⟩ of matrices (m, k) and (p, k), by oneDNN.

    It copies the first unless it is contiguous, and is very slow where the second has gaps.
    """
    if not (two.is_contiguous() or two.mT.is_contiguous()):
        two = two.contiguous()
    found: Tensor = torch.ops.mkldnn._linear_pointwise.default(one, two, None, "none", [], "")
    return found


def onednn_serves(one: Tensor, two: Tensor, size: tuple[int, int, int]) -> bool:
    """Whether oneDNN computes large products of these matrices: in much less time.

    Torch's own are computed by a library that is slow on some processors of other makers. Where
    sizes change all the time, only the first ones are served.
    """
    if not (type(one) is type(two) is Tensor and one.dtype is two.dtype is torch.float32):
        return False
    if (
        one.device.type != "cpu"
        or not torch._C._get_mkldnn_enabled()
        or not _in_full_precision()
        or torch.are_deterministic_algorithms_enabled()
        or torch.compiler.is_compiling()
    ):
        return False
    key = (MATRIX, torch.get_num_threads())
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _tried_products()
    if found != ONEDNN or (size not in _sizes and len(_sizes) >= _SIZES):
        return False
    _sizes.add(size)
    return True


def _tried_products() -> str:
    """The usual library, unless oneDNN is there, right, and faster by far."""
    one = torch.linspace(-1, 1, _SIDE * _SIDE, dtype=torch.float32, device="cpu")
    one = one.sin_().view(_SIDE, _SIDE)
    try:
        right = torch.allclose(by_onednn(one, one), one @ one.T, rtol=1e-4, atol=1e-4)
    except (AttributeError, RuntimeError, TypeError):  # this build has none, or another
        return MATRIX
    kernels = {MATRIX: lambda x: x @ x.T, ONEDNN: lambda x: by_onednn(x, x)}
    return _fastest(kernels, one, gain=_FAR) if right else MATRIX


def _tried(dtype: torch.dtype, a: int, b: int) -> str:
    """The faster kernel, into one buffer."""
    n = max(1, _TRIAL // (a * b))
    out = torch.zeros(n, a, b, dtype=dtype, device="cpu")
    return _fastest(_KERNELS, out.new_ones(n, a, 1), out.new_ones(n, 1, b), out=out)


def _fastest(
    kernels: Mapping[str, Callable[..., Any]], *args: Tensor, gain: float = _GAIN, **kwargs: Tensor
) -> str:
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
    best = {name: min(seconds[name]) for name in others} | {first: gain * min(seconds[first])}
    return min(best, key=best.__getitem__)
