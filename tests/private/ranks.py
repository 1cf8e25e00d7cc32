"""What every one of several processes runs: private trainings on gloo."""

from __future__ import annotations

import datetime
import io
import json
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import persample
from persample import private

from .programs import data, finish, losses, net, planned, training
from .test_noise import PerPart
from .test_users import OWNERS, users_plan

Rows = list[list[float]]
SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {}


def scenario(run: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    SCENARIOS[run.__name__] = run
    return run


def work(rank: int, world: int, folder: str) -> None:
    """The body of one process."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    found: dict[str, Any] = {}
    for name, run in SCENARIOS.items():
        torch.manual_seed(0)
        try:
            found[name] = run()
        except persample.PersampleError as error:
            found[name] = {"refused": error.what}
        except Exception:
            found[name] = {"crash": traceback.format_exc()}
            break
        dist.barrier()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    if all("crash" not in f for f in found.values()):
        dist.destroy_process_group()


class Buffered(nn.Module):
    """DDP would broadcast its buffer in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = net()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.scale) / self.scale


def numbers(model: nn.Module) -> Rows:
    """All parameters, whole."""
    found = []
    for parameter in model.parameters():
        value = parameter.detach()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        found.append(value.double().flatten().tolist())
    return found


def spread(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


@scenario
def replicated() -> dict[str, Any]:
    made = training(spread(net()), micro_batch=3, verify=True)
    finish(made)
    return {"parameters": numbers(made.model), "parts": len(made.parts(0))}


@scenario
def loop_form() -> dict[str, Any]:
    model = spread(net())
    made = training(model, micro_batch=3)
    for parts in made.batches():
        for batch in parts:
            with made.record() as tape:
                tape.backward(losses(model, batch))
        made.step()
    return {"parameters": numbers(model)}


@scenario
def unwrapped() -> dict[str, Any]:
    made = training(micro_batch=3)
    finish(made)
    return {"parameters": numbers(made.model)}


@scenario
def with_buffers() -> dict[str, Any]:
    made = training(spread(Buffered()), micro_batch=3, verify=True)
    finish(made)
    return {"parameters": numbers(made.model)}


@scenario
def with_users() -> dict[str, Any]:
    made = training(spread(net()), plan=users_plan(), users=OWNERS, micro_batch=9)
    users = [
        u for k in range(6) for part in made.parts(k) for u in [(k, int(v)) for v in part.units]
    ]
    finish(made)
    return {"parameters": numbers(made.model), "users": users}


@scenario
def empty() -> dict[str, Any]:
    plan = planned(sample_rate=0.02, batch_size=None, divisor=10.0)
    made = training(spread(net()), plan=plan, micro_batch=1)
    finish(made)
    return {"parameters": numbers(made.model)}


@scenario
def secrets() -> dict[str, Any]:
    made = training(spread(net()), noise_generator=None, sample_generator=None)
    finish(made)
    return {"secrets": [made.noise.secret.hex(), made.sampler.secret.hex()],
            "parameters": numbers(made.model)}  # fmt: skip


@scenario
def resumed() -> dict[str, Any]:
    def make() -> private.Training:
        return training(spread(net(dropout=0.5)), micro_batch=3)

    torch.manual_seed(dist.get_rank())
    whole = make()
    for step in whole:
        if step == 3:
            found = whole.state_dict()
    second = make()
    torch.manual_seed(77)
    second.load_state_dict(found)
    finish(second)
    return {"same": numbers(whole.model) == numbers(second.model),
            "parameters": numbers(second.model)}  # fmt: skip


@scenario
def resumed_alone() -> dict[str, Any]:
    """The state of a replicated model goes into a bare one."""
    plan = planned(bands=3)
    first = training(spread(net()), plan=plan, micro_batch=3)
    for step in first:
        if step == 3:
            found = first.state_dict()
    second = training(plan=plan, micro_batch=3)
    second.load_state_dict(found)
    finish(second)
    return {"same": numbers(first.model) == numbers(second.model)}


@scenario
def forked() -> dict[str, Any]:
    first, second = (training(spread(net()), micro_batch=3) for _ in range(2))
    for _ in first:
        break
    second.load_state_dict(first.state_dict(), fork=True)
    finish(second)
    return {"secrets": [second.noise.secret.hex()], "parameters": numbers(second.model)}


class PerRank(PerPart):
    """Every process adds noise of its own before the sums are added up."""

    def clipped(self, tape: Any, part: Any) -> dict[str, Tensor]:
        return private.Training.clipped(self, tape, part)

    def step(self, closure: None = None) -> None:
        batch = self._batch
        assert batch is not None
        total = batch.sums.total()
        private.training.Noise(secret=private.keys.fresh(), std=self.plan.noise_std).add(
            batch.step, total
        )
        batch.sums._found = total
        super().step()


def variance(kind: type[private.Training]) -> dict[str, Any]:
    """Measured on a model whose sums are zero: all that is released is noise."""
    model = nn.Linear(5, 2000, bias=False)
    x = torch.zeros(40, 5)
    made = training(spread(model), x, planned(noise_multiplier=0.7, max_norm=3.0), kind=kind,
                    noise_generator=None, micro_batch=4,
                    loss_fn=lambda m, b: m(b).square().sum(1))  # fmt: skip
    squares, count = 0.0, 0
    for _ in made:
        grad = model.weight.grad
        assert grad is not None
        squares, count = squares + float(grad.double().square().sum()), count + grad.numel()
    return {"ratio": squares / count / (0.7 * 3.0 / 10) ** 2, "count": count}


@scenario
def noise() -> dict[str, Any]:
    return variance(private.Training)


@scenario
def noise_per_rank() -> dict[str, Any]:
    return variance(PerRank)


def in_shards(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0])
    return fully_shard(model)


@scenario
def sharded() -> dict[str, Any]:
    made = training(in_shards(net()), micro_batch=3, verify=True)
    finish(made)
    return {"parameters": numbers(made.model)}


@scenario
def sharded_with_users() -> dict[str, Any]:
    made = training(in_shards(net()), plan=users_plan(), users=OWNERS, micro_batch=9)
    finish(made)
    return {"parameters": numbers(made.model)}


@scenario
def sharded_and_empty() -> dict[str, Any]:
    plan = planned(sample_rate=0.02, batch_size=None, divisor=10.0)
    made = training(in_shards(net()), plan=plan, micro_batch=1)
    finish(made)
    return {"parameters": numbers(made.model)}


@scenario
def sharded_and_resumed() -> dict[str, Any]:
    whole = training(in_shards(net()), micro_batch=3)
    for step in whole:
        if step == 3:
            file = io.BytesIO()
            torch.save(whole.state_dict(), file)
    second = training(in_shards(net()), micro_batch=3)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    finish(second)
    return {"same": numbers(whole.model) == numbers(second.model)}


@scenario
def different_parameters() -> dict[str, Any]:
    model = net()
    with torch.no_grad():
        model[0].weight.add_(dist.get_rank())
    finish(training(model))
    return {}


@scenario
def different_plans() -> dict[str, Any]:
    finish(training(spread(net()), plan=planned(noise_multiplier=1.0 + dist.get_rank())))
    return {}


@scenario
def different_data() -> dict[str, Any]:
    x, y = data()
    finish(training(spread(net()), (x + dist.get_rank(), y)))
    return {}
