"""What a batch says of its samples: their labels, and what the model predicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ..errors import UsageError
from ..inputs.batch_samples import Pick, described, one_batch, picked, tensors
from ..inputs.containers import entries

LABELS = ("labels", "label", "y", "target", "targets")


def expect_batches(batches: Any) -> Iterable[Any]:
    """Refuse a single batch given where an iterable of batches belongs."""
    expect_no_data_set(batches)
    if one_batch(batches) or isinstance(batches, str):
        raise UsageError(
            f"inspect takes an iterable of batches, got one {type(batches).__name__}",
            why="a loop over it would not give batches",
            fix="pass a DataLoader, or a list with the batch in it: [batch]",
        )
    if not isinstance(batches, Iterable):
        raise UsageError(
            f"inspect takes an iterable of batches, got {type(batches).__name__}",
            fix="pass a DataLoader or a list of batches",
        )
    return batches


def expect_no_data_set(data: Any) -> None:
    """Refuse a data set, of torch or of Hugging Face, given where its batches belong."""
    columns = hasattr(data, "column_names") and hasattr(data, "features")
    single_items = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    if single_items or columns:
        raise UsageError(
            f"inspect takes batches, got a data set ({type(data).__name__})",
            why="a loop over it gives single samples",
            fix="DataLoader(dataset, batch_size=64) with your collate_fn; batch_size=None if its "
            "items are whole batches",
        )


def single(batch: Any, error: Exception) -> UsageError | None:
    """What to say if the step failed on what is most likely a single sample.

    That is one without tensors, or one with a plain number where a batch has a tensor of them.
    """
    empty = not tensors(batch)
    parts = [part for _, part in entries(batch) or ()]
    if not empty and not any(isinstance(part, (int, float)) for part in parts):
        return None
    message = (str(error).strip().splitlines() or [""])[0]
    holds = "holds no tensors" if empty else "looks like a single sample"
    tensorless = ", collate_fn=...) with a collate_fn that makes tensors"
    return UsageError(
        f"the training step failed on {described(batch)}, which {holds}",
        why=f"{type(error).__name__}: {message}; a data set gives single samples, not batches",
        fix=f"pass DataLoader(dataset, batch_size=64{tensorless if empty else ')'}",
    )


def expect_losses(losses: Any, n: int) -> None:
    """One loss for each of n samples."""
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != (n,):
        raise UsageError(
            f"loss_fn returned {shape}, not one loss for each of {n} samples",
            why="a sample's gradient is the gradient of its own loss",
            fix='return a vector of losses, e.g. cross_entropy(..., reduction="none"); '
            "sum or average over positions of a sample, not over samples",
        )


def labels_of(batch: Any, pick: Pick | Literal[False] | None, n: int) -> Tensor | None:
    """Integer labels (n,): as told, or where batches usually have them."""
    if pick is False:
        return None
    if pick is not None:
        told = picked(pick, batch, "labels")
        found = told if isinstance(told, Tensor) else torch.as_tensor(told)
        if tuple(found.shape) != (n,) or found.is_floating_point() or found.is_complex():
            raise UsageError(
                f"labels have shape {tuple(found.shape)} and dtype {found.dtype}",
                why=f"one whole number for each of {n} samples is needed",
                fix="labels= a key, position or function of the batch; or leave it out",
            )
        return found.detach().long().cpu()
    usual = _usual(batch)
    if not isinstance(usual, Tensor) or usual.is_floating_point() or usual.is_complex():
        return None
    return usual.detach().long().cpu() if tuple(usual.shape) == (n,) else None


def _usual(batch: Any) -> Any:
    """What lies where batches usually have labels."""
    if isinstance(batch, Mapping):
        return next((batch[key] for key in LABELS if key in batch), None)
    named = None
    if not isinstance(batch, Tensor):
        named = next((name for name in LABELS if hasattr(batch, name)), None)
    if named is not None:
        return getattr(batch, named)
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return batch[1]
    return None


def predictions_of(output: Any, labels: Tensor | None, n: int) -> Tensor | None:
    """The class of the largest output, where the model's output looks like class scores."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    else:
        output = getattr(output, "logits", output)
    if labels is None or not isinstance(output, Tensor) or output.dim() != 2:
        return None
    if output.shape[0] != n or output.shape[1] < 2 or not output.is_floating_point():
        return None
    if labels.numel() and int(labels.max()) >= output.shape[1]:
        return None
    return output.detach().argmax(1).cpu()
