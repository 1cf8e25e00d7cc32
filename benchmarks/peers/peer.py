"""What a peer is, the registry of peers, and the copy of a model that a library gets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..models.case import Case
from ..models.language import LanguageModel
from ..models.pretrained import Logits
from ..models.vision import BatchedVisionTransformer, VisionTransformer
from .answers import Grads, rows_clipped, rows_gram, rows_norms

Steps = dict[str, Callable[[], Any]]
Peer = Callable[[Case, float], Steps]
PEERS: dict[str, Peer] = {}
OWN = ("persample", "persample, fresh", "persample, lean")


def peer(name: str) -> Callable[[Peer], Peer]:
    """Register a peer under a name."""

    def register(build: Peer) -> Peer:
        PEERS[name] = build
        return build

    return register


@dataclass
class Twin:
    """A copy of the model as a library of module hooks needs it.

    The mathematics is the same; the plain step that everything is divided by stays the original.
    """

    net: nn.Module
    shapes: dict[str, torch.Size]
    names: dict[str, str] = field(default_factory=dict)  # where they differ from the original's

    def collect(self, attribute: str) -> Grads:
        """What a library left on the parameters, under the original names and in their shapes."""
        found: Grads = {}
        for name, p in self.net.named_parameters():
            value = getattr(p, attribute, None) if p.requires_grad else None
            if value is not None:
                true = self.names.get(name, name)
                if value.shape[value.dim() - p.dim() :] == p.shape:
                    value = value.reshape(*value.shape[: value.dim() - p.dim()], *self.shapes[true])
                found[true] = value
        clear(self.net, attribute)
        return found


def twin(net: nn.Module) -> Twin:
    """A copy that looks tokens and positions up once per sample, in embeddings."""
    shapes = {name: p.shape for name, p in net.named_parameters()}
    net = copy.deepcopy(net)
    if isinstance(net, (LanguageModel, Logits)):
        net.batched = True
    if isinstance(net, VisionTransformer):
        names = {"token.weight": "token", "positions.weight": "positions"}
        return Twin(BatchedVisionTransformer(net), shapes, names)
    return Twin(net, shapes)


def clear(net: nn.Module, *attributes: str) -> None:
    """Drop ``.grad`` and what a library left on the parameters."""
    for parameter in net.parameters():
        parameter.grad = None
        for attribute in attributes:
            if hasattr(parameter, attribute):
                setattr(parameter, attribute, None)


def from_rows(grads: Callable[[], Grads], bound: float) -> Steps:
    """All questions from materialised gradients."""
    return {
        "grads": grads,
        "norms": lambda: rows_norms(grads()),
        "clipped sum": lambda: rows_clipped(grads(), bound),
        "gram": lambda: rows_gram(grads()),
    }
