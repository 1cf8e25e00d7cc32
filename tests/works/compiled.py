"""torch.compile: a compiled model is recorded as it was written."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import persample
from persample.testing import oracle

from ..models import Fn
from .base import Cases, Outcome, answers, data, gradients, net, squares

CASES = Cases("torch.compile")


class Counter:
    """A backend that counts how often it compiles and how often what it made runs."""

    def __init__(self) -> None:
        self.compiled = self.ran = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph.forward(*args)

        return run


@contextmanager
def fresh() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()


def _names(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("_orig_mod."): g for name, g in rows.items()}


def around(compile_first: bool, mode: str) -> Outcome:
    """Record a compiled model between two plain steps; the program stays compiled outside."""
    with fresh():
        counter, x = Counter(), data()
        model: Any = net() if mode != "in place" else Fn(lambda s, x: s.m(x), m=net())
        expected = {f"_orig_mod.{k}": g for k, g in oracle(net(), squares, x).items()}
        if mode == "whole":
            model = torch.compile(model, backend=counter)
        elif mode == "part":
            model[2] = torch.compile(model[2], backend=counter)
            expected = {k.replace("_orig_mod.2.", "2._orig_mod."): g for k, g in expected.items()}
            expected = _names(expected)
        else:
            model.compile(backend=counter)
            expected = {k.replace("_orig_mod.", "m."): g for k, g in expected.items()}
        before = 0
        if compile_first:
            squares(model, x).sum().backward()
            before = counter.ran
            assert before, "the program is compiled outside"
        with persample.record(model) as tape:
            tape.backward(squares(model, x))
        assert counter.ran == before, "the recording runs eagerly"
        model.zero_grad()
        squares(model, x).sum().backward()
        assert counter.ran == before + 1, "and the program is compiled again after it"
        plain = {k: g.sum(0) for k, g in expected.items()}
        gap = max(float((gradients(model)[k] - g).abs().max()) for k, g in plain.items())
        return Outcome(max(answers(tape, expected), gap))


CASES.right("torch.compile(model), compiled before the recording", True, "whole")(around)
CASES.right("torch.compile(model), recorded first", False, "whole")(around)
CASES.right("model.compile()", True, "in place")(around)
CASES.right("a compiled submodule", True, "part")(around)


@CASES.right("a compiled loss function")
def loss() -> Outcome:
    with fresh():
        counter, x, model = Counter(), data(), net()
        expected = oracle(model, squares, x)
        losses = torch.compile(lambda out: out.square().sum(1), backend=counter)
        losses(model(x))
        with persample.record(model) as tape:
            tape.backward(losses(model(x)))
        assert counter.ran == 1
        return Outcome(answers(tape, expected))


@CASES.right("torch.compile called inside the recording")
def inside() -> Outcome:
    with fresh():
        counter, x, model = Counter(), data(), net()
        expected = oracle(model, squares, x)
        with persample.record(model) as tape:
            quick = torch.compile(model, backend=counter)
            tape.backward(quick(x).square().sum(1))
        return Outcome(answers(tape, expected))


@CASES.right("a compiled module with graph breaks and dropout in the recording")
def breaks() -> Outcome:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = net()

        def forward(self, x: Tensor) -> Tensor:
            h = self.m[:2](x)
            torch._dynamo.graph_break()
            return self.m[2:](nn.functional.dropout(h, 0.0))

    with fresh():
        model: Any = torch.compile(Broken(), backend=Counter())
        x = data()
        expected = oracle(net(), squares, x)
        model(x)
        with persample.record(model) as tape:
            tape.backward(squares(model, x))
        return Outcome(answers(tape, {f"_orig_mod.m.{k}": g for k, g in expected.items()}))
