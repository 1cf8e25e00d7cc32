"""Rules: how a use's per-sample gradients are represented. ``generic`` serves every operator."""

from . import (  # noqa: F401  (importing a family fills the table)
    arithmetic,
    convolution,
    distance,
    einsum,
    embedding,
    experts,
    indexing,
    linear,
    normalization,
    writing,
)
from .generic import generic
from .rows import Unsuited
from .stretched import stretched
from .table import RULES, Forms, OfTable, Rule

__all__ = ["RULES", "Forms", "OfTable", "Rule", "Unsuited", "generic", "stretched"]
