"""Random model graphs: layers, reshapes, transposes, reuse, tying, joins; exact or refused.

python -m tests.graphs 2000 [seed] [--ids]

With ``--ids`` samples have one row or several, in no order.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.layouts.layout import Layout, ids_of
from persample.testing import relative_error

Step = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Graph(nn.Module):
    """A random program over a pool of shared layers and raw parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = random.Random(seed)
        self.n = self.rng.choice([2, 3, 4])
        self.t = self.rng.choice([self.n, 2, 3, 4])
        self.d = self.rng.choice([self.n, 4, 6])
        torch.manual_seed(seed)
        d = self.d
        self.linear, self.other = nn.Linear(d, d), nn.Linear(d, d, bias=False)
        self.norm, self.conv = nn.LayerNorm(d), nn.Conv1d(d, d, 3, padding=1)
        self.rnn = nn.GRU(d, d, batch_first=True)
        self.scale, self.token = nn.Parameter(torch.randn(d)), nn.Parameter(torch.randn(1, 1, d))
        self.matrix = nn.Parameter(torch.randn(d, d) / d)
        self.square = nn.Parameter(torch.randn(self.n, self.n))
        names = sorted(STEPS)
        self.program = [self.rng.choice(names) for _ in range(self.rng.randint(2, 9))]
        self.end = self.rng.choice(["mean", "mean", "mean", "first", "transposed"])

    def forward(self, x: Tensor) -> Tensor:
        """Run the program; steps whose shapes do not fit are skipped, in every run alike."""
        h, kept = x, x
        for k, name in enumerate(self.program):
            try:
                new = STEPS[name](self, h, kept)
            except (RuntimeError, IndexError, ValueError) as error:
                if isinstance(error, persample.PersampleError):
                    raise
                continue
            if k % 3 == 0:
                kept = h
            h = new
        return h


def _token(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    return torch.cat([m.token.expand(h.shape[0], -1, -1), h], 1)


def _windows(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    n, t, d = h.shape
    return h.reshape(n * t // 2, 2, d) if t % 2 == 0 else h.reshape(n * t, 1, d)


def _buffer(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[:, ::2] = h[:, ::2] * 2
    return out + h


def _rows(m: Any, h: Tensor, kept: Tensor) -> Tensor:
    flat = h.reshape(-1, h.shape[-1])
    order = (
        (flat.detach().sum(1) > 0).long().argsort(stable=True)
    )  # grouped by a key, as experts do
    out = torch.zeros_like(flat).index_add(0, order, m.linear(flat[order]))
    return out.view_as(h)


STEPS: dict[str, Step] = {
    "linear": lambda m, h, k: m.linear(h),
    "other": lambda m, h, k: m.other(h),
    "tied": lambda m, h, k: F.linear(h, m.linear.weight.t()),
    "norm": lambda m, h, k: m.norm(h),
    "conv": lambda m, h, k: m.conv(h.transpose(1, 2)).transpose(1, 2),
    "rnn": lambda m, h, k: m.rnn(h)[0],
    "scale": lambda m, h, k: h * m.scale,
    "inplace": lambda m, h, k: (h * 1).mul_(m.scale).add_(m.token),
    "matrix": lambda m, h, k: h @ m.matrix,
    "left": lambda m, h, k: m.matrix @ h.mT if h.dim() == 3 else m.matrix @ h,
    "mix": lambda m, h, k: m.square @ h.flatten(1),
    "tanh": lambda m, h, k: h.tanh(),
    "relu": lambda m, h, k: (h * 1).relu_(),
    "add": lambda m, h, k: h + k,
    "mul": lambda m, h, k: h * k.tanh(),
    "attend": lambda m, h, k: F.scaled_dot_product_attention(h, h, h),
    "scores": lambda m, h, k: (h @ h.mT).softmax(-1) @ h,
    "transpose": lambda m, h, k: h.transpose(0, 1),
    "turn": lambda m, h, k: h.mT,
    "flatten": lambda m, h, k: h.reshape(-1, h.shape[-1]),
    "unflatten": lambda m, h, k: h.view(-1, m.t, m.d),
    "regroup": lambda m, h, k: h.view(m.n, -1, m.d),
    "windows": _windows,
    "token": _token,
    "drop": lambda m, h, k: h[:, 1:],
    "halves": lambda m, h, k: torch.cat(h.chunk(2, -1)[::-1], -1),
    "double": lambda m, h, k: torch.cat([h, h.sin()], 0),
    "undouble": lambda m, h, k: sum(h.chunk(2, 0)) if h.shape[0] % 2 == 0 else h,
    "roll": lambda m, h, k: h.roll(1, 1),
    "roll samples": lambda m, h, k: h.roll(1, 0),
    "sort": lambda m, h, k: h.sort(1)[0],
    "cumsum": lambda m, h, k: h.cumsum(1),
    "softmax": lambda m, h, k: h.softmax(0) if h.shape[0] == 3 else h.softmax(-1),
    "centre": lambda m, h, k: h - h.mean(1, keepdim=True),
    "centre samples": lambda m, h, k: h - h.mean(0),
    "einsum": lambda m, h, k: torch.einsum("btd,de->bte", h, m.matrix),
    "einsum2": lambda m, h, k: torch.einsum("abd,ed->bae", h, m.matrix),
    "pad": lambda m, h, k: F.pad(h, (0, 0, 1, 0)),
    "pad samples": lambda m, h, k: F.pad(h, (0, 0, 0, 0, 1, 0))[1:],
    "buffer": _buffer,
    "rows": _rows,
    "mask": lambda m, h, k: h.masked_fill(h.detach() > 1, 0.5),
    "repeat": lambda m, h, k: h.repeat_interleave(2, 1),
    "repeat samples": lambda m, h, k: h.repeat_interleave(2, 0),
    "detach": lambda m, h, k: h + k.detach(),
    "unfold": lambda m, h, k: h.unfold(1, 2, 1).mean(-1),
}  # fmt: skip


def losses_of(model: Graph, x: Tensor) -> Tensor:
    out = model(x)
    if model.end == "transposed" and out.dim() > 1:
        out = out.transpose(0, 1)
    if model.end == "first" and out.dim() == 3 and out.shape[1]:
        return out[:, 0].square().sum(1)
    return out.flatten(1).square().mean(1) if out.dim() > 1 else out.square()


def rows_of(model: Graph, *, told: bool) -> Tensor:
    """The sample of every row of the input: one each in order, or some each in none."""
    ids = list(range(model.n))
    if told:
        ids += [model.rng.randrange(model.n) for _ in range(model.rng.choice([0, 1, 2, model.n]))]
        model.rng.shuffle(ids)
    return torch.tensor(ids)


def truth(
    model: Graph, x: Tensor, losses: Tensor, ids: Tensor, given: Tensor
) -> dict[str, Tensor] | None:
    """Rows by one backward pass per sample; None if a sample's losses depend on another."""
    named = dict(model.named_parameters())
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for i in range(model.n):
        found = torch.autograd.grad(losses[ids == i].sum(), [*named.values(), x],
                                    retain_graph=True, allow_unused=True)  # fmt: skip
        if found[-1] is not None and bool(found[-1][given != i].ne(0).any()):
            return None
        for (name, p), g in zip(named.items(), found, strict=False):
            rows[name].append(torch.zeros_like(p) if g is None else g)
    return {name: torch.stack(r) for name, r in rows.items()}


def trial(seed: int, *, told: bool = False) -> str:
    model = Graph(seed).double()
    given = rows_of(model, told=told)
    options: dict[str, Any] = {"n": model.n, "sample_ids": given} if told else {}
    x = torch.randn(len(given), model.t, model.d, dtype=torch.float64, requires_grad=True)
    losses = losses_of(model, x)
    if not losses.requires_grad or losses.dim() != 1:
        return "skipped"
    try:
        with persample.record(model, **options) as tape:
            mine = losses_of(model, x)
            tape.backward(mine)
            layout = tape._context.look(mine)
        found = tape.grads()
    except persample.PersampleError:
        return "refused"
    if not isinstance(layout, Layout):
        return "scalar"
    ids = ids_of(layout, losses.shape, model.n, losses.device).expand(losses.shape)
    expected = truth(model, x, losses, ids, given)
    error = float("inf") if expected is None else relative_error(found, expected)
    return (
        "exact" if error < 1e-10 else f"wrong: seed {seed} {error:.1e} {model.program} {model.end}"
    )


def main() -> int:
    told = "--ids" in sys.argv
    numbers = [int(word) for word in sys.argv[1:] if word != "--ids"]
    count, start = [*numbers, *(2000, 0)[len(numbers) :]]
    torch.set_num_threads(1)
    totals: Counter[str] = Counter()
    for seed in range(start, start + count):
        verdict = trial(seed, told=told)
        if verdict.startswith("wrong"):
            print(verdict)
        totals[verdict.split(":")[0]] += 1
    print(dict(totals))
    return int(totals["wrong"] > 0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
