"""The benchmark measures, judges and reports; its pages are what its results give."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as program
from benchmarks.measure import expanded_weights, small
from benchmarks.measure.results import RESULTS, ROOT
from benchmarks.measure.timing import Cell, cells_of, competing, judged, measure, summary
from benchmarks.models import MODELS, SMALL
from benchmarks.models.case import Case, classify, predict
from benchmarks.models.language import LanguageModel
from benchmarks.models.vision import Residual
from benchmarks.peers import NEEDS, PEERS
from benchmarks.peers.answers import Referee, drawn
from benchmarks.peers.by_hand import by_hand
from benchmarks.report import findings, rows, tables


def test_quick_run_of_one_model_and_two_peers(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "tiny", "--quick", "--out", str(tmp_path)]
    command += ["--parts", "time", "memory", "--peers", "persample", "loop"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True)
    time = json.loads((tmp_path / "peers.json").read_text())["warm heap, 1 thread"]["tiny"]
    size = json.loads((tmp_path / "memory.json").read_text())["mapped heap, 1 thread"]["tiny"]
    for peer in ("persample", "loop"):
        for question in ("grads", "norms", "clipped sum"):
            cell = time["peers"][peer][question]
            assert cell["state"] == "right"
            assert cell["quartiles"][0] <= cell["median"] <= cell["quartiles"][1]
            if (peer, question) != ("persample", "grads"):
                assert "ratio" in size["peers"][peer][question]
    assert time["control"]["median"] > 0
    assert 0 < time["processor share"] <= 1.05
    assert (tmp_path / "environment.json").exists()
    made = tables.makers(tmp_path)
    assert "| tiny |" in made["time-norms"]()
    assert "| tiny |" in made["short"]()


def test_later_rounds_are_for_those_that_compete() -> None:
    took = {"a": 1.0, "b": 1.4, "c": 2.0, "fast and wrong": 0.1}
    cells = [Cell(name, "norms", lambda: None, seconds=[t, t]) for name, t in took.items()]
    cells[-1].found["state"] = "wrong"
    cells.append(Cell("c", "gram", lambda: None, seconds=[9.0, 9.0]))
    left = [(cell.peer, cell.question) for cell in competing(cells)]
    assert left == [("a", "norms"), ("b", "norms"), ("fast and wrong", "norms"), ("c", "gram")]
    assert summary(cells[0], [2.0, 2.0, 5.0])["median"] == 0.5


@pytest.mark.filterwarnings("ignore")  # what peers warn of is theirs
@pytest.mark.parametrize("name", list(PEERS))
def test_every_peer_is_right_on_a_tiny_model(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    case, referee, _ = drawn(MODELS["tiny"])
    for question, step in PEERS[name](case, referee.bound).items():
        cell = Cell(name, question, step)
        judged(cell, case, referee)
        assert cell.found.get("state", "right") == "right", cell.found


@pytest.mark.parametrize("name", list(SMALL))
def test_small_models_are_answered_right(name: str) -> None:
    case, referee, _ = drawn(SMALL[name])
    for question in small.QUESTIONS:
        cell = Cell("persample", question, PEERS["persample"](case, referee.bound)[question])
        judged(cell, case, referee)
        assert cell.found["state"] == "right", cell.found


def test_small_models_are_summed_up_and_a_wrong_answer_is_not_timed(monkeypatch: Any) -> None:
    found = {name: {"norms": float(k), "clipped sum": 1.0} for k, name in enumerate("abcdefghijk")}
    said = small.summary({**found, "wrong": {"state": "wrong"}})["norms"]
    assert said == {"median": 5.0, "90th percentile": 9.0}
    wrong = lambda case, bound: {"norms": lambda: Referee(case).norms * 2, "clipped sum": None}
    monkeypatch.setitem(PEERS, "persample", wrong)
    result = small.model("tabular_mlp", 1)
    assert result["state"] == "wrong"
    assert "plain_ms" not in result
    assert "wrong" in findings.small({"models": {"m": result}, "summary": {}})


def test_budgets_and_processes_are_reported() -> None:
    cells = {"default": {"time": 1.25, "memory": 1.1}, "rows": {"time": 1.5, "memory": 3.0}}
    found = {"vit": {"plain_ms": 100.0, "plain_bytes": 5 << 20, "budgets": cells}}
    assert "| vit | 100 ms, 5 MiB | 1.25 (1.10) | 1.50 (3.00) |" in findings.budgets(found)
    cell = {"plain_ms": 9.0, "samples per second": 80.0}
    cell |= {"clipped sum, then reduced": 1.3, "clipped sum, overlapped": 1.2}
    assert "| gpt | 2 | 9 ms | 80 | 1.30 | 1.20 |" in findings.processes({"gpt": {"2": cell}})
    assert not findings.budgets({})
    assert not findings.processes({})


def _small(build: str) -> Case:
    """Every kind of layer that the program by hand knows."""
    if build == "tied":
        net: torch.nn.Module = LanguageModel(20, 8, 1, 2, 6, tied=True)
        return net, torch.randint(20, (3, 6)), torch.randint(20, (3, 6)), predict
    if build == "residual":
        net = torch.nn.Sequential(Residual(32, 64, 2), torch.nn.Flatten(), torch.nn.Linear(576, 2))
        return net, torch.randn(3, 32, 6, 6), torch.randint(2, (3,)), classify
    return MODELS[build]()


@pytest.mark.parametrize("name", ["tiny", "tied", "residual", "lstm"])
def test_the_program_by_hand_is_right(name: str) -> None:
    case, referee, _ = drawn(lambda: _small(name))
    for question, step in by_hand(case, referee.bound).items():
        cell = Cell("by hand", question, step)
        for _ in range(2):  # the first step tries formulas
            judged(cell, case, referee)
            assert cell.found["state"] == "right", cell.found


def _wrong(scale: float) -> Any:
    """A peer that scales one sample's gradient."""

    def build(case: Any, bound: float) -> Any:
        def grads() -> Any:
            found = {k: g.clone() for k, g in Referee(case, bound).grads.items()}
            for rows_ in found.values():
                rows_[0] *= scale
            return found

        return {"grads": grads}

    return build


@pytest.mark.parametrize(("scale", "state"), [(1.0, "right"), (1.01, "wrong"), (2.0, "wrong")])
def test_a_wrong_peer_is_found(monkeypatch: Any, scale: float, state: str) -> None:
    monkeypatch.setitem(PEERS, "planted", _wrong(scale))
    case, referee, _ = drawn(MODELS["tiny"])
    cell = Cell("planted", "grads", PEERS["planted"](case, referee.bound)["grads"])
    judged(cell, case, referee)
    assert cell.found["state"] == state


def test_a_failing_peer_keeps_its_message() -> None:
    case, referee, _ = drawn(MODELS["tiny"])

    def fail() -> None:
        raise NotImplementedError("no rule for this layer\nsecond line")

    cell = Cell("planted", "norms", fail)
    judged(cell, case, referee)
    assert cell.found["message"] == "NotImplementedError: no rule for this layer"
    model = {"plain_ms": 1.0, "peers": {"loop": {"norms": cell.found}}}
    assert "fails" in rows.question({"m": model}, "norms", "median")
    assert "no rule for this layer" in rows.messages({"m": model})


def test_data_at_a_kink_are_drawn_again() -> None:
    seeds = []

    def build() -> Any:
        seeds.append(torch.initial_seed())
        net, x, y, loss = MODELS["tiny"]()
        if len(seeds) > 1:
            return net, x, y, loss
        return net, x, y, lambda out, y: loss(out, y) * (1 + 0.01 * (len(out) > 1))

    _, _, seed = drawn(build)
    assert seed == 1
    assert seeds == [0, 1]


def _cell(median: float, spread: float = 0.01) -> dict[str, Any]:
    quartiles = [median - spread, median + spread]
    return {"state": "right", "median": median, "quartiles": quartiles}


@pytest.mark.parametrize(
    ("own", "rival", "verdict"),
    [
        (_cell(1.0), _cell(2.0), "ahead of loop, 0.50"),
        (_cell(2.0), _cell(1.0), "behind loop, 2.00"),
        (_cell(1.02, 0.001), _cell(1.0, 0.001), "within 3 % of loop"),
        (_cell(1.0, 0.3), _cell(1.2, 0.3), "level with loop within noise"),
        (_cell(1.2, 0.3), _cell(1.0, 0.3), "level with loop within noise"),
        (_cell(2.0), {**_cell(1.0), "state": "wrong"}, "–"),
    ],
)
def test_verdicts(own: dict[str, Any], rival: dict[str, Any], verdict: str) -> None:
    model = {"plain_ms": 1.0, "peers": {"persample": {"norms": own}, "loop": {"norms": rival}}}
    assert rows.compared(model, "norms", "median", model) == verdict


@pytest.mark.parametrize("sign", [{"processor share": 0.5}, {"control": {"median": 1.2}}])
def test_a_disturbed_machine_claims_nothing(sign: dict[str, Any]) -> None:
    cells = {"persample": {"norms": _cell(1.0)}, "loop": {"norms": _cell(2.0)}}
    model = {"plain_ms": 1.0, "peers": cells, **sign}
    assert "not claimed" in rows.compared(model, "norms", "median", model)


@pytest.mark.parametrize("page", tables.PAGES)
def test_pages_are_what_the_results_give(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- bench:" in text
    assert tables.filled(text, tables.makers(RESULTS)) == text


def test_a_row_that_does_not_fit_its_head_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        rows.table(["model", "time"], [["mlp", "1.0", "2.0"]])


def test_a_failed_step_does_not_reach_the_next_question(monkeypatch: Any, tmp_path: Path) -> None:
    def build(case: Any, bound: float) -> Any:
        broken: list[int] = []

        def fail() -> None:
            broken.append(1)
            raise RuntimeError("first")

        def norms() -> Any:
            return Referee(case).norms / (0 if broken else 1)

        return {"grads": fail, "norms": norms}

    monkeypatch.setitem(PEERS, "planted", build)
    case, referee, _ = drawn(MODELS["tiny"])
    cells, _ = cells_of(case, referee, ["planted"], tmp_path / "current", 0.0)
    assert [cell.found["state"] for cell in cells] == ["fails", "right"]


def test_a_peer_that_runs_out_of_memory_in_the_rounds_is_named(
    monkeypatch: Any, tmp_path: Path
) -> None:
    def build(case: Any, bound: float) -> Any:
        calls: list[int] = []

        def norms() -> Any:
            calls.append(1)
            if len(calls) > 2:
                raise RuntimeError("cannot allocate")
            return Referee(case).norms

        return {"norms": norms}

    monkeypatch.setitem(PEERS, "planted", build)
    options = {"rounds": 3, "seconds": 9.0, "current": tmp_path / "current"}
    found = list(measure("tiny", ["planted", "loop"], **options))
    assert [len(f["peers"]) for f in found] == [2, 2, 2, 2]
    last = found[-1]
    assert last["peers"]["planted"]["norms"]["message"] == "RuntimeError: cannot allocate"
    assert "median" not in last["peers"]["planted"]["norms"]
    assert last["rounds"] == 3
    assert "quartiles" in last["peers"]["loop"]["norms"]


def test_a_process_that_dies_keeps_what_it_found(monkeypatch: Any) -> None:
    saved = {"n": 5, "rounds": 2, "plain_ms": 1.0, "peers": {"loop": {"norms": _cell(2.0)}}}

    def die(job: Any, given: Any, peers: list[str], result: Path) -> list[str]:
        text = f"import os; open({str(result)!r}, 'w').write({json.dumps(saved)!r}); os.abort()"
        return [sys.executable, "-c", text]

    monkeypatch.setattr(program, "arguments", die)
    given = argparse.Namespace(threads=1, peers=["loop"])
    found = program.run(program.Job("time", "tiny", "warm"), given)
    assert found["peers"] == saved["peers"]
    assert "ended with code" in found["message"]
    assert "not claimed" in rows.compared(
        {**found, "peers": {**found["peers"], "persample": {"norms": _cell(1.0)}}},
        "norms", "median", found,
    )  # fmt: skip
    assert "stopped after 2 rounds" in rows.messages({"tiny": found})


@pytest.mark.parametrize("name", ["tokens", "text", "volume", "instance_norm", "depthwise", "rnn"])
def test_the_drop_in_takes_no_more_memory_than_the_original(name: str) -> None:
    each = expanded_weights.steps(name)
    for step in (each["original"], each["ours"]):
        step()
    assert expanded_weights.peak(each["ours"]) <= expanded_weights.peak(each["original"])
