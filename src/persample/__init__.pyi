# What type checkers see: the names of __init__.py, which loads their modules when first used.

from . import expanded_weights, forms, inspection, private, rules, testing
from .api import record
from .errors import (
    ExtractedNumberWarning,
    MissedUseError,
    MixedSamplesError,
    NonFiniteWarning,
    PersampleError,
    StaleError,
    StorageError,
    UnheardWarning,
    UsageError,
    VerificationError,
)
from .inspection import Report, Show, inspect
from .tape import Tape
from .tape.clipping import automatic, flat, per_group, per_layer
from .uses.context import Ahead
from .verification import verify

__all__ = [
    "Ahead",
    "ExtractedNumberWarning",
    "MissedUseError",
    "MixedSamplesError",
    "NonFiniteWarning",
    "PersampleError",
    "Report",
    "Show",
    "StaleError",
    "StorageError",
    "Tape",
    "UnheardWarning",
    "UsageError",
    "VerificationError",
    "automatic",
    "expanded_weights",
    "flat",
    "forms",
    "inspect",
    "inspection",
    "per_group",
    "per_layer",
    "private",
    "record",
    "rules",
    "testing",
    "verify",
]
__version__: str
