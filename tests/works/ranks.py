"""What every one of several processes runs: scenarios with DDP and fully_shard.

A batch of seven samples is split unevenly, the last of four processes gets none of it. The truth is
one process with the whole batch: Σ over all samples of clipped gradients.
"""

from __future__ import annotations

import datetime
import importlib
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import persample
from persample.testing import oracle, relative_error

from ..models import Fn, par
from .base import data, squares

SPLITS = {1: [7], 2: [5, 2], 4: [4, 2, 1, 0]}
BOUND = 0.8


@dataclass(frozen=True, slots=True)
class Scenario:
    """A row of the table."""

    pattern: str
    run: Callable[[], float]
    tolerance: float = 1e-10


SCENARIOS: dict[str, Scenario] = {}
PAIRS: set[str] = set()  # tried with two processes only
ALONE: set[str] = set()  # with one
REFUSED: set[str] = set()


def scenario(
    pattern: str,
    *args: Any,
    tolerance: float = 1e-10,
    kind: set[str] | None = None,
    refused: bool = False,
) -> Callable[[Any], Any]:
    def add(run: Callable[..., float]) -> Callable[..., float]:
        name = pattern
        SCENARIOS[name] = Scenario(pattern, lambda: run(*args), tolerance)
        if kind is not None:
            kind.add(name)
        if refused:
            REFUSED.add(name)
        return run

    return add


def work(rank: int, world: int, folder: str) -> None:
    """The body of one process."""
    importlib.import_module(f"{__package__}.ranks_with_grad")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_device("cpu")  # gloo
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )  # fmt: skip
    found: dict[str, Any] = {}
    for name, each in SCENARIOS.items():
        if (name in PAIRS and world != 2) or (name in ALONE and world != 1):
            continue
        torch.manual_seed(0)
        try:
            found[name] = {"error": each.run()}
        except persample.PersampleError as error:
            found[name] = {"refused": {"what": error.what, "fix": error.fix}}
        except Exception as error:
            found[name] = {"crash": f"{type(error).__name__}: {error}"}
            break
        dist.barrier()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    if all("crash" not in f for f in found.values()):
        dist.destroy_process_group()


# ---------------------------------------------------------------------- the truth


def body() -> nn.Module:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Tanh())
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), inner, nn.Linear(6, 3)).double()


def mine(x: Tensor) -> Tensor:
    """This process's part of the batch."""
    return x.split(SPLITS[dist.get_world_size()])[dist.get_rank()]


def clipped(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    rows = oracle(model, squares, x)
    norms = torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)
    return {k: torch.tensordot((BOUND / norms).clamp(max=1), g, 1) for k, g in rows.items()}


def whole(value: Tensor | None) -> Tensor:
    """A gradient or a parameter with all its shards; the same in every process, or NaN."""
    assert value is not None
    full = value.full_tensor() if hasattr(value, "full_tensor") else value
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, full.detach())
    same = all(torch.equal(full, other) for other in seen)
    return full.detach() if same else torch.full_like(full, float("nan"))


def bare(name: str) -> str:
    return name.removeprefix("module.")


def train(
    model: nn.Module,
    twin: nn.Module,
    *,
    steps: int = 3,
    plain: bool = False,
    evaluate: bool = False,
    **options: Any,
) -> float:
    """Steps with momentum, against the same steps of a plain model on the whole batch."""
    mover = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1, momentum=0.9)
    other = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], 0.1, momentum=0.9)
    worst = 0.0
    for k in range(steps):
        x = data(7 * (k + 1), 5)[7 * k :]
        if plain:  # a plain step of the wrapper in between finds it as it left it
            model.zero_grad()
            squares(model, mine(x)).sum().backward()
            found = {bare(n): whole(p.grad) for n, p in model.named_parameters() if p.requires_grad}
            twin.zero_grad()
            (squares(twin, x).sum() / dist.get_world_size()).backward()
            worst = max(worst, relative_error(found, _grads(twin)))
        if evaluate:  # leaves the parameters of the root gathered
            with torch.no_grad():
                model(x)
        with persample.record(model, **options) as tape:
            tape.backward(squares(model, mine(x)))
        worst = max(worst, _local(tape, twin, mine(x), **options))
        tape.set_grad(tape.clipped_sum(BOUND))
        expected = clipped(twin, x)
        found = {bare(n): whole(p.grad) for n, p in model.named_parameters() if p.requires_grad}
        worst = max(worst, relative_error(found, expected))
        for name, parameter in twin.named_parameters():
            if parameter.requires_grad:
                parameter.grad = expected[name]
        mover.step()
        other.step()
    moved = {bare(n): whole(p) for n, p in model.named_parameters()}
    theirs = {n: p.detach() for n, p in twin.named_parameters()}
    return float(max(worst, relative_error(moved, theirs)))


def _grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _local(tape: persample.Tape, twin: nn.Module, x: Tensor, **options: Any) -> float:
    """This process's own rows and norms."""
    rows = oracle(twin, squares, x)
    norms = torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)
    error = float((tape.norms() - norms).abs().max()) if len(x) else 0.0
    if options.get("lean"):
        return error
    found = {bare(name): g for name, g in tape.grads().items()}
    return max(error, relative_error(found, rows))


# ---------------------------------------------------------------------- DDP


def replicated(options: dict[str, Any], **recording: Any) -> float:
    model = DistributedDataParallel(body(), **options)
    return train(model, body(), plain=True, **recording)


scenario("DDP: set_grad sums over processes, uneven and empty batches; plain steps in between", {})(
    replicated
)
_FLAGS = ({"find_unused_parameters": True}, {"gradient_as_bucket_view": True})
for _flag in _FLAGS:
    scenario(f"DDP with {next(iter(_flag))}=True", _flag, kind=PAIRS)(replicated)


@scenario("DDP, lean recording", kind=PAIRS)
def lean() -> float:
    return replicated({}, lean=True)


@scenario("DDP around a recorded model: record(ddp.module), called as ddp(x)", kind=PAIRS)
def around() -> float:
    model = DistributedDataParallel(body())
    x = data(7, 5)
    with persample.record(model.module) as tape:
        tape.backward(squares(model, mine(x)))
    tape.set_grad(tape.clipped_sum(BOUND))
    found = {n: whole(p.grad) for n, p in model.module.named_parameters()}
    return relative_error(found, clipped(body(), x))


@scenario("DDP, micro-batches: set_grad(..., accumulate=True)", kind=PAIRS)
def accumulated() -> float:
    model, x = DistributedDataParallel(body()), data(14, 5)
    for part in x.split(7):
        with persample.record(model) as tape:
            tape.backward(squares(model, mine(part)))
        tape.set_grad(tape.clipped_sum(BOUND), accumulate=True)
    found = {bare(n): whole(p.grad) for n, p in model.named_parameters()}
    return relative_error(found, clipped(body(), x))


@scenario("DDP around a part of the model: the rest stays local, as in a plain step", kind=PAIRS)
def partial() -> float:
    model, x = body(), data(7, 5)
    model[2] = DistributedDataParallel(model[2])
    with persample.record(model) as tape:
        tape.backward(squares(model, mine(x)))
    tape.set_grad(tape.clipped_sum(BOUND))
    own, everybodys = clipped(body(), mine(x)), clipped(body(), x)
    found = {n.replace("2.module", "2"): p.grad for n, p in model.named_parameters()}
    expected = {n: everybodys[n] if n.startswith("2.") else own[n] for n in own}
    return relative_error(found, expected)


def step(model: nn.Module, **options: Any) -> persample.Tape:
    with persample.record(model, **options) as tape:
        tape.backward(squares(model, mine(data(7, 5))))
    return tape


@scenario("DDP, processes that pass different gradients", kind=PAIRS, refused=True)
def different() -> float:
    tape = step(DistributedDataParallel(body()))
    grads = tape.clipped_sum(BOUND)
    if dist.get_rank() == 1:
        grads.popitem()
    tape.set_grad(grads)
    return 0.0


@scenario("DDP, one process passes per-sample gradients", kind=PAIRS, refused=True)
def misshapen() -> float:
    tape = step(DistributedDataParallel(body()))
    tape.set_grad(tape.grads() if dist.get_rank() == 1 else tape.clipped_sum(BOUND))
    return 0.0


@scenario("DDP, set_grad inside no_sync()", kind=PAIRS, refused=True)
def unsynced() -> float:
    model = DistributedDataParallel(body())
    with model.no_sync():
        tape = step(model)
        tape.set_grad(tape.clipped_sum(BOUND))
    return 0.0


@scenario("DDP, set_grad inside join()", kind=PAIRS, refused=True)
def joined() -> float:
    model = DistributedDataParallel(body())
    with model.join():
        tape = step(model)
        tape.set_grad(tape.clipped_sum(BOUND))
    return 0.0


@scenario("DDP with static_graph=True", kind=PAIRS, refused=True)
def static() -> float:
    step(DistributedDataParallel(body(), static_graph=True))
    return 0.0


@scenario("DDP with a communication hook", kind=PAIRS, refused=True)
def compressed() -> float:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = DistributedDataParallel(body())
    model.register_comm_hook(None, allreduce_hook)
    step(model)
    return 0.0


# ---------------------------------------------------------------------- fully_shard


def sharded(model: Any, *parts: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for part in parts:
        fully_shard(part, **options)
    return fully_shard(model, **options)


def shards(options: dict[str, Any], recording: dict[str, Any]) -> float:
    model = body()
    return train(sharded(model, model[2], **options), body(), **recording)


scenario("fully_shard: grads, norms, clipped sums and set_grad, uneven and empty batches", {},
         {})(shards)  # fmt: skip
scenario("fully_shard, plain steps in between", {}, {"plain": True}, kind=PAIRS)(shards)
scenario("fully_shard, lean recording", {}, {"lean": True}, kind=PAIRS)(shards)
scenario("fully_shard, verify=True", {}, {"verify": True, "steps": 1}, kind=PAIRS)(shards)
scenario("fully_shard, reshard_after_forward=False", {"reshard_after_forward": False}, {},
         kind=PAIRS)(shards)  # fmt: skip


@scenario("fully_shard, an evaluation between steps", kind=PAIRS)
def evaluated() -> float:
    return train(sharded(body()), body(), evaluate=True)


class Odd(nn.Module):
    """Derived and tied weights, an operator without a rule, a frozen layer, checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = parametrizations.weight_norm(nn.Linear(5, 6))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.pair = nn.Bilinear(6, 6, 6)
        self.low = Fn(lambda s, x: x @ (s.w + s.b @ s.a).t(), w=par(6, 6), a=par(2, 6), b=par(6, 2))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.low.w
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.first(x).tanh())
        h = checkpoint(lambda h: self.pair(h, h).tanh(), h, use_reentrant=False)
        return self.tied(self.low(h).tanh())


@scenario("fully_shard: weight_norm, LoRA-like, tied and frozen weights, checkpointing", kind=PAIRS)
def odd() -> float:
    return train(sharded(Odd()), Odd())


@scenario("fully_shard by layer: the same", kind=PAIRS)
def odd_by_layer() -> float:
    model = Odd()
    return train(sharded(model, model.first, model.pair), Odd())


@scenario("fully_shard, MixedPrecisionPolicy(bfloat16)", tolerance=3e-2, kind=PAIRS)
def narrow() -> float:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model, x = sharded(body().float(), mp_policy=policy), data(7, 5)
    with persample.record(model) as tape:
        tape.backward(squares(model, mine(x).float()))
    tape.set_grad(tape.clipped_sum(BOUND))
    found = {n: whole(p.grad).double() for n, p in model.named_parameters()}
    return relative_error(found, clipped(body(), x))


class Borrowing(nn.Module):
    """A module uses what another one computed from its parameters."""

    def __init__(self, by_argument: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by_argument, self.own = by_argument, par(5, 5)
        self.lender = Fn(lambda s: s.w.exp(), w=par(5, 5))
        self.borrower = Fn(lambda s, x, w: (x @ w) @ s.v, v=par(5, 3))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        if self.by_argument:
            return self.borrower(x, self.own.exp())
        return x @ (self.lender() * self.own)


def borrowing(by_argument: bool) -> float:
    model = Borrowing(by_argument)
    step(sharded(model, model.lender, model.borrower))
    return 0.0


scenario("fully_shard, a derived weight returned by another sharded module", False, kind=PAIRS,
         refused=True)(borrowing)  # fmt: skip
scenario("fully_shard, a derived weight passed to another sharded module", True, kind=PAIRS,
         refused=True)(borrowing)  # fmt: skip


@scenario("fully_shard with gradient sync switched off", kind=PAIRS, refused=True)
def asynchronous() -> float:
    model = sharded(body())
    model.set_requires_gradient_sync(False)
    step(model)
    return 0.0


@scenario('fully_shard with record(..., unproven="loop")', kind=PAIRS, refused=True)
def looped() -> float:
    step(sharded(body()), unproven="loop")
    return 0.0


@scenario("FullyShardedDataParallel (the older wrapper)", kind=PAIRS, refused=True)
def older() -> float:
    from torch.distributed.fsdp import FullyShardedDataParallel

    step(FullyShardedDataParallel(body(), device_id=torch.device("cpu")))
    return 0.0


@scenario("tensor-parallel parameters", kind=PAIRS, refused=True)
def parallel() -> float:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = body()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    step(parallelize_module(model, mesh, {"0": ColwiseParallel()}))
    return 0.0


@scenario("torch.distributed's composable replicate", kind=PAIRS, refused=True)
def composed() -> float:
    from torch.distributed._composable.replicate import replicate

    step(replicate(body()))
    return 0.0


@scenario("DataParallel without several devices", kind=ALONE)
def data_parallel() -> float:
    return train(nn.DataParallel(body()), body())
