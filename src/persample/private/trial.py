"""The first step's check: persample against autograd, on rows that hold no data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PersampleError, VerificationError
from ..verification import verify

ROWS = 4


def verify_on_synthetic_rows(
    model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor], batch: Any, rows: int
) -> str:
    """Check one step; returns ``"passed"``, or why it could not be tried.

    Only shapes and dtypes of the batch are read. Random numbers are not what every model takes, so
    a model that fails on them is left to the recording itself, which refuses what it cannot prove.
    """
    kept = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        made = synthetic(batch, rows, torch.Generator().manual_seed(0))
        with torch.random.fork_rng(), torch.no_grad():
            losses = loss_fn(model, made)
        if not bool(torch.isfinite(losses).all()):
            return "not tried: the losses of synthetic rows are not finite"
        found = verify(model, loss_fn, made)
    except PersampleError as error:
        return f"not tried: {error.what}"
    except Exception as error:
        return f"not tried: {type(error).__name__} on synthetic rows"
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
    if found.interacting:
        moved = max(found.parameters, key=lambda one: one.isolation)
        raise VerificationError(
            "samples change each other's gradients",
            where=f"most in the gradient of {moved.name!r}, by {moved.isolation:.0%} of its size",
            why="a statistic of the batch or of its labels, or a number taken out of torch, "
            "reaches the losses, so clipping does not bound what one sample changes",
            fix="compute each loss from its own sample and from public constants alone",
        )
    if not found.ok:
        raise VerificationError(
            "persample does not agree with autograd on this model",
            why=str(found),
            fix="report the model; verify=False skips this check",
        )
    return "passed"


def synthetic(value: Any, rows: int, generator: torch.Generator) -> Any:
    """A batch of random rows in the shape of another: normal numbers, zeros and ones.

    Raises TypeError where it holds something else than tensors: that might be data.
    """
    if isinstance(value, Mapping):  # also the batches of Hugging Face
        items = {key: synthetic(item, rows, generator) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, (tuple, list)):
        found = [synthetic(item, rows, generator) for item in value]
        return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
    if not isinstance(value, Tensor):
        raise TypeError(type(value).__name__)
    sampled = value.dim() > 0 and len(value) == rows
    shape = (ROWS, *value.shape[1:]) if sampled else tuple(value.shape)
    if value.is_floating_point() or value.is_complex():
        made = torch.randn(shape, generator=generator, dtype=torch.float32)
    else:
        made = torch.randint(2, shape, generator=generator)
    return made.to(value.dtype).to(value.device)
