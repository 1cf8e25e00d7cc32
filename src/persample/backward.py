"""Back-propagation under the recorder's eyes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from .conditions import RandomState, recast, uncast
from .errors import LOOP, MissedUseError, PersampleError, StaleError, UsageError
from .forms import Form, within
from .layout import Layout
from .lean import Visitor
from .loop import disagreement, one_by_one, reference_of
from .nodes import expect_unconverted, leaves_of
from .proof import expect_history, expect_one_each, expect_possible, prove
from .refusals import exchanged
from .requests import number, shown
from .settling import in_order

if TYPE_CHECKING:
    from .recorder import Recorder


def tape_backward(
    recorder: Recorder, losses: Tensor, *, scale: float | Tensor | None, retain_graph: bool
) -> None:
    """The body of ``Tape.backward``."""
    with torch._C.DisableTorchFunction():
        if not isinstance(losses, Tensor):
            several = isinstance(losses, (list, tuple))
            fix = "torch.stack(losses)" if several else "F.cross_entropy(..., reduction='none')"
            raise UsageError(f"backward takes a tensor of losses, got {shown(losses)}", fix=fix)
        if losses.is_complex():
            raise UsageError("losses must be real", fix="pass losses.real, or losses.abs()")
        if losses.layout is not torch.strided:
            raise UsageError(f"losses must be dense, got {shown(losses)}", fix="losses.to_dense()")
        weights = "multiply the losses by weights of their own before backward"
        factor = 1.0 if scale is None else number(scale, "scale", fix=weights)
        if not factor > 0 or factor == float("inf"):
            raise UsageError(
                f"scale must be a positive finite number, got {scale!r}",
                fix="pass scaler.get_scale(), or leave it out",
            )
        if not losses.requires_grad:
            unused = ", or use none of the chosen parameters"
            raise UsageError(
                "the losses carry no gradient",
                why="they were detached, made integers, computed under no_grad, or from constants"
                + (unused if recorder.parameters.partial else ""),
                fix="compute them inside the block with gradients enabled",
            )
        if losses.is_floating_point() and factor > torch.finfo(losses.dtype).max:
            raise UsageError(
                f"scale = {factor:g} is not a number of the losses' {losses.dtype}",
                fix="compute the losses in float32 (autocast does), or take a smaller scale",
            )
        seed = torch.full_like(losses, factor)
    checked_backward(recorder, losses, seed, factor, retain_graph)


def _expect_one_tensor(recorder: Recorder, losses: Tensor) -> None:
    """The native graph tells which of the tensors in a parameter's slot the losses depend on."""
    for leaf in leaves_of(losses.grad_fn) if losses.grad_fn is not None else ():
        name = recorder.parameters.stand(leaf)
        if name is not None:
            raise exchanged(None, name)


def checked_backward(
    recorder: Recorder, losses: Tensor, seed: Tensor, factor: float, retain_graph: bool
) -> None:
    """Back-propagate proven losses, and prove afterwards that nothing was missed."""
    ledger = recorder.tape._ledger
    with torch._C.DisableTorchFunction():
        recorder.parameters.expect_no_hooks()
        recorder.parameters.expect_no_new()
        expect_history(recorder, losses)
        if recorder.native and losses.grad_fn is not None:
            expect_unconverted(losses.grad_fn)
        if recorder.native and recorder.parameters.exchanged:
            _expect_one_tensor(recorder, losses)
        recorder.inputs.guess.expect_agreement(losses, recorder.n)
        try:
            scalar, coupled = prove(recorder, losses)
        except PersampleError:
            if not recorder.loop:
                raise
            expect_possible(recorder)
            ledger.apart = False
            one_by_one(recorder, losses, retain_graph=retain_graph)
            return
    expect_possible(recorder)
    expect_one_each(recorder, scalar=scalar)
    # loop: what taps cannot see would be lost, so the answer is compared with autograd's, too
    compared = recorder.native and not scalar and not ledger.scalar
    reference = reference_of(recorder, losses) if compared else None
    mark, count = len(ledger.entries), ledger.backwards
    ledger.ordered = _in_order(recorder, losses)
    trouble = _followed(recorder, losses, seed, factor, retain_graph)
    # second derivatives pass no taps: that they are missing says nothing against the proof
    proven = trouble is None and (recorder.second_order or ledger.looped is not None)
    if trouble is None:
        with torch._C.DisableTorchFunction():
            ledger.remember_values(mark)
        ledger.backwards += 1
        ledger.scalar = ledger.scalar or scalar
        ledger.coupled = ledger.coupled or coupled
        if ledger.looped is None:
            trouble = disagreement(recorder, losses, reference)
            if trouble is None:
                return
    if trouble is not None and not recorder.loop:
        ledger.trouble = trouble
        raise trouble
    ledger.trouble = None
    ledger.apart = ledger.apart and proven
    ledger.rollback(mark)
    ledger.backwards = count
    one_by_one(recorder, losses, retain_graph=retain_graph)


def _in_order(recorder: Recorder, losses: Tensor) -> bool:
    """Whether loss i is sample i's."""
    with torch._C.DisableTorchFunction():
        state = recorder.look(losses)
        n, patterns = recorder.n or 0, recorder.inputs.patterns
        return isinstance(state, Layout) and in_order(state, losses.shape, n, patterns)


def _followed(
    recorder: Recorder, losses: Tensor, seed: Tensor, factor: float, retain_graph: bool
) -> PersampleError | None:
    """One pass in which taps are listened to; what went wrong."""
    ledger = recorder.tape._ledger
    with torch._C.DisableTorchFunction():
        unfollowed = recorder.custom.unfollowed([losses.grad_fn])
    if unfollowed is not None:
        return unfollowed
    if ledger.lean is not None:
        ledger.lean.begin(patient=recorder.custom.reentrant)
    again = recorder.ahead is not None and recorder.ahead.again
    keep = ledger.retain = retain_graph or recorder.loop or again or recorder.custom.shared()
    random = RandomState(losses.device) if ledger.lean is not None else None
    try:
        with receiving(recorder, factor):
            ends: Sequence[Tensor | GradientEdge] = ()
            if recorder.native:
                ends = [recorder.anchor, *recorder.custom.edges()]
            engine([losses], [seed], keep, ends)
    except PersampleError as error:
        if not recorder.loop:
            raise
        ledger.trouble = error
    if ledger.trouble is None and ledger.lean is not None:
        with torch._C.DisableTorchFunction(), torch.no_grad(), uncast(), within(recorder.budget):
            ledger.lean.finish()
        with torch._C.DisableTorchFunction():
            # an edge of the graph: the caller may write to the losses, or detach them
            root = (get_gradient_edge(losses), losses.device, seed, factor) if keep else None
        if random is not None and not recorder.custom.exposed:
            ledger.lean.restless = random.changed()
        ledger.lean.finished(root, recorder.marks.hooks(), retain=retain_graph)
    return ledger.trouble


def engine(
    roots: Sequence[Tensor | GradientEdge],
    seeds: Sequence[Tensor],
    retain: bool,
    inputs: Sequence[Tensor | GradientEdge] = (),
) -> None:
    """``torch.autograd.backward`` without its checks: roots and seeds have been looked at."""
    _engine_run_backward(
        tuple(roots), tuple(seeds), retain, False, tuple(inputs),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def revisit(
    recorder: Recorder, names: set[str], visit: Visitor, *, linear: bool, last: bool
) -> None:
    """Lean recordings: one more backward pass that shows every gradient to a visitor.

    The ``last`` question frees the graph while it passes, as an ordinary backward does, unless the
    user asked to keep it.
    """
    ledger = recorder.tape._ledger
    lean = ledger.lean
    assert lean is not None
    if lean.root is None and not lean.ahead.again:
        raise UsageError(
            "this question needs one more backward pass, and Ahead(again=False) freed the graph",
            fix="name it in Ahead(...), or leave again=False out",
        )
    if lean.root is None:
        raise UsageError(
            "this lean recording has given its sum, and its graph is gone",
            why="a weighted or clipped sum frees the graph while it back-propagates",
            fix="ask for sums last, or tape.backward(losses, retain_graph=True)",
        )
    ledger.expect_values()
    hooks = recorder.marks.hooks()
    if any(count > lean.hooks.get(key, 0) for key, count in hooks.items()):
        raise StaleError(
            "a hook was registered after the backward pass",
            why="a lean recording back-propagates again, and the hook would change what comes back",
            fix="register hooks before tape.backward(losses), or after the tape was asked",
        )

    def chosen(name: str, form: Form) -> None:
        if name in names:
            visit(name, form)

    edge, _, seed, factor = lean.root
    ledger.retain = lean.retain or not last
    lean.begin(chosen, linear=linear, patient=recorder.custom.reentrant)
    try:
        # questions run with the recorder switched off; recomputation must see it
        with torch._C._EnableTorchFunction(), recast(lean.autocast), receiving(recorder, factor):
            engine([edge], [seed], ledger.retain)
        if ledger.trouble is not None:
            raise ledger.trouble
        with torch.no_grad():  # forms that waited may hold what a recomputation saved
            lean.finish()
    finally:
        lean.begin()
        if not ledger.retain:
            lean.root = None
            ledger.values.clear()  # nothing will be computed from them


@contextlib.contextmanager
def receiving(recorder: Recorder, factor: float) -> Iterator[None]:
    """Taps are listened to; native gradients that reach a parameter are caught and undone."""
    ledger = recorder.tape._ledger
    with torch._C.DisableTorchFunction():
        leaves = recorder.parameters.leaves()
        before = [leaf.grad for leaf in leaves]
        for leaf, grad in zip(leaves, before, strict=True):
            if grad is not None:
                leaf.grad = None
        threads = torch._C._is_multithreading_enabled()
    ledger.receiving, ledger.factor = True, 1.0 / factor
    if ledger.lean is not None:  # code that runs in backward may do something else the next time
        ledger.lean.guarded = recorder.custom.exposed
        recorder.calls.passing = ledger.lean
    recorder.custom.taken.begin()
    recorder.marks.memories = []
    mark = len(ledger.entries)
    done = False
    escaped: list[Tensor] = []
    try:
        with torch._C.DisableTorchFunction():  # one thread: recomputation has to see the mode
            torch._C._set_multithreading_enabled(False)
        with recorder.watching():
            yield
        with torch._C.DisableTorchFunction():
            ledger.expect_what_was_saved()
        done = ledger.trouble is None
    finally:
        ledger.receiving = False
        recorder.calls.passing = None
        ledger.returned.clear()
        recorder.custom.taken.begin()
        recorder.marks.memories = None
        with torch._C.DisableTorchFunction():
            torch._C._set_multithreading_enabled(threads)
            for leaf, grad in zip(leaves, before, strict=True):
                if leaf.grad is not None:
                    escaped.append(leaf)
                    leaf.grad = None
                if grad is not None:
                    leaf.grad = grad
        if not done or escaped:  # an interrupted backward leaves no half of itself
            ledger.rollback(mark)
    if escaped and ledger.trouble is None:
        names = {id(t): name for name, t in recorder.model.named_parameters()}
        found = [names.get(id(leaf), "?") for leaf in escaped]
        ledger.trouble = _missed(found, reentrant=recorder.custom.reentrant)


def _missed(names: Sequence[str], *, reentrant: bool) -> MissedUseError:
    return MissedUseError(
        "a parameter was used where the recorder could not see it: " + ", ".join(names[:4]),
        why="autograd computed an ordinary gradient for it (a scripted module, a custom "
        "autograd.Function, another thread, a graph built before the block)",
        fix="checkpoint(..., use_reentrant=False) everywhere" if reentrant else LOOP,
    )
