"""Recurrent layers and cells, split so that the gradients of their gates are in reach."""

from .cells import CELLS, cell
from .unroll import request, unroll

__all__ = ["CELLS", "cell", "request", "unroll"]
