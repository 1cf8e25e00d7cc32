"""The parts of an inspection against brute force: neighbours, duplicates, curves, rows in files."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import persample
from persample.inspection import health, neighbours
from persample.inspection.picture import png
from persample.inspection.progress import Progress, clock
from persample.inspection.scores import rank, suspicion
from persample.inspection.store import Ragged, Rows, Scratch, Texts
from persample.inspection.table import Table, number

from .inspected import blobs, losses, net, report


def rows(n: int = 50, width: int = 16, seed: int = 0) -> Tensor:
    return torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ neighbours


def test_nearest_are_those_of_largest_cosine() -> None:
    p = rows()
    usable = torch.ones(50, dtype=torch.bool)
    usable[[3, 9]] = False
    found = neighbours.nearest(p, usable, 4)
    for i in range(50):
        if not usable[i]:
            assert found.cosines[i].eq(0).all()
            continue
        cosines = torch.nn.functional.cosine_similarity(p[i], p)
        cosines[[3, 9, i]] = 0
        best = cosines.abs().topk(4).indices
        assert set(found.indices[i].tolist()) == set(best.tolist())
        assert float(found.agreement()[i]) == pytest.approx(float(cosines[best].mean()), abs=1e-5)


def test_beyond_the_limit_neighbours_come_from_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "EVERY", 20)
    monkeypatch.setattr(neighbours, "BLOCK", 7)
    found = neighbours.nearest(rows(), torch.ones(50, dtype=torch.bool), 3)
    assert len(found.indices.unique()) <= 20
    assert not (found.indices == torch.arange(50).unsqueeze(1)).any()


def test_class_agreement_leaves_the_sample_itself_out() -> None:
    p, labels = rows(30), torch.arange(30) % 3
    usable = torch.ones(30, dtype=torch.bool)
    usable[4] = False
    found = neighbours.class_agreement(p, labels, usable)
    u = p / p.norm(dim=1, keepdim=True)
    for i in range(30):
        others = (labels == labels[i]) & usable & (torch.arange(30) != i)
        mean = u[others].sum(0)
        expected = float(u[i] @ mean / mean.norm()) if usable[i] else 0.0
        assert float(found[i]) == pytest.approx(expected, abs=1e-5)


def test_directions_of_vanishing_gradients() -> None:
    """In float32 the squares of 1e-25 are zero, but its direction is as good as any."""
    p = rows(6)
    tiny = p * torch.tensor([1, 1e-25, 1e-12, 1e12, 1e30, 1e-37]).unsqueeze(1)
    expected = p / p.norm(dim=1, keepdim=True)
    expected[5] = 0
    torch.testing.assert_close(neighbours.unit(tiny), expected)
    assert neighbours.unit(torch.tensor([[0.0, 0.0], [float("nan"), 1.0]])).eq(0).all()


@pytest.mark.parametrize("limit", [10_000, 30])
def test_duplicates(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit, candidates share a bucket of signs."""
    monkeypatch.setattr(neighbours, "EVERY", limit)
    p = rows(80, 64)
    p[40], p[70], p[11] = p[5], p[5] * 1.005, -p[5]
    p[60], p[61] = p[59] * 1.1, 0
    p[62] = 0
    p[30] = float("nan")
    p[31] = float("nan")
    norms = p.norm(dim=1)
    usable = torch.isfinite(norms)
    assert neighbours.duplicates(p, norms, usable) == [[5, 40, 70]]
    assert neighbours.duplicates(p, norms, usable, tolerance=0.2) == [[5, 40, 70], [59, 60]]


def test_many_duplicates_are_one_group() -> None:
    p = rows(1, 8).expand(3000, 8).contiguous()
    (group,) = neighbours.duplicates(p, p.norm(dim=1), torch.ones(3000, dtype=torch.bool))
    assert group == list(range(3000))


# ------------------------------------------------------------------ scores


def test_rank_shares_ties() -> None:
    assert rank(torch.tensor([5.0, 1.0, 5.0, 0.0])).tolist() == pytest.approx(
        [5 / 6, 1 / 3, 5 / 6, 0]
    )
    assert rank(torch.tensor([2.0])).tolist() == [0.0]
    assert rank(torch.zeros(0)).tolist() == []


def test_a_lone_opponent_is_the_suspect() -> None:
    p = torch.tensor([[1.0, 0.0]]).repeat(12, 1) + 0.05 * rows(12, 2)
    p[7] = -3 * p[7]
    found = suspicion(p, p.norm(dim=1), torch.zeros(12, dtype=torch.long), torch.ones(12).bool())
    assert int(found.score.argmax()) == 7
    assert float(found.agreement[7]) < -0.9
    assert found.class_agreement is None  # one class is no class


def test_scores_stay_between_zero_and_one() -> None:
    p = rows(40)
    found = suspicion(p, p.norm(dim=1), torch.arange(40) % 4, torch.ones(40).bool())
    assert 0 <= float(found.score.min()) <= float(found.score.max()) <= 1


# ------------------------------------------------------------------ clipping and noise


def test_clip_curve_is_that_of_clipped_gradients() -> None:
    g = rows(70, 9, 3).double() * torch.logspace(-1, 1, 70).unsqueeze(1)
    g[11] = float("nan")
    norms = g.norm(dim=1)
    usable = torch.isfinite(norms)
    found = health.clip_curve(g, norms, usable)
    mean = g[usable].mean(0)
    for t, clipped, bias in zip(found.thresholds, found.clipped, found.bias, strict=True):
        c = (t / norms[usable]).clamp(max=1).unsqueeze(1)
        expected = ((c * g[usable]).mean(0) - mean).norm() / mean.norm()
        assert float(bias) == pytest.approx(float(expected), abs=1e-9)
        assert float(clipped) == pytest.approx(float((norms[usable] > t).double().mean()))
    assert float(found.clipped[-1]) == 0
    assert float(found.bias[-1]) < 1e-12


def test_noise_is_the_ratio_of_averages_of_what_the_tape_says() -> None:
    model, parts, told = net(torch.float64), [], []
    for batch in blobs(n=64, size=16, dtype=torch.float64):
        with persample.record(model) as tape:
            tape.backward(losses(model, batch))
        told.append(tape.noise_scale())
        mean = sum(float(g.mean(0).square().sum()) for g in tape.grads().values())
        parts.append([16.0, float(tape.norms().square().mean()), mean])
    found = health.noise(torch.tensor(parts, dtype=torch.float64))
    assert found is not None
    trace = sum(t.trace for t in told) / 4
    gradient = sum(t.sq_gradient for t in told) / 4
    assert found.trace == pytest.approx(trace)
    assert found.value == pytest.approx(trace / gradient)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high


def test_a_mean_gradient_that_cannot_be_told_from_zero() -> None:
    found = health.noise(torch.tensor([[16.0, 1.0, 0.05], [16.0, 1.0, 0.07], [16.0, 1.0, 0.06]]))
    assert found is not None
    assert found.value is None
    assert health.noise(torch.tensor([[16.0, 1.0, 0.5]])) is None


# ------------------------------------------------------------------ rows


@pytest.mark.parametrize("limit", [1 << 20, 100, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.uint8])
def test_rows_are_the_same_in_memory_and_in_files(limit: int, dtype: torch.dtype) -> None:
    kept = Rows(Scratch(limit=limit))
    given = [(torch.rand(n, 3, 2) * 99).to(dtype) for n in (4, 0, 1, 7)]
    for part in given:
        kept.append(part)
        part.zero_()  # the caller may reuse its memory
    assert kept.tensor().shape == (12, 3, 2)
    assert kept.on_disk == (12 * 6 * dtype.itemsize > limit)
    assert float(kept.tensor().double().sum()) > 0
    kept.append(torch.ones(2, 3, 2))
    assert kept.tensor()[12:].double().eq(1).all()
    with pytest.raises(persample.UsageError, match="earlier ones"):
        kept.append(torch.ones(2, 5))


@pytest.mark.parametrize("limit", [1 << 20, 0])
def test_rows_of_different_lengths_and_texts(limit: int) -> None:
    scratch = Scratch(limit=limit)
    ragged, texts = Ragged(scratch), Texts(scratch)
    ragged.append(torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]), [3, 0, 5])
    ragged.append(torch.arange(0), [])
    ragged.append(torch.arange(2), [2])
    assert [ragged[i].tolist() for i in range(4)] == [[0, 1, 2], [], [0, 1, 2, 3, 4], [0, 1]]
    texts.append(["één", "", "日本"])
    assert [texts[i] for i in range(3)] == ["één", "", "日本"]


def test_files_go_away_with_the_report(tmp_path: Path) -> None:
    found = report(memory=0, scratch=str(tmp_path))
    assert list(tmp_path.iterdir())
    torch.testing.assert_close(found.norms, report().norms)
    torch.testing.assert_close(found.suspicion.score, report().suspicion.score)
    del found
    assert not list(tmp_path.iterdir())


def test_what_stays_in_memory_does_not_grow_with_the_data() -> None:
    def held(n: int) -> int:
        made = report(blobs(n=n), memory=2000, check=False).collected
        columns = [made.losses, made.norms, made.parameter_norms, made.projections, made.labels]
        return sum(p.numel() * p.element_size() for c in columns for p in c._parts)

    assert held(2000) <= held(100) <= 5 * 2000


FULL = """
import resource, signal, sys
from pathlib import Path
import persample
from tests.inspection.inspected import blobs, losses, net
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
found = persample.inspect(net(), losses, blobs(), progress=False)
old = found.to_json(folder / "report.json").read_text()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # as a full disk
for work in (
    lambda: found.to_json(folder / "report.json"),
    lambda: found.to_html(folder / "report.html"),
    lambda: persample.inspect(net(), losses, blobs(), memory=0, scratch=str(folder)),
):
    try:
        work()
    except persample.StorageError as error:
        assert len(str(error).splitlines()) == 4, error
    else:
        raise AssertionError("it was written")
del found
assert [p.name for p in folder.iterdir()] == ["report.json"], list(folder.iterdir())
assert (folder / "report.json").read_text() == old
"""


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_full_device() -> None:
    with pytest.raises(persample.StorageError, match="No space left"):
        report().to_csv("/dev/full")


# ------------------------------------------------------------------ small things


def test_png() -> None:
    data = png((torch.rand(3, 5, 4) * 255).to(torch.uint8))
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[16:24] == bytes([0, 0, 0, 4, 0, 0, 0, 5])


def test_progress() -> None:
    stream = io.StringIO()
    bar = Progress(4, stream=stream)
    bar.update(1, 10)
    assert stream.getvalue() == ""  # not a terminal
    bar = Progress(4, shown=True, stream=stream)
    assert "50%" in bar.line(2, 1000, 3.0)
    assert "1,000 samples  0:03 left" in bar.line(2, 1000, 3.0)
    assert "3 batches" in Progress(None).line(3, 9, 1.0)
    bar.update(4, 10)
    bar.close()
    assert stream.getvalue().endswith("\r")
    assert clock(3725) == "1:02:05"


def test_table() -> None:
    table = Table({"id": ["a", "b"], "value": torch.tensor([1.0, 2.5])})
    assert str(table).splitlines() == ["id  value", "a       1", "b     2.5"]
    assert table.text(limit=1).endswith("… and 1 more")
    assert [number(v) for v in (0.0, 1234.5, 1e-9, 0.25)] == ["0", "1,234", "1.0e-09", "0.25"]
