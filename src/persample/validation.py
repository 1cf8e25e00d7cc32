"""Checks of arguments, before anything is computed from them."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .errors import UsageError


def shown(value: object) -> str:
    """A value in an error message, at most one line."""
    if isinstance(value, Tensor):
        kind = "a tensor" if value.layout is torch.strided else f"a {str(value.layout)[6:]} tensor"
        return f"{kind} {tuple(value.shape)} of {value.dtype} on {value.device}"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:59]}…"


def counted(count: int, one: str, several: str = "") -> str:
    """A number of things: one loss, two losses."""
    return f"{count} {one if count == 1 else several or one + 's'}"


def whole(value: Any, what: str, *, least: int | None = None, fix: str = "") -> int:
    """An integer, also of NumPy or torch; truth values are none."""
    try:
        found = None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        found = None
    if found is None or (least is not None and found < least):
        kind = {None: "an integer", 0: "a non-negative integer", 1: "a positive integer"}[least]
        raise UsageError(
            f"{what} must be {kind}, got {shown(value)}", fix=fix or f"pass {kind} as {what}"
        )
    return found


def number(value: Any, what: str, *, fix: str = "") -> float:
    """One real number; text and truth values are none."""
    if isinstance(value, Tensor):
        fits = value.numel() == 1 and not value.is_meta
        fits = fits and not value.is_complex() and value.dtype != torch.bool
    else:
        fits = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not fits:
        raise UsageError(
            f"{what} must be one number, got {shown(value)}", fix=fix or f"pass one float as {what}"
        )
    return float(value)


def expect_loss_fn(loss_fn: Any) -> None:
    """Refuse what cannot be called with a model and a batch."""
    if not callable(loss_fn):
        raise UsageError(
            f"loss_fn is a function of (model, batch), got {shown(loss_fn)}",
            fix="lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], reduction='none')",
        )


def expect_ids(ids: Any, what: str) -> None:
    """Refuse what does not give every row the number of a sample."""
    integral = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex())
    if not integral or ids.dim() != 1 or ids.is_meta or ids.layout is not torch.strided:
        raise UsageError(
            f"{what} must be a dense tensor of integers with one axis, got {shown(ids)}",
            fix="torch.tensor([0, 0, 1]): rows 0 and 1 are of sample 0, row 2 is of sample 1",
        )


def expect_coefficients(c: Any, n: int) -> None:
    """Refuse what is not one finite real number for each sample."""
    fits = isinstance(c, Tensor) and c.shape == (n,) and not c.is_complex()
    if not fits or c.is_meta or c.layout is not torch.strided:
        raise UsageError(
            f"coefficients must be real, in a tensor of shape ({n},), got {shown(c)}",
            fix="one number for each sample, in the order of the losses",
        )
    if not bool(torch.isfinite(c.double()).all()):
        raise UsageError("coefficients must be finite", fix="zero leaves a sample out")


def expect_projection(dim: Any, seed: Any) -> tuple[int, int]:
    """Refuse what is not a positive dimension and an integer seed."""
    return whole(dim, "dim", least=1), whole(seed, "seed")


def expect_direction(
    direction: Any, names: Iterable[str], selected: Mapping[str, Tensor], *,
    chosen: bool = False, several: bool = False,
) -> None:  # fmt: skip
    """Refuse a direction that does not fit the parameters asked for.

    ``chosen``: the names were selected by ``params=``, and the direction may also hold others.
    ``several``: it may hold m directions, as tensors (m, *shape).
    """
    if not isinstance(direction, Mapping):
        raise UsageError(
            f"a direction is a dictionary of names, got {shown(direction)}",
            fix="{name: tensor of the parameter's shape}, as tape.weighted_sum(c) gives it",
        )
    wanted = list(names)
    odd = set(wanted) - set(direction) if chosen else set(direction) ^ set(wanted)
    if odd:
        raise UsageError(
            f"the direction must have the recorded parameters' names: {sorted(map(str, odd))[:4]}",
            fix="leave none out and add none; params= selects some of them",
        )
    counts = {_expect_along(name, direction[name], selected[name], several) for name in wanted}
    if len(counts) > 1:
        raise UsageError(
            f"parameters have different numbers of directions: {sorted(counts)}",
            fix="give every parameter (m, *shape) with the same m, or its own shape",
        )


def _expect_along(name: str, value: Any, parameter: Tensor, several: bool) -> int:
    """Refuse what is no direction of a parameter; how many there are (0 for a single one)."""
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{name}: a direction holds tensors, got {shown(value)}",
            fix="{name: tensor of the parameter's shape}",
        )
    many = several and value.dim() and value.shape[1:] == parameter.shape
    if value.shape != parameter.shape and not many:
        raise UsageError(
            f"{name}: direction {tuple(value.shape)}, parameter {tuple(parameter.shape)}",
            fix="give every parameter a tensor of its own shape"
            + (", or m of them: (m, *shape)" if several else ""),
        )
    if value.device != parameter.device or value.layout is not torch.strided:
        raise UsageError(
            f"{name}: a direction must be dense, on the parameter's device, got {shown(value)}",
            fix=f"direction[{name!r}].to_dense().to({str(parameter.device)!r})",
        )
    if value.is_complex() and not parameter.is_complex():
        raise UsageError(
            f"{name}: a complex direction for a real parameter", fix="take its real part"
        )
    return value.shape[0] if value.dim() > parameter.dim() else 0


def unfit(grads: Any, selected: Mapping[str, Tensor]) -> UsageError | None:
    """Why these cannot become the parameters' gradients."""
    if not isinstance(grads, Mapping):
        return UsageError(
            f"set_grad takes {{name: gradient}}, got {shown(grads)}",
            fix="tape.set_grad(tape.clipped_sum(1.0))",
        )
    for name, value in grads.items():
        if name not in selected:
            return UsageError(
                f"no recorded parameter is called {name!r}", fix="names are those of tape.names"
            )
        parameter = selected[name]
        if not isinstance(value, Tensor) or value.is_meta is not parameter.is_meta:
            return UsageError(
                f"{name}: a gradient must be a tensor, got {shown(value)}",
                fix="tape.set_grad(tape.clipped_sum(1.0))",
            )
        if value.shape != parameter.shape:
            return UsageError(
                f"{name}: a gradient of shape {tuple(value.shape)} for a parameter of "
                f"shape {tuple(parameter.shape)}",
                fix="set_grad takes sums over samples, not per-sample gradients",
            )
        if value.is_complex() and not parameter.is_complex():
            return UsageError(
                f"{name}: a complex gradient for a real parameter", fix="take its real part"
            )
    return None
