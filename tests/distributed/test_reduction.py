"""Sums that travel while the next are computed: the numbers of two calls, and no process waits.

Two processes with gloo run every scenario below and compare ``set_clipped_grad`` with
``set_grad(clipped_sum)`` and with the oracle; what one process raises, the other must raise, too.
"""

from __future__ import annotations

import datetime
import functools
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import persample
from persample.distributed import reduction
from persample.forms.fast import stacked
from persample.tape.question import Question
from persample.testing import oracle, relative_error

SCENARIOS: dict[str, Callable[[], str]] = {}
BOUND = 0.7
SAME = "the same"


def scenario(run: Callable[[], str]) -> Callable[[], str]:
    SCENARIOS[run.__name__] = run
    return run


class Routed(nn.Module):
    """Tied, frozen and sometimes unused weights; positions; many short parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.rare, self.tied = nn.Linear(6, 6), nn.Linear(6, 6)
        self.tied.weight = self.last.weight
        self.frozen = nn.Linear(6, 6)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        h = self.frozen(self.norm(self.first(x).tanh()))
        h = self.tied(self.last(h).tanh())
        return self.rare(h) if rare else h


def build() -> Routed:
    torch.manual_seed(0)
    return Routed().double()


def batch() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(7, 4, 5, dtype=torch.float64)


def mine(x: Tensor, split: tuple[int, int] = (5, 2)) -> Tensor:
    return x.split(list(split))[dist.get_rank()]


def losses(out: Tensor) -> Tensor:
    return out.square().sum((1, 2))


def recorded(model: nn.Module, x: Tensor, rare: bool = False, **options: Any) -> persample.Tape:
    with persample.record(model, **options) as tape:
        tape.backward(losses(model(x, rare=rare)))
    return tape


def grads(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            full = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            found[name.removeprefix("module.")] = full.clone()
    return found


def expected(x: Tensor) -> dict[str, Tensor]:
    rows = oracle(build(), lambda model, x: losses(model(x)), x)
    norms = torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)
    c = (BOUND / norms).clamp(max=1)
    return {name: torch.einsum("n,n...->...", c, g) for name, g in rows.items()}


def compared(model: nn.Module, *, split: tuple[int, int] = (5, 2), **options: Any) -> str:
    """Two steps, each both ways and by the oracle."""
    for _ in range(2):
        x = mine(batch(), split)
        tape = recorded(model, x, **options)
        tape.set_clipped_grad(BOUND)
        found = grads(model)
        model.zero_grad()
        tape = recorded(model, x, **options)
        tape.set_grad(tape.clipped_sum(BOUND))
        before = grads(model)
        model.zero_grad()
        assert found.keys() == before.keys()
        assert all(torch.equal(found[name], before[name]) for name in found)
        truth = expected(batch())
        kept = {name: value for name, value in found.items() if name in truth}
        assert kept.keys() == truth.keys()
        assert relative_error(kept, truth) < 1e-10
    return SAME


def replicated(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(build(), find_unused_parameters=True, **options)


def sharded(*parts: str) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = build()
    for part in parts:
        fully_shard(getattr(model, part))
    return fully_shard(model)


@scenario
def ddp() -> str:
    return compared(replicated())


@scenario
def ddp_one_bucket_for_each() -> str:
    reduction.BUCKET = 1
    return compared(replicated())


@scenario
def ddp_one_bucket_for_all() -> str:
    reduction.BUCKET = 1 << 40
    return compared(replicated())


@scenario
def ddp_every_sum_on_its_own() -> str:
    stacked.JOINED = 0
    return compared(replicated())


@scenario
def ddp_lean() -> str:
    return compared(replicated(), lean=True)


@scenario
def ddp_empty_batch() -> str:
    return compared(replicated(), split=(7, 0))


@scenario
def fully_shard() -> str:
    return compared(sharded())


@scenario
def fully_shard_by_layer() -> str:
    return compared(sharded("first", "norm"))


@scenario
def a_weight_that_one_process_uses() -> str:
    model = replicated()
    rare = dist.get_rank() == 1
    tape = recorded(model, mine(batch()), rare)
    tape.set_clipped_grad(BOUND)
    found = grads(model)
    tape.set_grad(tape.clipped_sum(BOUND))
    assert bool(found["rare.weight"].any())
    assert all(torch.equal(found[name], value) for name, value in grads(model).items())
    return SAME


@scenario
def accumulated_and_chosen() -> str:
    model = replicated()
    only = {"params": lambda name: "first" in name}
    tape = recorded(model, mine(batch()))
    tape.set_clipped_grad(BOUND, **only)
    once = grads(model)
    tape.set_clipped_grad(BOUND, accumulate=True, **only)
    twice = grads(model)
    assert set(once) == {"first.weight", "first.bias"}
    assert all(torch.equal(2 * once[name], twice[name]) for name in once)
    return SAME


def raised(run: Callable[[], None], model: nn.Module) -> str:
    """The message of an error that leaves ``.grad`` alone."""
    try:
        run()
    except Exception as error:
        assert not grads(model)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "no error"


@scenario
def one_process_fails_before_anything_is_sent() -> str:
    def rule(norms: Tensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("the rule")
        return torch.ones_like(norms)

    model = replicated()
    tape = recorded(model, mine(batch()))
    return raised(lambda: tape.set_clipped_grad(BOUND, rule=rule), model)


@scenario
def one_process_fails_half_way() -> str:
    reduction.BUCKET, stacked.JOINED = 1, 0
    model = replicated()
    tape = recorded(model, mine(batch()))
    summed, calls = Question.cast, []

    def fail(self: Question, *args: Any, **options: Any) -> dict[str, Tensor]:
        calls.append(1)
        if dist.get_rank() == 1 and len(calls) == 3:
            raise MemoryError("no room")
        return summed(self, *args, **options)

    Question.cast = fail  # type: ignore[method-assign]
    try:
        said = raised(lambda: tape.set_clipped_grad(BOUND), model)
    finally:
        Question.cast = summed  # type: ignore[method-assign]
    assert len(calls) >= 3
    compared(replicated())  # nothing is left on its way
    return said


@scenario
def processes_ask_for_different_things() -> str:
    model = replicated()
    tape = recorded(model, mine(batch()))
    params = "first.weight" if dist.get_rank() else "last.weight"
    name = next(n for n in tape.names if n.endswith(params))
    return raised(lambda: tape.set_clipped_grad(BOUND, params=name), model)


@scenario
def no_sync() -> str:
    model = replicated()
    with model.no_sync():
        tape = recorded(model, mine(batch()))
        return raised(lambda: tape.set_clipped_grad(BOUND), model)


def work(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    bucket, joined, found = reduction.BUCKET, stacked.JOINED, {}
    for name, run in SCENARIOS.items():
        reduction.BUCKET, stacked.JOINED = bucket, joined
        try:
            found[name] = run()
        except Exception as error:
            found[name] = f"crash: {type(error).__name__}: {error}"
            break
        dist.barrier()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))


@functools.cache
def together() -> list[dict[str, str]]:
    """What each of two processes found."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        ranks = [context.Process(target=work, args=(r, folder), daemon=True) for r in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(240)
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        files = [Path(folder) / f"{rank}.json" for rank in range(2)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


FAILURES = {
    "one_process_fails_before_anything_is_sent": ("processes disagree", "ZeroDivisionError: the"),
    "one_process_fails_half_way": ("processes disagree", "MemoryError: no room"),
    "processes_ask_for_different_things": ("processes disagree", "processes disagree"),
    "no_sync": ("inside no_sync()", "inside no_sync()"),
}


@pytest.mark.parametrize("name", list(SCENARIOS))
def test_two_processes(name: str) -> None:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("gloo is not there")
    said = [found.get(name, "it never finished") for found in together()]
    for text, wanted in zip(said, FAILURES.get(name, (SAME, SAME)), strict=True):
        assert wanted in text, said


def test_one_process_without_a_group() -> None:
    model, x = build(), batch()
    recorded(model, x).set_clipped_grad(BOUND)
    truth = expected(x)
    found = grads(model)
    assert relative_error({name: found[name] for name in truth}, truth) < 1e-10
