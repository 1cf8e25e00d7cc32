"""How a model is distributed over processes, and what of that cannot be recorded."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..errors import UsageError
from .reduction import (
    Reduction,
    Targets,
    anywhere,
    is_distributed,
    loaded_class,
    reduce_shard,
)


def find_processes(model: nn.Module) -> Processes | None:
    """How a model is distributed; None if there is only one process, without process group."""
    return Processes(model) if dist.is_available() and dist.is_initialized() else None


class Processes:
    """Which parameters of a recorded model other processes also hold, and how."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._replicas = [m for m in self._modules if isinstance(m, DistributedDataParallel)]
        sharded = loaded_class("torch.distributed.fsdp", "FSDPModule")
        self._sharded = [m for m in self._modules if sharded and isinstance(m, sharded)]

    @property
    def sharded(self) -> bool:
        """Whether the memory of parameters comes and goes while the model runs."""
        return bool(self._sharded)

    def check(self, parameters: Iterable[Tensor], *, loop: bool) -> None:
        """Refuse what cannot be recorded."""
        for replica in self._replicas:
            _check_replica(replica)
        flat = loaded_class("torch.distributed.fsdp", "FullyShardedDataParallel")
        for module in self._modules:
            if flat and isinstance(module, flat):
                raise _unsupported("FullyShardedDataParallel", "torch.distributed.fsdp.fully_shard")
            if "replicate" in (_registry(module) or ()):
                raise _unsupported("torch.distributed's composable replicate", "DDP")
        homes = self.homes()
        for parameter in parameters:
            if is_distributed(parameter) and id(parameter) not in homes:
                raise _unsupported("a distributed parameter outside fully_shard", "fully_shard")
        if loop and self._sharded:
            raise UsageError(
                "unproven='loop' on a model of fully_shard",
                why="processes would run different numbers of backward passes and wait forever",
                fix="record the model before it is sharded",
            )

    def homes(self) -> dict[int, Tensor]:
        """The sharded parameter of whatever ``fully_shard`` puts into a module's slot, by id."""
        found = {}
        for module in self._sharded:
            for group in _groups_of(module):
                _check_group(group)
                for slot in group.fsdp_params:
                    home = slot.sharded_param
                    for each in (home, getattr(slot, "_unsharded_param", home)):
                        found[id(each)] = home
        return found

    def notice(self) -> None:
        """The recorded model is being called: by a DDP around it, perhaps."""
        replica = DistributedDataParallel._active_ddp_module
        if replica is not None and all(replica is not known for known in self._replicas):
            _check_replica(replica)
            self._replicas.append(replica)

    def reduce(
        self,
        grads: Mapping[str, Tensor],
        selected: Mapping[str, Tensor],
        *,
        accumulate: bool,
        problem: UsageError | None,
    ) -> Targets:
        """(parameter, sum over processes) of every gradient, after all have agreed to it."""
        key = [(name, tuple(g.shape), str(g.dtype)) for name, g in sorted(grads.items())]
        reduction = self.reduction(
            sorted(grads), selected, key=(key, accumulate),
            problem=problem or self._problem(grads.values()),
        )  # fmt: skip
        reduction.begin()
        for name, grad in sorted(grads.items()):
            reduction.add(name, grad)
        return reduction.targets()

    def reduction(
        self, names: Sequence[str], selected: Mapping[str, Tensor], *, key: Any,
        problem: UsageError | None = None,
    ) -> Reduction:  # fmt: skip
        """Sums of these names, to be sent one by one; ``key``: what all processes must share."""
        replicated = {id(p): r.process_group for r in self._replicas for p in r._module_parameters}
        places, problem = {**replicated, **self.homes()}, problem or self._problem(())
        return Reduction(places, names, selected, key=(list(names), key), problem=problem)

    def add_mean(self, grads: Mapping[str, Tensor], selected: Mapping[str, Tensor]) -> None:
        """Add gradients to ``.grad`` as DDP and ``fully_shard`` do: the mean over processes.

        Inside DDP's ``no_sync()`` they stay this process's own, and are reduced with the next.
        """
        homes = self.homes()
        replicas = {id(p): r for r in self._replicas for p in r._module_parameters}
        for name, parameter in sorted(selected.items()):
            value, home = grads.get(name), homes.get(id(parameter))
            replica = replicas.get(id(parameter))
            if home is not None:
                groups = home.device_mesh.get_all_groups()  # type: ignore[attr-defined]
                if anywhere(value is not None, groups, parameter.device):
                    whole = torch.zeros_like(parameter) if value is None else value
                    mean = reduce_shard(whole, home) / home.device_mesh.size()  # type: ignore[attr-defined]
                    home.grad = mean if home.grad is None else home.grad + mean
            elif replica is not None and replica.require_backward_grad_sync:
                groups = [replica.process_group]
                if anywhere(value is not None, groups, parameter.device):
                    whole = torch.zeros_like(parameter, requires_grad=False)
                    for part in (parameter.grad, value):
                        whole += 0 if part is None else part
                    dist.all_reduce(whole, group=replica.process_group)
                    parameter.grad = whole / dist.get_world_size(replica.process_group)
            elif value is not None:
                parameter.grad = value if parameter.grad is None else parameter.grad + value

    def _problem(self, grads: Iterable[Tensor]) -> UsageError | None:
        if any(not r.require_backward_grad_sync for r in self._replicas):
            return UsageError(
                "set_grad inside no_sync()",
                why="it reduces at once; gradients left unreduced would let processes drift apart",
                fix="leave no_sync(); set_grad(..., accumulate=True) adds up micro-batches",
            )
        if any(r._join_config.enable for r in self._replicas):
            return _unsupported("DDP's join()", "an empty batch where a process has run out")
        if any(is_distributed(g) for g in grads):
            return UsageError(
                "set_grad takes this process's own sums, got a DTensor",
                fix="pass what the tape answered; set_grad reduces and shards it",
            )
        return None


def _check_replica(replica: DistributedDataParallel) -> None:
    for found, what, instead in (
        (replica.static_graph, "static_graph=True", "DDP without it"),
        (replica._comm_hooks, "a communication hook", "DDP without it"),
        (replica.mixed_precision, "mixed_precision", "torch.autocast"),
        (replica._delay_all_reduce_params, "delay_all_reduce_named_params", "DDP without it"),
    ):
        if found:
            raise _unsupported(f"DDP with {what}", instead)


def _groups_of(module: Any) -> Any:
    """Groups of parameters that a module of ``fully_shard`` gathers at once."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    group = state._fsdp_param_group  # before torch 2.13, one at most
    return [] if group is None else [group]


def _check_group(group: Any) -> None:
    if not group.reduce_grads or not group.all_reduce_grads:
        raise UsageError(
            "a model of fully_shard with gradient sync switched off",
            why="gradients kept aside would be added later, unclipped",
            fix="model.set_requires_gradient_sync(True); set_grad(..., accumulate=True) adds up",
        )
    if any(slot.is_dtensor for slot in group.fsdp_params):
        raise _unsupported("tensor-parallel parameters", "fully_shard alone")


def _registry(module: nn.Module) -> Any:
    contract = sys.modules.get("torch.distributed._composable.contract")
    return None if contract is None else contract._get_registry(module)


def _unsupported(what: str, instead: str) -> UsageError:
    return UsageError(
        f"{what} is not supported",
        why="persample does not know how its gradients reach the other processes",
        fix=f"use {instead}",
    )
