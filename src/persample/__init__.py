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
from typing import Any

_HOMES = {
    "Ahead": "uses.context",
    "ExtractedNumberWarning": "errors",
    "MissedUseError": "errors",
    "MixedSamplesError": "errors",
    "NonFiniteWarning": "errors",
    "PersampleError": "errors",
    "Report": "inspection",
    "Show": "inspection",
    "StaleError": "errors",
    "StorageError": "errors",
    "Tape": "tape",
    "UnheardWarning": "errors",
    "UsageError": "errors",
    "VerificationError": "errors",
    "automatic": "tape.clipping",
    "flat": "tape.clipping",
    "inspect": "inspection",
    "per_group": "tape.clipping",
    "per_layer": "tape.clipping",
    "record": "api",
    "verify": "verification",
}  # each public name and the module it is in
_SUBMODULES = {"expanded_weights", "forms", "inspection", "private", "rules", "testing"}
__all__ = sorted({*_HOMES, "testing"})
__version__ = "0.2.0.dev0"


def __getattr__(name: str) -> Any:
    """Load a module when one of its names is first used (PEP 562); types are in __init__.pyi."""
    if name in _SUBMODULES:
        return importlib.import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES, "__version__"})
