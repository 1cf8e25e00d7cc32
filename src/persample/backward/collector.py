"""What backward brings: every tap's data and gradients become the forms of its use."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..autograd_graph import leaves_of
from ..errors import Reason, UsageError, describe, unheard
from ..forms import Form, Joint
from ..guards.guards import Guards
from ..guards.messages import gone, gradient_of_unowned_rows, slot_exchanged
from ..layouts import ADDITIVE
from ..rules import OfTable
from ..run_state import uncast
from ..uses import Context, Firing, Operand, Use
from .consumers.consumer import Consumer, Kept
from .contribution import (
    Contribution,
    attached,
    crosses,
    forget_lookups,
    reached,
    sources,
    table_behind,
    written_out,
)
from .rule_choice import forms_of
from .waiting import wait


class Collector:
    """Listens to the taps of one recording and hands their forms to a consumer."""

    def __init__(self, context: Context, guards: Guards, consumer: Consumer) -> None:
        self._context, self._guards = context, guards
        self.consumer = consumer
        spread = context.processes
        self._sharded = spread is not None and spread.sharded
        self.behind = False  # whether gradients go back to parameters behind derived tensors

    def hand_to(self, consumer: Consumer) -> None:
        """Hand forms to another consumer from now on, and forget those of the one before."""
        self.consumer.clear()
        self.consumer = consumer

    # ------------------------------------------------------------------ forward

    def expect(self, use: Use) -> None:
        """A use was recorded in forward."""
        if self._sharded:
            for operand in use.operands:
                if crosses(operand.edge):
                    raise gone(use)
                self.sources(operand)  # while the memory of parameters is there
        if self._context.options.lean and not self._context.backward.receiving:
            for operand in use.operands:
                self.consumer.expect(self.sources(operand))

    # ------------------------------------------------------------------ backward

    def receive(
        self, use: Use, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> None:
        """A tap fired (torch functions are not watched): turn what it brought into forms."""
        backward = self._context.backward
        if not backward.receiving:
            self._stray(use)
            return
        if backward.listener is not None:
            backward.listener(saved)
        self._context.batches.touch(use.batches)
        if not use.tapped.usual:
            for reason, grad in zip(use.tapped.refused, grads, strict=True):
                if reason is not None and grad is not None:
                    backward.refuse(reason.error("samples interact before the loss"))
                    return
        if torch.is_grad_enabled() or torch._C._is_any_autocast_enabled():
            with torch.no_grad(), uncast():
                self._take(use, saved, grads)
        else:
            self._take(use, saved, grads)

    def _stray(self, use: Use) -> None:
        """A backward pass that was not announced."""
        backward = self._context.backward
        if backward.muted:
            if torch.is_grad_enabled() and not (use.closed or use.operator in ADDITIVE):
                self._lose_dependence(use)
            return
        if backward.trouble is None:
            if not backward.strict:
                unheard()
            backward.trouble = UsageError(
                "a backward pass that persample did not start reached the recorded model",
                why="its root is unknown, so nothing proves whose loss was back-propagated",
                fix="call tape.backward(losses)",
            )
        if backward.strict:
            raise UsageError(
                "a backward pass reached the recorded module past its outputs",
                where=describe(use.place),
                why="a tensor from inside it (kept by a hook or a closure) is in the loss",
                fix="return that tensor from forward()",
            )

    def _lose_dependence(self, use: Use) -> None:
        """A gradient is differentiated again that passed a use which was not prepared for it."""
        if self._context.options.loop:  # the native graph has it
            return
        why = "how this gradient depends on the parameters was not recorded"
        fix = (
            "x.requires_grad_() inside the block, before the model uses x, for the tensor by which "
        )
        reason = Reason(f"torch.autograd.grad of {use.operator}", why, (), use.place)
        self._context.backward.refuse(
            reason.error("a gradient inside forward cannot be followed", fix=f"{fix}it is taken")
        )

    def _take(self, use: Use, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]) -> None:
        context, options = self._context, self._context.options
        user_code, backward, copied = context.user_code, context.backward, context.caller.copied
        scaled = tuple([None if g is None else self._unscaled(g) for g in grads])
        self._guards.fired(use, saved, scaled)
        if not options.lean and not backward.strict:  # those two ask at once
            saved = (copied(saved[0]),) if len(saved) == 1 else tuple([copied(t) for t in saved])
        if backward.trouble is not None:
            return
        if not use.tapped.usual and self._reaches_nobody(use, scaled):
            return
        if context.parameters.exchanged and self._exchanged(use):
            return
        if user_code.by_hand:
            forget_lookups(use, user_code.by_hand)
        consumer = self.consumer
        if (
            use.kind.alone
            and isinstance(consumer, Kept)
            and not (options.positions or self._sharded)
        ):
            waiting = wait(use, saved[0], scaled[0], context.n)
            if waiting is not None:
                consumer.wait(waiting)
                return
        firing, positions = Firing(saved, scaled), options.positions
        forms, name = forms_of(use, firing, context.n or 0, options.rules, positions=positions)
        kept = firing if positions else None
        pairs = list(zip(use.operands, forms, strict=True))
        if backward.strict:  # a bias before its matrix, whose rows drive all out of the cache
            pairs.reverse()
        for operand, form in pairs:
            if operand.edge is not None:
                self.behind = True
            elif operand.name is None:
                continue
            if isinstance(form, OfTable):
                operand, form = table_behind(operand, self._selected), form.rows
            if form is None:
                continue
            contribution = Contribution(use, operand, form, name, kept)
            if self._sharded:
                self._write_out(contribution)
            else:
                consumer.take(contribution, self.attached)

    def _reaches_nobody(self, use: Use, grads: Sequence[Tensor | None]) -> bool:
        """Whether rows of no sample, or of one that was guessed, received a gradient."""
        for layout, grad in zip(use.out_layouts, grads, strict=True):
            if layout.ids is not None and grad is not None:
                guessed = None if self._context.backward.ordered else use.guessed
                unowned = None if layout.owned else layout.ids < 0
                if reached(unowned, grad) or reached(guessed, grad):
                    self._context.backward.refuse(gradient_of_unowned_rows(use))
                    return True
        return False

    def _exchanged(self, use: Use) -> bool:
        """Whether this use was of another tensor than the one that stands for its parameter."""
        parameters = self._context.parameters
        for operand in use.operands:
            operand.sources = None  # another tensor may have been in the slot then
            edge = operand.edge
            ends: Sequence[Any] = [operand.owner] if edge is None else leaves_of(edge.node)
            for name in map(parameters.stand, ends):
                if name is not None:
                    self._context.backward.refuse(slot_exchanged(use.place, name))
                    return True
        return False

    def _write_out(self, contribution: Contribution) -> None:
        """Hand over a contribution whose parameters' memory is gone after backward."""
        each = written_out(contribution, self._selected)
        if each is None:
            self._context.backward.refuse(gone(contribution.use))
        for one in each or []:
            self.consumer.take(one, self.attached)

    def _unscaled(self, grad: Tensor) -> Tensor:
        factor = self._context.backward.factor
        if grad.requires_grad:
            grad = grad.detach()
        if grad._is_zerotensor():  # no memory, and not to be written to
            grad = grad.clone()
        if factor == 1.0:
            # what goes on to a hook or a custom function may be written to there
            return grad.clone() if self._context.user_code.exposed else grad
        return grad.to(torch.promote_types(grad.dtype, torch.float32)) * factor

    # ------------------------------------------------------------------ parameters behind a use

    @property
    def _selected(self) -> Mapping[str, Tensor]:
        return self._context.parameters.selected

    def attached(
        self, contribution: Contribution, names: Container[str] | None = None
    ) -> list[tuple[str, Form]]:
        """A contribution's form as forms of the parameters behind its operand, all by default."""
        by_hand, selected = self._context.user_code.by_hand, self._selected
        found = attached(contribution, selected if names is None else names, selected, by_hand)
        if found and found[0][1].__class__ is Joint:
            self._guards.expect_deterministic(contribution.operand.edge.node, found)
        return found

    def sources(self, operand: Operand) -> list[str]:
        """The parameters that a derived tensor was computed from."""
        return sources(operand, self._selected)
