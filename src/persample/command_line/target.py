"""What a command works on: ``module:function``, and what the function returns."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ..errors import PersampleError, UsageError
from ..inputs.batch_samples import one_batch
from ..inspection import Show
from ..inspection.reading import expect_no_data_set

RECORD = ("constants", "dim", "n", "params", "sample_ids", "unproven")
KNOWN = ("ids", "labels", "show", "width", *RECORD)


@dataclass(frozen=True, slots=True)
class Target:
    """A model, its losses, the data as batches, and options of :func:`persample.inspect`."""

    model: nn.Module
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: Any
    options: dict[str, Any] = field(default_factory=dict)

    def first_batch(self) -> Any:
        """The batch that verify and explain look at."""
        for batch in self.batches:
            return batch
        raise UsageError("the data set is empty", fix="return at least one batch")

    def record_options(self) -> dict[str, Any]:
        """The options that :func:`persample.record` knows."""
        return {name: self.options[name] for name in RECORD if name in self.options}


def load(name: str) -> Target:
    """Import the module, call the function, read what it returns."""
    module_name, colon, function = name.partition(":")
    if not colon or not module_name or not function:
        raise UsageError(
            f"{name!r} is not of the form module:function",
            fix="train:step means the function step of train.py",
        )
    if module_name.endswith(".py"):  # the file's name does as well
        module_name = os.path.normpath(module_name)[:-3].replace(os.sep, ".")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"no module called {error.name!r} can be imported from here",
            fix="run the command in the directory of your file",
        ) from error
    except Exception as error:
        raise failed(f"importing {module_name}", error) from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UsageError(
            f"{module_name} has no function {function!r}",
            fix=f"name a function of {module_name} that returns (model, loss_fn, data)",
        )
    try:
        made = found()
    except PersampleError:
        raise
    except Exception as error:
        raise failed(name, error) from error
    return read(name, made)


def read(name: str, made: Any) -> Target:
    """(model, loss_fn, data) or (model, loss_fn, data, show or options)."""
    if not isinstance(made, (tuple, list)) or len(made) not in (3, 4):
        raise UsageError(
            f"{name} must return (model, loss_fn, data) and optionally how to show a sample",
            why=f"it returned {type(made).__name__}"
            + (f" of length {len(made)}" if isinstance(made, (tuple, list)) else ""),
            fix="return model, loss_fn, data: loss_fn(model, batch) gives one loss per sample",
        )
    model, loss_fn, data = made[:3]
    if not isinstance(model, nn.Module) or not callable(loss_fn):
        raise UsageError(
            f"{name} must return an nn.Module, a function of (model, batch), and data",
            why=f"it returned {type(model).__name__}, {type(loss_fn).__name__}",
            fix="return model, loss_fn, data, in this order",
        )
    extra = made[3] if len(made) == 4 else {}
    options = {"show": extra} if isinstance(extra, Show) else extra
    if not isinstance(options, Mapping) or not set(options) <= set(KNOWN):
        raise UsageError(
            f"the fourth thing that {name} returns must be a persample.Show or options",
            fix=f"a dictionary with some of {', '.join(KNOWN)}",
        )
    return Target(model, loss_fn, as_batches(name, data), dict(options))


def as_batches(name: str, data: Any) -> Any:
    """What is one batch becomes a list of one; anything else must be batches."""
    expect_no_data_set(data)
    if one_batch(data):
        return [data]
    has_tensors = isinstance(data, list) and any(isinstance(d, Tensor) for d in data)
    if has_tensors:
        raise UsageError(
            f"{name} returns a list of tensors: one batch, or a batch each?",
            fix="return a tuple (x, y) for one batch, [(x, y), ...] or a DataLoader for several",
        )
    if not hasattr(data, "__iter__"):
        raise UsageError(
            f"the data that {name} returns are {type(data).__name__}",
            fix="return a batch, a list of batches or a DataLoader",
        )
    return data


def failed(what: str, error: BaseException) -> UsageError:
    """The user's own code raised: say where, in the form of every other error."""
    frames = traceback.extract_tb(error.__traceback__)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    own = [
        f for f in frames if not f.filename.startswith((here, "<")) and "/torch/" not in f.filename
    ]
    last = own[-1] if own else (frames[-1] if frames else None)
    where = "" if last is None else f"{last.filename}:{last.lineno} in {last.name}: {last.line}"
    message = (str(error).strip().splitlines() or [""])[0]
    return UsageError(
        f"{what} raised {type(error).__name__}",
        where=where,
        why=message,
        fix="run the function in Python to see the whole traceback",
    )
