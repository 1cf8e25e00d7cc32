"""Several processes: the same coins, a share of the micro-batches each, one sum, one noise."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UsageError
from .users import Part

T = TypeVar("T")


class Processes:
    """The processes that train one model together; alone, it does nothing.

    Every process draws the same coins and cuts the batch into the same micro-batches, of which it
    takes every ``count``-th. Sums are added up over all processes, and each adds the same noise to
    the result: it is in it once.
    """

    def __init__(self, model: nn.Module) -> None:
        self.rank, self.count = 0, 1
        self._group: Any = None
        self._sharded = any(is_sharded(p) for p in model.parameters())
        self._replicas = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
        if dist.is_available() and dist.is_initialized():
            self._group = self._replicas[0].process_group if self._replicas else dist.group.WORLD
            self.rank = dist.get_rank(self._group)
            self.count = dist.get_world_size(self._group)

    @property
    def independent(self) -> bool:
        """Whether this process may run the bare model on its own."""
        return self.count == 1 or not self._sharded

    def share(self, value: T) -> T:
        """The first process's value, in all of them."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(self._group, 0), group=self._group)
        return box[0]

    def mine(self, parts: Sequence[Part]) -> list[Part]:
        """The micro-batches of this process.

        A sharded model gathers its parameters in every forward, which all processes must run: where
        one has a micro-batch less, it runs a sample of another once more, for nothing.
        """
        found = list(parts[self.rank :: self.count])
        if self._sharded and len(found) * self.count < len(parts):
            found.append(parts[0].first())
        return found

    def add_up(self, sums: Iterable[Tensor]) -> None:
        """Σ over processes, in place, the same bits in each."""
        if self.count == 1:
            return
        pending = [dist.all_reduce(s, group=self._group, async_op=True) for s in sums]
        for work in pending:
            work.wait()

    def expect_agreement(self, facts: Mapping[str, str]) -> None:
        """Refuse processes that were given different things."""
        if self.count == 1:
            return
        seen: list[Any] = [None] * self.count
        dist.all_gather_object(seen, dict(facts), group=self._group)
        for name in facts:
            if any(other[name] != seen[0][name] for other in seen):
                raise UsageError(
                    f"processes disagree about the {name}",
                    why="every process must hold the same model, data and plan",
                    fix="DistributedDataParallel(model) gives all of them the first one's "
                    "parameters; data and plan must be made alike",
                )

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Let each process run its own number of forwards.

        DDP broadcasts buffers in forward, and would wait for a process that has no micro-batch
        left. Buffers that change are refused anyway.
        """
        before = [(r, r.require_forward_param_sync) for r in self._replicas]
        with contextlib.ExitStack() as stack:
            for replica in self._replicas:
                stack.enter_context(replica.no_sync())
                replica.require_forward_param_sync = False
            try:
                yield
            finally:
                for replica, value in before:
                    replica.require_forward_param_sync = value


def bare(model: nn.Module) -> nn.Module:
    """The module inside DDP and torch.compile, whose names are the same everywhere."""
    inner = getattr(model, "_orig_mod", model)
    return bare(inner.module) if isinstance(inner, DistributedDataParallel) else inner


def checksum(parameters: Mapping[str, Tensor]) -> str:
    """A digest of parameters: names, shapes, and the values where no process holds only a part."""
    digest = hashlib.sha256()
    for name, parameter in parameters.items():
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if not is_sharded(parameter):
            value = parameter.detach()
            value = torch.view_as_real(value) if value.is_complex() else value
            digest.update(str(float(value.double().sum())).encode())
    return digest.hexdigest()


def is_sharded(tensor: Tensor) -> bool:
    """Whether processes hold parts of this tensor."""
    return hasattr(tensor, "device_mesh")


def as_gradient(value: Tensor, parameter: Tensor) -> Tensor:
    """A gradient of a parameter's dtype and, if it is sharded, this process's part of it."""
    cast = value.to(parameter.dtype)
    if not is_sharded(parameter):
        return cast
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    whole = DTensor.from_local(cast, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
