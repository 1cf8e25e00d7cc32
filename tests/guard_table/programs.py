"""The programs that guards are counted over: each can be run twice, and says how it came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import persample
from persample.testing import oracle, relative_error

from .. import graphs, loops, zoo
from ..api import test_refusals
from ..attacks.__main__ import CASES as ATTACKS
from ..attacks.__main__ import SCRIPTS, part
from ..attacks.base import REFUSED as ATTACK_REFUSED
from ..attacks.base import judge, judge_script
from ..batteries import test_zoo
from ..batteries.test_models import double, loss
from ..models import MODELS
from ..works.__main__ import CASES as WORKS
from ..works.base import Case, Missing, Wrong, verdict

RANDOM = 300  # programs of each fuzzer
EXACT, REFUSED, WRONG, ANSWERED, FAILED = "exact", "refused", "wrong", "answered", "failed"


class Program(NamedTuple):
    """A battery, a name, and two runs that share no state.

    A run returns exact, refused, wrong (also if rows are autograd's, but samples influence each
    other), answered (and not judged) or failed.
    """

    battery: str
    name: str
    runs: tuple[Callable[[], str], Callable[[], str]]


def twice(run: Callable[..., str], *args: Any) -> tuple[Callable[[], str], Callable[[], str]]:
    return (lambda: run(*args),) * 2


def model(name: str, lean: bool) -> str:
    torch.manual_seed(0)
    net, batch = double(*MODELS[name](3))
    with persample.record(net, n=3, lean=lean) as tape:
        tape.backward(loss(net, batch))
    error = relative_error(tape.grads(), oracle(net, loss, batch, n=3))
    return EXACT if error < 1e-9 else WRONG


def works(case: Case) -> str:
    """A row of docs/works-with.md; a question that it expects to be refused counts as refused."""
    try:
        return REFUSED if "refused" in verdict(case) else EXACT
    except (Missing, Wrong) as error:
        return WRONG if isinstance(error, Wrong) else FAILED
    except AssertionError:  # answered where it was to be refused
        return ANSWERED


def attack(case: Any, **options: Any) -> str:
    """A case of attacks.

    Where samples influence each other, autograd's gradients of the losses are not right.
    """
    torch.manual_seed(0)
    found = judge(case, **options)
    coupled = case.expectation == ATTACK_REFUSED and "alone" not in found.detail
    if found.outcome == EXACT and (coupled or "several samples" in found.detail):
        return WRONG
    return found.outcome if found.outcome in (EXACT, REFUSED, WRONG) else FAILED


def refused(name: str) -> str:
    """A row of tests/api/test_refusals.py."""
    build, losses, _ = test_refusals.REFUSED[name]
    torch.manual_seed(0)
    test_refusals.step(build(), losses)
    return ANSWERED


def protocol(script: Any) -> str:
    torch.manual_seed(0)
    found = judge_script(script)
    if "by autograd itself" in found.detail:
        return FAILED
    return found.outcome if found.outcome in (EXACT, REFUSED, WRONG) else FAILED


def fuzzed(run: Callable[..., str], seed: int, **options: Any) -> str:
    """Of random graphs and loops; ``met``: refused by right."""
    found = run(seed, **options).split(":")[0]
    return REFUSED if found in ("refused", "met") else found if found in (EXACT, WRONG) else FAILED


def architecture(builder: Any) -> str:
    kind = zoo.judge(builder).kind
    return kind if kind in (EXACT, REFUSED, WRONG) else FAILED


def programs() -> Iterator[Program]:
    """All of them."""
    for name in MODELS:
        yield Program("models", name, twice(model, name, False))
        yield Program("models, lean", name, twice(model, name, True))
    for case in WORKS:
        if case.heading != "Several processes":
            yield Program("works", case.pattern, twice(works, case))
    for name in test_refusals.REFUSED:
        yield Program("refused models", name, twice(refused, name))
    for name in ATTACKS:
        for lean in (False, True):
            battery = "attacks, lean" if lean else "attacks"
            for one, other in zip(part(name).cases(), part(name).cases(), strict=True):
                runs = (
                    lambda one=one, lean=lean: attack(one, lean=lean),
                    lambda other=other, lean=lean: attack(other, lean=lean),
                )
                yield Program(battery, one.name, runs)
    for name in SCRIPTS:
        for one, other in zip(part(name).scripts(), part(name).scripts(), strict=True):
            runs = (lambda one=one: protocol(one), lambda other=other: protocol(other))
            yield Program("attack scripts", one.name, runs)
    for seed in range(RANDOM):
        yield Program("graphs", str(seed), twice(fuzzed, graphs.trial, seed))
        runs = (lambda seed=seed: fuzzed(graphs.trial, seed, told=True),) * 2
        yield Program("graphs, ids", str(seed), runs)
        yield Program("loops", str(seed), twice(fuzzed, loops.judge, seed))
    for name, builder in test_zoo.CASES.items():
        yield Program("zoo", name, twice(architecture, builder))
