"""The tape: answers queries about gradients by querying forms and adding over uses."""

from .tape import Tape

__all__ = ["Tape"]
