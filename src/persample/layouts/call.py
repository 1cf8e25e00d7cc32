"""One call of an operator as a layout rule sees it, and the helper most rules are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import Mixing
from .layout import Layout, State, align, explicit, ids_of, merge, place
from .reshaping import squeeze_colours

Result = State | None
# classes of values that say all of themselves
PLAIN = (
    int, float, bool, str, complex, type(None), type(Ellipsis),
    torch.dtype, torch.device, torch.memory_format,
)  # fmt: skip
Places = Sequence[int | None]
Rule = Callable[["Call"], "Result | list[Result]"]


class Call:
    """Operator name, arguments, result, and the layouts of the coloured arguments."""

    __slots__ = ("args", "func", "kwargs", "layouts", "n", "name", "out")

    def __init__(
        self,
        name: str,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        out: Any,
        layouts: dict[int, Layout],
        n: int,
    ) -> None:
        self.name, self.func, self.args, self.kwargs, self.out = name, func, args, kwargs, out
        self.layouts, self.n = layouts, n

    def arg(self, index: int, *names: str, default: Any = None) -> Any:
        """An argument by position or by any of its names."""
        if index < len(self.args):
            return self.args[index]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    @property
    def first(self) -> Tensor:
        """The result, or the first tensor among several."""
        return collect(self.out)[0]

    def layout(self, tensor: Any) -> Layout | None:
        """The layout of an argument, None for a constant."""
        return self.layouts.get(id(tensor))

    def colours(self, tensor: Tensor) -> Tensor:
        """The sample of every element of an argument, -1 in a constant; not expanded."""
        layout = self.layout(tensor)
        if layout is None:
            return torch.full((1,) * tensor.dim(), -1, device=tensor.device)
        return ids_of(layout, tensor.shape, self.n, tensor.device)

    def merge(self, *layouts: Layout | None, out: Tensor | None = None) -> Layout | None:
        """The layout of a result from those of what it is made of, None for constants."""
        shape, result = (self.first if out is None else out).shape, None
        for layout in layouts:
            if layout is not None:
                result = layout if result is None else merge(result, layout, shape, self.n)
        return result

    def painted(self, ids: Tensor) -> Layout:
        """The layout from the sample of every element."""
        return explicit(squeeze_colours(ids, self.n), self.n)

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, in order."""
        return collect([self.args, self.kwargs])


def collect(value: Any) -> list[Tensor]:
    """Every tensor inside nested containers."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, Tensor):
                found.append(item)
            elif isinstance(item, (list, tuple, dict)):
                found += collect(item)
    return found


def axes(value: int | Sequence[int] | None, rank: int) -> set[int]:
    """Axes as a set of non-negative numbers; None means all."""
    if value is None:
        return set(range(rank))
    if isinstance(value, (int, torch.SymInt)):
        value = (value,)
    return {int(v) % rank for v in value} if rank else set()


def other_sizes(tensor: Tensor, axis: int) -> tuple[int, ...]:
    """The sizes of all axes but one."""
    return (*tensor.shape[:axis], *tensor.shape[axis + 1 :])


def trailing(tensor: Tensor, count: int) -> set[int]:
    """The last ``count`` axes."""
    return set(range(max(tensor.dim() - count, 0), tensor.dim()))


def carry(
    call: Call,
    operands: Sequence[tuple[Any, Iterable[int]]],
    out: Tensor,
    core: Iterable[int] = (),
) -> Layout | None:
    """Colours through an operator that loops over all axes but each operand's core axes.

    The loop axes of operands and result are aligned from the right, as in broadcasting.
    A coloured core axis, or a coloured argument that is no operand, is mixing. Core axes may be
    counted from the end.
    """
    loops = _loops(out, core)
    placed: list[tuple[Any, Places]] = []
    for tensor, core_in in operands:
        if id(tensor) in call.layouts:
            to = dict(zip(reversed(_loops(tensor, core_in)), reversed(loops), strict=False))
            placed.append((tensor, [to.get(d) for d in range(tensor.dim())]))
    return gather_colours(call, placed, out)


def _loops(tensor: Tensor, core: Iterable[int]) -> list[int]:
    """All axes but the core."""
    rank = tensor.dim()
    gone = {d % max(rank, 1) if d < 0 else d for d in core}
    return [d for d in range(rank) if d not in gone]


def gather_colours(
    call: Call, operands: Sequence[tuple[Any, Places]], out: Tensor
) -> Layout | None:
    """Colours when every operand says where each of its axes goes (None: lost)."""
    held = [(layout, t.shape, to) for t, to in operands if (layout := call.layout(t)) is not None]
    result = call.merge(*[place(*each, out.shape, call.n) for each in held], out=out)
    if not {id(tensor) for tensor, _ in operands}.issuperset(call.layouts):
        raise Mixing(f"{call.name}: an argument holds samples that is shared by all rows")
    return result


def carry_each(
    call: Call, operands: Sequence[tuple[Any, Iterable[int]]], cores: Sequence[int]
) -> Result | list[Result]:
    """The same for one result or several, each with its number of trailing core axes.

    A result of shape (0,) was not computed, unless it is one number for each of no samples.
    """
    if isinstance(call.out, Tensor):
        return carry(call, operands, call.out, trailing(call.out, cores[0]))
    return [
        None
        if out.shape == (0,) and (core or call.n)
        else carry(call, operands, out, trailing(out, core))
        for out, core in zip(call.out, cores, strict=False)
    ]


def elementwise(call: Call) -> Layout | None:
    """Colours through broadcasting element-by-element operators."""
    held = [(layout, t.shape) for t in call.tensors() if (layout := call.layout(t)) is not None]
    return call.merge(*[align(*each, call.first.shape, call.n) for each in held])


def first_only(call: Call) -> Layout | None:
    """The first argument's layout, shape unchanged; the others give at most a dtype or a size."""
    return call.layouts.get(id(call.arg(0, "input", "self", "indices")))
