"""Where gradients belong among processes, and how they get there."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UsageError

Targets = list[tuple[Tensor, Tensor]]


class Places:
    """The sharded parameter, or the group of replicas, behind each parameter of a model."""

    def __init__(self, homes: dict[int, Tensor], replicated: dict[int, Any]) -> None:
        self._homes, self._replicated = homes, replicated

    def home(self, parameter: Tensor) -> Any:
        """The sharded parameter whose ``.grad`` is meant, or None."""
        return self._homes.get(id(parameter))

    def replicas(self, parameter: Tensor) -> Any:
        """The processes that hold the same parameter, unless it is sharded or local."""
        return self._replicated.get(id(parameter))

    def groups(self, parameters: Iterable[Tensor]) -> list[Any]:
        """Every process group behind the parameters, each once, in their order."""
        found: dict[int, Any] = {}
        for parameter in parameters:
            home, group = self.home(parameter), self.replicas(parameter)
            if home is not None:
                groups = home.device_mesh.get_all_groups()
            else:
                groups = [] if group is None else [group]
            found.update({id(each): each for each in groups})
        return list(found.values())


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
