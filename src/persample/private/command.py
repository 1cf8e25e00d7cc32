"""The command ``persample private``: train with a stated guarantee, and say what was promised."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..errors import UsageError
from .digits import DigitNet, accuracy, digits, losses
from .plan import Plan, plan
from .statement import round_up
from .training import LossFn, Training

EXAMPLES = """
  persample private                                     the demonstration, on scikit-learn's digits
  persample private train:step --epsilon 3 --epochs 10  your own function: (model, losses, data)"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished training; printed, it is what the command says."""

    training: Training
    accuracy: float | None = None

    def __str__(self) -> str:
        made = self.training.plan
        spent = f"epsilon {round_up(self.training.epsilon())} at delta {made.delta:g}"
        right = (
            "" if self.accuracy is None else f"accuracy {self.accuracy:.1%} on held-out digits, "
        )
        return f"{right}{spent}\n\n{made}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command, besides the target and the device."""
    parser.add_argument("--epsilon", type=float, default=3.0, help="the target (3)")
    parser.add_argument(
        "--delta", type=float, help="default: a power of ten, at most 1 / (10 size)"
    )
    parser.add_argument(
        "--epochs", type=float, help="expected passes over the data (10; 30 in the demo)"
    )
    parser.add_argument("--batch-size", type=int, help="expected samples in a batch (256, or all)")
    parser.add_argument("--max-norm", type=float, default=1.0, help="the clipping bound C (1)")
    parser.add_argument("--lr", type=float, help="learning rate of Adam (0.001; 0.008 in the demo)")
    parser.add_argument("--micro-batch", type=int, default=64, help="samples recorded at once (64)")
    parser.add_argument("--save", metavar="FILE", help="write the parameters, and nothing secret")


def run(given: argparse.Namespace, target: Any = None) -> int:
    """Train and print: exit code 0. ``target`` is a ``command_line.target.Target``, or None."""
    outcome = _digits(given) if target is None else _own(given, target)
    if given.save is not None:  # before anything is printed: standard output may be closed
        torch.save(outcome.training.model.state_dict(), given.save)
    print(outcome)
    if given.save is not None:
        print(f"\nwritten: {given.save}")
    return 0


# ---------------------------------------------------------------------- the two trainings


def _digits(given: argparse.Namespace) -> Outcome:
    train, test = digits()
    made = planned(given, len(train[0]), epochs=30.0)
    announce(made, f"a small network on {len(train[0]):,} digits")
    training = trained(given, DigitNet(), losses, train, made, lr=8e-3)
    return Outcome(training, accuracy(training.model, test))


def _own(given: argparse.Namespace, target: Any) -> Outcome:
    data, collate = samples(target.batches)
    made = planned(given, len(data) if collate is not None else _count(data), epochs=10.0)
    announce(made, f"{type(target.model).__name__} on {made.size or 0:,} samples")
    kept = {k: v for k, v in target.record_options().items() if k != "params"}
    training = trained(
        given, target.model, target.loss_fn, data, made, lr=1e-3, collate=collate, options=kept
    )
    return Outcome(training)


def planned(given: argparse.Namespace, size: int, *, epochs: float) -> Plan:
    """The plan of the command line's constants; the size of the data counts as public."""
    return plan(
        epsilon=given.epsilon,
        delta=small_delta(size) if given.delta is None else given.delta,
        size=size,
        batch_size=min(256, size) if given.batch_size is None else given.batch_size,
        epochs=epochs if given.epochs is None else given.epochs,
        max_norm=given.max_norm,
    )


def small_delta(size: int) -> float:
    """The power of ten at or below 1 / (10 · size)."""
    return float(10.0 ** -math.ceil(math.log10(10 * size)))


def trained(
    given: argparse.Namespace,
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    made: Plan,
    *,
    lr: float,
    **options: Any,
) -> Training:
    """All steps of the plan, by Adam."""
    device = getattr(given, "device", None)
    if device is not None:
        model.to(device)
    moved = [p for p in model.parameters() if p.requires_grad]
    training = Training(
        model, torch.optim.Adam(moved, lr if given.lr is None else given.lr), data, made,
        loss_fn, micro_batch=given.micro_batch, **options,
    )  # fmt: skip
    for _ in training:
        pass
    return training


def announce(made: Plan, what: str) -> None:
    """Say what happens while nothing is seen."""
    print(
        f"training {what}: {made.steps:,} steps of about {made.batch_size:,.0f} samples, "
        f"noise multiplier {made.noise_multiplier:.3f} …",
        file=sys.stderr,
        flush=True,
    )


# ---------------------------------------------------------------------- the user's own data


def samples(batches: Any) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """Samples that can be drawn one by one, from what a target returned, and their collate."""
    if isinstance(batches, DataLoader):  # its data set is drawn from, whatever its own order is
        return batches.dataset, batches.collate_fn
    if not isinstance(batches, (list, tuple)) or not batches:
        raise UsageError(
            "private training needs samples that can be drawn one by one",
            why=f"the function returned {type(batches).__name__}",
            fix="return (model, loss_fn, (x, y)) with all samples, or a DataLoader over a Dataset",
        )
    if len(batches) == 1:
        return _plain(batches[0]), None
    try:
        return _joined([_plain(batch) for batch in batches]), None
    except (RuntimeError, TypeError, KeyError) as error:
        raise UsageError(
            "the batches cannot be put together again",
            why=(str(error).splitlines() or [type(error).__name__])[0],
            fix="return all samples as one batch (x, y), or a DataLoader over a Dataset",
        ) from error


def _plain(batch: Any) -> Any:
    """Dictionaries of Hugging Face as plain ones, lists as tuples."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return tuple(batch) if isinstance(batch, list) else batch


def _joined(batches: list[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(batches)
    if isinstance(first, dict):
        return {name: torch.cat([batch[name] for batch in batches]) for name in first}
    return tuple(torch.cat(list(column)) for column in zip(*batches, strict=True))


def _count(data: Any) -> int:
    columns = list(data.values()) if isinstance(data, dict) else data
    return len(columns if isinstance(columns, Tensor) else columns[0])
