"""Nearest gradients and duplicates, from projections, a block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

EVERY = 16_384  # up to here all pairs are compared
BLOCK = 1_024


@dataclass(frozen=True, slots=True)
class Neighbours:
    """For each sample the k gradients of largest |cosine|: who, and the cosine with its sign."""

    indices: Tensor
    cosines: Tensor

    def agreement(self) -> Tensor:
        """Mean cosine with the nearest gradients, −1 … 1; zero for a sample without direction."""
        if self.cosines.shape[1] == 0:
            return torch.zeros(self.cosines.shape[0], dtype=torch.float32)
        return self.cosines.mean(1)


def unit(rows: Tensor) -> Tensor:
    """Rows of length one; rows that are zero, not finite or below 1e-30 become zero.

    Scaled by their largest entry first: the squares of a well-fitted sample's gradient underflow.
    """
    rows = rows.float()
    top = rows.abs().amax(1, keepdim=True) if rows.numel() else rows.new_zeros(len(rows), 1)
    fine = torch.isfinite(top) & (top > 1e-30)
    rows = torch.where(fine, rows / torch.where(fine, top, 1), 0)
    sizes: Tensor = rows.norm(dim=1, keepdim=True)
    return rows / sizes.clamp(min=1)


def blocks(count: int, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Runs of samples."""
    for first in range(0, count, size):
        yield first, min(first + size, count)


def nearest(projections: Tensor, usable: Tensor, k: int = 10, *, seed: int = 0) -> Neighbours:
    """The k nearest usable gradients of every sample, by |cosine|.

    Nearest means most parallel, in the same or in the opposite direction: gradients are nearly
    parallel where inputs are alike, and the sign says whether the labels pull the same way. Beyond
    16,384 samples the neighbours are sought among that many, drawn at random.
    """
    count = projections.shape[0]
    pool = usable.nonzero().flatten()
    if pool.numel() > EVERY:
        drawn = torch.randperm(pool.numel(), generator=torch.Generator().manual_seed(seed))
        pool = pool[drawn[:EVERY]].sort().values
    k = max(0, min(k, pool.numel() - 1))
    indices = torch.zeros(count, k, dtype=torch.long)
    cosines = torch.zeros(count, k, dtype=torch.float32)
    if k == 0:
        return Neighbours(indices, cosines)
    others = unit(projections[pool])
    for first, last in blocks(count):
        mine = unit(projections[first:last])
        found = mine @ others.T
        found[pool.unsqueeze(0) == torch.arange(first, last).unsqueeze(1)] = 0  # not oneself
        best = found.abs().topk(k, 1).indices
        indices[first:last] = pool[best]
        cosines[first:last] = found.gather(1, best)
    cosines[~usable] = 0
    return Neighbours(indices, cosines)


def class_agreement(projections: Tensor, labels: Tensor, usable: Tensor) -> Tensor:
    """Cosine of every gradient with the mean direction of its class, itself left out."""
    classes, inverse = labels.unique(return_inverse=True)
    sums = torch.zeros(len(classes), projections.shape[1], dtype=torch.float32)
    for first, last in blocks(len(labels)):
        mine = unit(projections[first:last]) * usable[first:last].unsqueeze(1)
        sums.index_add_(0, inverse[first:last], mine)
    found = torch.zeros(len(labels), dtype=torch.float32)
    for first, last in blocks(len(labels)):
        mine = unit(projections[first:last]) * usable[first:last].unsqueeze(1)
        found[first:last] = (mine * unit(sums[inverse[first:last]] - mine)).sum(1)
    return found


def duplicates(
    projections: Tensor, norms: Tensor, usable: Tensor, *, tolerance: float = 0.02
) -> list[list[int]]:
    """Groups of samples whose gradients differ by less than ``tolerance`` of their length.

    Each sample joins the group of the earliest sample that it is close to. Beyond 16,384 samples
    only those are compared whose projections fall on the same sides of sixteen random planes, four
    times over: a pair is missed about once in ten thousand.
    """
    first = torch.arange(len(norms))
    for pool in _pools(projections, (usable & (norms > 0)).nonzero().flatten()):
        _join(projections, norms, pool, tolerance, first)
    groups: dict[int, list[int]] = {}
    for i in (first != torch.arange(len(norms))).nonzero().flatten().tolist():
        root = int(first[i])
        while int(first[root]) != root:
            root = int(first[root])
        groups.setdefault(root, [root]).append(i)
    return [groups[root] for root in sorted(groups)]


def _pools(projections: Tensor, pool: Tensor) -> Iterator[Tensor]:
    """All samples at once, or sets of those that share a bucket of signs."""
    if pool.numel() <= EVERY:
        yield pool
        return
    generator = torch.Generator().manual_seed(0)
    powers = 2 ** torch.arange(16)
    for _ in range(4):  # nearly equal rows share a key nine times out of ten
        planes = torch.randn(projections.shape[1], 16, generator=generator)
        parts = [
            ((unit(projections[pool[a:b]]) @ planes) > 0).long() @ powers
            for a, b in blocks(pool.numel())
        ]
        keys, order = torch.cat(parts).sort(stable=True)
        _, counts = keys.unique_consecutive(return_counts=True)
        for bucket in pool[order].split(counts.tolist()):
            if bucket.numel() > 1:
                yield bucket


def _join(
    projections: Tensor, norms: Tensor, pool: Tensor, tolerance: float, first: Tensor
) -> None:
    """Point every sample at the earliest one of the pool that it is close to."""
    for a, b in blocks(pool.numel()):
        mine = projections[pool[a:b]].float() / norms[pool[a:b]].float().unsqueeze(1)
        for c, d in blocks(b):
            theirs = projections[pool[c:d]].float() / norms[pool[c:d]].float().unsqueeze(1)
            p, q = mine.square().sum(1, keepdim=True), theirs.square().sum(1).unsqueeze(0)
            near = p + q - 2 * mine @ theirs.T <= tolerance**2 * torch.maximum(p, q)
            ratio = norms[pool[a:b]].unsqueeze(1) / norms[pool[c:d]].unsqueeze(0)
            near &= (ratio - 1).abs() <= tolerance
            near &= pool[c:d].unsqueeze(0) < pool[a:b].unsqueeze(1)
            rows = near.any(1).nonzero().flatten()
            earliest = pool[c:d][near[rows].int().argmax(1)]
            target = pool[a:b][rows]
            first[target] = torch.minimum(first[target], earliest)
