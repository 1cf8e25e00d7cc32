"""Batches in every kind of container: opened, taken apart, moved, verified, inspected, measured."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import persample
from persample.command_line.memory import measure
from persample.inputs.batch_samples import batch_size, moved, one_batch, picked, take
from persample.inputs.containers import leaves, mapped
from persample.testing import oracle, relative_error

from .batch_kinds import KINDS, Frozen, Reader, coupled, field, losses, parts


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> Any:
    if request.param == "BatchEncoding":
        pytest.importorskip("transformers")
    return KINDS[request.param]


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


# ------------------------------------------------------------------ every kind


def test_some_samples_of_a_batch_of_any_kind(kind: Any) -> None:
    given = parts()
    batch = kind(**given)
    assert batch_size(batch) == 6
    found = take(batch, torch.tensor([4, 4, 1]), 6)
    assert type(found) is type(batch) or isinstance(found, dict)
    for name, part in given.items():
        picked_ = [part[i] for i in (4, 4, 1)]
        expected = torch.stack(picked_) if isinstance(part, Tensor) else picked_
        assert same(field(found, name), expected)
        assert field(batch, name) is part  # the caller's own stays as it is
    assert take(batch, torch.arange(3), 99) is batch  # nothing has 99 samples


def test_a_batch_of_any_kind_is_moved_as_a_copy(kind: Any) -> None:
    given = parts()
    batch = kind(**given)
    found = moved(batch, "meta")
    for name in ("input_ids", "labels", "idx"):
        assert field(found, name).device.type == "meta"
        assert field(batch, name) is given[name]
    assert field(found, "text") == given["text"]
    assert moved(batch, None) is batch


def test_verify_takes_every_kind_and_still_finds_what_is_coupled(kind: Any) -> None:
    batch = kind(**parts())
    assert persample.verify(Reader(), losses, batch).ok
    assert not persample.verify(Reader(), coupled, batch).ok


def test_inspect_takes_every_kind(kind: Any) -> None:
    model = Reader()
    found = persample.inspect(
        model, losses, [kind(**parts(0)), kind(**parts(6))], ids="idx", progress=False
    )
    each = [oracle(model.double(), losses, parts(first)) for first in (0, 6)]
    rows = [torch.cat([g.flatten(1) for g in g.values()], 1).norm(dim=1) for g in each]
    torch.testing.assert_close(found.norms, torch.cat(rows), rtol=1e-5, atol=1e-6)
    assert [found.ids[i] for i in range(12)] == list(range(500, 512))
    assert found.verification is not None
    assert found.verification.ok
    assert torch.equal(found.labels, torch.cat([parts(k)["labels"] for k in (0, 6)]))
    assert found.shown(7).tokens == tuple(str(int(v)) for v in parts(6)["input_ids"][1])
    assert found.shown(7).contributions is not None  # colours
    torch.testing.assert_close(found.shown(7).contributions.sum(), found.norms[7].float() ** 2)


def test_memory_of_every_kind(kind: Any) -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(
            model(field(batch, "input_ids")), field(batch, "labels"), reduction="none"
        )

    found = measure(Reader(), step, kind(**parts()), limit=1 << 20)
    assert found.n == 6
    assert all(peak.each > 0 for peak in found.peaks)


def test_the_oracle_takes_every_kind(kind: Any) -> None:
    model = Reader().double()
    assert relative_error(
        oracle(model, losses, kind(**parts())), oracle(model, losses, parts())
    ) == 0  # fmt: skip


def test_one_batch_is_told_from_batches(kind: Any) -> None:
    batch = kind(**parts())
    assert one_batch(batch)
    assert not one_batch([batch])
    with pytest.raises(persample.UsageError, match="iterable of batches"):
        persample.inspect(Reader(), losses, batch, progress=False)


@pytest.mark.parametrize("pick", ["idx", lambda batch: field(batch, "idx")])
def test_entries_of_every_kind(kind: Any, pick: Any) -> None:
    assert torch.equal(picked(pick, kind(**parts()), "ids"), torch.arange(500, 506))
    with pytest.raises(persample.UsageError, match="'nowhere' is not in the batch"):
        picked("nowhere", kind(**parts()), "ids")


# ------------------------------------------------------------------ containers


def test_what_does_not_change_stays_itself() -> None:
    value = {"a": [torch.zeros(2), (1, "b")], "c": Frozen(torch.ones(1), torch.ones(1), None, [])}
    assert mapped(value, lambda t: t) is value
    assert len(leaves(value)) == 3


def test_containers_in_containers_and_objects_in_containers() -> None:
    class Graph:
        def __init__(self) -> None:
            self.x, self.inner = torch.zeros(3), Inner()

    class Inner:
        def __init__(self) -> None:
            self.hidden = torch.zeros(3)

    value = OrderedDict(a=[Graph()], b=(torch.zeros(3), None))
    found = mapped(value, lambda t: t + 1, objects=True)
    assert type(found) is OrderedDict
    assert float(found["a"][0].x.sum()) == float(found["b"][0].sum()) == 3
    assert found["a"][0].inner is value["a"][0].inner  # none inside another
    assert float(value["a"][0].x.sum()) == 0
    closed = mapped(value, lambda t: t + 1)
    assert closed["a"][0] is value["a"][0]


def test_modules_functions_and_types_are_not_opened() -> None:
    value = [nn.Linear(2, 2), Reader, losses, copy.copy, "text", 3]
    assert leaves(value, objects=True) == []
    assert moved(value, "meta") is value
    assert next(value[0].parameters()).device.type == "cpu"


def test_subclasses_of_lists_and_tuples() -> None:
    class Rows(list):  # type: ignore[type-arg]
        extra = 0

    rows = Rows([torch.zeros(2)])
    rows.extra = 5
    found = mapped(rows, lambda t: t + 1)
    assert type(found) is Rows
    assert found.extra == 5
    assert float(rows[0].sum()) == 0
    top = torch.tensor([[3.0, 1.0]]).topk(1)
    assert type(mapped(top, lambda t: t + 1)) is type(top)


def test_packed_sequences() -> None:
    rows = [torch.randn(t, 3) for t in (2, 4, 1)]
    batch = (pack_sequence(rows, enforce_sorted=False), torch.arange(3))
    assert batch_size(batch) == 3
    found = take(batch, torch.tensor([2, 0, 0]), 3)
    for got, expected in zip(unpack_sequence(found[0]), [rows[2], rows[0], rows[0]], strict=True):
        assert torch.equal(got, expected)
    assert found[1].tolist() == [2, 0, 0]
    assert moved(batch, "meta")[0].data.device.type == "meta"
    assert batch[0].data.device.type == "cpu"

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(3, 4), nn.Linear(4, 3)

        def forward(self, packed: Any) -> Tensor:
            out: Tensor = self.head(self.lstm(packed)[1][0][0])
            return out

    def last(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def summed(model: nn.Module, batch: Any) -> Tensor:
        return last(model, batch) * float(batch[0].data.sum())

    assert persample.verify(Net(), last, batch).ok
    assert not persample.verify(Net(), summed, batch).ok


def test_objects_that_move_themselves() -> None:
    class Sealed:
        __slots__ = ("x",)

        def __init__(self, x: Tensor) -> None:
            self.x = x

        def to(self, device: Any) -> Sealed:
            self.x = self.x.to(device)  # in place, as some do
            return self

    batch = {"sealed": Sealed(torch.zeros(2))}
    assert moved(batch, "meta")["sealed"].x.device.type == "meta"
    assert batch["sealed"].x.device.type == "cpu"
    with pytest.raises(persample.UsageError, match="a Sealed"):
        batch_size(batch["sealed"])


# ------------------------------------------------------------------ graphs


def graphs() -> tuple[Any, Any, list[Any]]:
    geometric = pytest.importorskip("torch_geometric")
    torch.manual_seed(0)
    made = []
    for i in range(12):
        k = 3 + i % 4
        made.append(
            geometric.data.Data(
                x=torch.randn(k, 4), edge_index=torch.randint(k, (2, 2 * k)),
                y=torch.randint(3, (1,)), idx=100 + i,
            )
        )  # fmt: skip
    return geometric, made[0].__class__, made


class Messages(nn.Module):
    """One step of messages and a mean over each graph, without the library's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, graph: Any) -> Tensor:
        h = self.one(graph.x)
        source, target = graph.edge_index
        h = h.index_add(0, target, h[source]).tanh()
        n = graph.num_graphs
        sums = h.new_zeros(n, 6).index_add(0, graph.batch, h)
        out: Tensor = self.two(sums / torch.bincount(graph.batch, minlength=n)[:, None])
        return out


def graph_losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch), batch.y, reduction="none")


OPTIONS: dict[str, Any] = {"n": lambda batch: batch.num_graphs, "sample_ids": "batch"}


def test_graphs_are_taken_and_moved() -> None:
    geometric, _, made = graphs()
    batch = geometric.data.Batch.from_data_list(made)
    assert batch_size(batch) == 12
    found = take((batch, torch.arange(12)), torch.tensor([5, 5, 0]), 12)
    assert found[0].idx.tolist() == [105, 105, 100]
    assert found[1].tolist() == [5, 5, 0]
    assert torch.equal(found[0].x, torch.cat([made[5].x, made[5].x, made[0].x]))
    there = moved(batch, "meta")
    assert there.x.device.type == "meta"
    assert batch.x.device.type == "cpu"
    assert there.num_graphs == 12


def test_graphs_are_verified_inspected_and_measured() -> None:
    geometric, kind, made = graphs()
    twin = kind(**made[3].to_dict())
    twin.idx = 200
    turned = kind(**made[3].to_dict())
    turned.idx, turned.edge_index = 201, made[3].edge_index.flip(0)
    loader = geometric.loader.DataLoader([*made, twin, turned], 7, shuffle=True)
    model = Messages()
    batch = geometric.data.Batch.from_data_list(made)
    assert persample.verify(model, graph_losses, batch, **OPTIONS).ok
    assert persample.verify(model, graph_losses, batch, n=12, sample_ids=batch.batch).ok

    def together(model: nn.Module, batch: Any) -> Tensor:
        return graph_losses(model, batch) * float(batch.x.sum())

    assert not persample.verify(model, together, batch, **OPTIONS).ok
    found = persample.inspect(model, graph_losses, loader, ids="idx", progress=False, **OPTIONS)
    assert found.verification is not None
    for i in range(found.count):
        graph = next(g for g in [*made, twin, turned] if g.idx == found.ids[i])
        alone = geometric.data.Batch.from_data_list([graph])
        model.zero_grad()
        graph_losses(model, alone).sum().backward()
        squares = sum(p.grad.square().sum() for p in model.parameters())  # type: ignore[union-attr]
        torch.testing.assert_close(found.norms[i].float(), torch.as_tensor(squares).sqrt())
    same_inputs = [set(group.ids) for group in found.duplicates() if group.identical]
    assert same_inputs == [{103, 200}]  # not the one whose edges are turned round
    assert measure(model, graph_losses, batch, **OPTIONS, limit=1 << 20).n == 12
    with pytest.raises(persample.UsageError, match="may reorder"):
        persample.inspect(
            model, graph_losses, loader, ids=range(14), progress=False, **OPTIONS
        )  # fmt: skip
