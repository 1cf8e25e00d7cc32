"""Sums over processes: where they belong, and how they travel while the next ones are computed.

Every process passes the same names in the same order; a sum that is ready early waits for its turn.
Small sums travel together. Nothing is written before all processes have said that they are done.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UsageError

Targets = list[tuple[Tensor, Tensor]]
BUCKET = 4 << 20  # bytes that travel together
Bucket = list[tuple[str, Tensor]]


def groups_of(place: Any) -> Any:
    """The process groups of a place: a sharded parameter, a group of replicas, or None."""
    if isinstance(place, Tensor):
        return place.device_mesh.get_all_groups()  # type: ignore[attr-defined]
    return [] if place is None else [place]


def is_distributed(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    kind = loaded_class("torch.distributed.tensor", "DTensor")
    return kind is not None and isinstance(tensor, kind)


def is_freed(tensor: Tensor) -> bool:
    """Whether a tensor's memory was freed."""
    return tensor.untyped_storage().size() < tensor.numel() * tensor.element_size()


def anywhere(here: bool, groups: Sequence[Any], device: torch.device) -> bool:
    """Whether a gradient came in one of the processes: then all of them reduce it."""
    flag = torch.tensor(int(here), device=device)
    for group in groups:
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def agree(group: Any, device: torch.device, number: int, problem: Exception | None) -> None:
    """Raise in every process if one has a problem, or if they are about to set different things."""
    state = torch.tensor([number, -number, int(problem is not None)], device=device)
    dist.all_reduce(state, dist.ReduceOp.MAX, group=group)
    top, low, bad = state.tolist()
    if problem is not None:
        raise problem
    if bad or top != -low:
        raise UsageError(
            "processes disagree about set_grad",
            why="another process refused it"
            if bad
            else "they pass different names, shapes or dtypes, or another accumulate=",
            fix="every process must pass the same questions' answers; an empty batch gives zeros",
        )


def reduce_shard(value: Tensor, home: Any, *, wait: bool = True) -> Tensor:
    """The sum over processes, each keeping its shard; it may still be on its way."""
    from torch.distributed.tensor import DTensor, Partial

    mesh = home.device_mesh
    mine = value.detach().contiguous()
    whole = DTensor.from_local(mine, mesh, [Partial()] * mesh.ndim, run_check=False)
    found = whole.redistribute(placements=home.placements, async_op=not wait)
    return found.to(home.device) if wait else found


def await_shard(value: Any, home: Any) -> Tensor:
    """A shard that was on its way."""
    from torch.distributed.tensor import DTensor

    local = value.to_local()
    local = local.wait() if hasattr(local, "wait") else local
    found = DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape,
        stride=value.stride(),
    )  # fmt: skip
    return found.to(home.device)


def loaded_class(module: str, name: str) -> Any:
    """A class, unless its module was never imported: then nothing is an instance of it."""
    return getattr(sys.modules.get(module), name, None)


class Reduction:
    """The sums of one question, on their way.

    ``places``: for a parameter's id the sharded parameter, or the group of replicas, behind it.
    """

    def __init__(
        self,
        places: Mapping[int, Any],
        names: Sequence[str],
        selected: Mapping[str, Tensor],
        *,
        key: Any,
        problem: Exception | None,
    ) -> None:
        self._places, self._names, self._selected = places, names, selected
        self._number = zlib.crc32(repr(key).encode())
        self._ready: dict[str, Tensor] = {}
        self._buckets: dict[tuple[int, torch.dtype], Bucket] = {}
        self._pending: list[tuple[Bucket, Tensor, Any]] = []
        self._found: dict[str, Tensor] = {}
        self._next, self._problem = 0, problem
        self._agreed = self._over = False

    def begin(self) -> None:
        """Every process is about to send the same; raises in all of them if one has a problem."""
        self._over = True
        self._agree(self._problem)
        self._over, self._agreed = False, True

    def add(self, name: str, value: Tensor) -> None:
        """One sum of this process; it is not written to."""
        self._ready[name] = value
        while self._next < len(self._names) and self._names[self._next] in self._ready:
            self._send(self._names[self._next])
            self._next += 1

    def finish(self) -> Targets:
        """The :meth:`targets`, if no process has failed meanwhile."""
        found = self.targets()
        self._agree(None)
        return found

    def targets(self) -> Targets:
        """(parameter, sum over processes) of every name."""
        self._wait()
        homes = [self._home(name) for name in self._names]
        return [
            (self._selected[name] if home is None else home, self._found[name])
            for name, home in zip(self._names, homes, strict=True)
        ]

    def fail(self, problem: Exception) -> None:
        """Let no process wait for this one, nor write what it lacks; raises the problem."""
        if self._over:  # all processes know
            raise problem
        if self._agreed:
            for name in self._names[self._next :]:
                parameter = self._selected[name]
                dtype = torch.promote_types(parameter.dtype, torch.float32)
                blank = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
                self.add(name, self._ready.get(name, blank))
            self._wait()
        self._agree(problem)

    def _home(self, name: str) -> Any:
        """The sharded parameter whose ``.grad`` is meant, or None."""
        place = self._places.get(id(self._selected[name]))
        return place if isinstance(place, Tensor) else None

    def _agree(self, problem: Exception | None) -> None:
        parameters = list(self._selected.values())
        groups = [group for p in parameters for group in groups_of(self._places.get(id(p)))]
        for group in {id(group): group for group in groups}.values():
            agree(group, parameters[0].device, self._number, problem)
        if problem is not None:
            raise problem

    def _send(self, name: str) -> None:
        parameter, value = self._selected[name], self._ready[name].detach()
        place = self._places.get(id(parameter))
        if isinstance(place, Tensor):
            self._found[name] = reduce_shard(value, place, wait=False)
        elif place is None:
            self._found[name] = value
        else:
            key = (id(place), value.dtype)
            bucket = self._buckets.setdefault(key, [])
            bucket.append((name, value))
            if sum(each.nbytes for _, each in bucket) >= BUCKET:
                self._flush(key)

    def _flush(self, key: tuple[int, torch.dtype]) -> None:
        bucket = self._buckets.pop(key)
        group = self._places[id(self._selected[bucket[0][0]])]
        flat = torch.cat([value.reshape(-1) for _, value in bucket])
        self._pending.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))

    def _wait(self) -> None:
        for key in list(self._buckets):
            self._flush(key)
        for bucket, flat, work in self._pending:
            work.wait()
            parts = flat.split([value.numel() for _, value in bucket])
            for (name, value), part in zip(bucket, parts, strict=True):
                self._found[name] = part.view(value.shape)
        for name, value in self._found.items():
            if (home := self._home(name)) is not None:
                self._found[name] = await_shard(value, home)
