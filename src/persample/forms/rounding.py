"""What rounding can hide in norms and sums whose terms may cancel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RUN = 4096  # squares that are added up in one go
_BLOCK = 256  # terms that a matrix product adds up one after the other
THIN = 16  # a result that is narrower is added up without blocks
_SHORT = 9 / 8  # (x + y)² is at most this times x², and nine times y²


class Norms(NamedTuple):
    """Squared lengths of gradients, one for each sample, and what rounding may have done to them.

    ``value`` is short of the exact one by ``units`` roundings of itself, and by ``doubt``: squares
    that cancelled or vanished. A certain sum of one sample is not farther than √``slip`` from what
    the value was computed from. Values of ``rows`` come from rows that are as far from the exact
    ones. ``exact`` computes a few samples again, in double precision.
    """

    value: Tensor
    doubt: Tensor | None = None
    slip: Tensor | None = None
    units: float = 16 + RUN / 8
    rows: bool = False
    exact: Callable[[Tensor], Tensor] | None = None

    def surely(self) -> Tensor:
        """What the exact ones do not exceed."""
        found = self.value * (1 + (self.units + 4) * torch.finfo(self.value.dtype).eps)
        if self.doubt is not None:
            found += self.doubt
        if self.rows and self.slip is not None:
            found = (found.sqrt_() + self.slip.sqrt()).square_()
        return found

    def bounds(self) -> Tensor:
        """What the squared length of a certain sum of one sample does not exceed."""
        found = self.surely()
        return found if self.slip is None else (found.sqrt_() + self.slip.sqrt()).square_()

    def again(self, which: Tensor) -> Tensor:
        """The exact values of a few samples, or what they do not exceed."""
        if self.exact is not None:
            return self.exact(which)
        return self.surely()[which].to(fine_dtype(which.device))

    def gap(self, share: float) -> Tensor | None:
        """What is in doubt, and a share of what the rows of the value may be off by."""
        if not self.rows or self.slip is None:
            return self.doubt
        off = self.slip.sqrt()
        found = (2 * self.value.sqrt() + off).mul_(off).mul_(share)
        return found if self.doubt is None else found.add_(self.doubt)

    def recomputed(self, which: Tensor) -> Norms:
        """The same with the exact values of some samples."""
        exact = self.again(which)
        value, slip = self.value.clone(), self.slip
        doubt = torch.zeros_like(value) if self.doubt is None else self.doubt.clone()
        value[which], doubt[which] = exact.to(value.dtype), (1e-6 * exact).to(value.dtype)
        if self.rows and slip is not None:
            slip = slip.clone()
            slip[which] /= 4  # it no longer counts twice
        return self._replace(value=value, doubt=doubt, slip=slip)


def units(size: int) -> float:
    """By how many units of itself a sum of so many squares may be too small.

    One large square swallows all small ones that come after it in the same lane and run. There are
    four lanes at least.
    """
    return 16 + min(size, RUN) / 8


def fine_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which a few numbers are added up one after the other."""
    return torch.float32 if device.type == "mps" else torch.float64


def slip_of(energy: Tensor, t: int, run: int, vanished: Tensor | None = None) -> Tensor:
    """The square of what a sum of t terms with this energy may be off by, so many in one go.

    Energy of factors whose squares ``vanished`` counts as a whole.
    """
    each = t * (error_units(t, run) * torch.finfo(energy.dtype).eps) ** 2
    if vanished is None:
        return energy * each
    return (vanished * (4 * 9)).add_(energy, alpha=_SHORT * each)


def add_slips(slips: Sequence[Tensor | None]) -> Tensor | None:
    """The square of what sums may be off by that are added to each other."""
    known = [slip.sqrt() for slip in slips if slip is not None]
    return torch.stack(known).sum(0).square_() if known else None


def run_of(t: int, a: int, b: int) -> int:
    """How many of t outer products are added up one after the other in a matrix (a, b)."""
    return t if min(a, b) < THIN else min(t, _BLOCK)


def error_units(t: int, run: int) -> float:
    """By how many units of its terms' sizes a sum of t terms in such runs may be off.

    Terms that are alike are rounded alike: the sum goes astray by a fifth of a unit with each.
    """
    return 8 + (run + t / max(run, 1)) / 5


def lengths(rows: Tensor) -> Tensor:
    """Numbers that lengths along the last axis do not exceed by much, also if squares vanish."""
    found: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return found.add_(math.sqrt(rows.shape[-1] * torch.finfo(found.dtype).tiny))


def multiply_products(
    one: Tensor, two: Tensor, a: int, b: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ one ∘ two of products (n, …, t, t) of positions of lengths a and b; four numbers a sample.

    The sum, what rounding can have hidden of it, its energy (the diagonal and what is hidden), and
    what may have vanished.
    """
    pair = (one, two)
    diagonals = torch.stack([m.diagonal(dim1=-2, dim2=-1) for m in pair])
    sizes = torch.stack([torch.linalg.vector_norm(m.flatten(-2), dim=-1) for m in pair])
    doubt, vanished = hidden_in_products(diagonals.sum(-1), sizes, a, b, one.shape[-1])
    energy = per_sample(diagonals[0] * diagonals[1]).add_(doubt)
    return per_sample(one * two).clamp_(min=0), doubt, energy, vanished


def hidden_in_products(
    traces: Tensor, sizes: Tensor, a: int, b: int, t: int
) -> tuple[Tensor, Tensor]:
    """What rounding can hide, and what may vanish, by traces and Frobenius norms (2, n, …).

    Rounding of ⟨lₜ, lₛ⟩ is some units of ‖lₜ‖‖lₛ‖, and not independent: positions that are alike
    are rounded alike. With ⟨rₜ, rₛ⟩ it makes at most the trace of one times the size of the other.
    A product that vanished may be multiplied by a huge one of the other kind.
    """
    numbers = torch.finfo(traces.dtype)
    # squares of products may vanish or overflow; no size exceeds its trace
    fair = torch.minimum(sizes.add_(t * math.sqrt(numbers.tiny)), traces)
    doubt = per_sample((traces * fair.flip(0)).sum(0))
    lost = max(_lost(a), _lost(b)) * numbers.eps / 2
    return doubt.mul_(lost), per_sample(traces.sum(0)).mul_(numbers.tiny * t * max(a, b))


def per_sample(numbers: Tensor) -> Tensor:
    """The sum over everything but samples."""
    return numbers.flatten(1).sum(1) if numbers.dim() > 1 else numbers


def _lost(length: int) -> float:
    """Units by which a product of so many terms, all of one sign, may be off: measured, doubled.

    Terms are added one after the other in blocks of some hundred.
    """
    return 4 + max(min(length, _BLOCK) / 4, math.sqrt(length) / 2)
