"""Buffers of the caller's own that gradients are written into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..layouts import overlaps, reach
from ..validation import shown


def expect_buffers(out: Any, parameters: Mapping[str, Tensor], n: int) -> dict[str, Tensor]:
    """A buffer for each of the parameters, none of which writes over another."""
    fix = "pass the dictionary of an earlier tape.grads() with the same n"
    if not isinstance(out, Mapping):
        raise UsageError(f"out must be a dictionary of names, got {shown(out)}", fix=fix)
    found: dict[str, Any] = {}
    for name, parameter in parameters.items():
        buffer, shape = out.get(name), (n, *parameter.shape)
        if not _fits(buffer, shape, parameter):
            raise UsageError(
                f"out[{name!r}] must be a dense tensor of shape {shape}, {parameter.dtype}, on "
                f"{parameter.device}, without gradients of its own, got {shown(buffer)}",
                fix=fix,
            )
        found[name] = buffer
    _expect_no_overlap(found)
    return found


def _fits(buffer: Any, shape: tuple[int, ...], parameter: Tensor) -> bool:
    return (
        isinstance(buffer, Tensor)
        and buffer.shape == shape
        and buffer.dtype is parameter.dtype
        and buffer.device == parameter.device
        and not buffer.requires_grad
        and buffer.layout is torch.strided
        and (buffer.is_contiguous() or not overlaps(buffer.shape, buffer.stride()))
    )


def _expect_no_overlap(buffers: Mapping[str, Tensor]) -> None:
    before: list[tuple[int, str]] = []  # that end later than the next begins
    for start, stop, name in sorted((*_span(b), k) for k, b in buffers.items() if b.numel()):
        before = [(last, other) for last, other in before if last > start]
        for _, other in before:
            if not _is_interleaved(buffers[other], buffers[name]):
                raise UsageError(
                    f"out[{other!r}] and out[{name!r}] share memory",
                    why="one would be written over the other",
                    fix="give every parameter a buffer of its own",
                )
        before.append((stop, name))


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from a tensor's first byte to its last."""
    start = tensor.data_ptr()
    return start, start + reach(tensor.shape, tensor.stride()) * tensor.element_size()


def _is_interleaved(a: Tensor, b: Tensor) -> bool:
    """Whether they are columns of one matrix of samples: rows alternate and never overlap."""
    step = a.stride(0) * a.element_size()
    if step != b.stride(0) * b.element_size():
        return False
    (first, last), (start, stop) = _span(a[0]), _span(b[0])
    in_order = last <= start and stop - first <= step
    return in_order or (stop <= first and last - start <= step)
