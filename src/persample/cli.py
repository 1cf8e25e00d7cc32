"""The command line: ``persample verify module:function`` and ``persample explain module:function``.

The function takes no arguments and returns (model, loss_fn, batch), where ``loss_fn(model, batch)``
gives one loss per sample: the training step one already has.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from .check import verify
from .entry import record
from .errors import PersampleError, UsageError

_EXAMPLES = """examples:
  persample verify train:step       compare with autograd and probe isolation, per parameter
  persample explain train:step      every use of every parameter, what is slow, ambiguous sizes

where train.py has

  def step():
      model, x, y = ...
      def losses(model, batch):
          return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
      return model, losses, (x, y)
"""


def load(target: str) -> tuple[Any, Any, Any]:
    """(model, loss_fn, batch) from ``module:function``."""
    name, colon, function = target.partition(":")
    if not colon or not name or not function:
        raise UsageError(f"{target!r} is not of the form module:function")
    sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"no module called {error.name!r} can be imported from here") from error
    found = getattr(module, function, None)
    if not callable(found):
        raise UsageError(f"{name} has no function {function!r}")
    made = found()
    if not isinstance(made, (tuple, list)) or len(made) != 3:
        raise UsageError(f"{target} must return (model, loss_fn, batch)")
    return made[0], made[1], made[2]


def _explain(model: Any, loss_fn: Any, batch: Any) -> str:
    with record(model) as tape:
        tape.backward(loss_fn(model, batch))
    return str(tape.explain())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 if all is well, 1 if refused or wrong, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="persample",
        description="Per-sample gradients of any unmodified PyTorch model.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, text in (
        ("verify", "check persample on a training step, exactly"),
        ("explain", "show what is recorded of a training step"),
    ):
        commands.add_parser(name, help=text).add_argument("target", metavar="module:function")
    given = parser.parse_args(arguments)
    try:
        model, loss_fn, batch = load(given.target)
    except UsageError as error:
        print(f"persample: {error}", file=sys.stderr)
        return 2
    try:
        if given.command == "explain":
            print(_explain(model, loss_fn, batch))
            return 0
        report = verify(model, loss_fn, batch)
        print(report)
        return 0 if report.ok else 1
    except PersampleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
