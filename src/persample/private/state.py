"""Checkpoints: all that a bit-for-bit resume needs, as plain dictionaries, tensors and numbers."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import StorageError, UsageError
from ..validation import shown
from . import keys
from .ledger import Ledger
from .loading import Source
from .noise import Noise
from .parallel import Processes, bare
from .plan import Plan
from .sampling import Sampler
from .users import Units

FORMAT = 1
NOTICE = (
    "As secret as the data: with the keys in this file the noise can be subtracted. "
    "Publish the model's parameters alone."
)


class Training(Protocol):
    """What a checkpoint holds of a :class:`persample.private.Training`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    optimizer_configuration: str
    scheduler: Any
    plan: Plan
    source: Source
    processes: Processes
    ledger: Ledger
    noise: Noise

    @property
    def sampler(self) -> Sampler:
        """The coins."""

    @property
    def units(self) -> Units:
        """Samples or users."""

    def trainable(self) -> dict[str, Tensor]:
        """The parameters that are trained."""

    def set_secrets(self, sample: bytes, noise: bytes) -> None:
        """Key the draws and the noise."""


def gather(training: Training) -> dict[str, Any]:
    """A snapshot; nothing in it changes when training goes on."""
    scheduler = training.scheduler
    return {
        "format": FORMAT,
        "notice": NOTICE,
        "versions": _versions(),
        "plan": training.plan.to_dict(),
        "plan_fingerprint": training.plan.fingerprint(),
        "data_fingerprint": data_fingerprint(training),
        "optimizer_configuration": training.optimizer_configuration,
        "ledger": {"steps": training.ledger.steps, "elsewhere": training.ledger.elsewhere},
        "secrets": {
            "sample": training.sampler.secret.hex(),
            "noise": training.noise.secret.hex(),
        },
        "noise": {"last": training.noise.last, "past": _past(training)},
        "model": snapshot(bare(training.model).state_dict()),
        "optimizer": snapshot(training.optimizer.state_dict()),
        "scheduler": None if scheduler is None else snapshot(scheduler.state_dict()),
        "generators": generators(),
    }


def restore(training: Training, found: Any, *, fork: bool) -> None:
    """Go on from a snapshot. Everything is checked before anything is changed."""
    _expect_state(found)
    _expect_same(training, found, fork=fork)
    same = found["optimizer_configuration"] == training.optimizer_configuration
    bare(training.model).load_state_dict(found["model"])
    if same:  # an optimizer of a fork may be another one: it starts anew
        training.optimizer.load_state_dict(found["optimizer"])
        if training.scheduler is not None:
            training.scheduler.load_state_dict(found["scheduler"])
    training.ledger.steps = found["ledger"]["steps"]
    training.ledger.elsewhere = found["ledger"]["elsewhere"]
    names = ("sample", "noise")
    sample, noise = (bytes.fromhex(found["secrets"][name]) for name in names)
    if fork:
        training.ledger.fork(training.plan.steps)
        sample, noise = (training.processes.share(keys.fresh()) for _ in names)
    training.set_secrets(sample, noise)
    training.noise.last = found["noise"]["last"]
    training.noise.past = {
        name: snapshot(found["noise"]["past"][known])
        for known, name in _names(training).items()
        if known in found["noise"]["past"]
    }
    _set_generators(found["generators"])


def save(found: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a file whole or not at all, for its owner alone."""
    target = Path(path)
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(dict(found), file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        raise StorageError(
            f"the checkpoint {target} could not be written",
            why=(str(error).splitlines() or [type(error).__name__])[0],
            fix="the file that was there before is untouched; save to a place with room",
        ) from error


def snapshot(value: Any) -> Any:
    """A deep copy in plain containers, its tensors detached."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping) and type(value).__name__ != "Counter":
        return {key: snapshot(item) for key, item in value.items()}
    if isinstance(value, list):
        return [snapshot(item) for item in value]
    if isinstance(value, tuple):
        return tuple(snapshot(item) for item in value)
    return copy.deepcopy(value)


def configuration(optimizer: torch.optim.Optimizer, model: nn.Module, scheduler: Any) -> str:
    """A digest of an optimizer and its scheduler: classes, parameters and settings of all groups.

    The learning rate counts as it was before a scheduler changed it.
    """
    names = {id(parameter): name for name, parameter in bare(model).named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: _plain(value) for key, value in group.items() if key != "params"}
        settings["lr"] = settings.pop("initial_lr", settings.get("lr"))
        members = [(names.get(id(p), ""), list(p.shape), str(p.dtype)) for p in group["params"]]
        groups.append({"settings": settings, "parameters": members})
    found = {"class": _kind(optimizer), "groups": groups, "scheduler": _schedule(scheduler)}
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def _schedule(scheduler: Any) -> Any:
    """The class of a scheduler, and what its checkpoint does not hold: values of functions."""
    if scheduler is None:
        return None
    functions = getattr(scheduler, "lr_lambdas", ())
    inner = getattr(scheduler, "_schedulers", ())
    return [
        _kind(scheduler),
        [[_plain(f(k)) for k in (0, 1, 2, 5, 10, 100, 1000)] for f in functions],
        [_schedule(each) for each in inner],
    ]


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return repr(value)


def data_fingerprint(training: Training) -> str:
    """A digest of the data and of whose they are."""
    owners = getattr(training.units, "owners", None)
    found = training.source.fingerprint()
    if owners is not None:
        found += hashlib.sha256(repr(owners.tolist()).encode()).hexdigest()
    return found


def _names(training: Training) -> dict[str, str]:
    """Names in the bare model, and as the training has them."""
    mine = {id(p): name for name, p in training.trainable().items()}
    named = bare(training.model).named_parameters()
    return {name: mine[id(p)] for name, p in named if id(p) in mine}


def _past(training: Training) -> dict[str, Any]:
    past = training.noise.past
    return {known: snapshot(past[n]) for known, n in _names(training).items() if n in past}


def _versions() -> dict[str, str]:
    found = {"persample": importlib.metadata.version("persample"), "torch": str(torch.__version__)}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["dp-accounting"] = importlib.metadata.version("dp-accounting")
    return found


def generators() -> dict[str, Any]:
    """The states of torch's global generators."""
    found: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def _set_generators(found: Mapping[str, Any]) -> None:
    torch.set_rng_state(found["cpu"].cpu())
    if "cuda" in found and torch.cuda.is_available():
        torch.cuda.set_rng_state_all([each.cpu() for each in found["cuda"]])


def _expect_state(found: Any) -> None:
    if not isinstance(found, Mapping) or "plan_fingerprint" not in found:
        raise UsageError(
            f"this is not the state of a private training: {shown(type(found))}",
            fix="training.load_state_dict(torch.load(path)) of what training.state_dict() returned",
        )
    if found["format"] != FORMAT:
        raise UsageError(
            f"the checkpoint has format {found['format']}, this persample reads {FORMAT}",
            fix=f"use persample {found.get('versions', {}).get('persample', '')}",
        )


def _expect_same(training: Training, found: Mapping[str, Any], *, fork: bool) -> None:
    if found["plan_fingerprint"] != training.plan.fingerprint():
        old, new = found["plan"], training.plan.to_dict()
        names = [name for name in new if old.get(name) != new[name]]
        raise UsageError(
            f"the checkpoint is of another plan: {', '.join(names[:4])}",
            why="what was spent under one plan is not what another one accounts for",
            fix="make the plan of the checkpoint: private.Plan.from_dict(state['plan'])",
        )
    if found["data_fingerprint"] != data_fingerprint(training):
        raise UsageError(
            "the checkpoint is of other data",
            why="coins and noise are keyed by the place of a record in the data",
            fix="pass the same data in the same order",
        )
    mine = {name: tuple(value.shape) for name, value in _tensors(bare(training.model).state_dict())}
    if mine != {name: tuple(value.shape) for name, value in _tensors(found["model"])}:
        raise UsageError(
            "the checkpoint is of another model",
            why="names or shapes of its parameters differ",
            fix="make the model as it was made for the checkpoint",
        )
    if fork:
        if training.plan.bands > 1:
            raise UsageError(
                "a training with correlated noise cannot be forked",
                why="both branches would go on from the same past noise",
                fix="train another model from the start, and count both",
            )
        return
    if found["optimizer_configuration"] != training.optimizer_configuration:
        raise UsageError(
            "the checkpoint is of another optimizer or scheduler",
            why="another update with the same noise would let it be subtracted",
            fix="configure it as before, or load_state_dict(state, fork=True): new noise, and both "
            "branches are counted",
        )


def _tensors(found: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in found.items() if isinstance(value, Tensor)]
