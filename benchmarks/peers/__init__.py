"""Who answers the questions: persample, torch, other libraries, and a program by hand."""

from __future__ import annotations

from . import libraries, native, own
from .peer import OWN, PEERS

__all__ = ["OWN", "PEERS", "libraries", "native", "own"]
