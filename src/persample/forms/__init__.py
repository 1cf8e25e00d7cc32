"""Forms: representations of n gradients that know their algebra."""

from .dense import Dense

__all__ = ["Dense"]
