"""The suspect score: which labels the gradients contradict."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .neighbours import Neighbours, class_agreement, nearest

STRONG = 0.7  # a score above it is counted as a suspect


@dataclass(frozen=True, slots=True)
class Suspicion:
    """One score per sample in 0 … 1, the three things it is made of, and a second opinion.

    ``vote`` is the label that the nearest gradients have most, each counted by its |cosine|.
    """

    score: Tensor
    size: Tensor
    agreement: Tensor
    class_agreement: Tensor | None
    neighbours: Neighbours
    vote: Tensor | None


def rank(values: Tensor) -> Tensor:
    """Position in sorted order, 0 … 1; ties share their mean position."""
    if values.numel() == 0:
        return values.float()
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    middle = counts.cumsum(0) - (counts + 1) / 2
    places: Tensor = middle / max(values.numel() - 1, 1)
    return places[inverse].float()


def suspicion(
    projections: Tensor, norms: Tensor, labels: Tensor | None, usable: Tensor, *, k: int = 10
) -> Suspicion:
    """Large gradients that disagree with the gradients nearest to them and with their class.

    With r the rank of the norm in 0 … 1, a the mean cosine with the k gradients of largest |cosine|
    and c the cosine with the mean direction of the class, score = (2 r + (1 − a) + (1 − c)/2) / 5.
    Without classes, (2 r + (1 − a)) / 4. Samples that are not usable score zero.
    """
    neighbours = nearest(projections, usable, k)
    size = torch.zeros(len(norms), dtype=torch.float32)
    size[usable] = rank(norms[usable])
    agreement = neighbours.agreement()
    if labels is None or labels.unique().numel() < 2:
        score = (2 * size + (1 - agreement)) / 4
        return Suspicion(score * usable, size, agreement, None, neighbours, None)
    own = class_agreement(projections, labels, usable)
    score = (2 * size + (1 - agreement) + (1 - own) / 2) / 5
    vote = _vote(neighbours, labels)
    return Suspicion(score * usable, size, agreement, own, neighbours, vote)


def _vote(neighbours: Neighbours, labels: Tensor) -> Tensor:
    """The label of most weight among the nearest gradients; one's own where there are none."""
    if neighbours.indices.shape[1] == 0:
        return labels.clone()
    theirs, weight = labels[neighbours.indices], neighbours.cosines.abs()
    same = theirs.unsqueeze(1) == theirs.unsqueeze(2)
    best = (same * weight.unsqueeze(1)).sum(2).argmax(1, keepdim=True)
    return torch.where(weight.sum(1) > 0, theirs.gather(1, best).squeeze(1), labels)
