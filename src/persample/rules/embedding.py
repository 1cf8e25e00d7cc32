"""Looking up rows of a table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..forms import Dense, Rows
from ..use import Firing, Use
from .rows import Unsuited, row_ids
from .table import Forms, rule


@rule("embedding")
def embedding(use: Use, firing: Firing, n: int) -> Forms:
    """padding_idx rows get nothing; scale_grad_by_freq counts within one sample."""
    weight, index, padding, by_frequency = use.bind(
        firing, "weight", "indices", "padding_idx", "scale_grad_by_freq"
    )
    grad, layout = firing.grads[0], use.out_layouts[0]
    if grad is None or len(use.operands) != 1:
        raise Unsuited
    sample = row_ids(grad, layout, n, grad.dim() - 1)
    flat = index.reshape(-1)
    values = grad.reshape(-1, grad.shape[-1])
    keep = sample >= 0
    if padding is not None and padding >= 0:
        keep = keep & (flat != padding)
    values = values.masked_fill(~keep.unsqueeze(1), 0)
    sample = sample.clamp(min=0)
    if by_frequency:
        values = values / _counts(sample, flat, weight.shape[0], values.dtype).unsqueeze(1)
    return [Rows(sample, flat.to(torch.long), values, n, weight.shape)]


def _counts(sample: Tensor, index: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """How often each row's (sample, index) occurs."""
    where: Tensor
    counts: Tensor
    _, where, counts = torch.unique(sample * size + index, return_inverse=True, return_counts=True)
    return counts[where].to(dtype)


@rule("embedding_bag _embedding_bag _embedding_bag_forward_only")
def embedding_bag(use: Use, firing: Firing, n: int) -> Forms:
    """Sums and means of rows; maxima go to the generic rule."""
    weight, index, offsets, by_frequency, mode, _, scales, _, padding = use.bind(
        firing, "weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse",
        "per_sample_weights", "include_last_offset", "padding_idx",
    )  # fmt: skip
    grad, layout = firing.grads[0], use.out_layouts[0]
    if grad is None or mode not in (0, 1) or len(use.operands) != 1:
        raise Unsuited
    if use.operands[0].value is not weight or use.results[0] != 0:
        raise Unsuited
    if by_frequency:
        return [Dense(_alone(use, firing, n))]
    bags = grad.shape[0]
    starts = offsets[:bags].to(torch.long)
    rows = torch.arange(index.shape[0], device=index.device)
    bag = torch.searchsorted(starts, rows, right=True) - 1
    sample = row_ids(grad, layout, n, 1)[bag]
    keep = sample >= 0
    if padding is not None and padding >= 0:
        keep = keep & (index != padding)
    values = grad[bag]
    if scales is not None:
        values = values * scales.unsqueeze(1)
    if mode == 1:
        sizes = torch.zeros(bags, dtype=grad.dtype, device=grad.device)
        sizes.index_add_(0, bag, (keep if padding is not None else sample >= 0).to(grad.dtype))
        values = values / sizes.clamp(min=1)[bag].unsqueeze(1)
    values = values.masked_fill(~keep.unsqueeze(1), 0)
    return [Rows(sample.clamp(min=0), index.to(torch.long), values, n, weight.shape)]


def _alone(use: Use, firing: Firing, n: int) -> Tensor:
    """Each sample's bags by torch's own kernel: it alone knows what it takes for frequencies."""
    weight, index, offsets, _, mode, _, scales, _, padding = use.bind(
        firing, "weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse",
        "per_sample_weights", "include_last_offset", "padding_idx",
    )  # fmt: skip
    grad = firing.grads[0]
    assert grad is not None
    sample = row_ids(grad, use.out_layouts[0], n, 1)
    ends = torch.cat([offsets[1 : grad.shape[0]], offsets.new_full((1,), index.shape[0])])
    table = weight.detach().requires_grad_()
    found = []
    for i in range(n):
        mine = (sample == i).nonzero().flatten()
        runs = [torch.arange(int(offsets[b]), int(ends[b]), device=index.device) for b in mine]
        starts = torch.tensor([0, *(r.numel() for r in runs)], device=index.device).cumsum(0)[:-1]
        rows = torch.cat(runs) if runs else index.new_zeros(0)
        with torch.enable_grad():
            out = F.embedding_bag(
                index[rows], table, starts, mode=("sum", "mean")[mode], scale_grad_by_freq=True,
                per_sample_weights=None if scales is None else scales[rows],
                padding_idx=None if padding is None or padding < 0 else padding,
            )  # fmt: skip
            found.append(torch.autograd.grad(out, table, grad[mine])[0])
    return torch.stack(found)
