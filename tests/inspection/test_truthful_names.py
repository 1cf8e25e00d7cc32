"""An id, a row or a duplicate shown to a person belongs to that very sample."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, TensorDataset

import persample
from persample.inspection import Group, load
from persample.inspection.contents import BLOCK, fingerprints, same
from persample.inspection.order import order_of

from .inspected import blobs, losses, net
from .inspected import report as plain_report

ODD = 7  # the row with the largest gradient by far


def rows() -> tuple[Tensor, Tensor, Tensor]:
    x, y = blobs(n=40, size=40)[0]
    x[ODD] *= 30
    y[ODD] = (y[ODD] + 1) % 3
    return x, y, torch.arange(40)


def report(batches: Any = None, **options: Any) -> persample.Report:
    """Of a linear model, to which the odd row matters most."""
    if batches is None:
        return plain_report(**options)
    torch.manual_seed(0)
    return persample.inspect(nn.Linear(6, 3), losses, batches, progress=False, **options)


def data() -> TensorDataset:
    return TensorDataset(*rows())


class Stream(torch_data.IterableDataset[Any]):
    """Each worker gives every second row."""

    def __iter__(self) -> Iterator[Any]:
        worker = torch_data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for i in range(first, 40, step):
            yield data()[i]


class Backwards(torch_data.Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(39, -1, -1))

    def __len__(self) -> int:
        return 40


class Turned(torch_data.SequentialSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(39, -1, -1))


class Halfway(DataLoader[Any]):
    """A loader that goes on where an earlier pass stopped."""

    def __iter__(self) -> Any:
        return iter(list(super().__iter__())[2:])


class Bar:
    """A progress bar around a loader."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Any:
        return iter(self.iterable)


def by_length(samples: list[Any]) -> Any:
    return torch_data.default_collate(sorted(samples, key=lambda s: float(s[0][0])))


def skipped() -> Any:
    accelerate = pytest.importorskip("accelerate")
    return accelerate.skip_first_batches(DataLoader(data(), 8), 2)


SHUFFLED: dict[str, tuple[Any, str]] = {
    "shuffle": (lambda: DataLoader(data(), 8, shuffle=True), "RandomSampler"),
    "weighted": (
        lambda: DataLoader(data(), 8, sampler=torch_data.WeightedRandomSampler([1.0] * 40, 40)),
        "WeightedRandomSampler",
    ),
    "subset": (
        lambda: DataLoader(data(), 8, sampler=torch_data.SubsetRandomSampler(range(40))),
        "SubsetRandomSampler",
    ),
    "distributed": (
        lambda: DataLoader(
            data(), 8, sampler=torch_data.DistributedSampler(data(), num_replicas=2, rank=1)
        ),
        "DistributedSampler",
    ),
    "own sampler": (lambda: DataLoader(data(), 8, sampler=Backwards()), "Backwards"),
    "a kind of sequential": (lambda: DataLoader(data(), 8, sampler=Turned(data())), "Turned"),
    "batch sampler": (
        lambda: DataLoader(
            data(), batch_sampler=torch_data.BatchSampler(Backwards(), 8, drop_last=False)
        ),
        "Backwards",
    ),
    "list of batches": (
        lambda: DataLoader(data(), batch_sampler=[[9, ODD], [1, 2]]), "by list",
    ),
    "single": (lambda: DataLoader(data(), batch_size=None, shuffle=True), "RandomSampler"),
    "stream": (lambda: DataLoader(Stream(), 8), "IterableDataset"),
    "stream of two": (lambda: DataLoader(Stream(), 8, num_workers=2), "2 workers"),
    "out of order": (lambda: DataLoader(data(), 8, in_order=False), "in_order=False"),
    "collate": (lambda: DataLoader(data(), 8, collate_fn=by_length), "by_length"),
    "own loader": (lambda: Halfway(data(), 8), "Halfway"),
    "skipped batches": (skipped, ""),
    "progress bar": (lambda: Bar(DataLoader(data(), 8, shuffle=True)), "RandomSampler"),
    "iterator": (lambda: iter(DataLoader(data(), 8)), "does not tell its order"),
}  # fmt: skip
IN_ORDER: dict[str, Any] = {
    "loader": lambda: DataLoader(data(), 8),
    "one worker": lambda: DataLoader(data(), 8, num_workers=1),
    "last batch dropped": lambda: DataLoader(data(), 9, drop_last=True),
    "batches": lambda: DataLoader(
        [tuple(part) for part in zip(*(r.split(8) for r in rows()), strict=True)], batch_size=None
    ),
    "list": lambda: list(DataLoader(data(), 8)),
}


@pytest.mark.parametrize("name", list(SHUFFLED))
def test_a_list_of_ids_is_refused_where_samples_may_be_reordered(name: str) -> None:
    make, why = SHUFFLED[name]
    with pytest.raises(persample.UsageError, match="cannot be paired") as caught:
        report(make(), ids=[f"row-{i}" for i in range(40)])
    assert why in caught.value.why
    assert 'ids="idx"' in caught.value.fix


@pytest.mark.parametrize("name", list(SHUFFLED))
def test_ids_that_the_batch_carries_name_the_odd_row(name: str) -> None:
    if name in ("single", "own loader", "skipped batches", "distributed", "weighted"):
        pytest.skip("batches of one, or the odd row may not come")
    found = report(SHUFFLED[name][0](), ids=2)
    assert found.outliers(1)["id"] == [ODD]


@pytest.mark.parametrize("name", list(SHUFFLED))
def test_without_ids_a_running_number_does_not_look_like_an_index(
    name: str, tmp_path: Path
) -> None:
    if name == "single":
        pytest.skip("samples without a batch axis")
    found = report(SHUFFLED[name][0]())
    assert not found.in_order
    (first,) = found.outliers(1)["id"]
    assert str(first).startswith("pass-")
    assert "position  suspicion" in str(found)
    assert "not index 7 of the data set" in str(found)
    assert SHUFFLED[name][1] in str(found)
    text = found.to_html(tmp_path / "p.html").read_text()
    assert "not index 7 of the data set" in text
    assert ">position</button>" in text
    assert ">id</button>" not in text
    saved = json.loads(found.to_json(tmp_path / "r.json").read_text())
    assert saved["samples"]["id"][3] == "pass-3"
    assert "index" not in saved["samples"]


@pytest.mark.parametrize("name", list(IN_ORDER))
def test_a_list_of_ids_is_taken_where_the_order_is_that_of_the_data(name: str) -> None:
    found = report(IN_ORDER[name](), ids=[f"row-{i}" for i in range(40)])
    assert found.outliers(1)["id"] == [f"row-{ODD}"]
    assert report(IN_ORDER[name]()).outliers(1)["id"] == [ODD]
    assert ("40 ids were given for 36" in str(found)) == (name == "last batch dropped")


def test_a_generator_has_the_order_of_the_pass_and_ids_are_the_callers_word() -> None:
    order = order_of(batch for batch in blobs())
    assert not order.of_data
    assert not order.why
    found = report((batch for batch in blobs()), ids=range(60))
    assert found.ids[59] == 59
    assert report(batch for batch in blobs()).ids[5] == "pass-5"


def test_shuffled_passes_without_ids_are_not_matched(tmp_path: Path) -> None:
    one, two = (report(DataLoader(data(), 8, shuffle=True)) for _ in range(2))
    told = two.compare(load(one.to_json(tmp_path / "one.json")))
    assert told.unmatched
    assert told.common == 0
    for ids in (told.added, told.removed, told.relabelled, told.new_suspects):
        assert not ids
    assert "cannot be matched" in str(told)
    assert "40 samples in both" not in str(told)
    assert report(data_in_order()).compare(one).unmatched
    named = [report(DataLoader(data(), 8, shuffle=True), ids=2) for _ in range(2)]
    assert named[0].compare(named[1]).common == 40
    assert not named[0].compare(named[1]).relabelled


def data_in_order() -> list[Any]:
    return list(DataLoader(data(), 8))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ("nowhere", "'nowhere' is not in the batch"),
        (9, "9 is not in the batch"),
        (lambda batch: "abcdefgh"[: len(batch[1])], "one id per sample"),
        (lambda batch: 5, "one id per sample"),
        (lambda batch: [1, 2, 3], "3 ids for a batch of 8"),
    ],
)
def test_wrong_ids_of_the_batch(ids: Any, message: str) -> None:
    with pytest.raises(persample.UsageError, match=message):
        report(data_in_order(), ids=ids)


# ------------------------------------------------------------------ equal inputs


class Bright(nn.Module):
    """Different inputs of one class have nearly the same gradient: their direction saturates."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x.mul(50).tanh())
        return out


def alike() -> tuple[Tensor, Tensor]:
    """30 rows in 3 classes; 20 is a copy of 2, and 21 has 2's inputs and another label."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(30) % 3
    x = torch.rand(30, 6, generator=generator) * 0.2 + 0.3
    x[torch.arange(30), y] *= -1
    x[20], y[20] = x[2], y[2]
    x[21], y[21] = x[2], (y[2] + 1) % 3
    return x, y


@pytest.mark.parametrize("size", [30, 8])
def test_equal_inputs_are_told_from_nearly_equal_gradients(size: int, tmp_path: Path) -> None:
    x, y = alike()
    batches = list(zip(x.split(size), y.split(size), strict=True))
    found = persample.inspect(Bright(), losses, batches, progress=False)
    groups = found.duplicates()
    assert groups[0] == Group((2, 20, 21), identical=True)
    assert [g.identical for g in groups[1:]] == [False] * 3  # the three classes
    assert sum(len(g.ids) for g in groups[1:]) == 29  # all but 21, whose label is another
    assert found.likeness.conflicting == [[2, 20, 21]]
    text = str(found)
    assert "2 duplicates" in text
    assert "1 group with different labels" in text
    assert "25 more have nearly the gradient of another" in text
    assert "2  20  21  (different labels)" in text
    page = found.to_html(tmp_path / "p.html").read_text()
    assert "Identical inputs: 1 group<" in page
    assert "Nearly equal gradients: 3 groups" in page
    assert "need not be duplicates" in page
    saved = json.loads(found.to_json(tmp_path / "r.json").read_text())["duplicates"]
    assert saved[0] == {"ids": [2, 20, 21], "inputs": "identical"}
    assert {group["inputs"] for group in saved[1:]} == {"different"}


def test_nothing_is_equal() -> None:
    text = str(report())
    assert "0 duplicates" in text
    assert "no two inputs are equal; no two gradients are nearly equal" in text


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.words(input_ids).tanh() * attention_mask.unsqueeze(2)
        out: Tensor = self.head(h.sum(1) / attention_mask.sum(1, keepdim=True))
        return out


def test_padding_that_a_mask_tells_is_no_part_of_the_inputs() -> None:
    def padded(texts: list[list[int]], length: int, *, left: bool = False) -> dict[str, Tensor]:
        rows, mask = [], []
        for text in texts:
            pad = [0] * (length - len(text))
            rows.append(pad + text if left else text + pad)
            mask.append([int(v != 0) for v in rows[-1]])
        labels = torch.tensor([sum(text) % 3 for text in texts])
        pair = {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}
        return {**pair, "labels": labels}

    texts = [[1, 2, 3], [4, 5, 6, 7], [2, 1, 3]]
    batches = [
        padded(texts, 4),
        padded([[1, 2, 3], [8, 8, 8, 8, 8, 8]], 6),
        padded(texts[:2], 5, left=True),
    ]

    def each(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch["input_ids"], batch["attention_mask"])
        return nn.functional.cross_entropy(scores, batch["labels"], reduction="none")

    found = persample.inspect(Words(), each, batches, progress=False)
    assert found.likeness.identical == [[0, 3, 5], [1, 6]]  # 2 has the same words in another order
    assert any(2 in group for group in found.likeness.alike)


def test_inputs_that_cannot_be_compared_are_not_called_equal(tmp_path: Path) -> None:
    class Flat(nn.Module):
        """Tokens of all samples one after the other: whose they are, only the model knows."""

        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, first: Tensor, rows: Tensor) -> Tensor:
            out: Tensor = self.net(rows.view(len(first), -1, 6).mean(1) + first.unsqueeze(1) * 0)
            return out

    batches = [(y, x.repeat_interleave(3, 0), x) for x, y in blobs()]

    def each(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(
            model(batch[0].float(), batch[1].view(-1, 18).view(-1, 6)), batch[0], reduction="none"
        )

    options: dict[str, Any] = {"progress": False, "check": False, "unproven": "loop"}
    found = persample.inspect(Flat(), each, batches, **options)
    assert not found.likeness.compared
    assert found.likeness.identical == []
    assert "Duplicates unknown" in str(found)
    assert all(group.identical is None for group in found.duplicates(tolerance=0.5))
    saved = json.loads(found.to_json(tmp_path / "r.json").read_text())["duplicates"]
    assert {group["inputs"] for group in saved} <= {"not compared"}


def test_inputs_that_the_model_writes_to_are_not_compared() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x.mul_(2))
            return out

    batches = [(x.clone(), y) for x, y in blobs()]
    found = persample.inspect(Writing(), losses, batches, progress=False, check=False)
    assert not found.likeness.compared


FINGERPRINTS: dict[str, tuple[Any, Any, bool]] = {
    "equal": ([1.0, 2.0], [1.0, 2.0], True),
    "exchanged": ([1.0, 2.0], [2.0, 1.0], False),
    "last bit": ([1.0, 2.0], [1.0, 2.0000002], False),
    "sign of zero": ([0.0, 1.0], [-0.0, 1.0], False),
    "zeros": ([0.0, 0.0], [0.0, 1.0], False),
}


@pytest.mark.parametrize("name", list(FINGERPRINTS))
def test_fingerprints_of_rows(name: str) -> None:
    a, b, equal = FINGERPRINTS[name]
    found = fingerprints([("x", torch.tensor([a, b]))], 2)
    assert found is not None
    assert torch.equal(found[0], found[1]) == equal


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64]
)
def test_fingerprints_tell_all_rows_apart_but_equal_ones(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 2 if dtype is torch.bool else 9, (400, 23), generator=generator).to(dtype)
    x[300:350] = x[10:60]
    found = fingerprints([("x", x)], 400)
    assert found is not None
    assert same(found) == [[i, 290 + i] for i in range(10, 60)]


def test_fingerprints_of_long_rows_other_axes_and_parts_of_batches() -> None:
    x = torch.zeros(3, BLOCK + 9)
    x[1, BLOCK + 3] = x[2, 2] = 1
    found = fingerprints([("x", x)], 3)
    assert found is not None
    assert same(found) == []
    assert torch.equal(found, torch.cat([fingerprints([("x", r)], 1) for r in x.split(1)]))
    y = torch.randn(4, 3, 2)
    y[:, 2] = y[:, 0]
    turned = fingerprints([("x", y)], 3, dim=1)
    assert turned is not None
    assert same(turned) == [[0, 2]]


@pytest.mark.parametrize(
    "inputs",
    [
        [("x", torch.zeros(3, 4)), ("packed", torch.zeros(17))],
        [("x", torch.zeros(3, 4)), ("edges", torch.zeros(2, 9))],
        [("x", torch.zeros(5, 4))],
        [("x", torch.zeros(3, 4)), ("names", ["a", "b"])],
        [("x", torch.zeros(3, 4)), ("what", object())],
        [("x", torch.zeros(3, 4).to_sparse())],
        [("flag", True)],
    ],
    ids=["packed", "edges", "other size", "two names", "object", "sparse", "nothing"],
)
def test_no_fingerprint_where_it_is_not_known_whose_an_input_is(inputs: Any) -> None:
    assert fingerprints(inputs, 3) is None


def test_constants_of_a_batch_are_part_of_all_its_samples() -> None:
    x = torch.zeros(2, 4)
    one = fingerprints([("x", x), ("mask", torch.zeros(4, 4)), ("flag", True)], 2)
    two = fingerprints([("x", x), ("mask", torch.ones(4, 4)), ("flag", True)], 2)
    assert one is not None
    assert two is not None
    assert same(torch.cat([one, two])) == [[0, 1], [2, 3]]
    texts = fingerprints([("x", x), ("text", ["a", "b"])], 2)
    assert texts is not None
    assert same(texts) == []


def test_a_picture_is_never_that_of_another_sample() -> None:
    (x, y), (u, v) = blobs(n=8, size=4)

    def each(model: nn.Module, batch: Any) -> Tensor:
        return losses(model, (batch["x"], batch["y"]))

    late = [{"y": y, "x": x}, {"x": u, "y": v}]  # features are seen in the second batch only
    found = persample.inspect(net(), each, late, progress=False)
    assert found.shown(0).features is None
    early = persample.inspect(net(), each, late[::-1], progress=False)
    assert torch.equal(early.shown(1).features, u[1])
    assert early.shown(5).features is None


# ------------------------------------------------------------------ classes in tables


def test_names_of_classes_in_files(tmp_path: Path) -> None:
    show = persample.Show(classes=["red", "green", "blue"])
    found = report(show=show)
    lines = list(csv.DictReader(found.to_csv(tmp_path / "a.csv").read_text().splitlines()))
    assert found.labels is not None
    for i in (0, 7, 59):
        assert lines[i]["label"] == str(int(found.labels[i]))
        assert lines[i]["label name"] == show.class_name(int(found.labels[i]))
        assert lines[i]["prediction name"] == show.class_name(int(lines[i]["prediction"]))
        assert lines[i]["vote name"] == show.class_name(int(lines[i]["vote"]))
    saved = json.loads(found.to_json(tmp_path / "a.json").read_text())
    assert saved["classes"] == {"0": "red", "1": "green", "2": "blue"}
    assert "label name" not in report().to_csv(tmp_path / "b.csv").read_text()


# ------------------------------------------------------------------ a data set for batches


class Rows(torch_data.Dataset[Any]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return data()[index]


class Columns:
    """As data sets of Hugging Face look."""

    column_names, features = ["x"], {"x": None}

    def __iter__(self) -> Any:
        return iter([{"x": [1.0, 2.0]}])


@pytest.mark.parametrize("given", [data(), Rows(), Columns()], ids=["tensors", "own", "columns"])
def test_a_data_set_instead_of_batches(given: Any) -> None:
    with pytest.raises(persample.UsageError, match="got a data set") as caught:
        report(given)
    assert "DataLoader(dataset" in caught.value.fix


def test_single_samples_instead_of_batches() -> None:
    samples = [{"x": [0.5] * 6, "label": 1} for _ in range(5)]
    with pytest.raises(persample.UsageError, match="a dict with x, label, which holds") as caught:
        persample.inspect(
            net(), lambda m, b: losses(m, (b["x"], b["label"])), samples, progress=False
        )
    assert "collate_fn" in caught.value.fix
    assert "single samples" in caught.value.why
