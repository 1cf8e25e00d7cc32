"""The tape: all uses of all parameters in one pass, and every query."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import (
    MissedUseError,
    MixedSamplesError,
    PersampleError,
    StaleError,
    UsageError,
)
from .explain import Explanation, explain
from .layout import Additive, Layout, Mixed
from .marks import version
from .parameters import Params, choose
from .rules import generic
from .use import Firing, Operand, Use

if TYPE_CHECKING:
    from .recorder import Recorder


class Tape:
    """What :func:`persample.record` yields. Ask it after :meth:`backward`."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder: Recorder | None = recorder
        self._uses: list[Use] = []
        self._receiving = False
        self._muted = False
        self._factor = 1.0
        self._trouble: PersampleError | None = None
        self._backwards = 0
        self._scalar = False
        self._coupled: Any = None
        self._looped: dict[str, Tensor] | None = None

    # ------------------------------------------------------------------ recording

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
    def busy(self) -> bool:
        """Whether a backward pass of the recorder's own is under way."""
        return self._receiving or self._muted

    @property
    def names(self) -> tuple[str, ...]:
        """The recorded parameters, in the order of ``named_parameters()``."""
        return tuple(self._open().parameters.selected)

    def mark(self, tensor: Tensor, *, dim: int = 0, ids: Tensor | None = None) -> Tensor:
        """Say where the samples are in a tensor that the model does not receive as input.

        ``dim`` is the axis of the samples; ``ids`` gives each index on it a sample instead (-1 for
        none). Returns the tensor.
        """
        self._open().mark(tensor, dim=dim, ids=ids)
        return tensor

    def backward(
        self, losses: Tensor, *, scale: float | Tensor | None = None, retain_graph: bool = False
    ) -> None:
        """Back-propagate ``losses.sum()``; afterwards the tape knows every sample's gradient.

        ``losses`` must hold the samples on axis 0, proven by the recording, or be a scalar that is
        a proven sum (or mean) over samples. ``scale`` multiplies the losses for the backward pass
        (loss scaling) and is divided out again.
        """
        self._open().backward(losses, scale=scale, retain_graph=retain_graph)

    def receive(
        self, use: Use, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> None:
        """A tap fired (internal)."""
        if not self._receiving:
            if self._trouble is None and not self._muted:
                self._trouble = UsageError(
                    "a backward pass that persample did not start reached the recorded model",
                    why="its root is unknown, so nothing proves whose loss was back-propagated",
                    fix="call tape.backward(losses)",
                )
            return
        kept = tuple(None if g is None else g.detach() for g in grads)
        if not use.firings:
            self._uses.append(use)
        use.firings.append(Firing(tuple(t.detach() for t in saved), kept, self._factor))

    def close(self) -> None:
        """Release everything the tape holds. Queries raise afterwards."""
        if self._recorder is not None:
            self._recorder.release()
        self._recorder = None
        self._uses.clear()
        self._looped = None

    def explain(self) -> Explanation:
        """Every use, what is slow and why, parameters without gradient, ambiguous sizes."""
        return explain(self._open(), self._uses)

    # ------------------------------------------------------------------ queries

    def grads(self, *, params: Params = None) -> dict[str, Tensor]:
        """Every sample's own gradient: ``{name: (n, *shape)}``.

        Row i of each tensor is the gradient of loss i. Rows are fresh, contiguous tensors of the
        parameter's dtype and device; a parameter that had no influence has zeros.

        >>> import torch, persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model) as tape:
        ...     tape.backward(model(torch.randn(4, 3)).square().sum(1))
        >>> {name: tuple(g.shape) for name, g in tape.grads().items()}
        {'weight': (4, 2, 3), 'bias': (4, 2)}
        """
        names = choose(params, self.names)
        with torch._C.DisableTorchFunction():
            return self._grads(names)

    def _grads(self, names: Sequence[str]) -> dict[str, Tensor]:
        recorder = self._ready()
        if self._looped is not None:
            return {name: self._looped[name].clone() for name in names}
        total: dict[str, Tensor] = {}
        for use in self._uses:
            if any(o.name is None or o.name in names for o in use.operands):
                for firing in use.firings:
                    self._add(total, use, firing, names)
        out = {}
        for name in names:
            parameter = recorder.parameters.selected[name]
            rows = total.get(name)
            if rows is None:
                rows = parameter.new_zeros((self.n, *parameter.shape), requires_grad=False)
            out[name] = rows.to(parameter.dtype).contiguous()
        return out

    def _add(
        self, total: dict[str, Tensor], use: Use, firing: Firing, names: Sequence[str]
    ) -> None:
        recorder = self._open()
        rule = recorder.rules.get(use.operator, generic)
        forms = rule(use, firing, self.n)
        for operand, form in zip(use.operands, forms, strict=True):
            if form is None:
                continue
            rows = form.dense()
            if firing.factor != 1.0:
                rows = rows * firing.factor
            for name, part in self._pull_back(operand, rows, names):
                if name in names:
                    total[name] = part if name not in total else total[name] + part

    def _pull_back(
        self, operand: Operand, rows: Tensor, names: Sequence[str]
    ) -> list[tuple[str, Tensor]]:
        """From a derived tensor to the parameters it was computed from."""
        recorder = self._open()
        if operand.name is not None:
            return [(operand.name, rows)]
        wanted = [recorder.parameters.selected[name] for name in names]
        if rows.shape[0] == 0:
            return []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = torch.autograd.grad(
                    operand.edge,
                    wanted,
                    rows,
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=True,
                )
        except RuntimeError:
            each = [
                torch.autograd.grad(operand.edge, wanted, row, retain_graph=True, allow_unused=True)
                for row in rows
            ]
            found = tuple(_stacked(column) for column in zip(*each, strict=True))
        return [(name, f) for name, f in zip(names, found, strict=True) if f is not None]

    # ------------------------------------------------------------------ checks

    def _open(self) -> Recorder:
        if self._recorder is None:
            raise UsageError("the tape is closed", fix="ask before tape.close()")
        return self._recorder

    def _ready(self) -> Recorder:
        recorder = self._open()
        if self._trouble is not None:
            raise self._trouble
        if not self._backwards:
            raise UsageError(
                "no backward pass was recorded",
                fix="call tape.backward(losses) with one loss per sample",
            )
        self._check_versions()
        return recorder

    def _check_versions(self) -> None:
        """Refuse to answer from parameters that have changed."""
        for use in self._uses:
            for operand in use.operands:
                if operand.name is not None and version(operand.value) != operand.version:
                    raise StaleError(
                        f"the parameter {operand.name!r} was modified after it was recorded",
                        fix="ask the tape before optimizer.step()",
                    )


def _stacked(column: tuple[Tensor | None, ...]) -> Tensor | None:
    rows = [g.to_dense() for g in column if g is not None]
    return torch.stack(rows) if rows else None


def expect_losses(losses: Tensor, state: Any, n: int) -> tuple[bool, Any]:
    """Refuse what is not a proven vector of losses or sum over samples; (is scalar, coupling)."""
    if isinstance(state, Layout):
        axes = state.axes
        if losses.dim() and axes not in ((0,), ()):
            raise MixedSamplesError(
                f"the losses {tuple(losses.shape)} do not hold the samples on axis 0",
                why=f"they are on axis {axes}",
                fix="bring the samples to axis 0, or pass losses.sum()",
            )
        if losses.dim() == 0 and n != 1:
            raise MixedSamplesError(
                "the loss belongs to a single sample",
                fix="pass one loss per sample",
            )
        ids = state.ids
        if ids is not None and bool((ids < 0).any()):
            raise MixedSamplesError("some losses belong to no sample", fix="drop them first")
        return False, state.coupled
    if isinstance(state, Additive):
        if losses.numel() != 1:
            raise MixedSamplesError(
                f"each element of the losses {tuple(losses.shape)} is a sum over samples",
                why="axis 0 does not hold the samples",
                fix="pass one loss per sample",
            )
        return True, state.coupled
    if isinstance(state, Mixed):
        raise state.reason.error("samples meet before the loss", fix=_LOOP)
    raise MixedSamplesError(
        f"the losses {tuple(losses.shape)} hold no samples",
        why="nothing the recorder followed leads from the samples to them",
        fix="call the model inside the block; tape.mark(x) tensors it does not receive as input",
    )


_LOOP = 'record(..., unproven="loop") computes the gradient of each loss by its own backward pass'


def missed(names: Sequence[str]) -> MissedUseError:
    """A native gradient reached parameters."""
    return MissedUseError(
        "a parameter was used where the recorder could not see it: " + ", ".join(names[:4]),
        why="autograd computed an ordinary gradient for it (a scripted module, a custom "
        "autograd.Function, a graph built before the block)",
        fix=_LOOP,
    )
