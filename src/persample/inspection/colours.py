"""Colours of tokens: the few samples that are shown are run once more, and asked by position."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..api import record
from ..errors import PersampleError
from ..inputs.batch_samples import resolved
from ..tape.tape import Tape
from ..testing import LossFn
from .collect import Collected
from .whole_samples import Segment

AT_ONCE = 16


def colour(
    model: nn.Module, loss_fn: LossFn, found: Collected, indices: set[int], options: dict[str, Any]
) -> None:
    """Ask what each position of some samples contributes to ‖gᵢ‖²; says so where it cannot."""
    if found.whole.missing or options.get("dim", 0) != 0:
        found.without_positions = found.whole.missing or "samples are not on axis 0"
        return
    device = next(model.parameters()).device
    try:
        for segment, places in found.whole.find(indices):
            for first in range(0, len(places), AT_ONCE):
                _some(
                    model, loss_fn, found, segment, places[first : first + AT_ONCE], device, options
                )
                if found.without_positions:
                    return
    except PersampleError as error:
        found.without_positions = error.why or error.what
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError) as error:
        found.without_positions = f"running some samples again raised {type(error).__name__}"


def _some(
    model: nn.Module,
    loss_fn: LossFn,
    found: Collected,
    segment: Segment,
    places: list[int],
    device: torch.device,
    options: dict[str, Any],
) -> None:
    batch = segment.batch(places, device)
    with record(model, **resolved({**options, "positions": True}, batch)) as tape:
        losses = loss_fn(model, batch)
        tape.backward(losses)
    numbers = segment.indices.tensor()[places].tolist()
    before = found.losses.tensor()[numbers]
    if not torch.allclose(losses.detach().float().cpu(), before, 1e-3, 1e-5, equal_nan=True):
        found.without_positions = "samples run again had other losses (dropout, or outside state)"
        return
    parts = positions(tape, found)
    if parts is not None:
        for number, part in zip(numbers, parts.float().cpu(), strict=True):
            found.gallery.contributions[number] = part
    tape.close()


def positions(tape: Tape, found: Collected) -> Tensor | None:
    """Each position's part of the squared norm: (n, positions).

    Parameters that were used without positions (the head of a classifier) are left out, once the
    first batch has told which they are.
    """
    try:
        if found.position_names is not None:
            return tape.positions(params=found.position_names)
        answer = tape.positions()
    except PersampleError as error:
        if found.position_names is None:
            found.position_names = [name for name in tape.names if _has_positions(tape, name)]
            if found.position_names:
                return positions(tape, found)
        found.without_positions = error.why or error.what
        return None
    found.position_names = list(tape.names)
    return answer


def _has_positions(tape: Tape, name: str) -> bool:
    try:
        tape.positions(params=name)
    except PersampleError:
        return False
    return True
