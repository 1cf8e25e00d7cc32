"""PyTorch's module database: every module and input, exact or refused.

python -m tests.modules [words]
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

import persample
from persample.layouts.layout import Layout, ids_of

from .operators import reduced


def infos() -> list[Any]:
    """Modules with autograd in float64."""
    from torch.testing._internal.common_modules import module_db

    return [m for m in module_db if torch.float64 in m.supported_dtypes("cpu")]


def run(model: nn.Module, args: Any, kwargs: Any) -> str:
    """One input: 'exact', 'refused', 'skipped' or 'wrong: …'."""
    torch.manual_seed(1)
    try:
        with persample.record(model) as tape:
            out = model(*args, **kwargs)
            recorder = tape._context
            states = [recorder.look(t) for t in _outputs(out)]
            losses = reduced(out, recorder)
            if losses is None or not states:
                return "refused"
            tape.backward(losses)
        found = tape.grads()
        n = tape.n
    except persample.PersampleError:
        return "refused"
    torch.manual_seed(1)
    total: Any = 0
    for tensor, layout in zip(_outputs(model(*args, **kwargs)), states, strict=True):
        assert isinstance(layout, Layout)
        ids = ids_of(layout, tensor.shape, n, tensor.device).expand(tensor.shape).reshape(-1)
        weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype)
        flat = (tensor.reshape(-1) * weights).square()
        total = torch.zeros(n, dtype=flat.dtype).index_add(0, ids, flat) + total
    worst, top = 0.0, 1e-30
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for i in range(n):
        rows = torch.autograd.grad(total[i], list(named.values()), retain_graph=True,
                                   allow_unused=True)  # fmt: skip
        for name, g in zip(named, rows, strict=True):
            expected = torch.zeros_like(named[name]) if g is None else g.to_dense()
            top = max(top, float(expected.abs().max()) if expected.numel() else 0.0)
            gap = (found[name][i] - expected).abs()
            worst = max(worst, float(gap.max()) if gap.numel() else 0.0)
    return "exact" if worst <= 1e-9 * top else f"wrong: {worst / top:.1e}"


def _outputs(out: Any) -> list[Tensor]:
    return [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.requires_grad]


def attack(info: Any) -> Counter[str]:
    """Verdicts over the module's inputs, in training and in eval mode."""
    verdicts: Counter[str] = Counter()
    torch.manual_seed(0)
    for training in (True, False):
        inputs = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=False, training=training
        )
        for given in inputs:
            if given.forward_input is None:
                continue
            made = given.constructor_input
            try:
                model = info.module_cls(*made.args, **made.kwargs).double().train(training)
            except TypeError:
                continue
            if not any(p.requires_grad for p in model.parameters()):
                verdicts["no parameter"] += 1
                continue
            verdict = run(model, given.forward_input.args, given.forward_input.kwargs)
            if verdict.startswith("wrong"):
                print(f"    WRONG {info.name} training={training} {made.kwargs}: {verdict}")
            verdicts[verdict.split(":")[0]] += 1
    return verdicts


def main() -> int:
    """Print the verdict of every module and the totals."""
    words = sys.argv[1:]
    totals: Counter[str] = Counter()
    for info in infos():
        if words and not any(w in info.name for w in words):
            continue
        try:
            verdicts = attack(info)
        except Exception as error:
            print(info.name, "error", type(error).__name__, str(error)[:120])
            totals["error"] += 1
            continue
        kinds = ("wrong", "exact", "refused")
        kind = next((k for k in kinds if verdicts[k]), "no parameter")
        totals[kind] += 1
        if kind not in ("exact", "no parameter") or words:
            print(info.name, dict(verdicts))
    print(dict(totals))
    return int(totals["wrong"] > 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
