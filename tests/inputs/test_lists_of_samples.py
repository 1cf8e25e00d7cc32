"""Inputs that come as a list with one tensor per sample, and what is said where that is unclear."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import persample
from persample.testing import oracle, relative_error

from ..models import Fn

Rows = dict[str, Tensor]


def alone(model: nn.Module, samples: list[Tensor]) -> Rows:
    """The gradient of each sample's loss, each in a list of its own."""
    named = dict(model.named_parameters())
    rows = [torch.autograd.grad(losses(model, [x])[0], list(named.values())) for x in samples]
    return {
        name: torch.stack(found) for name, found in zip(named, zip(*rows, strict=True), strict=True)
    }


def losses(model: nn.Module, samples: list[Tensor]) -> Tensor:
    return model(samples).square().sum(1)


def pooled(s: Any, xs: list[Tensor]) -> Tensor:
    return torch.stack([s.head(s.first(x).relu().mean(0)) for x in xs])


def padded(s: Any, xs: list[Tensor]) -> Tensor:
    h = s.first(pad_sequence(xs, batch_first=True)).relu()
    there = torch.arange(h.shape[1]) < torch.tensor([len(x) for x in xs])[:, None]
    return s.head((h * there[:, :, None]).sum(1))


def joined(s: Any, xs: list[Tensor]) -> Tensor:
    parts = s.first(torch.cat(xs)).relu().split([len(x) for x in xs])
    return s.head(torch.stack([p.amax(0) for p in parts]))


def network(function: Any) -> nn.Module:
    torch.manual_seed(0)
    return Fn(function, first=nn.Linear(4, 5), head=nn.Linear(5, 2)).double()


def samples(*sizes: int) -> list[Tensor]:
    return [torch.randn(size, 4, dtype=torch.float64) for size in sizes]


@pytest.mark.parametrize("function", [pooled, padded, joined])
@pytest.mark.parametrize("sizes", [(3, 5, 2), (4, 5, 4, 4), (1, 3)])
def test_one_sample_each(function: Any, sizes: tuple[int, ...]) -> None:
    model, xs = network(function), samples(*sizes)
    with persample.record(model) as tape:
        tape.backward(losses(model, xs))
    assert tape.n == len(sizes)
    assert relative_error(tape.grads(), alone(model, xs)) < 1e-12


@pytest.mark.parametrize("function", [pooled, padded, joined])
@pytest.mark.parametrize("sizes", [(3, 3), (3,)])
def test_of_equal_sizes_if_n_is_given(function: Any, sizes: tuple[int, ...]) -> None:
    model, xs = network(function), samples(*sizes)
    with persample.record(model, n=len(sizes)) as tape:
        tape.backward(losses(model, xs))
    assert relative_error(tape.grads(), alone(model, xs)) < 1e-12


@pytest.mark.parametrize("function", [pooled, padded, joined])
def test_as_many_rows_as_samples_if_they_are_marked(function: Any) -> None:
    model, xs = network(function), samples(3, 3, 3)
    with persample.record(model, n=3) as tape:
        for k, x in enumerate(xs):
            tape.mark(x, ids=torch.full((len(x),), k))
        tape.backward(losses(model, xs))
    assert relative_error(tape.grads(), alone(model, xs)) < 1e-12


@pytest.mark.parametrize("function", [pooled, padded, joined])
def test_a_tensor_that_is_two_samples_is_refused(function: Any) -> None:
    model, xs = network(function), samples(3, 5, 2)
    xs.append(xs[0])
    with (
        pytest.raises(persample.UsageError, match="sample 0 and as sample 3") as caught,
        persample.record(model) as tape,
    ):
        tape.backward(losses(model, xs))
    assert "clone" in caught.value.fix
    copies = [x.clone() for x in xs]
    with persample.record(model) as tape:
        tape.backward(losses(model, copies))
    assert relative_error(tape.grads(), alone(model, copies)) < 1e-12


def test_a_tensor_that_is_marked_as_two_samples_is_refused() -> None:
    model, (x, y) = network(pooled), samples(3, 3)
    with persample.record(model, n=3) as tape:
        tape.mark(x, ids=torch.zeros(3, dtype=torch.long))
        tape.mark(x, ids=torch.zeros(3, dtype=torch.long))
        tape.mark(y, ids=torch.ones(3, dtype=torch.long))
        with pytest.raises(persample.UsageError, match="marked with other ids before"):
            tape.mark(x, ids=torch.full((3,), 2))


@pytest.mark.parametrize("function", [pooled, padded, joined])
@pytest.mark.parametrize("sizes", [(3, 5, 2, 4), (3, 4, 3, 3), (2, 2, 2, 2)])
def test_they_are_verified(function: Any, sizes: tuple[int, ...]) -> None:
    model, batch = network(function), (samples(*sizes), torch.arange(4.0).double())

    def weighed(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, batch[0]) * (1 + batch[1])

    assert persample.verify(model, weighed, batch, n=4).ok


def test_packed_sequences_of_a_list() -> None:
    def f(s: Any, xs: list[Tensor]) -> Tensor:
        lengths = torch.tensor([len(x) for x in xs])
        rows = s.first(pad_sequence(xs, batch_first=True))
        packed = pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        return s.cell(packed)[1][-1]

    torch.manual_seed(0)
    model = Fn(f, first=nn.Linear(4, 5), cell=nn.GRU(5, 3, batch_first=True)).double()
    xs = samples(3, 5, 2)
    with persample.record(model) as tape:
        tape.backward(losses(model, xs))
    assert relative_error(tape.grads(), alone(model, xs)) < 1e-12


def test_samples_of_a_list_that_meet() -> None:
    def f(s: Any, xs: list[Tensor]) -> Tensor:
        return torch.stack([s.first(x).sum(0) * s.first(xs[0]).sum(0) for x in xs])

    model = Fn(f, first=nn.Linear(4, 5)).double()
    with (
        persample.record(model) as tape,
        pytest.raises(persample.MixedSamplesError, match="different samples"),
    ):
        tape.backward(losses(model, samples(3, 5, 2)))


def test_a_list_of_features_holds_samples_on_its_rows() -> None:
    def f(s: Any, xs: list[Tensor]) -> Tensor:
        return s.head((s.first(xs[0]) + s.first(xs[1])).relu())

    model, xs = network(f), samples(3, 3)
    with persample.record(model) as tape:
        tape.backward(losses(model, xs))
    assert tape.n == 3


def test_equal_sizes_are_refused_with_what_to_do() -> None:
    model = network(pooled)
    with (
        persample.record(model) as tape,
        pytest.raises(persample.MixedSamplesError) as caught,
    ):
        tape.backward(losses(model, samples(3, 3)))
    assert "record(..., n=2)" in caught.value.fix


def to_dense(s: Any, x: Tensor, batch: Tensor) -> Tensor:
    """Rows of each graph beside each other: where they go is counted over the batch."""
    counts = torch.bincount(batch)
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)[:-1]])
    wide = x.new_zeros(len(counts), int(counts.max()), 5)
    wide[batch, torch.arange(len(batch)) - starts[batch]] = s.first(x).tanh()
    return s.head(wide.sum(1))


class Graph(Fn):
    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return to_dense(self, x, batch)


def test_an_input_that_tells_whose_the_rows_are() -> None:
    torch.manual_seed(0)
    model = Graph(to_dense, first=nn.Linear(4, 5), head=nn.Linear(5, 2)).double()
    ids = torch.tensor([0, 0, 1, 1, 1, 2])
    x = torch.randn(6, 4, dtype=torch.float64)
    for given, constants in ((ids, ()), (ids.clone(), ()), (ids.clone(), ("batch",))):
        with persample.record(model, n=3, sample_ids=given, constants=constants) as tape:
            tape.backward(model(x, ids).square().sum(1))
        named = dict(model.named_parameters())
        for k in range(3):
            part = x[ids == k]
            loss = model(part, torch.zeros(len(part), dtype=torch.long)).square().sum()
            parts = torch.autograd.grad(loss, list(named.values()))
            found = {name: rows[k] for name, rows in tape.grads().items()}
            assert relative_error(found, dict(zip(named, parts, strict=True))) < 1e-12


def test_bags_with_offsets() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(9, 4), nn.Linear(4, 3)

        def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
            return self.head(self.bag(text, offsets))

    model, text, offsets = Bags(), torch.arange(9), torch.tensor([0, 2, 5])
    with (
        persample.record(model) as tape,
        pytest.raises(persample.MixedSamplesError) as caught,
    ):
        tape.backward(model(text, offsets).square().sum(1))
    assert "if each bag is a sample: record(..., constants=...)" in caught.value.fix
    with persample.record(model, constants=("text",)) as tape:
        tape.backward(model(text, offsets).square().sum(1))
    assert tape.n == 3


def test_parameters_used_directly_with_data_that_nobody_marked() -> None:
    model = Fn(lambda s: None, w=nn.Parameter(torch.randn(4, 2)))
    x = torch.randn(3, 4)
    with (
        persample.record(model) as tape,
        pytest.raises(persample.MixedSamplesError, match="no tensor was recognised") as caught,
    ):
        tape.backward(F.softplus(x @ model.w).sum(1))
    assert "tape.mark(x)" in caught.value.fix
    with persample.record(model) as tape:
        tape.mark(x)
        tape.backward(F.softplus(x @ model.w).sum(1))
    assert tape.grads()["w"].shape == (3, 4, 2)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_states_of_a_recurrent_layer_are_no_list_of_samples(
    n: int, explicit: bool, layers: int
) -> None:
    torch.manual_seed(0)
    layer = nn.LSTM(4, 3, num_layers=layers, batch_first=True).double()
    x = torch.randn(n, 5, 4, dtype=torch.float64)
    states = tuple(torch.randn(layers, n, 3, dtype=torch.float64) for _ in range(2))
    with persample.record(layer, n=n if explicit else None) as tape:
        tape.backward(layer(x, states)[0].square().sum((1, 2)))
    each = []
    for i in range(n):
        mine = tuple(s[:, i : i + 1].contiguous() for s in states)
        loss = layer(x[i : i + 1], mine)[0].square().sum()
        each.append(torch.autograd.grad(loss, list(layer.parameters())))
    expected = {
        name: torch.stack(rows)
        for (name, _), rows in zip(layer.named_parameters(), zip(*each, strict=True), strict=True)
    }
    assert relative_error(tape.grads(), expected) < 1e-10


def test_pairs_beside_what_is_known_to_hold_samples_are_no_list_of_samples() -> None:
    torch.manual_seed(0)
    parts = {"e": nn.Linear(4, 4), "l": nn.LSTM(4, 3, batch_first=True)}
    parts["b"] = Fn(lambda s, h, turns: s.w(h * turns[0] + turns[1]), w=nn.Linear(4, 4))
    model, turns = nn.ModuleDict(parts).double(), torch.randn(2, 1, 5, 4).double().unbind(0)

    def loss(model: Any, x: Tensor) -> Tensor:
        states = tuple(torch.zeros(1, len(x), 3, dtype=torch.float64) for _ in range(2))
        return model["l"](model["b"](model["e"](x), turns), states)[0].square().sum((1, 2))

    x = torch.randn(2, 5, 4, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(loss(model, x))
    assert relative_error(tape.grads(), oracle(model, loss, x)) < 1e-10


class Nodes:
    """A batch that can be called, and keeps its tensors one level deeper."""

    def __init__(self, x: Tensor, batch: Tensor) -> None:
        self.store = {"x": x, "batch": batch}

    def __call__(self) -> Tensor:
        return self.store["x"]


def test_a_batch_that_can_be_called() -> None:
    torch.manual_seed(0)
    ids = torch.tensor([0, 0, 1, 1, 1, 2])
    graphs = Nodes(torch.randn(6, 4, dtype=torch.float64), ids)
    model = network(lambda s, b: to_dense(s, b.store["x"], b.store["batch"]))
    with persample.record(model, n=3, sample_ids=ids, constants=("batch",)) as tape:
        tape.backward(model(graphs).square().sum(1))
    for k in range(3):
        part = Nodes(graphs()[ids == k], ids[ids == k] - k)
        loss = model(part).square().sum()
        rows = torch.autograd.grad(loss, list(model.parameters()))
        found = [g[k] for g in tape.grads().values()]
        torch.testing.assert_close(found, list(rows))


def test_a_callable_beside_tensors_is_no_batch() -> None:
    model = network(lambda s, schedule, x: s.head(s.first(schedule() * x)))
    schedule = Nodes(torch.ones(9, 1, dtype=torch.float64)[:1], torch.zeros(9))
    with persample.record(model) as tape:
        tape.backward(model(schedule, torch.randn(3, 4, dtype=torch.float64)).square().sum(1))
    assert tape.norms().shape == (3,)


def test_samples_that_nobody_told_of() -> None:
    model = network(lambda s, get: s.head(s.first(get())))
    x = torch.randn(3, 4, dtype=torch.float64)
    with (
        persample.record(model, n=3) as tape,
        pytest.raises(persample.MixedSamplesError, match="parameters alone") as caught,
    ):
        tape.backward(model(lambda: x).square().sum(1))
    assert "tape.mark(x)" in caught.value.fix
