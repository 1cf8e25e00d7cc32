"""Back-propagation under the recorder's eyes."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..autograd_graph import expect_unconverted, leaves_of
from ..errors import PersampleError, Reason, StaleError, UsageError
from ..forms import Form
from ..guards.guards import Guards
from ..guards.messages import slot_exchanged
from ..inputs.inputs import Inputs
from ..layouts import Layout, in_order
from ..modes import watching
from ..run_state import RandomState, recast, uncast
from ..uses import ANCHOR, Context
from .collector import Collector
from .consumers.consumer import Consumer, Kept, Looped
from .consumers.lean import Lean, Visitor
from .kept_forms import add_to_grad, write_grad
from .listening import Roots, engine, listen
from .loss_checks import (
    expect_followed,
    expect_history,
    expect_one_each,
    expect_possible,
    expect_tensor,
    prove,
)
from .one_by_one import OneByOne
from .plain_step import estimating
from .several_passes import expect_to_be_added


class Passes:
    """Runs the backward passes of one recording."""

    def __init__(
        self, context: Context, inputs: Inputs, collector: Collector, guards: Guards
    ) -> None:
        self._context, self._inputs = context, inputs
        self._collector, self._guards = collector, guards
        self._one_by_one = OneByOne(context, collector)
        self._listen = functools.partial(listen, context, collector, guards)

    def run(self, losses: Tensor, *, scale: float | Tensor | None, retain_graph: bool) -> None:
        """The body of ``Tape.backward``."""
        with torch._C.DisableTorchFunction():
            factor = expect_tensor(self._context, losses, scale)
            seed = torch.full_like(losses, factor)
        self.run_checked(losses, seed, factor, retain_graph)

    def run_plain(self, losses: Tensor, seed: Tensor, retain_graph: bool) -> bool:
        """A ``backward()`` of the caller's own; whether it belongs to the recording."""
        before = self._context.backward.count
        self.run_checked(losses, seed, 1.0, retain_graph, plain=True)
        return self._context.backward.count > before

    def run_checked(
        self, losses: Tensor, seed: Tensor, factor: float, retain_graph: bool, *,
        plain: bool = False,
    ) -> None:  # fmt: skip
        """Back-propagate proven losses, and prove afterwards that nothing was missed."""
        context, backward = self._context, self._context.backward
        options = context.options
        with torch._C.DisableTorchFunction():
            self._expect_recordable(losses)
            proof = self._prove(losses)
        expect_possible(self._context, done=self._collector.consumer.done)
        if proof is None:  # recomputation has to see the recorder here, too
            self._loop(losses, retain_graph, plain)
            return
        scalar, coupled = proof
        expect_one_each(context, scalar=scalar)
        # loop: what taps cannot see would be lost, so the answer is compared with autograd's, too
        compared = options.native and not scalar and not backward.scalar
        before = backward.ordered, list(backward.reference)
        reference = self._one_by_one.reference_of(losses) if compared else None
        backward.ordered = self._in_order(losses)
        trouble = self._followed(losses, seed, factor, retain_graph)
        looped = isinstance(self._collector.consumer, Looped)
        # second derivatives pass no taps: that they are missing says nothing against the proof
        proven = trouble is None and (context.user_code.second_order or looped)
        if trouble is None:
            if plain and not context.batches.reached and isinstance(self._collector.consumer, Kept):
                backward.ordered, backward.reference = before
                return  # of another model, perhaps
            self._expect_joined(before, plain)
            self._remember()
            self._note(losses, scalar, coupled)
            if not looped:
                trouble = self._one_by_one.disagreement(losses, reference)
                if trouble is None:
                    backward.count += 1
                    if options.grad:
                        add_to_grad(context, self._collector)
                    return
        if trouble is not None and not options.loop:
            backward.trouble = trouble
            raise trouble
        backward.trouble = None
        backward.apart = backward.apart and proven
        self._collector.consumer.rollback()
        self._loop(losses, retain_graph, plain)

    def _note(self, losses: Tensor, scalar: bool, coupled: Reason | None) -> None:
        """What is true of all passes so far."""
        backward = self._context.backward
        backward.scalar = backward.scalar or scalar
        backward.coupled = backward.coupled or coupled
        backward.extracted = backward.extracted or self._guards.numbers.before(losses)

    def _prove(self, losses: Tensor) -> tuple[bool, Reason | None] | None:
        """Whether the losses are one number, and what couples them; None where a loop is left."""
        try:
            return prove(self._context, self._inputs, losses)
        except PersampleError:
            if not self._context.options.loop:
                raise
            self._context.backward.apart = False
            return None

    def _expect_recordable(self, losses: Tensor) -> None:
        """Refuse what would be lost or misread on the way back from the losses."""
        parameters, native = self._context.parameters, self._context.options.native
        parameters.expect_no_hooks()
        parameters.expect_no_new()
        expect_history(self._context, losses)
        node = losses.grad_fn
        if native and node is not None:
            expect_unconverted(node)
        if native and node is not None and parameters.exchanged:
            # the native graph tells which of the tensors in a parameter's slot they depend on
            for name in map(parameters.stand, leaves_of(node)):
                if name is not None:
                    raise slot_exchanged(None, name)
        self._inputs.guess.expect_agreement(losses, self._context.n)

    def _expect_joined(self, before: tuple[bool, list[Tensor | None]], plain: bool) -> None:
        """Refuse a pass that is not to be added to those before; leave everything as it was."""
        backward = self._context.backward
        try:
            self._context.batches.expect_joined(first=not backward.count)
            expect_to_be_added(self._context, self._inputs.call_count, plain=plain)
        except UsageError:
            self._collector.consumer.rollback()
            backward.ordered, backward.reference = before
            raise

    def _loop(self, losses: Tensor, retain_graph: bool, plain: bool) -> None:
        """One pass per loss; the losses themselves tell which batches they are of."""
        backward = self._context.backward
        known = self._context.states.table.get(id(losses))
        batches = 0 if known is None else known.batches
        self._context.batches.expect_joined(first=not backward.count, batches=batches)
        expect_to_be_added(self._context, self._inputs.call_count, plain=plain)
        sums = self._one_by_one.run(losses, retain_graph=retain_graph)
        backward.extracted = backward.extracted or self._guards.numbers.before(losses)
        backward.count += 1
        if self._context.options.grad:
            write_grad(self._context, sums)

    def _in_order(self, losses: Tensor) -> bool:
        """Whether loss i is sample i's."""
        with torch._C.DisableTorchFunction():
            state, n = self._context.look(losses), self._context.n or 0
            patterns = self._context.patterns
            return isinstance(state, Layout) and in_order(state, losses.shape, n, patterns)

    def _remember(self) -> None:
        consumer = self._collector.consumer
        again = isinstance(consumer, Lean) and consumer.root is not None
        latest = consumer.latest() if isinstance(consumer, Kept) else []
        with torch._C.DisableTorchFunction():
            self._guards.remember(latest, again=again)

    # ------------------------------------------------------------------ passes

    def _followed(
        self, losses: Tensor, seed: Tensor, factor: float, retain_graph: bool
    ) -> PersampleError | None:
        """One pass in which taps are listened to; what went wrong."""
        context, backward = self._context, self._context.backward
        options, user_code = context.options, context.user_code
        with torch._C.DisableTorchFunction():
            unfollowed = expect_followed(context, [losses.grad_fn])
        if unfollowed is not None:
            return unfollowed
        lean = self._lean()
        if lean is not None:
            lean.show(None, patient=user_code.reentrant)
        again = options.ahead is not None and options.ahead.again
        keep = retain_graph or options.loop or again or user_code.shares_graphs()
        random = RandomState(losses.device) if lean is not None else None
        ends: Roots = [ANCHOR, *user_code.edges()] if options.native else ()
        try:
            with estimating(context, losses):
                self._listen(factor, [losses], [seed], ends, retain=keep)
        except PersampleError as error:
            if not options.loop:
                raise
            backward.trouble = error
        if backward.trouble is None:
            with torch._C.DisableTorchFunction(), torch.no_grad(), uncast():
                self._collector.consumer.finish()
        if backward.trouble is None and lean is not None:
            drawn = random is not None and not user_code.exposed and random.changed()
            self._guards.comparison.finish(random=drawn)
            with torch._C.DisableTorchFunction():
                # an edge of the graph: the caller may write to the losses, or detach them
                root = (get_gradient_edge(losses), losses.device, seed, factor) if keep else None
            lean.finished(root, context.states.hooks(), retain=retain_graph)
        return backward.trouble

    def _lean(self) -> Lean | None:
        consumer = self._collector.consumer
        return consumer if isinstance(consumer, Lean) else None

    def revisit(self, names: set[str], visit: Visitor, *, linear: bool, last: bool) -> None:
        """Lean recordings: one more backward pass that shows every gradient to a visitor.

        The ``last`` question frees the graph while it passes, as an ordinary backward does, unless
        the user asked to keep it.
        """
        lean, backward = self._lean(), self._context.backward
        assert lean is not None
        root = self._expect_root(lean)

        def chosen(name: str, form: Form) -> None:
            if name in names:
                visit(name, form)

        edge, _, seed, factor = root
        keep = lean.retain or not last
        lean.show(chosen, linear=linear, patient=self._context.user_code.reentrant)
        try:
            # questions run with the recorder switched off; recomputation must see it
            with torch._C._EnableTorchFunction(), recast(lean.autocast):
                self._listen(factor, [edge], [seed], retain=keep)
            if backward.trouble is not None:
                raise backward.trouble
            with torch.no_grad():  # forms that waited may hold what a recomputation saved
                lean.finish()
            self._guards.comparison.finish()
        finally:
            lean.begin()
            lean.show(None)
            if not keep:
                lean.root = None  # no further pass follows
                self._guards.forget_values()

    def _expect_root(self, lean: Lean) -> tuple[GradientEdge, torch.device, Tensor, float]:
        """Where a further pass starts, if there may be one."""
        if lean.root is None and not lean.ahead.again:
            raise UsageError(
                "this question needs one more backward pass, and Ahead(again=False) freed the "
                "graph",
                fix="name it in Ahead(...), or leave again=False out",
            )
        if lean.root is None:
            raise UsageError(
                "this lean recording has given its sum, and its graph is gone",
                why="a weighted or clipped sum frees the graph while it back-propagates",
                fix="ask for sums last, or tape.backward(losses, retain_graph=True)",
            )
        self._guards.expect_values(behind=self._collector.behind)
        hooks = self._context.states.hooks()
        if any(count > lean.hooks.get(key, 0) for key, count in hooks.items()):
            raise StaleError(
                "a hook was registered after the backward pass",
                why="a lean recording back-propagates again, and the hook would change what comes "
                "back",
                fix="register hooks before tape.backward(losses), or after the tape was asked",
            )
        return lean.root

    def run_backward(
        self, roots: Roots, seeds: Sequence[Tensor], consumer: Consumer, *, retain: bool
    ) -> None:
        """Back-propagate from given roots, and hand every use's gradients to a consumer."""
        self._context.parameters.expect_no_hooks()
        expect_possible(self._context, done=self._collector.consumer.done)
        nodes = [root.node for root in roots if isinstance(root, GradientEdge)]
        unfollowed = expect_followed(self._context, nodes)
        if unfollowed is not None:
            raise unfollowed
        collector = self._collector
        before, collector.consumer = collector.consumer, consumer
        try:
            self._listen(1.0, roots, seeds, retain=retain)
        finally:
            collector.consumer = before
        if self._context.backward.trouble is not None:
            raise self._context.backward.trouble

    def run_silently(
        self, roots: Roots, seeds: Sequence[Tensor], inputs: Roots, *, retain: bool
    ) -> None:
        """Back-propagate to inputs alone; parameters get nothing."""
        with self._context.backward.silence(), watching(self._context.mode):
            engine(roots, seeds, retain, inputs)
