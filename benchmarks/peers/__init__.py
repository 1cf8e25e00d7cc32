"""Who answers the questions: persample, torch, other libraries, and a program by hand."""

from __future__ import annotations

from . import attribution, functional, libraries, native, own
from .peer import OWN, PEERS

__all__ = ["NEEDS", "OWN", "PEERS", "attribution", "functional", "libraries", "native", "own"]

NEEDS = {
    "Opacus hooks": "opacus", "Opacus ghost": "opacus", "BackPACK": "backpack",
    "opake": "opake.dpsgd", "dattri-llm": "dattri_llm",
}  # fmt: skip
