"""Recurrent layers and cells, split so that the gradients of their gates are in reach."""

from .unroll import CELLS, cell, request, unroll

__all__ = ["CELLS", "cell", "request", "unroll"]
