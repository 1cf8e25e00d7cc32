"""How a use gets its operator's output gradient: a hook before the operator's own node, or a node.

The hook is the rule: it costs little and leaves the graph as torch built it. A node of our own
(:class:`Tap`) serves where there is no native node (no argument requires a gradient), where several
results are tapped, and where saved-tensor hooks (activation checkpointing, offloading) decide how
the arguments are kept.

The gradient of a use by its data is a use of its own. Code that takes a gradient inside forward, to
compute a loss with it (forces, Jacobians), makes the loss depend on a parameter once more: through
the operator's derivative. That derivative is a function of the use's data, of the gradients of its
results, and of the same parameters. If the samples are separate in the use, they are in its
gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks as _saved_tensor_hooks

from ..errors import Reason
from ..layouts import LATE, PRODUCTS, Layout, closed
from .context import ANCHOR
from .marks import versions
from .signature import Kind, Tapped, Template
from .use import Use


class Before:
    """Called by autograd before the operator's own node runs, with the complete gradients.

    The arguments are held detached: an argument that is written to later gets a history that leads
    through this very node, and would keep itself alive.
    """

    __slots__ = ("index", "saved", "shape", "use", "versions")

    def __init__(
        self, use: Use, saved: Sequence[Tensor], index: int, shape: torch.Size | None
    ) -> None:
        self.use, self.index, self.shape = use, index, shape
        self.saved: tuple[Tensor, ...] | None = tuple([t.detach() for t in saved])
        self.versions = versions(self.saved)

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Hand the gradient to the use; matrix products get one that need not be copied twice."""
        grad, context = grads[self.index], self.use.context()
        if grad is None or context is None or context.closed:
            return None
        changed = None
        with torch._C.DisableTorchFunction():
            if self.shape is not None:
                grad = grad.reshape(self.shape)
            elif grad.dim() > 2 and self.use.operator in PRODUCTS and not grad.is_contiguous():
                grad = grad.contiguous()
                changed = (*grads[: self.index], grad, *grads[self.index + 1 :])
            saved = self.saved
            if saved is None or versions(saved) != self.versions:
                raise self._gone()
            context.receiver.receive(self.use, saved, (grad,))
        backward = context.backward
        if backward.receiving and not backward.retain:
            self.saved = None
        return changed

    def afterwards(self, found: Any, grads: tuple[Tensor | None, ...]) -> None:
        """The same after the operator's own node has run, where rows are written out at once.

        For operators that take their most memory while they compute the gradient of their input,
        and those whose rows are so large that they drive what the node reads out of the cache.
        """
        self(grads)

    def _gone(self) -> RuntimeError:
        """Why what was saved cannot be given back."""
        if self.saved is None:
            return RuntimeError(
                f"{self.use.operator}: back-propagating a second time through a graph that was "
                "freed; pass retain_graph=True the first time"
            )
        return RuntimeError(
            f"an argument of {self.use.operator} was modified by an inplace operation after "
            "it was used, and is needed for gradients"
        )


def hook(use: Use, result: Tensor, saved: Sequence[Tensor]) -> bool:
    """Listen at the node of a result, or of what it is a reshaped view of; whether there is one.

    A view that is written to in place gets a new node, and gradients no longer pass its old one;
    they pass the node of the tensor it is a view of.
    """
    if _saved_tensor_hooks(True) is not None:
        return False
    made, base, shape = result, result._base, None
    if base is not None:
        if base.numel() != result.numel() or not (base.is_contiguous() and result.is_contiguous()):
            return False
        made, shape = base, result.shape
    node = made.grad_fn
    if node is None:
        return False
    before = Before(use, saved, made.output_nr, shape)
    context = use.context() if use.kind.alone or use.kind.operator in LATE else None
    if context is not None and context.backward.strict:
        node.register_hook(before.afterwards)
    else:
        node.register_prehook(before)
    return True


class Tap(torch.autograd.Function):
    """Identity on the outputs of one operator; saves the operator's data arguments.

    Saving goes through ``save_for_backward``, so that activation checkpointing and saved-tensor
    hooks see it and an argument overwritten in place raises. The anchor gives the node a reason to
    exist where no data argument requires a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, use: Any, count: int, dirty: bool, *tensors: Tensor
    ) -> Any:
        """Pass ``tensors[count:]`` through; keep ``tensors[:count]``."""
        outs = tensors[count:]
        ctx.use, ctx.count = use, count
        ctx.save_for_backward(*tensors[:count])
        ctx.set_materialize_grads(False)
        if dirty:
            ctx.mark_dirty(*outs)
        else:
            outs = tuple(o.clone() for o in outs)
        return outs[0] if len(outs) == 1 else outs

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Forward-mode derivatives pass as they are; what they are used for is not followed."""
        outs = tangents[4 + ctx.count :]
        return outs[0] if len(outs) == 1 else outs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Hand the gradients to the use and pass them on, to its results or to its data."""
        found: list[Tensor | None] = [None] * ctx.count
        needed = ctx.needs_input_grad[4:]
        given = any(g is not None for g in grads)
        if given and (any(needed) or not torch.is_grad_enabled()):
            use, saved = ctx.use, ctx.saved_tensors
            use.fire(saved[: len(use.kind.data)] if use.closed else saved, grads)
            if use.closed:
                wanted = [k for k in range(ctx.count) if needed[k]]
                for k, grad in zip(wanted, _by_data(use, saved, grads, wanted), strict=True):
                    found[k] = grad
        return (None, None, None, None, *found, *grads)


def _by_data(
    use: Use, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...], wanted: list[int]
) -> tuple[Tensor, ...]:
    """The gradients by a use's data; where they are differentiated again, they are a use.

    Where parameters stay in the graph, they were saved after the data.
    """
    with torch._C.DisableTorchFunction():
        count, seeds = len(use.kind.data), [grad for grad in grads if grad is not None]
        values = saved[count:] or [operand.value for operand in use.operands]
        arguments = [t.detach() for t in (*saved[:count], *values)]
        made = gradient_use(use, arguments, grads, wanted)
        with torch.no_grad():
            found: tuple[Tensor, ...] = made.func(*arguments, *(t.detach() for t in seeds))
        context = use.context()
        if context is None or not torch.is_grad_enabled():
            return found
        context.receiver.expect(made)
        data = [*saved[:count], *seeds, *saved[count:]]
        tapped: Any = Tap.apply(ANCHOR, made, len(data), False, *data, *found)
        return (tapped,) if len(found) == 1 else tapped


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
    return Reason(f"torch.autograd.grad of {use.operator}", why, (), use.place) if why else None
