"""Colours of tokens: the few samples that are shown are run once more, and asked by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..entry import record
from ..errors import PersampleError
from ..tape import Tape
from ..testing import LossFn
from .store import Rows, Scratch

if TYPE_CHECKING:
    from .collect import Collected

LARGEST = 64 << 10  # bytes of a sample that is kept whole
AT_ONCE = 16


@dataclass(slots=True)
class Segment:
    """Samples of batches of one structure and shape, and how to make a batch of some of them."""

    spec: TreeSpec
    leaves: list[Any]
    rows: dict[int, Rows]
    indices: Rows

    def batch(self, places: list[int], device: torch.device) -> Any:
        """A batch of some samples; leaves that hold no samples are those of the first batch."""
        leaves = list(self.leaves)
        for k, kept in self.rows.items():
            leaves[k] = kept.tensor()[places].to(device)
        return tree_unflatten(leaves, self.spec)


class Whole:
    """Small samples kept whole, so that some can be run again."""

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self.segments: dict[Any, Segment] = {}
        self.complete = True

    def add(self, batch: Any, n: int, first: int) -> None:
        """Keep the samples of a batch whose first one has number ``first``."""
        leaves, spec = tree_flatten(batch)
        held = {
            k: leaf.detach()
            for k, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] == n
        }
        size = sum(leaf.numel() * leaf.element_size() for leaf in held.values())
        if not held or size > LARGEST * n:
            self.complete = False
            return
        shapes = tuple((k, tuple(leaf.shape[1:]), leaf.dtype) for k, leaf in held.items())
        segment = self.segments.get(shapes)
        if segment is None:
            rows = {k: Rows(self._scratch) for k in held}
            rest = [None if k in held else leaf for k, leaf in enumerate(leaves)]
            segment = self.segments[shapes] = Segment(spec, rest, rows, Rows(self._scratch))
        for k, leaf in held.items():
            segment.rows[k].append(leaf)
        segment.indices.append(torch.arange(first, first + n))

    def find(self, wanted: set[int]) -> list[tuple[Segment, list[int]]]:
        """Segments with the places in them of some samples."""
        numbers = torch.tensor(sorted(wanted))
        found = []
        for segment in self.segments.values():
            places = torch.isin(segment.indices.tensor(), numbers).nonzero().flatten().tolist()
            if places:
                found.append((segment, places))
        return found


def colour(
    model: nn.Module, loss_fn: LossFn, found: Collected, indices: set[int], options: dict[str, Any]
) -> None:
    """Ask what each position of some samples contributes to ‖gᵢ‖²; says so where it cannot."""
    if not found.whole.complete or options.get("dim", 0) != 0:
        found.without_positions = "samples are too large to be kept whole"
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
    with record(model, **{**options, "positions": True}) as tape:
        losses = loss_fn(model, segment.batch(places, device))
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
