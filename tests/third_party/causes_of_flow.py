"""Programs of other packages: rows of nobody, gradients in forward, what holds samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Fn, par

from .cause import NEEDLESS, cause, mark, mark_all, name_it, subject
from .subject import N, Subject

# ---------------------------------------------------------------------- rows of nobody


def apart(made: Subject) -> None:
    """Call the layer on constant rows by themselves."""

    def f(s: Any, x: Tensor) -> Tensor:
        return s.a(x) * s.a(x.new_ones(2, 5)).mean(0)

    made.model.function = f


@cause("a weight meets rows that are constant for everyone", NEEDLESS, "along another axis", apart)
def constant_rows() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        rows = torch.cat([x.flatten(0, 1), x.new_ones(2, 5)])
        made = s.a(rows)
        return made[: len(x) * 3].view(len(x), 3, 4) * made[-2:].mean(0)

    return subject(Fn(f, a=nn.Linear(5, 4)), torch.randn(N, 3, 5))


@cause("a weight meets no rows (a relation without edges)")
def no_rows() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        source = torch.zeros(0, dtype=torch.long)
        sent = s.message(x[source])
        return s.a(x) + torch.zeros(len(x), 4, dtype=x.dtype).index_add(0, source, sent)

    return subject(Fn(f, a=nn.Linear(5, 4), message=nn.Linear(5, 4)), torch.randn(N, 5))


@cause("a weight meets rows chosen by a mask that chooses none")
def no_rows_by_mask() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        out = s.a(x)
        chosen = x[:, 0] > 1e6
        out[chosen] = out[chosen] + s.message(x[chosen])
        return out

    return subject(Fn(f, a=nn.Linear(5, 4), message=nn.Linear(5, 4)), torch.randn(N, 5))


@cause("a weight meets places that nothing was added to")
def untouched_rows() -> Subject:
    def f(s: Any, x: Tensor, owner: Tensor) -> Tensor:
        nothing = torch.zeros(0, dtype=torch.long)
        gathered = torch.zeros_like(x).index_add(0, nothing, x[nothing])
        rows = s.a(x) + s.b(s.c(gathered) + 1)
        return torch.zeros(int(owner.max()) + 1, 4, dtype=x.dtype).index_add(0, owner, rows)

    graphs = _graphs()
    model = Fn(f, a=nn.Linear(5, 4), b=nn.Linear(6, 4), c=nn.Linear(5, 6))
    batch = _joined(graphs, range(N))
    return subject(model, *batch, pick=lambda rows: _joined(graphs, rows), options=_options)


# ---------------------------------------------------------------------- gradients inside forward


@cause("a gradient of the model inside forward (energy and forces)")
def forces() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = s.b(torch.tanh(s.a(x)))
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return energy + force.square().sum(1, keepdim=True)

    return subject(Fn(f, a=nn.Linear(5, 4), b=nn.Linear(4, 1)), torch.randn(N, 5))


def prepare(made: Subject) -> None:
    """``h.requires_grad_()`` before the model uses h."""
    made.model.prepared = True


@cause("a gradient by a hidden tensor inside forward", NEEDLESS, "requires_grad_()", prepare)
def hidden_slope() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        if s.prepared:
            h.requires_grad_()
        energy = s.b(torch.tanh(s.c(h)))
        return energy + torch.autograd.grad(energy.sum(), h, create_graph=True)[0]

    model = Fn(f, a=nn.Linear(5, 4), b=nn.Linear(4, 1), c=nn.Linear(4, 4))
    model.prepared = False
    return subject(model, torch.randn(N, 5))


@cause("a Jacobian's trace by all seeds at once (continuous flows)")
def trace() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        y = s.b(torch.tanh(s.a(x)))
        seeds = torch.eye(5, dtype=x.dtype).unsqueeze(1).expand(5, len(x), 5)
        (found,) = torch.autograd.grad(y, x, seeds, create_graph=True, is_grads_batched=True)
        return y + found.diagonal(dim1=0, dim2=2).sum(1, keepdim=True)

    return subject(Fn(f, a=nn.Linear(5, 4), b=nn.Linear(4, 5)), torch.randn(N, 5))


# ---------------------------------------------------------------------- what holds samples


@cause("an input whose size is n by chance", NEEDLESS, "constants=", name_it)
def coincidence() -> Subject:
    def f(s: Any, x: Tensor, table: Tensor) -> Tensor:
        return s.a(x) @ table

    pick = torch.randn(N, 5), torch.randn(N, 3)
    model = Fn(f, a=nn.Linear(5, N))
    return subject(model, *pick, pick=lambda rows: (pick[0][list(rows)], pick[1]))


@cause("data reach the loss through a distribution's log_prob alone", NEEDLESS, "tape.mark", mark)
def log_prob() -> Subject:
    def f(s: Any) -> Any:
        return torch.distributions.Normal(s.mean, s.scale.exp())

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return -model().log_prob(x).sum(1)

    return Subject(Fn(f, mean=par(5), scale=par(5)), loss, torch.randn(N, 5))


def _flat(groups: list[list[Tensor]]) -> list[Tensor]:
    return [image for group in groups for image in group]


@cause("nested lists of images")
def nested_lists() -> Subject:
    sizes = (4, 5), (6,), (5, 7, 4), (4, 4)
    groups = [[torch.randn(2, size, size) for size in each] for each in sizes]

    def f(s: Any, groups: list[list[Tensor]]) -> Tensor:
        made = [s.a(image.mean((1, 2))) for image in _flat(groups)]
        owner = torch.tensor([k for k, group in enumerate(groups) for _ in group])
        pooled = torch.zeros(len(groups), 3, dtype=made[0].dtype)
        return pooled.index_add(0, owner, torch.stack(made))

    return subject(Fn(f, a=nn.Linear(2, 3)), groups, pick=lambda rows: ([groups[i] for i in rows],))


@cause("one call per sample", NEEDLESS, "tape.mark", mark_all)
def calls_per_sample() -> Subject:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return torch.stack([model(row.unsqueeze(0)).square().sum() for row in x])

    return Subject(nn.Sequential(nn.Linear(5, 4), nn.Tanh()), loss, torch.randn(N, 5))


# ---------------------------------------------------------------------- new mechanisms


def _graphs() -> list[Tensor]:
    return [torch.randn(size, 5) for size in (3, 4, 3, 5)]


def _joined(graphs: list[Tensor], rows: Any) -> tuple[Tensor, Tensor]:
    chosen = [graphs[i] for i in rows]
    return torch.cat(chosen), torch.cat([torch.full((len(g),), k) for k, g in enumerate(chosen)])


def _options(batch: Any) -> dict[str, Any]:
    return {"n": int(batch[1].max()) + 1, "sample_ids": batch[1], "constants": (1,)}


def _keep(score: Tensor, owner: Tensor, count: Tensor) -> Tensor:
    """The rows of each graph's two largest scores: all are sorted, then grouped by graph."""
    _, first = torch.sort(score, descending=True)
    grouped, second = torch.sort(owner[first], stable=True)
    start = torch.cumsum(count, 0) - count
    place = torch.arange(len(score)) - start[grouped]
    return first[second[place < 2]]


@cause("a sort over all rows, then a stable sort by graph (ragged top-k)")
def ragged_top() -> Subject:
    def f(s: Any, x: Tensor, owner: Tensor) -> Tensor:
        score = torch.tanh((x * s.w).sum(-1))
        keep = _keep(score, owner, torch.bincount(owner))
        kept = s.a(x[keep] * score[keep].unsqueeze(1))
        return torch.zeros(int(owner.max()) + 1, 4, dtype=x.dtype).index_add(0, owner[keep], kept)

    graphs = _graphs()
    batch = _joined(graphs, range(N))
    model = Fn(f, w=par(5), a=nn.Linear(5, 4))
    return subject(model, *batch, pick=lambda rows: _joined(graphs, rows), options=_options)


@cause("ragged top-k of equal scores, and again of what was kept")
def ragged_top_twice() -> Subject:
    def f(s: Any, x: Tensor, owner: Tensor) -> Tensor:
        x = s.a(x.round())
        for w in (s.w, s.v):
            score = (x * w).sum(-1)
            kept = _keep(score, owner, torch.bincount(owner))
            x, owner = torch.tanh(x[kept] * score[kept, None]), owner[kept]
        return torch.zeros(int(owner.max()) + 1, 4, dtype=x.dtype).index_add(0, owner, s.b(x))

    graphs = [row[:2].repeat(6, 1) for row in _graphs()]
    batch = _joined(graphs, range(N))
    model = Fn(f, w=par(4), v=par(4), a=nn.Linear(5, 4), b=nn.Linear(4, 4))
    return subject(model, *batch, pick=lambda rows: _joined(graphs, rows), options=_options)


def _packs(s: Any, graphs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Two sequences of several samples each, padded, and whose each place is."""
    owner = [torch.full((len(g),), k) for k, g in enumerate(graphs)]
    halves = slice(0, None, 2), slice(1, None, 2)
    rows = [torch.cat(graphs[half]) for half in halves if graphs[half]]
    owners = [torch.cat(owner[half]) for half in halves if graphs[half]]
    pad = nn.utils.rnn.pad_sequence
    return s.a(pad(rows, batch_first=True)), pad(owners, batch_first=True, padding_value=-1)


@cause("attention in packs of several samples each, padded")
def packs() -> Subject:
    def f(s: Any, graphs: list[Tensor]) -> Tensor:
        x, owner = _packs(s, graphs)
        mask = owner[:, None, :, None] == owner[:, None, None, :]
        q, k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in s.qkv(x).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        kept = owner >= 0
        return torch.zeros(len(graphs), 4, dtype=x.dtype).index_add(0, owner[kept], s.b(x[kept]))

    graphs = _graphs()
    model = Fn(f, a=nn.Linear(5, 4), b=nn.Linear(4, 4), qkv=nn.Linear(4, 12))
    return subject(model, graphs, pick=lambda rows: ([graphs[i] for i in rows],))


@cause("learned queries, one for each sample of a pack")
def learned_queries() -> Subject:
    def f(s: Any, graphs: list[Tensor]) -> Tensor:
        x, owner = _packs(s, graphs)
        mine = torch.arange(len(graphs))[:, None] == owner[:, None]
        found = nn.functional.scaled_dot_product_attention(
            s.q.expand(*mine.shape[:2], 4), x, x, mine
        )
        return s.b(found[owner.amax(1) >= 0].sum(0))

    graphs = _graphs()
    model = Fn(f, a=nn.Linear(5, 4), b=nn.Linear(4, 4), q=nn.Parameter(torch.randn(4)))
    return subject(model, graphs, pick=lambda rows: ([graphs[i] for i in rows],))


@cause("torch.vmap inside forward")
def mapped() -> Subject:
    def f(s: Any, x: Tensor) -> Tensor:
        return torch.vmap(lambda row: torch.tanh(s.a(row)))(x)

    return subject(Fn(f, a=nn.Linear(5, 4)), torch.randn(N, 5))
