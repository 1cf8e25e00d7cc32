"""One run of autograd's engine in which the taps are listened to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward

from ..guards.guards import Guards
from ..guards.native_gradients import Escapes
from ..modes import watching
from ..uses import Context
from .collector import Collector

Roots = Sequence[Tensor | GradientEdge]


def listen(
    context: Context, collector: Collector, guards: Guards, factor: float, roots: Roots,
    seeds: Sequence[Tensor], ends: Roots = (), *, retain: bool,
) -> None:  # fmt: skip
    """Run it; native gradients that reach a parameter are caught and undone."""
    backward, consumer = context.backward, collector.consumer
    with torch._C.DisableTorchFunction():
        escapes = Escapes(context)
        threads = torch._C._is_multithreading_enabled()
    backward.receiving, backward.factor, backward.retain = True, 1.0 / factor, retain
    guards.pass_begins()
    consumer.begin()
    context.batches.begin()
    context.states.memories = []
    done, missed = False, None
    try:
        # one thread: recomputation has to see the mode, which would see this call, too
        with torch._C.DisableTorchFunction():
            torch._C._set_multithreading_enabled(False)
        with watching(context.mode):
            engine(roots, seeds, retain, ends)
        with torch._C.DisableTorchFunction():
            guards.pass_ends()
        done = backward.trouble is None
    finally:
        backward.receiving = False
        guards.pass_left()
        context.states.memories = None
        with torch._C.DisableTorchFunction():
            torch._C._set_multithreading_enabled(threads)
            missed = escapes.restore()
        if not done or missed is not None:  # an interrupted pass leaves no half of itself
            consumer.rollback()
    if missed is not None:
        backward.refuse(missed)


def engine(roots: Roots, seeds: Sequence[Tensor], retain: bool, inputs: Roots = ()) -> None:
    """``torch.autograd.backward`` without its checks: roots and seeds have been looked at."""
    _engine_run_backward(
        tuple(roots), tuple(seeds), retain, False, tuple(inputs),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip
