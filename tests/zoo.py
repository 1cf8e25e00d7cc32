"""Every architecture in the zoo against the oracle: ``python -m tests.zoo [words...]``.

Each model runs unmodified and in float64. Where its own code casts to float32 the tolerance is that
of float32, and a second run with those casts widened to float64 must agree to the tight one.
Verdicts: exact, refused, wrong, error; a model that cannot be built or run alone is skipped.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import persample
from persample.testing import LossFn, oracle, relative_error
from tests import zoo_transformers, zoo_vision

TIGHT, LOOSE = 1e-10, 1e-4
TOO_LARGE = 2_000_000
NARROW = "float32 inside"
WIDE = (torch.float64, torch.complex128)
KINDS = ("exact", "refused", "wrong", "error", "skipped")
Grads = dict[str, Tensor]


def cases() -> Iterator[tuple[str, str, zoo_transformers.Builder]]:
    """Family, name and a builder of (model, loss function, batch) for every model."""
    yield from zoo_vision.cases()
    yield from zoo_transformers.cases()


@dataclass
class Trial:
    """A model that runs, the gradients it should have, and how exactly."""

    model: nn.Module
    loss_fn: LossFn
    batch: Any
    expected: Grads
    tolerance: float
    notes: list[str]


@dataclass(frozen=True)
class Verdict:
    """What happened, and one line about it."""

    kind: str
    detail: str


class Skip(Exception):
    """This model cannot be judged."""


# ---------------------------------------------------------------------- float64


class _Narrow(TorchFunctionMode):
    """Notices differentiable results that are narrower than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dtype not in WIDE:
                self.seen = True
        return out


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New tensors have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def widened() -> Iterator[None]:
    """Code that asks for float32 by name gets float64."""
    with (
        mock.patch.object(torch, "float32", torch.float64),
        mock.patch.object(torch, "float", torch.float64),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        yield


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating tensors in ``dtype``."""

    def convert(leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if floating else leaf

    return tree_map(convert, batch)


# ---------------------------------------------------------------------- one model


def native(model: nn.Module, loss_fn: LossFn, batch: Any) -> tuple[Grads, bool]:
    """A plain backward of each loss of the batch, and whether anything was not in float64."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for i in range(zoo_vision.N):
        with _Narrow() as narrow:
            losses = loss_fn(model, batch)
        if losses.shape != (zoo_vision.N,):
            raise Skip(f"losses of shape {tuple(losses.shape)}")
        losses[i].backward()
        for name, p in named.items():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad)
            p.grad = None
    return {name: torch.stack(row) for name, row in rows.items()}, narrow.seen


def settle(model: nn.Module, loss_fn: LossFn, batch: Any) -> str:
    """Training mode, unless the model draws random numbers or uses statistics of the batch then."""

    def varies() -> bool:
        with torch.no_grad():
            torch.manual_seed(0)
            first = loss_fn(model, batch)
            torch.manual_seed(1)
            return not torch.allclose(first, loss_fn(model, batch), equal_nan=True)

    model.train()
    if not any("BatchNorm" in type(m).__name__ for m in model.modules()) and not varies():
        return ""
    model.eval()
    if varies():
        raise Skip("random in evaluation mode")
    return "eval"


def prepared(builder: zoo_transformers.Builder, dtype: torch.dtype) -> Trial:
    """The model in this dtype with its expected gradients."""
    with default_dtype(torch.float32):
        model, loss_fn, batch = builder()
    size = sum(p.numel() for p in model.parameters())
    if size > TOO_LARGE:
        raise Skip(f"{size:,} parameters")
    model.to(dtype)
    batch = cast(batch, dtype)
    notes = [settle(model, loss_fn, batch)]
    together, narrow = native(model, loss_fn, batch)
    if not all(g.isfinite().all() for g in together.values()):
        raise ValueError("gradients are not finite")
    if not any(g.any() for g in together.values()):
        raise Skip("gradients are zero")
    if narrow:
        notes.append(NARROW if dtype == torch.float64 else "float32")
    tolerance = LOOSE if narrow else TIGHT
    expected = oracle(model, loss_fn, batch)
    apart = relative_error(together, expected)
    if not apart < tolerance:
        expected = oracle(model, loss_fn, batch, twice=True)
        notes.append("oracle twice")
        if not relative_error(together, expected) < tolerance:
            expected = together
            notes[-1] = f"other gradients ({apart:.0e}) alone than in a batch"
    return Trial(model, loss_fn, batch, expected, tolerance, [note for note in notes if note])


def recorded(trial: Trial, unproven: str = "refuse") -> Grads:
    """The gradients from persample."""
    with persample.record(trial.model, unproven=unproven) as tape:
        losses = trial.loss_fn(trial.model, trial.batch)
        tape.backward(losses)
    return tape.grads()


def compared(trial: Trial, found: Grads) -> Verdict:
    """Exact or wrong."""
    error = relative_error(found, trial.expected)
    if error < trial.tolerance:
        return Verdict("exact", f"{error:.0e}")
    if set(found) != set(trial.expected):
        return Verdict("wrong", f"names differ: {sorted(set(found) ^ set(trial.expected))[:3]}")
    errors = {k: relative_error({k: found[k]}, {k: v}) for k, v in trial.expected.items()}
    bad = [k for k, e in errors.items() if not e < trial.tolerance]
    return Verdict("wrong", f"{error:.0e}; {len(bad)} of {len(errors)} parameters, first {bad[:2]}")


def attempt(trial: Trial, unproven: str = "refuse") -> Verdict:
    """One recording and its verdict."""
    try:
        return compared(trial, recorded(trial, unproven))
    except persample.PersampleError as error:
        return Verdict("refused", f"{error.what} | {error.where} | {error.why}")
    except Exception as error:
        return Verdict("error", located(error))


def located(error: BaseException) -> str:
    """The error and the innermost line of it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = ""
    if trace is not None:
        path = trace.tb_frame.f_code.co_filename.split("/")
        where = f" at {'/'.join(path[-2:])}:{trace.tb_lineno}"
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}{where}"


def judge(builder: zoo_transformers.Builder) -> Verdict:
    """The verdict in float64, or in float32 where float64 does not run."""
    reason = ""
    for dtype in (torch.float64, torch.float32):
        with default_dtype(dtype):
            try:
                trial = prepared(builder, dtype)
            except Skip as skip:
                return Verdict("skipped", str(skip))
            except Exception as error:
                reason = located(error)
                continue
            verdict = attempt(trial)
            details = [verdict.detail, *trial.notes]
            if verdict.kind == "refused":
                details.append(f"loop: {attempt(trial, 'loop').kind}")
        if verdict.kind == "exact" and NARROW in trial.notes:
            verdict, more = again_widened(builder, verdict)
            details = [verdict.detail, *trial.notes, more]
        return Verdict(verdict.kind, "; ".join(details))
    return Verdict("skipped", reason)


def again_widened(builder: zoo_transformers.Builder, before: Verdict) -> tuple[Verdict, str]:
    """The same model with its float32 casts widened must agree to the tight tolerance."""
    with widened(), default_dtype(torch.float64):
        try:
            trial = prepared(builder, torch.float64)
        except Exception as error:
            return before, f"not widened: {located(error)[:60]}"
        found = attempt(trial)
    if trial.tolerance != TIGHT:
        return before, "not widened: float32 remains"
    if found.kind == "exact":
        return before, f"widened {found.detail}"
    return found, f"when widened, {before.detail} before"


# ---------------------------------------------------------------------- all of them


def report(counts: dict[str, Counter[str]]) -> None:
    """Totals per family and overall."""
    total: Counter[str] = Counter()
    print(f"\n{'family':<16}" + "".join(f"{kind:>9}" for kind in KINDS))
    for family, found in counts.items():
        total.update(found)
        print(f"{family:<16}" + "".join(f"{found[kind]:>9}" for kind in KINDS))
    print(f"{'all':<16}" + "".join(f"{total[kind]:>9}" for kind in KINDS), flush=True)


def main(words: list[str]) -> int:
    """Judge every model whose family and name hold one of the words."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(2)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for family, name, builder in cases():
        title = f"{family} {name}"
        if words and not any(word in title for word in words):
            continue
        start = time.perf_counter()
        verdict = judge(builder)
        counts[family][verdict.kind] += 1
        spent = time.perf_counter() - start
        print(f"{verdict.kind:<8} {title:<48} {spent:5.1f}s  {verdict.detail}", flush=True)
        gc.collect()
    report(counts)
    return int(any(found["wrong"] or found["error"] for found in counts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
