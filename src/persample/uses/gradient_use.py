"""The gradient of a use by its data, as a use of its own.

Code that takes a gradient inside forward, to compute a loss with it (forces, Jacobians), makes the
loss depend on a parameter once more: through the operator's derivative. That derivative is a
function of the use's data, of the gradients of its results, and of the same parameters. If the
samples are separate in the use, they are in its gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import Reason
from ..layouts.layout import Layout, closed
from .signature import Kind, Tapped, Template
from .use import Use


class Gradient:
    """Gradients by some arguments (``wanted``), given those of some results (``given``)."""

    __slots__ = ("given", "use", "wanted")

    def __init__(self, use: Use, wanted: list[int], given: list[int]) -> None:
        self.use, self.wanted, self.given = use, wanted, given

    def __call__(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Data, parameters, and gradients of results: run the operator again, and back."""
        use, again = self.use, torch.is_grad_enabled()
        count = len(use.kind.data)
        end = count + len(use.operands)
        with torch.enable_grad():
            own = [_alias(t) if k in self.wanted else t for k, t in enumerate(leaves[:end])]
            results = use.replay(own[:count], own[count:])
            outs = [results[k] for k in self.given]
            moved = [out.requires_grad for out in outs]
            return torch.autograd.grad(
                [out for out, moves in zip(outs, moved, strict=True) if moves],
                [own[k] for k in self.wanted],
                [g for g, moves in zip(leaves[end:], moved, strict=True) if moves],
                create_graph=again,
                materialize_grads=True,
            )


def _alias(tensor: Tensor) -> Tensor:
    """A tensor of its own to take a gradient by: the same one may come as several arguments."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def gradient_use(
    use: Use, arguments: Sequence[Tensor], grads: Sequence[Tensor | None], wanted: list[int]
) -> Use:
    """The use that gives the gradients by wanted arguments: data first, then parameters."""
    given = [k for k, grad in enumerate(grads) if grad is not None]
    count, mine = len(use.kind.data), len(use.operands)
    total = count + mine + len(given)
    layouts = [*use.kind.layouts, *[None] * mine]
    kind = Kind(
        f"gradient of {use.operator}",
        Template(None, total, ()),
        list(range(count, count + mine)),
        [*range(count), *range(count + mine, total)],
        [*use.kind.layouts, *(use.out_layouts[k] for k in given)],
    )
    operands = [operand.moved(count + k) for k, operand in enumerate(use.operands)]
    func = Gradient(use, wanted, given)
    made = Use(use.context, kind, func, [None] * total, operands, use.place, use.batches)
    made.closed = True
    made.tapped = Tapped(
        list(range(len(wanted))),
        [layouts[k] or closed(0) for k in wanted],
        [_refused(use, layouts[k], given) for k in wanted],
        [arguments[k].shape for k in wanted],
        [arguments[k].dtype for k in wanted],
    )
    return made


def _refused(use: Use, layout: Layout | None, given: list[int]) -> Reason | None:
    """Why a gradient by data of this layout cannot be followed, if it cannot."""
    for k in given:
        if use.tapped.refused[k] is not None:
            return use.tapped.refused[k]
    why = ""
    if layout is None:
        why = "a gradient is taken by a tensor that all samples share: it is a sum over them"
    elif use.guessed is not None:
        why = "a gradient is taken through rows of no sample"
    return Reason(f"torch.autograd.grad of {use.operator}", why, (), use.place) if why else None
