"""What private training refuses, and what to do instead."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..errors import PersampleError, UsageError
from ..validation import shown
from .plan import Plan

_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm
# whose buffers follow from parameters alone
_DERIVED = ("SpectralNorm", "_SpectralNorm")


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained, each once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def expect_plan(plan: Any, count: int, users: object) -> None:
    """Refuse a plan that says something else than the data."""
    if not isinstance(plan, Plan):
        raise UsageError(
            f"plan must be a private.Plan, got {shown(plan)}",
            fix="plan = private.plan(epsilon=8, delta=1e-5, size=..., batch_size=..., epochs=...)",
        )
    if plan.divisor is None:
        raise UsageError(
            "the plan has no divisor: it is enough for accounting, not for training",
            fix="private.plan(..., size=...) or private.plan(..., divisor=...)",
        )
    if (plan.unit == "user") is (users is None):
        given = "users= was not given" if users is None else "users= was given"
        raise UsageError(
            f"the plan protects a {plan.unit}, but {given}",
            fix="private.plan(unit='user', ...) and Training(..., users=one label per sample)",
        )
    if plan.unit == "sample" and plan.size not in (None, count):
        raise UsageError(
            f"the plan is for {plan.size:,} samples, but the data have {count:,}",
            why="size is a public constant; a record that is removed keeps its index",
            fix=f"private.plan(size={count}, ...), if that number may be known; tensors with a row "
            "for each sample are passed as a tuple, (x, y)",
        )


def expect_model(model: Any) -> dict[str, Tensor]:
    """Refuse modules whose state mixes or keeps samples, and hooks; what is trained."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be an nn.Module, got {shown(model)}", fix="pass the module")
    trained = trainable(model)
    if not trained:
        raise UsageError("the model has no trainable parameter", fix="requires_grad_(True)")
    for name, module in model.named_modules():
        if isinstance(module, _BATCH_NORM) and (module.training or module.running_mean is None):
            raise UsageError(
                f"{_called(name, module)} normalises over the batch",
                why="every sample's gradient depends on the others, and the running statistics "
                "would publish them",
                fix="replace it by GroupNorm or LayerNorm, or put it in eval() mode",
            )
        if isinstance(module, _INSTANCE_NORM):
            if module.training and module.track_running_stats:
                raise UsageError(
                    f"{_called(name, module)} keeps running statistics",
                    why="they are computed from the data without noise, and saved with the model",
                    fix="track_running_stats=False, or put it in eval() mode",
                )
    for name, parameter in trained.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UsageError(
                f"the parameter {name!r} has a gradient hook",
                why="it would act on sums after clipping, or not at all",
                fix="remove the hook",
            )
    return trained


def _called(name: str, module: nn.Module) -> str:
    return f"{type(module).__name__} {name!r}" if name else type(module).__name__


def expect_optimizer(optimizer: Any, model: nn.Module, trained: Mapping[str, Tensor]) -> None:
    """Refuse an optimizer of other parameters, and one that runs the model again."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"optimizer must be a torch.optim.Optimizer, got {shown(optimizer)}",
            fix="torch.optim.SGD(model.parameters(), lr=0.1)",
        )
    if _needs_argument(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} calls a closure, perhaps several times in a step",
            why="every call would be a release of its own, with the same noise or none",
            fix="an optimizer whose step() needs no closure: SGD, Adam, AdamW",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError(
            "SparseAdam takes sparse gradients only",
            why="noise is added to every row: rows without it would tell who was not drawn",
            fix="torch.optim.Adam(model.parameters())",
        )
    known = {id(p) for p in model.parameters()}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if not held <= known:
        raise UsageError(
            "the optimizer holds parameters that are not the model's",
            why="they would be trained without noise, or not at all",
            fix=f"{type(optimizer).__name__}(model.parameters(), ...), of this very model",
        )
    left = [name for name, p in trained.items() if id(p) not in held]
    if left:
        raise UsageError(
            f"the optimizer does not hold the trainable parameter {left[0]!r}",
            why="its gradient would be clipped with the others, for nothing",
            fix="freeze it with requires_grad_(False), or give it to the optimizer",
        )


def expect_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> None:
    """Refuse a scheduler of another optimizer, and one that reads a metric."""
    for each in _nested(scheduler):
        if isinstance(each, ReduceLROnPlateau) or _needs_argument(each):
            raise UsageError(
                f"{type(each).__name__} reads a metric",
                why="a training loss that decides the learning rate is published without noise",
                fix="a scheduler that counts steps: CosineAnnealingLR, LambdaLR, OneCycleLR",
            )
        if getattr(each, "optimizer", optimizer) is not optimizer:
            raise UsageError(
                "the scheduler belongs to another optimizer", fix="make it from this optimizer"
            )


def _nested(scheduler: Any) -> Iterable[Any]:
    if scheduler is None:
        return
    if not callable(getattr(scheduler, "step", None)):
        raise UsageError(
            f"scheduler must be one of torch.optim.lr_scheduler, got {shown(scheduler)}",
            fix="torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps)",
        )
    yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _nested(inner)


def _needs_argument(stepped: object) -> bool:
    """Whether ``step`` takes something besides the object; schedulers wrap the one it has."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    _, *found = inspect.signature(type(stepped).step).parameters.values()  # type: ignore[attr-defined]
    return any(p.default is p.empty and p.kind in kinds for p in found)


def refused(error: PersampleError) -> PersampleError:
    """A refusal without fixes that private training refuses, too."""
    fixes = re.split(r"[;,] or,? ", error.fix)
    kept = [fix for fix in fixes if "unproven=" not in fix]
    if len(kept) == len(fixes):
        return error
    kept += ["compute each loss from its own sample and from public constants alone"]
    fix = "; or ".join(fix for fix in kept if fix)
    return type(error)(error.what, where=error.where, why=error.why, fix=fix)


def expect_options(options: Mapping[str, Any], *, users: bool) -> None:
    """Refuse options of a recording under which a clipped sum would not be the plan's."""
    if options.get("unproven", "refuse") != "refuse":
        raise UsageError(
            'unproven="loop" in private training',
            why="gradients of losses whose samples interact are no bounded contributions",
            fix="leave it out; what is refused then cannot be trained privately as it is",
        )
    for name in ("n", "sample_ids"):
        if users and name in options:
            raise UsageError(
                f"{name}= in a training of users",
                why="which rows are whose follows from users=",
                fix="leave it out",
            )
    if options.get("params") is not None:
        raise UsageError(
            "params= in private training",
            why="every trainable parameter is clipped and noised together",
            fix="freeze the others with requires_grad_(False)",
        )


def expect_losses(losses: Any, rows: int) -> None:
    """Refuse what ``loss_fn`` returned if it is not one loss per sample."""
    if not isinstance(losses, Tensor):
        raise UsageError(
            f"loss_fn must return a tensor of losses, got {shown(losses)}",
            fix='F.cross_entropy(model(x), y, reduction="none")',
        )
    if losses.dim() == 0 or len(losses) != rows:
        raise UsageError(
            f"loss_fn must return one loss per sample, got shape {tuple(losses.shape)} "
            "for a micro-batch",
            why="a sum or a mean over samples cannot be clipped per sample",
            fix='reduction="none" in the loss, then a mean over all axes but the first',
        )


def number_taken(where: str) -> UsageError:
    """The forward took a number out of a batch statistic, and computed losses after it."""
    return UsageError(
        "a number of several samples was taken out of torch before the losses",
        where=where.partition(": ")[2].partition("; if they")[0],
        why="losses that depend on it let one sample change the gradients of others: no clipping "
        "bounds its influence",
        fix="compute with it in torch, or take it (for a log) after the losses are computed",
    )


class Written:
    """Buffers and parameters as they were before a forward: data must not be written to them."""

    def __init__(self, model: nn.Module) -> None:
        self._seen = [
            (f"{prefix}.{name}" if prefix else name, held, name, value, value._version)
            for prefix, module in model.named_modules()
            for held in (module._parameters, module._buffers)
            for name, value in held.items()
            if value is not None and not (held is module._buffers and _is_derived(module, name))
        ]

    def expect_none(self) -> None:
        """Refuse a model that keeps something of its samples: no noise would be added to it."""
        for path, held, name, value, version in self._seen:
            if held.get(name) is not value or value._version != version:
                kind = "parameter" if isinstance(value, nn.Parameter) else "buffer"
                raise UsageError(
                    f"the {kind} {path!r} was written to in forward",
                    why="what it keeps of the data is saved with the model, without noise",
                    fix="put that module in eval() mode, or keep such state out of the model",
                )


def _is_derived(module: nn.Module, name: str) -> bool:
    """Vectors of spectral norms follow from the weight alone."""
    if type(module).__name__ in _DERIVED:
        return True
    return name.endswith(("_u", "_v")) and f"{name[:-2]}_orig" in module._parameters
