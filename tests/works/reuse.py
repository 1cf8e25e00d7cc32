"""Threads, nesting, reuse, and what must not be left behind."""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
from torch import Tensor, nn

import persample
from persample.testing import oracle

from .base import Cases, Outcome, answers, data, net, squares

CASES = Cases("Threads, nesting and reuse")


@CASES.right("two models recorded in two threads")
def threads() -> Outcome:
    models, x = [net(), net()], data()
    errors: list[float] = []
    expected = [oracle(model, squares, x + k) for k, model in enumerate(models)]

    def work(k: int) -> None:
        for _ in range(10):
            with persample.record(models[k]) as tape:
                tape.backward(squares(models[k], x + k))
            errors.append(answers(tape, expected[k]))

    both = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    return Outcome(max(errors) if len(errors) == 20 else float("inf"))


@CASES.refused("a model called in another thread than the recording's")
def elsewhere() -> Outcome:
    model, x = net(), data()
    found: list[Tensor] = []
    with persample.record(model) as tape:
        thread = threading.Thread(target=lambda: found.append(squares(model, x)))
        thread.start()
        thread.join()
        tape.backward(found[0])
    return Outcome(answers(tape, oracle(model, squares, x)))


@CASES.right("nested recordings of two models, one after the other")
def nested() -> Outcome:
    a, b, x = net(), net(), data()
    with persample.record(a) as outer:
        first = squares(a, x)
        with persample.record(b) as inner:
            inner.backward(squares(b, x * 2))
        outer.backward(first)
    errors = [
        answers(outer, oracle(a, squares, x)),
        answers(inner, oracle(b, squares, x * 2)),
    ]
    return Outcome(max(errors))


@CASES.refused("two recordings of one model at the same time")
def twice() -> Outcome:
    model = net()
    with persample.record(model), persample.record(model):
        pass
    return Outcome(0.0)


def transformed(transform: Any) -> Outcome:
    model = net()

    def inside(x: Tensor) -> Tensor:
        with persample.record(model) as tape:
            losses = squares(model, x)
            tape.backward(losses)
        return losses.sum()

    transform(inside)(data())
    return Outcome(0.0)


CASES.refused("record inside torch.func.grad", torch.func.grad)(transformed)
CASES.refused("record inside torch.func.vmap", lambda f: torch.func.vmap(f, in_dims=1))(transformed)


@CASES.right("an exception in the block: the model is as before, the next recording works")
def broken() -> Outcome:
    model, x = net(), data()
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    try:
        with persample.record(model):
            model(x)
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    same = hooks == [len(m._forward_pre_hooks) for m in model.modules()]
    with persample.record(model) as tape:
        tape.backward(squares(model, x))
    return Outcome(answers(tape, oracle(model, squares, x)) if same else float("inf"))


@CASES.right("five hundred recordings: no object, no tensor and no memory more than before")
def growth() -> Outcome:
    model, x = nn.Sequential(net(), nn.Linear(3, 512).double()), data()

    def steps(count: int) -> tuple[int, int, int]:
        for k in range(count):
            with persample.record(model, lean=bool(k % 2)) as tape:
                tape.backward(squares(model, x))
            tape.clipped_sum(1.0)
        gc.collect()
        alive = gc.get_objects()
        tensors = sum(issubclass(type(o), Tensor) for o in alive)
        return len(alive), tensors, _resident()

    steps(50)
    objects, tensors, memory = steps(50)
    more = steps(500)
    # 500 recordings keep factors of 500 · 16 kB = 8 MB if they leak
    grown = (more[0] - objects) / 500 > 0.1 or more[1] > tensors + 2
    return Outcome(float(grown or more[2] - memory > 4 << 20), 0.0)


def _resident() -> int:
    """Bytes of memory of this process, where the system tells."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:
        return 0
