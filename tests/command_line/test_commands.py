"""The command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import persample
from persample.command_line.cli import main
from persample.command_line.memory import Meter, measure, parse_size
from persample.errors import UsageError

from ..inspection.inspected import blobs, losses, net


@pytest.mark.parametrize(
    ("arguments", "code", "out", "err"),
    [
        (["verify", "tests.command_line.steps:good"], 0, "passed", ""),
        (["explain", "tests.command_line.steps:good"], 0, "weight", ""),
        (["explain", "tests.command_line.steps:good", "--memory", "1MiB"], 0, "n in 1 MiB", ""),
        (
            ["explain", "tests.command_line.steps:good", "--memory", "much"],
            2,
            "",
            "amount of memory",
        ),
        (["explain", "tests.command_line.steps:mixing"], 1, "", "BatchNorm"),
        (["verify", "tests.command_line.steps:mixing"], 1, "", "BatchNorm"),
        (["verify", "tests.command_line.steps:coupled"], 1, "FAILED", ""),
        (["verify", "tests.command_line.steps:odd"], 2, "", "must return"),
        (["verify", "tests.command_line.steps:nothing"], 2, "", "no function"),
        (["verify", "tests.nowhere:step"], 2, "", "no module"),
        (["verify", "steps"], 2, "", "module:function"),
        (["verify", "tests.inspection.inspected:step"], 0, "passed", ""),
        (["verify", "tests/inspection/inspected.py:step"], 0, "passed", ""),
        (["verify", "./nowhere.py:step"], 2, "", "no module called 'nowhere'"),
        (["verify", "tests.inspection.inspected:listed"], 2, "", "one batch, or a batch each"),
        (["inspect", "tests.inspection.inspected:step"], 0, "suspects, most suspicious first", ""),
        (
            ["inspect", "tests.inspection.inspected:step", "--batches", "1"],
            0,
            "16 samples in 1 batch\n",
            "",
        ),
        (["inspect", "tests.inspection.inspected:step", "--batches", "0"], 2, "", "at least 1"),
        (
            ["inspect", "tests.inspection.inspected:step", "--html", "no/where.html"],
            2,
            "",
            "no directory",
        ),
        (
            ["inspect", "tests.inspection.inspected:step", "--against", "none.json"],
            2,
            "",
            "cannot be read",
        ),
        (
            ["inspect", "tests.inspection.inspected:step", "--csv", "/dev/full"],
            1,
            "Gradients verified",
            "No space left",
        ),
        (["inspect", "tests.inspection.inspected:with_ids"], 0, "<i>blue", ""),
        (["inspect", "tests.inspection.inspected:ones"], 1, "Not verified", ""),
        (
            ["inspect", "tests.inspection.inspected:data_set"],
            2,
            "",
            "got a data set (TensorDataset)",
        ),
        (["inspect", "tests.inspection.inspected:samples"], 1, "", "which holds no tensors"),
        (
            ["inspect", "tests.inspection.inspected:pairs"],
            1,
            "",
            "which looks like a single sample",
        ),
        (["inspect", "tests.inspection.inspected:shuffled"], 1, "", "cannot be paired"),
        (["inspect", "tests.inspection.inspected:mapped"], 0, "Gradients verified", ""),
        (["verify", "tests.inspection.inspected:mapped"], 0, "passed", ""),
        (["explain", "tests.inspection.inspected:mapped", "--memory", "1MiB"], 0, "n in 1 MiB", ""),
        (["inspect", "tests.command_line.steps:good"], 0, "Linear, 5 samples", ""),
        (["inspect", "tests.command_line.steps:mixing"], 1, "", "BatchNorm"),
        (["inspect", "tests.command_line.steps:coupled"], 1, "do not trust", ""),
        (["inspect", "tests.inspection.inspected:scalar"], 1, "", "one loss per sample"),
        (["inspect", "tests.inspection.inspected:nothing"], 1, "", "the data set is empty"),
        (["inspect", "tests.inspection.inspected:broken"], 1, "", "inspected.py"),
        (["inspect", "tests.inspection.inspected:raising"], 2, "", "no data today"),
        (["inspect", "tests.inspection.inspected:late"], 1, "", "batch 3"),
        (
            ["inspect", "tests.inspection.inspected:interrupted_at_once"],
            130,
            "",
            "nothing was written",
        ),
    ],
)
def test_commands(
    arguments: list[str], code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    seen = capsys.readouterr()
    assert out in seen.out
    assert err in seen.err
    assert "Traceback" not in seen.err
    assert len(seen.err.splitlines()) <= 4


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("", "inspect", "verify", "explain"):
        with pytest.raises(SystemExit) as caught:
            main([*command.split(), "--help"])
        assert caught.value.code == 0
        told = capsys.readouterr().out
        assert f"  persample {command or 'verify'} train:step" in told
        assert "returns (model, loss_fn, data)" in told or not command
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"persample {persample.__version__}\n"
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2


def test_files_and_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    page, rows = tmp_path / "p.html", tmp_path / "r.csv"
    assert main(["inspect", "tests.inspection.inspected:step", "--json", str(first)]) == 0
    command = [
        "inspect",
        "tests.inspection.inspected:step",
        "--json",
        str(second),
        "--html",
        str(page),
    ]
    assert main([*command, "--csv", str(rows), "--against", str(first)]) == 0
    out = capsys.readouterr().out
    assert "what changed" in out
    assert "60 samples in both" in out
    assert json.loads(second.read_text())["count"] == 60
    assert len(rows.read_text().splitlines()) == 61
    assert "What changed" in page.read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json", "b.json", "p.html", "r.csv"]


def test_interrupted_files_are_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "part.json"
    assert (
        main(["inspect", "tests.inspection.inspected:interrupted_late", "--json", str(path)]) == 130
    )
    assert "seen so far" in capsys.readouterr().err
    saved = json.loads(path.read_text())
    assert saved["interrupted"] is True
    assert saved["count"] == len(saved["samples"]["id"]) == 32


def test_a_real_control_c(tmp_path: Path) -> None:
    """Whenever it comes: a clear message, exit code 130, no half-written file."""
    (tmp_path / "slow.py").write_text(
        "import time, sys\n"
        "from tests.inspection.inspected import net, losses, blobs\n"
        "def batches():\n"
        "    for batch in blobs(n=6000):\n"
        "        print('batch', file=sys.stderr, flush=True)\n"
        "        time.sleep(0.02)\n"
        "        yield batch\n"
        "def step():\n"
        "    return net(), losses, batches()\n"
    )
    source = Path(__file__).parents[2]
    paths = os.pathsep.join([str(source / "src"), str(source)])
    running = subprocess.Popen(
        [sys.executable, "-m", "persample", "inspect", "slow:step", "--json", "r.json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background
    )  # fmt: skip
    assert running.stderr is not None
    for _ in range(8):
        assert running.stderr.readline() == "batch\n"
    time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "Traceback" not in err
    assert "Interrupted" in out
    assert json.loads((tmp_path / "r.json").read_text())["count"] >= 16
    assert [p for p in tmp_path.iterdir() if p.name.startswith(".")] == []


# ------------------------------------------------------------------ memory


def test_the_meter_counts_live_tensors() -> None:
    with Meter() as meter:
        kept = torch.zeros(1000)
        view = kept[10:]
        assert meter.now == 4000
        passing = torch.zeros(500, dtype=torch.float64)
        assert meter.now == 8000
        del passing
        assert meter.now == 4000
        kept.add_(1)
        torch.zeros(250)
    assert meter.peak == 8000
    assert view.shape == (990,)


def test_peaks_grow_with_the_batch_and_grads_with_the_model() -> None:
    wide = torch.nn.Linear(6, 300)
    batch = (blobs(n=40, size=40)[0][0], torch.zeros(40, dtype=torch.long))
    found = measure(wide, losses, batch, limit=1 << 30)
    peaks = {p.name: p for p in found.peaks}
    dense = 300 * 7 * 4
    assert peaks["grads()"].each >= dense
    assert peaks["norms()"].each < dense
    small = peaks["grads()"].largest(1 << 30, found.model)
    assert 0 < small < peaks["norms()"].largest(1 << 30, found.model)
    told = peaks["grads()"]
    again = measure(wide, losses, (batch[0].repeat(3, 1), batch[1].repeat(3)), limit=1 << 30)
    predicted = told.fixed + told.each * 120
    actual = next(p for p in again.peaks if p.name == "grads()").at_n
    assert predicted == pytest.approx(actual, rel=0.05)


def test_memory_of_an_empty_batch() -> None:
    with pytest.raises(UsageError, match="empty"):
        measure(net(), losses, (torch.zeros(0, 6), torch.zeros(0).long()))


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 << 30), ("512M", 512 << 20), ("1.5k", 1536), ("77", 77)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size
