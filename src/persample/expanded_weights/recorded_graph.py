"""A recorded part of the caller's graph: one forward, and the backward passes through it.

The module runs under a recorder on detached inputs. One node in the caller's graph stands for all
of it; its backward runs the part's own backward pass while the recorder watches, so that a plain
``loss.backward()`` is enough and recomputation (activation checkpointing) is seen.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..errors import LOOP, MixedSamplesError, StaleError, UsageError
from ..forms import BUDGET
from ..inputs.containers import mapped
from ..layouts.layout import CONSTANT, Mixed
from ..recording.recorder import Recording
from ..uses import ANCHOR, Derived, Options, versions
from .detached import Detached, rewrite
from .kept_tensors import DEPTH, kept_by
from .own import use_own_rules
from .sample_batch import Batch
from .sample_rows import accumulate, filled_up
from .written import Written


@dataclass
class RecordedGraph:
    """What the caller's graph refers to: places in the graph, not the outputs' memory."""

    recording: Recording
    batch: Batch
    inputs: list[Tensor]
    outputs: list[GradientEdge]
    states: list[Any]
    shared: bool
    versions: dict[str, int] = field(default_factory=dict)
    written: dict[str, Tensor | None] = field(default_factory=dict)

    def backward(self, grads: Sequence[Tensor | None], *, wanted: bool) -> list[Tensor | None]:
        """Back-propagate; gradients of the inputs."""
        pairs = [(k, g) for k, g in enumerate(grads) if g is not None]
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if not self.outputs:
            raise RuntimeError(
                "Trying to backward through the graph a second time; call the first backward with "
                "retain_graph=True"
            )
        roots, seeds = [self.outputs[k] for k, _ in pairs], [g for _, g in pairs]
        try:
            if wanted:
                self._expect(k for k, _ in pairs)
                self._into_grad_sample(roots, seeds, retain=keep)
            elif self.inputs:
                self.recording.passes.run_silently(roots, seeds, self.inputs, retain=keep)
            return [x.grad for x in self.inputs]
        finally:
            for x in self.inputs:
                x.grad = None
            if not keep:
                self.outputs, self.states = [], []
                self.recording.release()

    def __del__(self) -> None:
        if self.outputs:  # the caller dropped the graph
            self.recording.release()

    def _into_grad_sample(
        self, roots: list[GradientEdge], seeds: list[Tensor], *, retain: bool
    ) -> None:
        selected = self.recording.context.parameters.selected
        before = self._expect_current(selected)
        written = Written(selected)
        try:
            self.recording.passes.run_backward(roots, seeds, written, retain=retain)
        except BaseException:
            for name, parameter in selected.items():
                if getattr(parameter, "grad_sample", None) is not before[name]:
                    parameter.grad_sample = before[name]  # type: ignore[attr-defined]
            raise
        count, mean = self.batch.rows, self.batch.loss_reduction == "mean"
        with torch._C.DisableTorchFunction():  # gradients are off in a backward pass
            written.finish()
            for name, rows in written.rows.items():
                weight = selected[name]
                if rows.dtype is not weight.dtype:
                    rows = rows.to(weight.dtype)
                if mean:
                    rows *= count
                if rows.shape[0] < count:
                    rows = filled_up(rows, count)
                accumulate(weight, rows)
        self.written = _grad_samples(selected)

    def _expect(self, used: Any) -> None:
        """Refuse gradients of outputs that are not one sample's each, or a sum over samples."""
        for k in used:
            state = self.states[k]
            if isinstance(state, Mixed):
                raise state.reason.error(
                    "Expanded Weights: samples interact inside the module", fix=f"persample.{LOOP}"
                )
            if isinstance(state, Derived):
                raise MixedSamplesError(
                    f"Expanded Weights: output {k} of the module depends on parameters alone",
                    why="no sample that the module received leads to it",
                    fix="use it inside forward(), with samples; give a regulariser its own "
                    "backward()",
                )

    def _expect_current(self, selected: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Refuse parameters of another step; the rows that are there."""
        before = self.versions
        for name, now in zip(selected, versions(selected.values()), strict=True):
            if now != before.get(name, now):
                raise StaleError(
                    f"the parameter {name!r} was modified between forward and backward",
                    why="its per-sample gradients would be those of another forward",
                    fix="call backward() before optimizer.step()",
                )
        found = _grad_samples(selected)
        for name, known in found.items() if not self.shared else ():
            if known is not None and self.written.get(name) is not known:
                raise multiple_calls(name)
        return found


def _grad_samples(selected: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
    return {name: getattr(p, "grad_sample", None) for name, p in selected.items()}


def multiple_calls(name: str) -> UsageError:
    """The error for rows of another batch that were not cleared."""
    return UsageError(
        "Current Expanded Weights accumulates the gradients, which will be incorrect for multiple "
        f"calls without clearing gradients: {name!r} still has a grad_sample",
        why="row i would be the sum over sample i of two batches",
        fix="set p.grad_sample = None for every parameter after each step",
    )


def expect_first_order() -> None:
    """Refuse a backward pass that is to be differentiated itself."""
    if torch.is_grad_enabled():
        raise MixedSamplesError(
            "Expanded Weights cannot compute gradients of gradients",
            why="create_graph=True (a gradient penalty) reaches parameters in ways that were not "
            "recorded",
            fix='persample.record(..., unproven="loop") follows it',
        )


class Node(torch.autograd.Function):
    """A recorded part as one node of the caller's graph."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, recorded: RecordedGraph, outputs: list[Tensor], *inputs: Tensor
    ) -> Any:
        """The part's outputs, which have been computed already."""
        ctx.recorded = recorded
        ctx.set_materialize_grads(False)
        return tuple(out.detach() for out in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Per-sample gradients, unless only gradients of inputs are wanted."""
        expect_first_order()
        if all(g is None for g in grads):
            return (None,) * (3 + len(ctx.recorded.inputs))
        # the anchor is a leaf, so that it is reached exactly where parameters would be
        wanted = torch._C._will_engine_execute_node(ctx.next_functions[0][0])
        return None, None, None, *ctx.recorded.backward(grads, wanted=wanted)


def run(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    batch: Batch,
    *,
    shared: bool = False,
    constants: Sequence[int] = (),
) -> Any:
    """The module's result, with per-sample gradients on the way back.

    ``shared``: several parts may add to the ``grad_sample`` of one weight. ``constants``: the
    places of arguments that hold no samples.
    """
    inputs = Detached(writable=not shared)
    args = tuple([inputs(a) if isinstance(a, Tensor) else mapped(a, inputs) for a in args])
    kwargs = mapped(kwargs, inputs) if kwargs else kwargs
    options, n = _options(batch.dim), batch.size
    recording = Recording(module, options, params=None, n=n, constants=constants, sample_ids=None)
    if not shared:  # a call of one function has found its rule already
        use_own_rules(recording, batch)
    for given in inputs.given:
        recording.context.states.put(given, CONSTANT)  # until it is known to hold samples
    recording.inputs.begin(module, args, kwargs)
    recording.context.backward.strict = True
    recording.open()
    try:
        result = module(*args, **kwargs)
    except BaseException:
        recording.release()
        raise
    finally:
        recording.close(None, None, None)
    return _in_one_node(recording, result, inputs, batch, None if shared else module)


@functools.cache
def _options(dim: int) -> Options:
    return Options(
        dim=dim, verify=False, loop=False, ahead=None, positions=False, budget=BUDGET, rows=None,
        rules={}, same_samples=False, grad=False,
    )  # fmt: skip


def _in_one_node(
    recording: Recording, result: Any, inputs: Detached, batch: Batch, module: nn.Module | None
) -> Any:
    """The result, its tensors outputs of one node of the caller's graph; and what modules keep."""
    context = recording.context
    outputs: list[Tensor] = []

    def gather(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and not any(tensor is known for known in outputs):
            outputs.append(tensor)
        return tensor

    with torch._C.DisableTorchFunction():
        mapped(result, gather, objects=DEPTH)
        written = inputs.written()
        for _, given in written:
            gather(given)
        kept = kept_by(module, context.states, [*outputs, *inputs.given]) if module else []
        for _, _, tensors in kept:
            for tensor in tensors:
                gather(tensor)
        states = [context.look(out) for out in outputs]
    if not outputs:
        recording.release()
        return result
    selected = context.parameters.selected
    edges = [get_gradient_edge(out) for out in outputs]
    recorded = RecordedGraph(recording, batch, inputs.leaves, edges, states, module is None)
    recorded.versions = dict(zip(selected, versions(selected.values()), strict=True))
    made = Node.apply(ANCHOR, recorded, outputs, *inputs.outer)
    found = dict(zip(map(id, outputs), made, strict=True))
    for tensor, given in written:
        rewrite(tensor, found[id(given)])
        found[id(given)] = tensor

    def outside(tensor: Tensor) -> Any:
        return found.get(id(tensor), tensor)

    for held, name, _ in kept:
        held[name] = mapped(held[name], outside, objects=DEPTH)
    return mapped(result, outside, objects=DEPTH)
