"""Everything the documents show runs."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = [name for _, name, _ in pkgutil.walk_packages(persample.__path__, "persample.")]


@pytest.mark.parametrize("name", ["persample", *MODULES])
def test_docstrings(name: str) -> None:
    torch.manual_seed(0)
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def run(block: str, page: Path, names: dict[str, Any]) -> None:
    torch.manual_seed(0)
    exec(compile(block, str(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
@pytest.mark.filterwarnings("ignore:Secure RNG turned off")  # what Opacus says at every start
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of Opacus' hooks
@pytest.mark.filterwarnings("ignore:Optimal order is the")  # of Opacus' search for the noise
@pytest.mark.filterwarnings("ignore:'pin_memory' argument")  # what Trainer's loader says on a CPU
def test_pages(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("dp_accounting", "opacus", "peft", "sklearn", "transformers"):
        if f"from {package}" in page.read_text() or f"import {package}" in page.read_text():
            pytest.importorskip(package)
    if "Trainer" in page.read_text():
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)  # programs may write where they run
    names: dict[str, Any] = {}
    for block in blocks(page):
        run(block, page, names)


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted(ROOT.glob("[CS]*.md"))], ids=lambda p: str(p.relative_to(ROOT))
)
def test_what_pages_name_is_there(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\((?!http)([^)#\s]+)", text):
        assert (page.parent / link).exists(), link
    for path in re.findall(r"`((?:benchmarks|docs|src|tests)/[\w./]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("exact", [True, False], ids=["float64", "bf16"])
def test_the_fine_tuning_step_is_the_one_sample_loop(exact: bool) -> None:
    pytest.importorskip("peft")
    page = ROOT / "docs" / "fine-tuning.md"
    names: dict[str, Any] = {}
    setup, step = blocks(page)
    run(setup, page, names)
    model = names["model"]
    assert isinstance(model, nn.Module)
    with torch.no_grad():  # a fresh adapter is zero, and so is half of its gradient
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if exact:
        model.double()
        assert "torch.bfloat16)" in step
        step = step.replace("torch.bfloat16)", "torch.bfloat16, enabled=False)")
        step = step.replace("logits.float()", "logits")
    batch = (names["ids"], names["mask"], names["labels"])
    for _ in range(2):  # the second step must not add to the first one's gradient
        rows = oracle(model, lambda m, b: _losses(m, b, exact), batch)
        run(step, page, names)
        norms = torch.cat([g.flatten(1) for g in rows.values()], 1).double().norm(dim=1)
        c = (1.0 / norms).clamp(max=1) / 16  # a mean over the batch
        expected = {name: torch.tensordot(c.to(g.dtype), g, 1) for name, g in rows.items()}
        found = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert relative_error(found, expected) < (1e-12 if exact else 2e-2)


def _losses(model: nn.Module, batch: Any, exact: bool) -> Tensor:
    ids, mask, labels = batch
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not exact):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    logits = logits if exact else logits.float()
    tokens = F.cross_entropy(logits.mT, labels[:, 1:], ignore_index=-100, reduction="none")
    return tokens.sum(1) / (labels[:, 1:] != -100).sum(1)
