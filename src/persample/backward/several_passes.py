"""Several backward passes in one block: whether the caller wants them added up.

Answers are sums over all passes, as ``.grad`` is in a plain program. A program that clears it
between two passes (adversarial examples, a first step to a sharper place) wants the second alone.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import UsageError
from ..uses import Context

_ONE = "one of them by a plain backward()"
_CALLS = "by plain backward() after two calls of the model"
_FIX = (
    "loss.backward(inputs=[x]) for gradients by inputs, which are not recorded; a block of its own "
    "for each pass; or, if they are to be added up, {more}record(..., same_samples=True)"
)


def expect_to_be_added(context: Context, call_count: int, *, plain: bool) -> None:
    """Refuse a later pass that the program may not want to be added to those before.

    ``plain``: the caller's own ``backward()`` starts it. ``call_count``: how often the model was
    called before.
    """
    backward, options = context.backward, context.options
    sharded = context.processes is not None and context.processes.sharded
    if backward.count and not options.same_samples:
        if options.grad and not sharded:  # where .grad shows what was cleared
            _expect_kept(context)
        elif plain != backward.by_caller or (plain and call_count != backward.call_count):
            what = _CALLS if plain == backward.by_caller else _ONE
            raise UsageError(
                f"two backward passes in one block, {what}",
                why="both are recorded, and answers would be sums over both; whether .grad was "
                "cleared between them cannot be seen",
                fix=_FIX.format(more="tape.backward(losses) for each, or "),
            )
    backward.by_caller, backward.call_count = plain, call_count


def _expect_kept(context: Context) -> None:
    """Refuse another pass after ``zero_grad()``: there is a ``.grad`` that shows it."""
    grads = [context.parameters.selected[name].grad for name in context.backward.written]
    if any(grad is None for grad in grads) or (grads and not any(map(_holds_anything, grads))):
        raise UsageError(
            "gradients were cleared between two backward passes of one block",
            why="both passes are recorded, and answers would be sums over both",
            fix=_FIX.format(more=""),
        )


def _holds_anything(grad: Tensor | None) -> bool:
    return grad is not None and bool(grad.any())
