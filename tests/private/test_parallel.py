"""Several processes give what one process gives with the same noise."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
import torch.multiprocessing

from .programs import finish, planned, training
from .ranks import Buffered, numbers, work
from .test_users import OWNERS, users_plan

WORLDS = [2, 4]
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="needs gloo",
)


@functools.cache
def together(world: int) -> list[dict[str, Any]]:
    """Every scenario in ``world`` processes: what each of them found."""
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=work, args=(rank, world, folder), daemon=True)
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(300)
        for process in ranks:
            if process.is_alive():
                process.kill()
                process.join()
        files = [Path(folder) / f"{rank}.json" for rank in range(world)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def found(name: str, world: int) -> list[dict[str, Any]]:
    results = [each.get(name, {"crash": "it never finished"}) for each in together(world)]
    for result in results:
        assert "crash" not in result, result["crash"]
    return results


def expect_equal(results: list[dict[str, Any]], expected: list[list[float]]) -> None:
    """To rounding equal to one process; bit for bit the same in all of them."""
    assert all(result["parameters"] == results[0]["parameters"] for result in results)
    for mine, theirs in zip(results[0]["parameters"], expected, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-6, rtol=1e-6)


ALONE: dict[str, Any] = {
    "replicated": lambda: training(micro_batch=3),
    "loop_form": lambda: training(micro_batch=3),
    "unwrapped": lambda: training(micro_batch=3),
    "with_buffers": lambda: training(Buffered(), micro_batch=3),
    "with_users": lambda: training(plan=users_plan(), users=OWNERS, micro_batch=9),
    "empty": lambda: training(
        plan=planned(sample_rate=0.02, batch_size=None, divisor=10.0), micro_batch=1
    ),
    "sharded": lambda: training(micro_batch=3),
    "sharded_with_users": lambda: training(plan=users_plan(), users=OWNERS, micro_batch=9),
    "sharded_and_empty": lambda: training(
        plan=planned(sample_rate=0.02, batch_size=None, divisor=10.0), micro_batch=1
    ),
}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ALONE)
def test_equal_to_one_process(name: str, world: int) -> None:
    made = ALONE[name]()
    finish(made)
    expect_equal(found(name, world), numbers(made.model))


@pytest.mark.parametrize("world", WORLDS)
def test_processes_share_the_work(world: int) -> None:
    parts = [result["parts"] for result in found("replicated", world)]
    assert sum(parts) == len(training(micro_batch=3).parts(0))
    assert max(parts) - min(parts) <= 1


@pytest.mark.parametrize("world", WORLDS)
def test_a_user_is_on_one_process(world: int) -> None:
    users = [tuple(user) for result in found("with_users", world) for user in result["users"]]
    assert len(set(users)) == len(users)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["secrets", "forked"])
def test_one_secret_for_all(name: str, world: int) -> None:
    results = found(name, world)
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("world", WORLDS)
def test_resume_is_bit_for_bit(world: int) -> None:
    results = found("resumed", world)
    assert all(result["same"] for result in results)
    assert all(result["parameters"] == results[0]["parameters"] for result in results)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["sharded_and_resumed", "resumed_alone"])
def test_other_models_resume_bit_for_bit(name: str, world: int) -> None:
    assert all(result["same"] for result in found(name, world))


@pytest.mark.parametrize("world", WORLDS)
def test_noise_is_there_once(world: int) -> None:
    for result in found("noise", world):
        assert abs(result["ratio"] - 1) < 5 * math.sqrt(2 / result["count"])


@pytest.mark.parametrize("world", WORLDS)
def test_noise_of_every_process_is_found(world: int) -> None:
    for result in found("noise_per_rank", world):
        assert abs(result["ratio"] - 1) > 20 * math.sqrt(2 / result["count"])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("different_parameters", "parameters"),
        ("different_plans", "plan"),
        ("different_data", "data"),
    ],
)
def test_processes_that_differ_are_refused_in_all(name: str, words: str, world: int) -> None:
    for result in found(name, world):
        assert words in result["refused"]
