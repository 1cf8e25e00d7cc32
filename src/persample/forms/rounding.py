"""What rounding can hide in norms and sums whose terms may cancel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RUN = 4096  # squares that are added up in one go
CUT = 512  # how many of them at a time where there are more
_BLOCK = 1024  # terms that a matrix product adds up one after the other
THIN = 16  # a result that is narrower is added up without blocks


def no_error() -> None:
    """A sum of one sample is what its norm was computed from."""


class Norms(NamedTuple):
    """Squared norms of gradients, one for each sample, and what rounding may have done to them.

    ``value`` is short of the exact one by ``units`` roundings of itself, and by ``doubt``: squares
    that cancelled or vanished. A certain sum of one sample is not farther than √``sq_error`` from
    what the value was computed from. Values of ``rows`` come from rows that are as far from the
    exact ones. ``exact`` computes a few samples again, in double precision.
    """

    value: Tensor
    doubt: Tensor | None = None
    sq_error: Callable[[], Tensor | None] = no_error
    units: float = 16 + RUN / 8
    rows: bool = False
    exact: Callable[[Tensor], Tensor] | None = None

    def kept(self) -> Norms:
        """The same with an error of sums that is computed, once."""
        if self.sq_error is no_error:
            return self
        sq_error = self.sq_error()
        return self._replace(sq_error=lambda: sq_error)

    def surely(self) -> Tensor:
        """What the exact ones do not exceed."""
        found = self.value * (1 + (self.units + 4) * torch.finfo(self.value.dtype).eps)
        if self.doubt is not None:
            found += self.doubt
        return _square_of_sum(found, self.sq_error()) if self.rows else found

    def bounds(self) -> Tensor:
        """What the squared norm of a certain sum of one sample does not exceed."""
        return _square_of_sum(self.surely(), self.sq_error())

    def again(self, which: Tensor) -> Tensor:
        """The exact values of a few samples, or what they do not exceed."""
        if self.exact is not None:
            return self.exact(which)
        return self.surely()[which].to(fine_dtype(which.device))

    def recomputed(self, which: Tensor) -> Norms:
        """The same with exact values of some samples, for which the error of sums counts once."""
        exact, sq_error = self.again(which), self.sq_error()
        value, doubt = self.value.clone(), self.doubt
        doubt = torch.zeros_like(value) if doubt is None else doubt.clone()
        value[which], doubt[which] = exact.to(value.dtype), (1e-6 * exact).to(value.dtype)
        if self.rows and sq_error is not None:
            sq_error = sq_error.index_put((which,), sq_error[which] / 4)
        return self._replace(value=value, doubt=doubt, sq_error=lambda: sq_error)


def _square_of_sum(square: Tensor, other: Tensor | None) -> Tensor:
    """(x + y)² from x² and y²."""
    return square if other is None else (square.sqrt() + other.sqrt()).square_()


def units(size: int) -> float:
    """By how many units of itself a sum of so many squares may be too small.

    One large square swallows all small ones that come after it in the same lane and run. There are
    four lanes at least.
    """
    return 16 + (size if size <= RUN else CUT) / 8


def fine_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which a few numbers are added up one after the other."""
    return torch.float32 if device.type == "mps" else torch.float64


def sq_error_of(energy: Tensor, t: int, run: int) -> Tensor:
    """The square of what a sum of t terms with this energy may be off by, so many in one go."""
    return energy * (t * (error_units(t, run) * torch.finfo(energy.dtype).eps) ** 2)


def sq_error_of_products(diagonals: Tensor, doubt: Tensor, run: int, length: int) -> Tensor:
    """The same from products of positions, their diagonals (2, n, …, t) and what is hidden in them.

    Energy of factors whose squares vanished counts as a whole.
    """
    t, tiny = diagonals.shape[-1], torch.finfo(doubt.dtype).tiny
    found = sq_error_of(per_sample(diagonals[0] * diagonals[1]).add_(doubt), t, run)
    vanished = per_sample(diagonals.sum(-1).sum(0)).mul_(4 * tiny * t * length)
    return vanished.mul_(9).add_(found, alpha=9 / 8)  # (x + y)² ≤ 9/8 x² + 9 y²


def add_errors(sq_errors: Sequence[Tensor | None]) -> Tensor | None:
    """The square of what sums may be off by that are added to each other."""
    known = [sq_error.sqrt() for sq_error in sq_errors if sq_error is not None]
    return torch.stack(known).sum(0).square_() if known else None


def run_of(t: int, a: int, b: int) -> int:
    """How many of t outer products are added up one after the other in a matrix (a, b)."""
    return t if min(a, b) < THIN else min(t, _BLOCK)


def error_units(t: int, run: int) -> float:
    """By how many units of its terms' sizes a sum of t terms in such runs may be off.

    Their size is √t times the norm of all of them. Every partial sum is rounded by half a unit of
    itself, and the partial sums of t terms add up to √(t³/3) times that norm at most.
    """
    return 8 + (run + t / max(run, 1)) / math.sqrt(12)


def norms_of_last_axis(rows: Tensor) -> Tensor:
    """Numbers that norms along the last axis do not exceed by much, also if squares vanish."""
    found: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return found.add_(math.sqrt(rows.shape[-1] * torch.finfo(found.dtype).tiny))


Products = tuple[Tensor, Tensor, Tensor]


def multiply_products(one: Tensor, two: Tensor, a: int, b: int) -> Products:
    """Σ one ∘ two of products (n, …, t, t) of positions of lengths a and b.

    The sums, what rounding can have hidden of them, and both diagonals: (n,), (n,), (2, n, …, t).
    """
    pair = (one, two)
    sizes = torch.stack([torch.linalg.vector_norm(m.flatten(-2), dim=-1) for m in pair])
    diagonals = torch.stack([m.diagonal(dim1=-2, dim2=-1) for m in pair])
    doubt = hidden_in_products(diagonals.sum(-1), sizes, a, b, one.shape[-1])
    return per_sample(one * two).clamp_(min=0), doubt, diagonals


def join_samples(found: Sequence[Products]) -> Products:
    """The same for some samples after the others."""
    if len(found) == 1:
        return found[0]
    value, doubt, diagonals = zip(*found, strict=True)
    return torch.cat(value), torch.cat(doubt), torch.cat(diagonals, 1)


def hidden_in_products(traces: Tensor, sizes: Tensor, a: int, b: int, t: int) -> Tensor:
    """What rounding can hide of sums, by traces and Frobenius norms (2, n, …) of products.

    Rounding of ⟨lₜ, lₛ⟩ is some units of ‖lₜ‖‖lₛ‖, and not independent: positions that are alike
    are rounded alike. With ⟨rₜ, rₛ⟩ it makes at most the trace of one times the size of the other.
    """
    numbers = torch.finfo(traces.dtype)
    # squares of products may vanish or overflow; no size exceeds its trace
    fair = torch.minimum(sizes.add_(t * math.sqrt(numbers.tiny)), traces)
    found = per_sample((traces * fair.flip(0)).sum(0))
    return found.mul_(max(_lost(a), _lost(b)) * numbers.eps / 2)


def per_sample(numbers: Tensor) -> Tensor:
    """The sum over everything but samples."""
    return numbers.flatten(1).sum(1) if numbers.dim() > 1 else numbers


def _lost(length: int) -> float:
    """Half units by which a product of so many terms, all of one sign, may be off.

    Terms are added one after the other in blocks: one large term may swallow all that follow it.
    """
    return 4 + min(length, _BLOCK) + length / _BLOCK
