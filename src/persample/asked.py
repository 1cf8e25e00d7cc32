"""What every question of a tape starts from."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import queries
from .conditions import uncast
from .errors import StaleError, UsageError
from .forms import Form, Together, within
from .lean import Visitor
from .ledger import Forms, Ledger
from .parameters import Params, choose

if TYPE_CHECKING:
    from .recorder import Recorder

Grads = dict[str, Tensor]


class Asked:
    """A recording, open for questions."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder: Recorder | None = recorder
        self._ledger = Ledger(recorder)
        self._warned = False
        self._lock = threading.RLock()  # questions of a lean recording back-propagate

    def __reduce__(self) -> Any:
        raise UsageError(
            "a tape can be neither copied nor pickled",
            why="it refers to the model and to the graph of one pass",
            fix="copy or store what was asked of it",
        )

    @property
    def n(self) -> int:
        """How many samples were seen."""
        n = self._open().n
        if n is None:
            raise UsageError(
                "no samples were seen",
                why="the model was not called inside the block",
                fix="call the model on its inputs inside the block, or tape.mark(x)",
            )
        return n

    @property
    def names(self) -> tuple[str, ...]:
        """The recorded parameters, in the order of ``named_parameters()``."""
        return tuple(self._open().parameters.selected)

    def _open(self) -> Recorder:
        if self._recorder is None:
            raise UsageError("the tape is closed", fix="ask before tape.close()")
        return self._recorder

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Unseen by any recorder, uncast, one thread at a time, within the memory budget."""
        budget = self._open().budget
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise UsageError(
                "a tape cannot be asked inside a torch.func transform",
                why="its answers carry no gradient, and are not batched",
                fix="ask outside, and use the answer inside",
            )
        try:
            with self._lock, torch._C.DisableTorchFunction(), uncast(), within(budget):
                yield
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise StaleError(
                "something that was recorded was overwritten in place",
                why=f"autograd says: {str(error).partition(' Hint')[0]}",
                fix="ask the tape before parameters, buffers, labels or masks are written to",
            ) from error

    def _device(self) -> torch.device:
        return next(iter(self._open().parameters.selected.values())).device

    def _forms(self, params: Params) -> dict[str, Form]:
        self._open()
        return self._ledger.forms(choose(params, self.names))

    def _each(
        self, names: Sequence[str], visit: Visitor, *, linear: bool = False, last: bool = False
    ) -> None:
        """Show the form of every parameter that received a gradient to a visitor.

        A lean recording back-propagates again for it, and frees the graph with the ``last``
        question. Where the question is ``linear``, a parameter may come use by use.
        """
        recorder = self._open()
        if self._ledger.lean is None:
            ledger = self._ledger
            for name, form in (ledger.forms if linear else ledger.written)(names).items():
                visit(name, form)
        else:
            self._ledger.ready()
            recorder.revisit(set(names), visit, linear=linear, last=last)

    def _sq_norms(self, params: Params) -> Tensor:
        parts = self._ledger.sq_norms(choose(params, self.names))
        return queries.added(parts, self.n, self._device())

    def _summed(
        self,
        names: Sequence[str],
        c: Mapping[str, Tensor],
        *,
        bad: Tensor | None = None,
        settled: Forms | None = None,
        certain: bool = False,
        wide: bool = False,
        last: bool = False,
    ) -> Grads:
        """Σ cᵢ gᵢ; ``bad`` samples are taken out before any batched kernel: 0 · NaN is NaN.

        ``certain``: from what certified bounds were computed from. ``wide``: float32 at least.
        """
        sums: Grads = {}

        def visit(name: str, form: Form) -> None:
            form = form if bad is None else form.without(bad)
            value = form.certain_sum(c[name]) if certain else form.weighted_sum(c[name])
            if isinstance(form, Together):
                sums.update(form.apart(value))
            else:
                sums[name] = sums[name] + value if name in sums else value

        if settled is None:
            # uses that cancel must be added as they were for the bounds: before they are scaled
            self._each(names, visit, linear=not certain, last=last)
        else:
            for name, form in settled.items():
                visit(name, form)
        found = {}
        for name in names:
            parameter = self._open().parameters.selected[name]
            dtype = parameter.dtype
            if wide:
                dtype = torch.promote_types(dtype, torch.float32)
            if name in sums:
                found[name] = sums[name].to(dtype)
            else:
                found[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        return found
