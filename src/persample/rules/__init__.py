"""Rules: how a use's per-sample gradients are represented. ``generic`` serves every operator."""

from . import (  # noqa: F401  (importing a family fills the table)
    arithmetic,
    convolution,
    embedding,
    experts,
    indexing,
    linear,
    normalization,
)
from .generic import generic
from .rows import Unsuited
from .table import RULES, Forms, OfTable, Rule

__all__ = ["RULES", "Forms", "OfTable", "Rule", "Unsuited", "generic"]
