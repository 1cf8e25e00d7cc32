"""What rounding can hide in norms and sums whose terms may cancel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

RUN = 4096  # squares that are added up in one go
_DOUBT = {torch.float32: 400 * torch.finfo(torch.float32).eps, torch.float64: 1e-6}
_NOTHING = 1e-20  # a squared norm that no one clips to
_BLOCK = 256  # terms that a matrix product adds up one after the other
THIN = 16  # a result that is narrower is added up without blocks


def units(size: int) -> float:
    """By how many units of itself a sum of so many squares may be too small.

    One large square swallows all small ones that come after it in the same lane and run. There are
    four lanes at least.
    """
    return 16 + min(size, RUN) / 8


def enlarge(found: Tensor, size: int) -> Tensor:
    """Bounds of sums of so many squares that were computed from rows as they are."""
    return found * (1 + units(size) * torch.finfo(found.dtype).eps)


def fine_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which a few numbers are added up one after the other."""
    return torch.float32 if device.type == "mps" else torch.float64


def rounding_error(energy: Tensor, t: int, run: int) -> Tensor:
    """What a sum of t terms with this energy may be off by, if so many are added in one go."""
    if t == 1:
        return torch.zeros_like(energy)
    return (t * energy).sqrt_().mul_(error_units(t, run) * torch.finfo(energy.dtype).eps)


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


def scale_sizes(sizes: Tensor, a: int, b: int) -> Tensor:
    """Sums of products' sizes in units of what rounding of such lengths can hide of them."""
    return sizes * (_lost(a) + _lost(b))


def scale_of(hidden: Tensor) -> Tensor:
    """The same from what can be hidden."""
    return hidden * (2 / torch.finfo(hidden.dtype).eps)


def hidden_in_products(one: Tensor, two: Tensor, a: int, b: int) -> Tensor:
    """What products of positions can hide of squared norms: (n,).

    ``one`` and ``two`` are products (n, …, t, t) of positions of lengths a and b.
    """
    traces = [m.diagonal(dim1=-2, dim2=-1).sum(-1) for m in (one, two)]
    sizes = [torch.linalg.vector_norm(m.flatten(-2), dim=-1) for m in (one, two)]
    return hidden_from_traces(traces, sizes, a, b, one.shape[-1])


def hidden_from_traces(
    traces: Sequence[Tensor], sizes: Sequence[Tensor], a: int, b: int, t: int
) -> Tensor:
    """The same from the traces and Frobenius norms of both kinds of products: (n, …) to (n,).

    Rounding of ⟨lₜ, lₛ⟩ is some units of ‖lₜ‖‖lₛ‖, and not independent: positions that are alike
    are rounded alike. With ⟨rₜ, rₛ⟩ it makes at most the trace of one times the size of the other.
    A product that vanished may be multiplied by a huge one of the other kind.
    """
    # squares of products may overflow or vanish; no size exceeds its trace
    fair = [
        torch.where((size > 1e-15) & torch.isfinite(size), size, trace)
        for size, trace in zip(sizes, traces, strict=True)
    ]
    unit, tiny = torch.finfo(traces[0].dtype).eps / 2, torch.finfo(traces[0].dtype).tiny
    found = traces[0] * (unit * _lost(a) * fair[1] + tiny * t * b)
    found += traces[1] * (unit * _lost(b) * fair[0] + tiny * t * a)
    return found.flatten(1).sum(1) if found.dim() > 1 else found


def _lost(length: int) -> float:
    """Units by which a product of so many terms, all of one sign, may be off: measured, doubled.

    Terms are added one after the other in blocks of some hundred.
    """
    return 4 + max(min(length, _BLOCK) / 4, math.sqrt(length) / 2)


def doubts(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Which squared norms, each with its scale, have samples that cancel to some thousandths.

    All of them are read back at once.
    """
    first = pairs[0][0]
    found = torch.stack([f.to(first) for f, _ in pairs])
    scale = torch.stack([s.to(first) for _, s in pairs])
    flags: list[bool] = _doubtful(found, scale).any(1).tolist()
    return flags


def _doubtful(found: Tensor, scale: Tensor) -> Tensor:
    return torch.sub(found, scale, alpha=_DOUBT[found.dtype]) < 0


def recompute_doubtful(found: Tensor, scale: Tensor, exactly: Callable[[Tensor], Tensor]) -> Tensor:
    """Squared norms; where products of positions cancel to some thousandths, computed again."""
    which = _doubtful(found, scale).nonzero().flatten()
    if which.numel():
        found[which] = exactly(which).to(found)
    return found


class Unsure(NamedTuple):
    """Squared norms from t positions of lengths a and b, and their energy.

    ``hidden`` is what rounding may have taken from them. A sum adds ``run`` positions in one go.
    """

    found: Tensor
    energy: Tensor
    hidden: Tensor
    a: int
    b: int
    t: int
    run: int
    exactly: Callable[[Tensor], Tensor]


def bound_norms(norms: Sequence[Unsure]) -> list[tuple[Tensor, Tensor]]:
    """Each one's bounds, and what its sum of positions may be off by.

    A bound is the norm plus what rounding can have hidden; doubtful norms are computed again.
    All are looked at together, and read back once. They are of one dtype and device.
    """
    found = torch.stack([each.found for each in norms])
    # energy that vanished is not hidden: a small factor may be multiplied by a huge one
    off = torch.stack([rounding_error(e.energy + e.hidden, e.t, e.run) for e in norms])
    unit = torch.finfo(found.dtype).eps
    sizes = found.new_tensor([units(each.a * each.b) for each in norms]).unsqueeze(1)
    slack = (unit * sizes * found).add_(torch.stack([each.hidden for each in norms]))
    doubtful = slack > (4e-3 * found).clamp_(min=_NOTHING)
    sizes = slack.add_(found)
    for k, doubt in enumerate(doubtful.any(1).tolist()):
        if doubt and norms[k].t > 1:
            which = doubtful[k].nonzero().flatten()
            exact = norms[k].exactly(which)
            norms[k].found[which] = exact.to(found.dtype)
            sizes[k, which] = (exact * (1 + 1e-6)).to(sizes.dtype)
    bounds = sizes.sqrt_().add_(off).square_()
    return list(zip(bounds, off, strict=True))
