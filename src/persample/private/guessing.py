"""Who took part? What right guesses say about ε: pure functions of canaries' scores."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch
from torch import Tensor

from ..errors import UsageError
from ..validation import shown, whole

_SHARE = 10  # guesses: the tenth of the canaries with the highest scores, and with the lowest


def guess(scores: Tensor, included: Tensor) -> tuple[int, int]:
    """How many guesses are made, and how many are right: a tenth is in, a tenth is out.

    Who is guessed depends on the scores alone, as the bound demands.
    """
    if scores.dim() != 1 or included.shape != scores.shape or included.dtype != torch.bool:
        raise UsageError(
            f"scores and included must be two vectors, got {shown(scores)} and {shown(included)}",
            fix="one score, and True or False, for each canary",
        )
    if not bool(torch.isfinite(scores).all()):
        raise UsageError("a score is not finite", fix="zero is the score of no information")
    expect_canaries(len(scores))
    count, order = len(scores) // _SHARE, scores.argsort(descending=True, stable=True)
    correct = included[order[:count]].sum() + (~included[order[-count:]]).sum()
    return 2 * count, int(correct)


def expect_canaries(count: int) -> None:
    """Refuse fewer than one guess on each side."""
    if count < _SHARE:
        raise UsageError(
            f"{count} canaries are too few", fix="400 or more give the audit some power"
        )


def lower_bound(
    *, canaries: int, guesses: int, correct: int, delta: float, confidence: float = 0.95
) -> float:
    """The largest ε that these guesses refute; zero if they refute none.

    >>> from persample.private import guessing
    >>> round(guessing.lower_bound(canaries=400, guesses=80, correct=80, delta=1e-5), 3)
    3.255
    >>> guessing.lower_bound(canaries=400, guesses=80, correct=40, delta=1e-5)
    0.0

    Args:
        canaries: m, each of which was in with probability ½ by a coin of its own.
        guesses: r ≤ m; the others were left open.
        correct: v, how many of the guesses were right.
        delta: δ.
        confidence: 1 minus the probability with which the bound may exceed ε.
    """
    whole(canaries, "canaries", least=1)
    if not 0 <= correct <= guesses <= canaries:
        raise UsageError(
            f"{correct} right of {guesses} guesses about {canaries} canaries",
            fix="correct ≤ guesses ≤ canaries",
        )

    def refuted(epsilon: float) -> bool:
        found = p_value(epsilon, canaries=canaries, guesses=guesses, correct=correct, delta=delta)
        return found < 1 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def p_value(epsilon: float, *, canaries: int, guesses: int, correct: int, delta: float) -> float:
    """The probability of so many right guesses under (ε, δ)-differential privacy, at most.

    P[X ≥ v] + 2mδ · max over i of P[v > X ≥ v − i] / i, X ~ Binomial(r, e^ε / (1 + e^ε)).
    """
    if not correct:
        return 1.0
    # P[X ≥ k] is the regularised incomplete beta function I_p(k, r − k + 1)
    special: Any = importlib.import_module("scipy.special")
    chance = 1 / (1 + math.exp(-epsilon))
    counts = torch.arange(1, correct + 1, dtype=torch.float64, device="cpu")
    tails = special.betainc(counts.numpy(), guesses - counts.numpy() + 1, chance)
    least = torch.cat([torch.ones(1, dtype=torch.float64), torch.as_tensor(tails)])
    exact = float(least[correct])
    widened = (least[:correct].flip(0) - exact) / counts  # i = 1 … v
    return min(1.0, exact + 2 * canaries * delta * float(widened.max()))
