"""``persample.inspect``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from ..errors import UsageError
from ..inputs.batch_samples import Pick
from ..testing import LossFn
from ..validation import expect_loss_fn, shown, whole
from .collect import Plan, collect, untouched
from .colours import colour
from .reading import expect_batches
from .report import Report
from .show import Show


def inspect(
    model: nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    ids: Pick | Iterable[Any] | None = None,
    *,
    labels: Pick | Literal[False] | None = None,
    show: Show | None = None,
    limit: int | None = None,
    device: torch.device | str | None = None,
    width: int = 128,
    check: bool = True,
    progress: bool | None = None,
    memory: int = 64 << 20,
    scratch: str | None = None,
    **options: Any,
) -> Report:
    """Find outliers, wrong labels and duplicates in one pass over a data set.

    The model, its buffers, its gradients and the random generators are left unchanged. Ctrl-C ends
    the pass early; the report then covers the samples seen so far.

    >>> import torch, persample
    >>> model = torch.nn.Linear(4, 3)
    >>> batches = [(torch.randn(8, 4), torch.randint(3, (8,))) for _ in range(3)]
    >>> def losses(model, batch):
    ...     return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    >>> report = persample.inspect(model, losses, batches, progress=False)
    >>> report.norms.shape, len(report.suspects(5))
    (torch.Size([24]), 5)

    Args:
        model: Any module; it is not changed.
        loss_fn: A function of (model, batch) that returns one loss per sample.
        batches: Any iterable of batches.
        ids: One id per sample: a key, attribute, position or function of the batch that carries
            them; or all ids in the order of the data, which is refused with a loader that may
            reorder samples. Without ids, samples are numbered: 7 if the order is that of the data,
            "pass-7" if it is only that of this pass.
        labels: Where the integer labels are. By default ``batch[1]`` or the key "labels", "label",
            "y" or "target", if it looks like labels; False uses none.
        show: How samples are shown.
        limit: The largest number of batches.
        device: Where to move model and batches.
        width: The dimension of the random projections.
        check: Verify the first samples.
        progress: Show progress; by default only on a terminal.
        memory: Bytes per column that stay in memory; larger columns go to files in ``scratch``.
        scratch: The directory of those files.
        **options: For :func:`persample.record`. ``n`` and ``sample_ids`` may also be a key or
            attribute of the batch, or a function of it.

    Raises:
        UsageError: An argument is invalid, or there are no data.
        MixedSamplesError: Samples interact before the loss.
        StorageError: A file could not be written.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"inspect takes an nn.Module, got {type(model).__name__}",
            fix="persample.inspect(model, loss_fn, batches)",
        )
    expect_loss_fn(loss_fn)
    if show is not None and not isinstance(show, Show):
        raise UsageError(
            f"show must be a persample.Show, got {shown(show)}",
            fix="show=persample.Show(images=lambda batch: batch[0])",
        )
    limit = None if limit is None else whole(limit, "limit", least=1)
    width, memory = whole(width, "width", least=1), whole(memory, "memory", least=0)
    for name in ("lean", "verify"):
        if options.pop(name, False):
            raise UsageError(f"inspect does not take {name}=", fix="leave it out")
    plan = Plan(
        ids=ids, labels=labels, show=show or Show(), limit=limit, device=device, width=width,
        check=check, progress=progress, memory=memory, scratch=scratch, options=options,
    )  # fmt: skip
    found = collect(model, loss_fn, expect_batches(batches), plan)
    report = Report(found)
    if not report.interrupted and len(found.gallery.tokens):
        with untouched(model):
            colour(model, loss_fn, found, report.worth_a_look(), options)
    return report
