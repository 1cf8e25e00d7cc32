"""``persample.inspect``: numbers, edge cases, files."""

from __future__ import annotations

import csv
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample import testing
from persample.inspection import Group, load
from persample.inspection.store import Rows

from .inspected import blobs, interrupted, late, losses, net, report, trained, with_ids


def whole(batches: Any) -> tuple[Tensor, Tensor]:
    return torch.cat([b[0] for b in batches]), torch.cat([b[1] for b in batches])


# ------------------------------------------------------------------ numbers


def test_norms_losses_and_predictions_are_those_of_single_samples() -> None:
    batches = blobs(n=23, size=5, dtype=torch.float64)
    model = net(torch.float64)
    found = persample.inspect(model, losses, batches, progress=False)
    x, y = whole(batches)
    truth = testing.oracle(model, losses, (x, y))
    for k, name in enumerate(found.names):
        expected = truth[name].flatten(1).norm(dim=1).float()
        torch.testing.assert_close(found.parameter_norms[:, k], expected)
    squares = sum(g.flatten(1).square().sum(1) for g in truth.values())
    torch.testing.assert_close(found.norms, squares.sqrt())
    torch.testing.assert_close(found.losses, losses(model, (x, y)).float())
    assert torch.equal(found.predictions, model(x).argmax(1))
    assert torch.equal(found.labels, y)
    assert found.verification is not None
    assert found.verification.ok
    assert found.cost.ratio is not None


def test_projections_do_not_depend_on_the_batches() -> None:
    small, large = report(blobs(size=7)), report(blobs(size=60))
    torch.testing.assert_close(small.projections, large.projections)
    assert [str(i) for i in small.suspects(9)["id"]] == [str(i) for i in large.suspects(9)["id"]]


def test_changed_labels_are_found_in_a_model_that_has_learned_them() -> None:
    batches = blobs(n=90)
    wrong = [4, 21, 40, 66]
    x, y = whole(batches)
    truth = y.clone()
    y[wrong] = (y[wrong] + 1) % 3
    batches = list(zip(x.split(30), y.split(30), strict=True))
    model = trained(batches, 2000)
    assert torch.equal(model(x).argmax(1), y)
    found = persample.inspect(model, losses, batches, progress=False)
    assert set(found.suspects(4)["id"]) == set(wrong)
    assert found.suspicion.vote is not None
    assert torch.equal(found.suspicion.vote[wrong], truth[wrong])


def test_duplicates_and_parameters_without_gradient() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    x, y = whole(blobs())
    x[50], y[50], x[7], y[7] = x[3], y[3], x[3] * (1 + 1e-4), y[3]
    made = persample.inspect(Net(), losses, [(x, y)], ids=range(100, 160), progress=False)
    assert made.duplicates() == [Group((103, 150), True), Group((103, 107, 150), False)]
    assert made.without_gradient == ["unused.weight", "unused.bias"]
    assert "unused.weight" in str(made)


def test_a_task_without_classes() -> None:
    def squares(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum(1)

    found = persample.inspect(net(), squares, [b[0] for b in blobs()], progress=False)
    assert found.labels is None
    assert found.predictions is None
    assert found.suspicion.class_agreement is None
    assert 0 <= float(found.suspicion.score.min()) <= float(found.suspicion.score.max()) <= 1
    assert "suspect samples" in str(found)


# ------------------------------------------------------------------ ids and labels


@pytest.mark.parametrize(
    ("ids", "first"),
    [
        (None, 0),
        ([f"s{i}" for i in range(60)], "s0"),
        (range(1000, 1060), 1000),
        (iter(range(5, 99)), 5),
        (lambda batch: [f"x{v:.3f}" for v in batch[0][:, 0].tolist()], None),
    ],
    ids=["none", "texts", "numbers", "iterator", "function"],
)
def test_ids(ids: Any, first: Any) -> None:
    found = report(ids=ids)
    assert len({found.ids[i] for i in range(60)}) == 60
    assert first is None or found.ids[0] == first


def test_ids_follow_shuffled_data() -> None:
    x, y = whole(blobs())
    data = torch.utils.data.TensorDataset(x, y, torch.arange(500, 560))
    loader = torch.utils.data.DataLoader(data, 13, shuffle=True)
    found = report(loader, ids=2)
    plain = report([(x, y)])
    order = torch.tensor([found.ids[i] for i in range(60)]) - 500
    assert not torch.equal(order, torch.arange(60))
    torch.testing.assert_close(found.norms, plain.norms[order])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": [1, 2, 3]}, "3 ids for a batch of 16"),
        ({"ids": "name"}, "not in the batch"),
        ({"labels": 0}, "labels have shape"),
        ({"labels": "y"}, "not in the batch"),
        ({"limit": 0}, "limit must be a positive"),
        ({"width": 0}, "width must be a positive"),
        ({"width": "8"}, "width must be"),
        ({"memory": -1}, "memory must be"),
        ({"show": 3}, "persample.Show"),
        ({"lean": True}, "lean"),
        ({"show": persample.Show(images=lambda b: b[0])}, "images must be"),
        ({"show": persample.Show(text=lambda b: ["a"])}, "gave 1 samples for a batch of 16"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(persample.UsageError, match=message):
        report(**options)


def test_batches_of_a_class_of_ones_own() -> None:
    class Batch:
        def __init__(self, x: Tensor, y: Tensor) -> None:
            self.x, self.y = x, y

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, batch: Batch) -> Tensor:
            found: Tensor = self.net(batch.x)
            return found

    def each(model: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(model(batch), batch.y, reduction="none")

    found = persample.inspect(Inside(), each, [Batch(*b) for b in blobs()], progress=False)
    torch.testing.assert_close(found.norms, report().norms)
    assert found.verification is not None
    assert found.verification.ok

    class Sealed:
        __slots__ = ("x", "y")

        def __init__(self, x: Tensor, y: Tensor) -> None:
            self.x, self.y = x, y

    def sealed(model: nn.Module, batch: Sealed) -> Tensor:
        return F.cross_entropy(model(batch.x), batch.y, reduction="none")

    found = persample.inspect(net(), sealed, [Sealed(*b) for b in blobs()], progress=False)
    torch.testing.assert_close(found.norms, report().norms)
    assert found.verification is None
    assert "cannot be exchanged" in found.collected.unverified


@pytest.mark.parametrize("k", [-1, "5", 2.0, True])
def test_wrong_lengths_of_lists(k: Any) -> None:
    found = report()
    for ask in (found.suspects, found.outliers):
        with pytest.raises(persample.UsageError, match="k must be"):
            ask(k)
    assert len(found.suspects(0)) == 0


@pytest.mark.parametrize("batches", [blobs()[0], blobs()[0][0], {"x": 1}, 5])
def test_one_batch_is_not_batches(batches: Any) -> None:
    with pytest.raises(persample.UsageError, match="iterable of batches"):
        report(batches)


# ------------------------------------------------------------------ edge cases


def test_a_refused_model_a_scalar_loss_and_no_data() -> None:
    mixing = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    with pytest.raises(persample.MixedSamplesError, match="BatchNorm"):
        persample.inspect(mixing, losses, blobs(), progress=False)
    with pytest.raises(persample.UsageError, match="not one loss for each of 16"):
        persample.inspect(
            net(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), blobs(), check=False, progress=False
        )
    for empty in ([], iter(()), [(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long))]):
        with pytest.raises(persample.UsageError, match="the data set is empty"):
            report(empty)
    model, loss_fn, batches = late()
    with pytest.raises(persample.MixedSamplesError, match="batch 3: "):
        persample.inspect(model, loss_fn, batches, progress=False)


def test_batches_of_one() -> None:
    found = report(blobs(n=5, size=1))
    assert found.count == 5
    assert found.verification is None
    assert found.noise is None
    assert "Not verified" in str(found)
    torch.testing.assert_close(found.norms, report(blobs(n=5, size=5)).norms)


def test_one_sample(tmp_path: Path) -> None:
    found = report(blobs(n=1, size=1))
    assert found.suspects(5)["id"] == [0]
    assert "<html" in found.to_html(tmp_path / "one.html").read_text()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_samples_that_are_not_finite_are_named_and_left_out(value: float, tmp_path: Path) -> None:
    batches = blobs()
    batches[1][0][3] = value
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    found = persample.inspect(model, losses, batches, progress=False, check=False)
    assert found.nonfinite.tolist() == [19]
    assert 19 not in list(found.suspects(60)["id"]) + list(found.outliers(60)["id"])
    keep = torch.arange(60) != 19
    clean = [(x[[i for i in range(len(x)) if (b, i) != (1, 3)]],
              y[[i for i in range(len(x)) if (b, i) != (1, 3)]])
             for b, (x, y) in enumerate(batches)]  # fmt: skip
    other = persample.inspect(model, losses, clean, progress=False, check=False)
    torch.testing.assert_close(found.norms[keep], other.norms)
    torch.testing.assert_close(found.suspicion.score[keep], other.suspicion.score)
    torch.testing.assert_close(found.clip_curve.bias, other.clip_curve.bias)
    assert "1 not finite" in str(found)
    saved = json.loads(found.to_json(tmp_path / "a.json").read_text())
    assert saved["nonfinite"] == [19]
    assert "NaN" not in (tmp_path / "a.json").read_text()


def test_no_sample_is_finite(tmp_path: Path) -> None:
    batches = [(torch.full_like(x, float("nan")), y) for x, y in blobs()]
    found = report(batches, check=False)
    assert len(found.nonfinite) == 60
    assert len(found.suspects()) == 0
    assert "No sample has a finite gradient" in str(found)
    found.to_html(tmp_path / "nan.html")


def test_gradients_that_vanish() -> None:
    model = net()
    batches = [(x, torch.full_like(y, -100)) for x, y in blobs()]  # all labels are ignored
    found = persample.inspect(model, losses, batches, progress=False)
    assert float(found.norms.max()) == 0
    assert found.duplicates() == []
    assert "Every gradient is zero" in str(found)


@pytest.mark.parametrize("after", [0, 1])
def test_control_c_gives_what_was_seen(after: int) -> None:
    model, loss_fn, batches = interrupted(after)
    found = persample.inspect(model, loss_fn, batches, progress=False, check=False)
    assert found.interrupted
    assert found.count == 16 * (after + 1)
    assert "Interrupted" in str(found)
    expected = persample.inspect(net(), losses, batches[: after + 1], progress=False, check=False)
    torch.testing.assert_close(found.norms, expected.norms)
    assert len(model._forward_hooks) == 0


def test_control_c_before_anything_was_seen() -> None:
    model, loss_fn, batches = interrupted(-1)
    with pytest.raises(KeyboardInterrupt):
        persample.inspect(model, loss_fn, batches, progress=False, check=False)


def test_control_c_while_rows_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, append = [], Rows.append

    def stopping(self: Rows, rows: Tensor) -> None:
        calls.append(rows)
        if len(calls) == 20:
            raise KeyboardInterrupt
        append(self, rows)

    monkeypatch.setattr(Rows, "append", stopping)
    found = report(check=False)
    assert found.interrupted
    assert found.count % 16 == 0
    assert len(found.table()) == len(found.losses) == len(found.projections) == found.count


def test_the_model_and_the_random_generator_end_as_they_were() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.drop = net(), nn.Dropout(0.5)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.inner(self.drop(x))

    model = Counting()
    model.inner[0].weight.grad = torch.ones(8, 6)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    found = persample.inspect(model, losses, blobs(), progress=False)
    assert "Dropout is active" in str(found)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(model.inner[0].weight.grad, torch.ones(8, 6))
    assert model.inner[2].weight.grad is None
    assert not model._forward_hooks


# ------------------------------------------------------------------ positions


class Reader(nn.Module):
    """Words in, one score per word or one for all."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)
        self.pooled = pooled

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x).tanh()
        return self.head(h.mean(1)) if self.pooled else self.head(h).sum(1)


@pytest.mark.parametrize("pooled", [False, True])
def test_tokens_are_coloured_by_what_they_contribute(pooled: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Reader(pooled).double()
    batches = [torch.randint(5, (4, 3)) for _ in range(2)]

    def squares(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum(1)

    show = persample.Show(tokens=lambda b: b, decode=["a", "b", "<c>", "d", " "])
    found = persample.inspect(model, squares, batches, show=show, progress=False)
    shown = found.shown(6)
    assert shown.tokens is not None
    assert shown.contributions is not None
    assert len(shown.tokens) == len(shown.contributions) == 3
    kept = [found.names.index(n) for n in (["words.weight"] if pooled else found.names)]
    expected = found.parameter_norms[6, kept].square().sum()
    torch.testing.assert_close(shown.contributions.sum(), expected)
    text = found.to_html(tmp_path / "t.html").read_text()
    assert "of the squared norm" in text
    assert ("count 1 of 3 parameters" in text) == pooled
    assert "&lt;c&gt;" in text
    assert "<c>" not in text


def test_a_model_without_positions_has_tokens_without_colours(tmp_path: Path) -> None:
    model = nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 2))
    batches = [torch.randint(5, (4, 3)) for _ in range(2)]
    found = persample.inspect(model, lambda m, b: m(b).square().sum(1), batches, progress=False)
    assert found.shown(6).contributions is None
    assert found.shown(6).tokens == tuple(str(int(v)) for v in batches[1][2])
    assert found.collected.without_positions
    assert "No token colours" in found.to_html(tmp_path / "t.html").read_text()


def test_only_samples_that_are_shown_are_coloured_and_only_if_they_run_again_the_same() -> None:
    torch.manual_seed(0)
    model = Reader(False)
    batches = [torch.randint(5, (20, 3 + k % 2)) for k in range(6)]  # two lengths

    def squares(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().sum(1)

    found = persample.inspect(model, squares, batches, progress=False)
    parts = found.collected.gallery.contributions
    assert set(parts) == found.worth_a_look()
    assert len(parts) < found.count
    for i, part in parts.items():
        torch.testing.assert_close(part.sum(), found.norms[i].float() ** 2)
        assert len(part) == 3 + (i // 20) % 2

    calls = iter(range(1000))
    found = persample.inspect(
        model, lambda m, b: squares(m, b) * (1 + next(calls)), batches, progress=False, check=False
    )
    assert not found.collected.gallery.contributions
    assert "other losses" in found.collected.without_positions


# ------------------------------------------------------------------ files


class Balanced(HTMLParser):
    """Every element that is opened is closed."""

    VOID = {"meta", "link", "img", "br", "wbr"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        assert not (given.get("src") or "").startswith("http")
        if "id" in given:
            self.ids.append(given["id"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_and_escapes_everything(tmp_path: Path) -> None:
    model, loss_fn, batches, options = with_ids()
    found = persample.inspect(model, loss_fn, batches, progress=False, **options)
    text = found.to_html(tmp_path / "p.html", against=found).read_text()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert len(parser.ids) == len(set(parser.ids))
    assert "&lt;b&gt;0&amp;" in text
    assert "<b>0&" not in text
    assert "<i>blue" not in text
    assert "not private" in text
    assert "http" not in text.replace("http://www.w3.org", "")


def test_json_csv_and_comparison(tmp_path: Path) -> None:
    before = report()
    path = before.to_json(tmp_path / "old.json")
    again = load(path)
    assert again.ids == list(range(60))
    torch.testing.assert_close(again.norms, before.norms.double())
    same = before.compare(path)
    assert same.common == 60
    assert not same.new_suspects
    assert len(same.movers) == 0
    assert same.by_position

    batches = blobs()
    batches[0][1][5] = (batches[0][1][5] + 1) % 3
    x, y = whole(batches)
    after = report([(x[2:], y[2:])], ids=range(2, 60))
    told = after.compare(before)
    assert told.removed == [0, 1]
    assert told.relabelled == [5]
    assert told.common == 58
    assert "relabelled: 5" in str(told)
    rows = list(csv.DictReader(after.to_csv(tmp_path / "a.csv").read_text().splitlines()))
    assert len(rows) == 58
    assert rows[3]["id"] == "5"
    assert float(rows[3]["norm"]) == pytest.approx(float(after.norms[3]))


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"samples": {}}'])
def test_a_file_that_is_no_report(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(persample.UsageError, match="not a report"):
        report().compare(path)
    with pytest.raises(persample.UsageError, match="cannot be read"):
        load(tmp_path / "none.json")


def test_another_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert len(report().suspects(5)) == 5
    finally:
        torch.set_default_dtype(torch.float32)
