"""The tape: answers questions about gradients by asking forms and adding over uses."""

from .tape import Tape

__all__ = ["Tape"]
