"""Rules: how a use's per-sample gradients are represented. ``generic`` serves every operator."""

from . import (  # noqa: F401  (importing a family fills the table)
    broadcast,
    contraction,
    convolution,
    embedding,
    linear,
    normalization,
)
from .expanded_copies import by_expanded_copies
from .generic import generic
from .table import RULES, Forms, OfTable, Rule, Unsuited

__all__ = [
    "RULES",
    "Forms",
    "OfTable",
    "Rule",
    "Unsuited",
    "by_expanded_copies",
    "generic",
    "stretched",
]
stretched = by_expanded_copies  # the former name
