"""The command line: ``persample inspect``, ``persample verify`` and ``persample explain``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import __version__
from ..api import record
from ..errors import PersampleError, UsageError
from ..inputs.batch_samples import moved, resolved
from ..inspection import Report, inspect
from ..inspection import load as load_report
from ..inspection.summary import summary
from ..private import command as private_command
from ..verification import verify
from .demonstration import announce, demonstration, explanation, mark
from .memory import measure, parse_size
from .target import Target, failed, load

DEMO_PAGE = "persample-inspect.html"
REFUSED, USAGE, INTERRUPTED = 1, 2, 130

_EXAMPLES = {
    "inspect": """
  persample inspect                                     the demonstration, on scikit-learn's digits
  persample inspect train:step --html report.html       one page about your own data
  persample inspect train:step --json today.json --against yesterday.json""",
    "verify": """
  persample verify train:step                           compare with autograd, per parameter""",
    "explain": """
  persample explain train:step --memory 8GiB            every use; the largest batch that fits""",
    "private": private_command.EXAMPLES,
}
_TARGET = """
where train.py has

  def step():
      model, data = ...                                 # data: a batch, or an iterable of batches
      def losses(model, batch):                         # one loss per sample
          return F.cross_entropy(model(batch[0]), batch[1], reduction="none")
      return model, losses, data                        # and optionally how to show a sample:
                                                        # persample.Show(...), or a dictionary with
                                                        # ids, labels, show

exit codes: 0 done, 1 refused or not verified, 2 wrong usage, 130 interrupted
"""


def parser() -> argparse.ArgumentParser:
    """The four commands."""
    made = argparse.ArgumentParser(
        prog="persample",
        description="Per-sample gradients of any unmodified PyTorch model.",
        epilog="".join(["examples:", *_EXAMPLES.values(), "\n", _TARGET]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--version", action="version", version=f"persample {__version__}")
    commands = made.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, text: str, **options: Any) -> argparse.ArgumentParser:
        found = commands.add_parser(
            name, help=text, description=text, epilog=f"examples:{_EXAMPLES[name]}\n{_TARGET}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        found.add_argument(
            "target", metavar="module:function",
            help="your function that returns (model, loss_fn, data)", **options,
        )  # fmt: skip
        found.add_argument("--device", help="move model and data there, e.g. cuda")
        return found

    _add_inspect_arguments(
        command("inspect", "find outliers, wrong labels and duplicates in a data set", nargs="?")
    )
    command("verify", "check a training step: compare with autograd, replace samples")
    explaining = command("explain", "show how each parameter is recorded, and the memory of a step")
    explaining.add_argument(
        "--memory", metavar="SIZE", help="the largest batch that fits, e.g. 8GiB"
    )
    training = command("private", "train with differential privacy to a stated epsilon", nargs="?")
    private_command.add_arguments(training)
    return made


def _add_inspect_arguments(inspecting: argparse.ArgumentParser) -> None:
    add = inspecting.add_argument
    add("--html", type=Path, help="write one self-contained page")
    add("--json", type=Path, help="write all numbers; --against reads it")
    add("--csv", type=Path, help="write one line per sample")
    add("--against", type=Path, metavar="OLD.json", help="compare with an earlier report")
    add("--batches", type=int, metavar="N", help="inspect only the first N batches")
    add("--scratch", metavar="DIR", help="directory for large intermediate results")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 on success, 1 if refused or wrong, 2 for wrong usage, 130 for Ctrl-C."""
    given = parser().parse_args(arguments)
    commands: dict[str, Callable[..., int]] = {
        "inspect": _inspect,
        "verify": _verify,
        "explain": _explain,
        "private": private_command.run,
    }
    loaded = False
    try:
        prepared = _prepare(given)
        loaded = True
        return commands[given.command](given, *prepared)
    except PersampleError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return USAGE if isinstance(error, UsageError) and not loaded else REFUSED
    except KeyboardInterrupt:
        print("persample: interrupted; nothing was written", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    except Exception as error:
        told = failed("the training step", error)
        print(f"{type(told).__name__}: {told}", file=sys.stderr)
        return REFUSED


def _prepare(given: argparse.Namespace) -> tuple[Any, ...]:
    """Check the arguments and load the target before any work is done."""
    old = None
    if given.command == "inspect":
        if given.batches is not None and given.batches < 1:
            raise UsageError(
                f"--batches must be at least 1, got {given.batches}",
                fix="leave it out to inspect all of them",
            )
        for path in (given.html, given.json, given.csv):
            if path is not None and not path.parent.is_dir():
                raise UsageError(
                    f"{path} cannot be written: there is no directory {path.parent}",
                    fix=f"mkdir -p {path.parent}",
                )
        old = None if given.against is None else load_report(given.against)
        if given.target is None:
            announce()
            return (*demonstration(), old)
        return (load(given.target), None, old)
    if given.command == "private":
        return (None if given.target is None else load(given.target),)
    size = getattr(given, "memory", None)
    return (load(given.target), None if size is None else parse_size(size))


def _inspect(given: argparse.Namespace, target: Target, wrong: Any, old: Any) -> int:
    report = inspect(
        target.model, target.loss_fn, target.batches, limit=given.batches, device=given.device,
        scratch=given.scratch, **target.options,
    )  # fmt: skip
    if wrong is not None:
        mark(report, wrong)
    again = None if old is None else report.compare(old)
    print(summary(report, colour=_colourful(), again=again))
    if wrong is not None:
        print(f"\n{explanation(report)}")
    _write(given, report, old, demo=wrong is not None)
    if report.interrupted:
        print("\ninterrupted: the report covers the samples seen so far", file=sys.stderr)
        return INTERRUPTED
    check = report.verification
    return 0 if check is not None and check.ok else REFUSED


def _write(given: argparse.Namespace, report: Report, old: Any, *, demo: bool) -> None:
    html = given.html or (Path(DEMO_PAGE) if demo else None)
    if given.json is not None:
        report.to_json(given.json)
    if given.csv is not None:
        report.to_csv(given.csv)
    if html is not None:
        report.to_html(html, against=old)
    written = [path for path in (given.json, given.csv, html) if path is not None]
    if written:
        print("\nwritten: " + ", ".join(str(path.resolve()) for path in written))


def _verify(given: argparse.Namespace, target: Target, _: Any) -> int:
    batch = _placed(given, target)
    report = verify(target.model, target.loss_fn, batch, **target.record_options())
    print(report)
    return 0 if report.ok else REFUSED


def _explain(given: argparse.Namespace, target: Target, memory: int | None) -> int:
    batch = _placed(given, target)
    with record(target.model, **resolved(target.record_options(), batch)) as tape:
        tape.backward(target.loss_fn(target.model, batch))
    print(tape.explain())
    tape.close()
    options = target.record_options()
    print(measure(target.model, target.loss_fn, batch, limit=memory, **options))
    return 0


def _placed(given: argparse.Namespace, target: Target) -> Any:
    if given.device is not None:
        target.model.to(given.device)
    return moved(target.first_batch(), given.device)


def _colourful() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ
