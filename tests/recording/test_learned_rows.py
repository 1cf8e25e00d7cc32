"""Calls on samples by explicit ids are learned: ids differ in every batch, rows stay in place.

The same model is recorded with other graphs at every step, sometimes of the same sizes. The answer
must be autograd's, or a refusal.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.layouts.layout import _closed_form
from persample.layouts.reshaping import squeeze_colours

N, D = 3, 4


class Graphs(nn.Module):
    """Layers on the nodes of several graphs, messages along edges, and a sum over each graph."""

    def __init__(self, middle: Callable[[Graphs, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.norm, self.scale = nn.LayerNorm(D), nn.Parameter(torch.rand(D))
        self.middle = middle

    def forward(self, x: Tensor, edges: Tensor, owner: Tensor) -> Tensor:
        """Two rounds of messages, and what a test puts between them."""
        h = self.send(self.first(x).tanh(), edges)
        h = self.middle(self, h, edges)
        h = self.send(self.second(h).tanh(), edges)
        return self.head(h.new_zeros(N, D).index_add_(0, owner, h)).square().sum(1)

    def send(self, h: Tensor, edges: Tensor) -> Tensor:
        """What neighbours hold, and a node's own."""
        messages = h.index_select(0, edges[0])
        to = edges[1].view(-1, 1).expand_as(messages)
        return h + h.new_zeros(h.shape).scatter_add_(0, to, messages)


def batch(sizes: tuple[int, ...], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes, edges within graphs, and the graph of every node."""
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    owner = owner[torch.randperm(len(owner), generator=generator)]
    ends = torch.randint(len(owner), (2, 60), generator=generator)
    edges = ends[:, owner[ends[0]] == owner[ends[1]]][:, :8]
    edges = torch.cat([edges, torch.arange(len(owner)).expand(2, -1)], 1)
    x = torch.randn(len(owner), D, generator=generator, dtype=torch.float64)
    return x, edges, owner


def truth(model: nn.Module, args: tuple[Tensor, ...]) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    rows = []
    for loss in model(*args):
        found = torch.autograd.grad(loss, [*named.values()], retain_graph=True, allow_unused=True)
        pairs = zip(found, named.values(), strict=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in pairs])
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(named)}


def check(model: nn.Module, args: tuple[Tensor, ...], **options: Any) -> None:
    constants = ("edges", "owner")
    with persample.record(model, n=N, sample_ids=args[2], constants=constants, **options) as tape:
        tape.backward(model(*args))
    norms = tape.norms()
    expected = truth(model, args)
    total = sum(rows.flatten(1).square().sum(1) for rows in expected.values())
    torch.testing.assert_close(norms, torch.as_tensor(total).sqrt())
    found = tape.grads()
    for name, rows in expected.items():
        torch.testing.assert_close(found.get(name, torch.zeros_like(rows)), rows)


def two_axes(model: Graphs, h: Tensor, edges: Tensor) -> Tensor:
    """Heads, and back; a view that is written to."""
    heads = h.view(-1, 2, D // 2)
    heads = heads * heads.sum(-1, keepdim=True)
    return torch.cat([*heads.unbind(1)], 1)


# what is between the two rounds, and which of it is handled in full at every step
BETWEEN: dict[str, tuple[Callable[[Graphs, Tensor, Tensor], Tensor], list[str]]] = {
    "nothing": (lambda m, h, e: h, []),
    "elements": (lambda m, h, e: (h.relu() * 2 - h.abs()).tanh(), []),
    "a norm and a scale": (lambda m, h, e: m.norm(h) * m.scale, []),
    "a layer of the same": (lambda m, h, e: m.first(h) + m.second(h), []),
    "other ranks": (two_axes, []),
    "a list": (lambda m, h, e: torch.stack([h, 2 * h], 1).sum(1), []),
    "several results": (lambda m, h, e: torch.cat(h.chunk(2, 1)[::-1], 1), []),
    "features transposed": (lambda m, h, e: h.t().flip(0).t(), []),
    "without gradients": (lambda m, h, e: h * h.detach().square().mean(1, keepdim=True), []),
}
SIZES = [(4, 3, 5), (4, 3, 5), (4, 3, 5), (2, 6, 4), (3, 5, 2), (4, 3, 5)]
MOVES = {"index_select", "getitem", "view", "expand_as", "new_zeros", "scatter_add", "index_add"}


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", BETWEEN)
def test_rows_that_stay_in_place_are_learned(name: str, lean: bool, handled: list[str]) -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    middle, rest = BETWEEN[name]
    model = Graphs(middle).double()
    for step, sizes in enumerate(SIZES):
        args = batch(sizes, generator)
        handled.clear()
        check(model, args, lean=lean)
        if step in (2, 3):  # as many rows, other ids
            first = handled[: handled.index("backward")] if "backward" in handled else handled
            assert [one for one in first if one not in MOVES] == rest


def crossed(model: Graphs, h: Tensor, edges: Tensor) -> Tensor:
    """Messages along an edge that is not in the list."""
    return model.send(h, torch.stack([edges[0], edges[1].roll(1)]))


def summed(model: Graphs, h: Tensor, edges: Tensor) -> Tensor:
    return h - h.mean(0)


@pytest.mark.parametrize("name", ["edges", "crossed", "summed", "products"])
def test_rows_of_other_samples_are_refused(name: str) -> None:
    """Also where the same calls kept samples apart so far."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = Graphs(lambda m, h, e: h).double()
    for _ in range(3):
        x, edges, owner = batch((4, 3, 5), generator)
        check(model, (x, edges, owner))
    if name == "edges":
        edges[0, 0] = (owner != owner[edges[1, 0]]).nonzero()[0, 0]
    else:
        model.middle = {
            "crossed": crossed, "summed": summed,
            "products": lambda m, h, e: (h @ h.t()) @ h,
        }[name]  # fmt: skip
    with (
        pytest.raises(persample.PersampleError),
        persample.record(model, n=N, sample_ids=owner, constants=("edges", "owner")) as tape,
    ):
        tape.backward(model(x, edges, owner))
        tape.norms()
    model.middle = lambda m, h, e: h
    check(model, batch((4, 3, 5), generator))


@pytest.mark.parametrize("how", ["copy", "numpy", "data"])
def test_indices_that_are_written_to_are_read_again(how: str) -> None:
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)

    def middle(model: Graphs, h: Tensor, edges: Tensor) -> Tensor:
        order = edges[0].clone()
        one = h.detach().index_select(0, order)  # autograd keeps no index that is written to
        other = edges[0].roll(3)
        if how == "copy":
            order.copy_(other)
        elif how == "numpy":
            order.numpy()[...] = other.numpy()
        else:
            order.data[...] = other
        two = h.detach().index_select(0, order)
        zeros = h.new_zeros(h.shape)
        sums = zeros.index_add(0, edges[0], one) + zeros.index_add(0, other, two).tanh()
        return h * sums

    model = Graphs(middle).double()
    for _ in range(4):
        check(model, batch((4, 3, 5), generator))


def test_rows_of_nobody() -> None:
    """Rows that nothing was added to: by values, no step is learned for layers on them."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)

    def middle(model: Graphs, h: Tensor, edges: Tensor) -> Tensor:
        edges = edges[:, :3]
        got = h.new_zeros(h.shape).index_add(0, edges[1], h.index_select(0, edges[0]))
        return h + model.second(got.tanh()).sin() * got

    model = Graphs(middle).double()
    for _ in range(5):
        check(model, batch((4, 3, 5), generator))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_closed_forms_are_found(n: int) -> None:
    """As the definition says: ids are (j // inner) % n for one inner, or for none."""
    generator = torch.Generator().manual_seed(n)
    for size in range(1, 13):
        index = torch.arange(size)
        inners = [d for d in range(1, size + 1) if size % n == 0 and size // n % d == 0]
        for inner in inners:
            ids = index // inner % n
            assert _closed_form(ids, n) in [k for k in inners if torch.equal(index // k % n, ids)]
        for _ in range(20):
            ids = torch.randint(-1, n, (size,), generator=generator)
            some = [k for k in inners if torch.equal(index // k % n, ids)]
            assert _closed_form(ids, n) in (some or [None])


def test_axes_of_one_colour_are_squeezed() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        shape = [int(s) for s in torch.randint(1, 4, (2,), generator=generator)]
        ids = torch.randint(-1, 3, shape, generator=generator)
        found = squeeze_colours(ids, 3).expand(shape)
        known = ids >= 0
        assert torch.equal(found[known], ids[known])


class Picked(nn.Module):
    """Rows that an input of the samples picks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(D, D), nn.Linear(D, 1)

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        """A loss for every row."""
        h = self.first(x).tanh()
        return self.head(h[neighbours].sum(1) * h).square().sum(1)


def test_indices_of_the_samples_are_read_every_time() -> None:
    """A program that picked each row itself does not say whose rows it picks later."""
    torch.manual_seed(0)
    model, owner = Picked().double(), torch.tensor([0, 0, 1, 1, 1, 2, 2])
    own = torch.arange(len(owner)).view(-1, 1)
    within = torch.tensor([1, 0, 4, 2, 3, 6, 5]).view(-1, 1)
    across = torch.tensor([5, 0, 4, 2, 3, 6, 1]).view(-1, 1)
    for step, neighbours in enumerate([own, own, own, within, across]):
        x = torch.randn(len(owner), D).double()
        with persample.record(model, n=N, sample_ids=owner) as tape:
            if step == 4:
                with pytest.raises(persample.PersampleError):
                    tape.backward(model(x, neighbours))
                continue
            losses = model(x, neighbours)
            tape.backward(losses)
        for name, p in model.named_parameters():
            rows = [
                torch.autograd.grad(model(x, neighbours)[owner == i].sum(), p)[0] for i in range(N)
            ]
            torch.testing.assert_close(tape.grads()[name], torch.stack(rows))


def test_bounds_that_are_tensors_are_compared() -> None:
    """Slices of one size are other rows, where their bounds are others."""
    torch.manual_seed(0)
    columns, starts = torch.tensor([0, 2]), torch.tensor([0, 2, 4])

    class Slices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(D, D), nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).tanh()
            parts = [h[start : start + 2, columns].sum(0) for start in starts]
            return self.head(torch.stack(parts)).square().sum(1)

    model, owner = Slices().double(), torch.tensor([1, 1, 0, 0, 2, 2])
    for _ in range(3):
        x = torch.randn(6, D).double()
        with persample.record(model, n=N, sample_ids=owner) as tape:
            tape.backward(model(x))
        for name, p in model.named_parameters():
            rows = [torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in model(x)]
            torch.testing.assert_close(tape.grads()[name], torch.stack(rows)[[1, 0, 2]])


def test_moved_rows_are_not_kept_alive() -> None:
    model, owner = nn.Linear(D, 1), torch.tensor([0, 1, 1, 2])
    kept: list[weakref.ref[Tensor]] = []
    with persample.record(model, n=N, sample_ids=owner) as tape:
        x = torch.randn(len(owner), D)
        tape.mark(x, ids=owner)
        for step in range(4):
            x = x.index_select(0, torch.arange(len(owner)).roll(step))
            kept.append(weakref.ref(x))
    assert [ref() is None for ref in kept] == [True, True, True, False]


@pytest.mark.parametrize(
    "owner", [[0, 2, 2], [0, 0, 2], [0, 1, 1], [1, 1, 0], [2, 0, 0], [1, 2, 0]]
)
def test_as_many_rows_as_samples(owner: list[int]) -> None:
    """Rows of graphs are not taken for nodes where their numbers agree, and one graph is empty."""
    torch.manual_seed(0)

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(D, D), nn.Linear(D, 1)

        def forward(self, x: Tensor, owner: Tensor) -> Tensor:
            h = self.first(x).tanh()
            return self.head(h.new_zeros(N, D).index_add(0, owner, h)).square().sum(1)

    model, x, ids = Sums().double(), torch.randn(3, D).double(), torch.tensor(owner)
    with persample.record(model, n=N, sample_ids=ids, constants=("owner",)) as tape:
        losses = model(x, ids)
        try:
            tape.backward(losses)
        except persample.PersampleError:
            assert len(set(owner)) < N
            return
    for name, p in model.named_parameters():
        rows = [torch.autograd.grad(loss, p, retain_graph=True)[0] for loss in model(x, ids)]
        torch.testing.assert_close(tape.grads()[name], torch.stack(rows))
