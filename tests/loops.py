"""Random programs that take a batch apart and go on sample by sample: exact or refused.

Lists of one tensor per sample pass through random steps: layers, joins with parameters and
constants, buffers, operators without a rule of their own, and now and then another sample. The
truth is one native backward pass per loss; whoever lets samples meet must be refused.

    python -m tests.loops 2000 [first seed]
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

import persample

Pieces = list[Tensor]
Step = Callable[["Net", Pieces, int, int], Pieces]
ROWS = 6


class Net(nn.Module):
    """Some layers, and a program that says in which order they meet the pieces."""

    def __init__(self, program: list[tuple[Step, int, int]]) -> None:
        super().__init__()
        self.linear, self.norm, self.words = nn.Linear(4, 4), nn.LayerNorm(4), nn.Embedding(5, 4)
        self.w, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        pieces = [x[i] for i in range(len(x))]
        for step, i, j in self.program:
            pieces = step(self, pieces, i, j)
        return torch.stack([numbers(piece) for piece in pieces])


def numbers(x: Tensor) -> Tensor:
    """No two elements count alike."""
    weights = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype).view(x.shape)
    return (x.tanh() * weights).sum()


def every(change: Callable[[Net, Tensor], Tensor]) -> Step:
    """The same for all pieces."""
    return lambda m, pieces, i, j: [change(m, piece) for piece in pieces]


def one(change: Callable[[Net, Tensor, int], Tensor]) -> Step:
    """One of the pieces changes."""
    return lambda m, pieces, i, j: [
        change(m, piece, i) if k == i else piece for k, piece in enumerate(pieces)
    ]


def in_a_buffer(m: Net, piece: Tensor, i: int) -> Tensor:
    buffer = piece.new_zeros(ROWS, 4)
    count = min(ROWS, len(piece))
    buffer[:count] = piece[:count] * m.b
    return buffer


def together(m: Net, pieces: Pieces, i: int, j: int) -> Pieces:
    rows = m.linear(torch.cat(pieces))
    return list(rows.split([len(piece) for piece in pieces]))


def batched(m: Net, pieces: Pieces, i: int, j: int) -> Pieces:
    if any(piece.shape != pieces[0].shape for piece in pieces):
        return pieces
    return list(m.linear(torch.stack(pieces)).tanh().unbind(0))


def meeting(m: Net, pieces: Pieces, i: int, j: int) -> Pieces:
    return [p + pieces[j].mean() if k == i else p for k, p in enumerate(pieces)]


STEPS: list[Step] = [
    every(lambda m, p: m.linear(p)),
    every(lambda m, p: m.norm(p)),
    every(lambda m, p: p @ m.w),
    every(lambda m, p: p * m.w[:1]),
    every(lambda m, p: torch.cat([m.b[None], p]).softmax(0)),
    every(lambda m, p: torch.kron(p[:1], m.b[None])[:, :4] + p),
    one(lambda m, p, i: m.linear(p)),
    one(lambda m, p, i: torch.cat([p, p.new_ones(1, 4)])),
    one(lambda m, p, i: torch.cov(torch.cat([p, 2 * p]).T)),
    one(lambda m, p, i: p + p.logsumexp(0)),
    one(lambda m, p, i: p.cumsum(0).flip(0)),
    one(lambda m, p, i: m.words(torch.tensor([i % 5, 1])) + p[:1]),
    one(lambda m, p, i: torch.dist(p, torch.zeros_like(p)) + p),
    one(lambda m, p, i: torch.zeros_like(p).index_add_(0, torch.arange(len(p)), p)),
    one(in_a_buffer),
    together,
    batched,
]


def program(draw: random.Random, n: int) -> list[tuple[Step, int, int]]:
    """Up to six steps; samples meet in one program out of ten or so."""
    steps = [draw.choice(STEPS) for _ in range(draw.randrange(1, 7))]
    if draw.random() < 0.1:
        steps[draw.randrange(len(steps))] = meeting
    return [(step, draw.randrange(n), draw.randrange(n)) for step in steps]


def truth(model: Net, x: Tensor) -> tuple[Tensor, bool]:
    """Every loss's own gradient, and whether a loss depends on another sample."""
    given = x.clone().requires_grad_()
    parameters, losses, rows, met = list(model.parameters()), model(given), [], False
    for i, loss in enumerate(losses):
        found = torch.autograd.grad(
            loss, [given, *parameters], retain_graph=True, allow_unused=True
        )
        others = [k for k in range(len(x)) if k != i]
        met = met or (found[0] is not None and bool(found[0][others].ne(0).any()))
        pairs = zip(parameters, found[1:], strict=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in pairs]
        rows.append(torch.cat([g.flatten() for g in filled]))
    return torch.stack(rows), met


def judge(seed: int) -> str:
    """'exact', 'refused', 'met' (samples met, refused), or what went wrong."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    n, lean = draw.choice([2, 3, 4, 6]), draw.random() < 0.3
    model = Net(program(draw, n)).double()
    x = torch.randn(n, draw.choice([1, 2, 3, 4, n]), 4, dtype=torch.float64)
    g, met = truth(model, x)
    if not bool(g.ne(0).any()):
        return "no gradient"
    try:
        with persample.record(model, n=n, lean=lean) as tape:
            tape.mark(x)
            tape.backward(model(x), retain_graph=True)
        norms, total = tape.norms(), tape.clipped_sum(0.3)
        rows = g if lean else torch.cat([v.flatten(1) for v in tape.grads().values()], 1)
    except persample.PersampleError:
        return "met" if met else "refused"
    sizes = g.norm(dim=1)
    clipped = (0.3 / sizes.clamp(min=1e-300)).clamp(max=1) @ g
    gaps = (norms - sizes, torch.cat([v.flatten() for v in total.values()]) - clipped, rows - g)
    error = max(float(gap.abs().max()) for gap in gaps) / max(1.0, float(g.abs().max()))
    if met:
        return f"wrong: samples meet (seed {seed})"
    return "exact" if error < 1e-9 else f"wrong: {error:.1e} (seed {seed})"


def main() -> None:
    """Print what was wrong, and the totals."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    given = [int(a) for a in sys.argv[1:]]
    count, first = given[0] if given else 2000, given[1] if len(given) > 1 else 0
    totals: Counter[str] = Counter()
    for seed in range(first, first + count):
        verdict = judge(seed)
        if verdict.startswith("wrong"):
            print(verdict, flush=True)
        totals[verdict.split(":")[0]] += 1
    print(dict(totals))


if __name__ == "__main__":
    main()
