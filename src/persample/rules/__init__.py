"""Rules: how a use's per-sample gradients are represented. ``generic`` serves every operator."""

from .generic import generic

__all__ = ["generic"]
