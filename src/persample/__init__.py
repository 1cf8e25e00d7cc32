"""Per-sample gradients of any unmodified PyTorch model.

>>> import torch, persample
>>> model = torch.nn.Linear(3, 1)
>>> with persample.record(model) as tape:
...     losses = model(torch.ones(2, 3)).square().squeeze(1)
...     tape.backward(losses)
>>> tape.grads()["weight"].shape
torch.Size([2, 1, 3])
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from . import testing
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
from .tape.clipping import automatic, flat, per_group, per_layer
from .tape.tape import Tape
from .uses.options import Ahead

if TYPE_CHECKING:
    from .inspection import Report, Show, inspect
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
    "flat",
    "inspect",
    "per_group",
    "per_layer",
    "record",
    "testing",
    "verify",
]
__version__ = "0.1.0"
_LAZY = {
    "Report": "inspection",
    "Show": "inspection",
    "inspect": "inspection",
    "verify": "verification",
}
_SUBMODULES = ("command_line", "expanded_weights", "inspection", "private", "verification")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Applications are loaded when they are first used: PEP 562."""
        if name in _SUBMODULES:
            return importlib.import_module(f".{name}", __name__)
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    packages = (module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    return sorted({*__all__, *packages, "__version__"})
