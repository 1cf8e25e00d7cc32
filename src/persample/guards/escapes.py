"""Native gradients that reach a parameter: a use was missed there."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import LOOP, MissedUseError
from ..uses.context import Context


class Escapes:
    """Takes ``.grad`` away from all leaves while a pass runs, and puts it back afterwards."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._leaves = context.parameters.leaves()
        self._before = [leaf.grad for leaf in self._leaves]
        for leaf, grad in zip(self._leaves, self._before, strict=True):
            if grad is not None:
                leaf.grad = None

    def restore(self) -> MissedUseError | None:
        """Undo what reached them; why the pass is refused, if something did."""
        escaped: list[Tensor] = []
        for leaf, grad in zip(self._leaves, self._before, strict=True):
            if leaf.grad is not None:
                escaped.append(leaf)
                leaf.grad = None
            if grad is not None:
                leaf.grad = grad
        if not escaped:
            return None
        names = {id(t): name for name, t in self._context.parameters.model.named_parameters()}
        found = [names.get(id(leaf), "?") for leaf in escaped]
        return _missed_use(found, reentrant=self._context.user_code.reentrant)


def _missed_use(names: Sequence[str], *, reentrant: bool) -> MissedUseError:
    return MissedUseError(
        "a parameter was used where the recorder could not see it: " + ", ".join(names[:4]),
        why="autograd computed an ordinary gradient for it (a scripted module, a custom "
        "autograd.Function, another thread, a graph built before the block)",
        fix="checkpoint(..., use_reentrant=False) everywhere" if reentrant else LOOP,
    )
