"""Per-sample gradients of any unmodified PyTorch model.

>>> import torch, persample
>>> model = torch.nn.Linear(3, 1)
>>> with persample.record(model) as tape:
...     losses = model(torch.ones(2, 3)).square().squeeze(1)
...     tape.backward(losses)
>>> tape.grads()["weight"].shape
torch.Size([2, 1, 3])
"""

from . import testing
from .check import verify
from .clipping import automatic, flat, per_group, per_layer
from .entry import record
from .errors import (
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
from .lean import Ahead
from .tape import Tape

__all__ = [
    "Ahead",
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
    "flat",
    "inspect",
    "per_group",
    "per_layer",
    "record",
    "testing",
    "verify",
]
__version__ = "0.1.0"
