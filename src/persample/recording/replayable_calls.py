"""How a tensor made of parameters alone came about: the call that made it, to be run once more."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..layouts import Layout, Operator, ids_of, propagate
from ..run_state import current_autocast
from ..uses import version
from .roles import Coloured

_EXPANDS = frozenset(("expand", "expand_as", "broadcast_to"))
_REPEATS = frozenset(("repeat", "tile"))

Again = Callable[[dict[int, Tensor]], Any]
Zeros = Callable[[Tensor, int, int], Tensor]
# an operator, its function, positional and named arguments, and what came out
Call = tuple[Operator, Any, tuple[Any, ...], dict[str, Any], Any]


class Origin:
    """The call that made a derived tensor, and the tensor made again with samples in it.

    ``call`` takes, for tensors by id, what to take instead; ``plain``: a parameter's own view,
    which rules know how to take.
    """

    __slots__ = ("_autocast", "_seen", "call", "failed", "index", "plain", "remade")

    def __init__(self, call: Again, index: int, seen: Sequence[Tensor], *, plain: bool) -> None:
        self.call, self.index, self.plain = call, index, plain
        self._seen = [(tensor, version(tensor), tensor.requires_grad) for tensor in seen]
        self._autocast = current_autocast(seen[0].device)
        self.remade: Tensor | None = None
        self.failed = False

    @property
    def seen(self) -> list[Tensor]:
        """The tensors that the call took."""
        return [tensor for tensor, _, _ in self._seen]

    def untouched(self) -> bool:
        """Whether what the call took was not written to, frozen, or cut off its history."""
        return all(
            version(tensor) == number and tensor.requires_grad == wanted
            for tensor, number, wanted in self._seen
        )

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast as it was for the call."""
        kind = self._seen[0][0].device
        if current_autocast(kind) == self._autocast:
            return contextlib.nullcontext()
        dtype = self._autocast[0][1] if self._autocast else None
        return torch.autocast(kind.type, dtype=dtype, enabled=bool(self._autocast))


def rooted(
    name: str, value: Any, shape: torch.Size, n: int, dim: int, zeros: Zeros
) -> Again | None:
    """A call that repeats a tensor n times along one axis, as a sum with samples' zeros.

    Where several axes are as long, the samples' own is the likeliest.
    """
    if name not in _EXPANDS | _REPEATS:
        return None
    before = [1] * (len(shape) - value.dim()) + [*value.shape]
    times = [s // b if b else 0 for s, b in zip(shape, before, strict=True)]
    axes = [d for d, t in enumerate(times) if t == n]
    if not axes:
        return None
    if name in _REPEATS and (len(axes) > 1 or any(t not in (1, n) for t in times)):
        return None
    axis = dim if dim in axes else axes[0]

    def again(_: dict[int, Tensor]) -> Any:
        apart = value.reshape(before).unsqueeze(axis)
        return (apart + zeros(value, len(shape) + 1, axis)).flatten(axis, axis + 1).expand(shape)

    return again


def fits(call: Call, found: Sequence[tuple[Tensor, Any]], coloured: Coloured, n: int) -> bool:
    """Whether results have the colours that they have where copies are but constants.

    As many rows as there are samples need not be theirs: a prefix joined to one sample's rows, or
    tokens to the rows of each.
    """
    if all(not isinstance(state, Layout) or state.ids is None for _, state in (*found, *coloured)):
        return True
    states = propagate(*call, coloured, n)
    each = states if isinstance(states, list) else [states] * len(found)
    return all(
        _agree(tensor, mine, state, n)
        for (tensor, mine), state in zip(found, each, strict=True)
        if isinstance(mine, Layout) and isinstance(state, Layout)
    )


def _agree(tensor: Tensor, mine: Layout, state: Layout, n: int) -> bool:
    """Rows that would be unowned may be those of a sample that has others here."""
    one, two = (ids_of(each, tensor.shape, n, tensor.device) for each in (mine, state))
    known = two >= 0
    return bool(torch.where(known, one == two, torch.isin(one, two[known])).all())


def laid_out(found: Tensor, like: Tensor) -> Tensor:
    """The same elements in memory as another tensor has them: code behind it may rely on that."""
    if found.shape != like.shape or _strides(found) == _strides(like) or 0 in like.stride():
        return found
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda d: -strides[d])
    back = sorted(range(like.dim()), key=order.__getitem__)
    return found.permute(order).contiguous().permute(back)


def _strides(tensor: Tensor) -> list[int]:
    """Those that matter."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def differs(found: Tensor, tensor: Tensor) -> Tensor:
    """Whether a tensor was not made again, but for rounding: what was read has changed unseen."""
    known = tensor.isfinite()
    gap = torch.where(known, found - tensor, 0).abs().amax()
    size = torch.where(known, tensor, 0).abs().amax()
    return torch.le(gap, size * torch.finfo(tensor.dtype).eps ** 0.5).logical_not()
