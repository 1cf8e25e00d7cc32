"""The recipes survive ordinary models, and give the gradients that they promise."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.expanded_weights import call_for_per_sample_grads
from persample.testing import oracle, relative_error

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

DOCS = Path(__file__).parents[2] / "docs"
README = DOCS.parent / "README.md"
PRIVATE = "private_step(drawn"  # the loop that draws batches
TINY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def blocks(page: Path, kind: str = "python") -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL)


def run(block: str, names: dict[str, Any]) -> None:
    torch.manual_seed(0)
    exec(compile(block, "recipe", "exec"), names)


def classifier() -> dict[str, Any]:
    """The names that the first block of the page defines, without dropout."""
    names: dict[str, Any] = {}
    run(blocks(DOCS / "recipes.md")[0], names)
    names["model"].eval()
    return names


def text_losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(input_ids=batch[0]).logits, batch[1], reduction="none")


# ------------------------------------------------------------------ private training


def private(dtype: torch.dtype, *, frozen: bool) -> dict[str, Any]:
    names = classifier()
    names["model"].to(dtype)
    if frozen:
        names["model"].bert.embeddings.requires_grad_(False)
    (block,) = [b for b in blocks(DOCS / "recipes.md") if PRIVATE in b]
    run(block, names)
    return names


def clipped_mean(names: dict[str, Any], rows: Tensor) -> dict[str, Tensor]:
    """DP-SGD's gradient without noise, from one text at a time."""
    model, bound = names["model"], names["C"]
    each = oracle(model, text_losses, (names["texts"][rows], names["labels"][rows]))
    norms = torch.cat([g.flatten(1) for g in each.values()], 1).norm(dim=1)
    c = (bound / norms).clamp(max=1) / names["expected"]
    return {name: torch.tensordot(c, g, 1) for name, g in each.items()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("frozen", [False, True])
def test_the_private_step_is_the_one_sample_loop_step_after_step(frozen: bool) -> None:
    names = private(torch.float64, frozen=frozen)
    names["sigma"], names["C"] = 0.0, 0.05
    for rows in (torch.arange(3, 13), torch.tensor([60]), torch.arange(0)):
        expected = clipped_mean(names, rows)
        names["private_step"](rows)
        found = gradients(names["model"])
        assert len(found) == len(names["trainable"])
        assert relative_error(found, expected) < 1e-6  # the bound is certified from above


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 5])
def test_private_steps_on_frozen_parameters_in_half_precision(
    dtype: torch.dtype, count: int
) -> None:
    names = private(dtype, frozen=True)
    before = [p.detach().clone() for p in names["model"].parameters()]
    names["private_step"](torch.arange(count))
    assert all(p.grad.dtype is dtype for p in names["trainable"])
    for p, old in zip(names["model"].parameters(), before, strict=True):
        assert torch.equal(p, old) != p.requires_grad


def test_noise_has_its_scale_and_no_seed_repeats_it() -> None:
    names = private(torch.float32, frozen=False)
    names["C"], drawn = 3.0, []
    for _ in range(2):
        torch.manual_seed(0)
        names["private_step"](torch.arange(0))
        drawn.append(torch.cat([p.grad.flatten() for p in names["trainable"]]))
    std = drawn[0].std() * names["expected"]
    assert abs(float(std) / 3.0 - 1) < 0.1
    assert not torch.equal(*drawn)


def test_noise_is_drawn_where_the_parameter_is(monkeypatch: pytest.MonkeyPatch) -> None:
    names = private(torch.float32, frozen=False)
    places = []

    def drawn(shape: Any, *, generator: torch.Generator, device: torch.device) -> Tensor:
        places.append((generator.device, torch.device(device)))
        return torch.zeros(shape, device=device)

    monkeypatch.setattr(torch, "randn", drawn)
    names["private_step"](torch.arange(0))
    assert places == [(p.device, p.device) for p in names["trainable"]]


# ------------------------------------------------------------------ bridges to Opacus


class Picky(nn.Module):
    """A model that cannot run an empty batch, with a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(20, 8), nn.Linear(8, 5)
        self.one.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if not len(x):
            raise RuntimeError("cannot reshape tensor of 0 elements")
        return self.two(self.one(x).relu())


@pytest.mark.filterwarnings("ignore")  # what Opacus says at every start
def test_bridges_survive_empty_batches_and_frozen_layers() -> None:
    pytest.importorskip("opacus")
    names: dict[str, Any] = {"torch": torch, "F": F, "persample": persample}
    names["call_for_per_sample_grads"] = call_for_per_sample_grads
    found = [b for b in blocks(DOCS / "migration.md") if "from opacus" in b]
    assert len(found) == 2
    for block in found:
        names["model"] = Picky()
        frozen = names["model"].one.weight.clone()
        assert "for x, y in loader:" in block
        empty = block.replace("64", "60").replace(
            "for x, y in loader:", "for x, y in [(data[:0]), *loader, (data[:0])]:"
        )
        run(empty, names)
        optimizer, loader = names["optimizer"], names["loader"]
        assert optimizer.expected_batch_size == int(60 / len(loader)) == 7
        assert torch.equal(frozen, names["model"].one.weight)


# ------------------------------------------------------------------ norms in a Trainer


class Mean(nn.Module):
    """A model whose forward takes no ``**kwargs``: Trainer divides by the accumulation steps."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.table(input_ids).mean(1))
        loss = {} if labels is None else {"loss": F.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, num_labels=3, **TINY,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=None,
        eos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def token_losses(model: nn.Module, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(logits.mT, labels, ignore_index=-100, reduction="none").sum(1)


def class_losses(model: nn.Module, batch: Any) -> Tensor:
    logits = model(input_ids=batch["input_ids"])["logits"]
    return F.cross_entropy(logits, batch["labels"], reduction="none")


def rows_of(model: nn.Module) -> list[dict[str, Tensor]]:
    ids = torch.randint(1, 50, (20, 6))
    if isinstance(model, transformers.GPT2LMHeadModel):
        keep = torch.arange(6) < torch.randint(3, 7, (20, 1))
        labels = ids.masked_fill(~keep, -100)
    else:
        labels = torch.randint(3, (20,))
    return [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]


def recipe_trainer() -> tuple[str, str]:
    """The source of the class of the page, and the line of it that holds the factor."""
    (block,) = [b for b in blocks(DOCS / "trainer.md") if "class NormTrainer" in b]
    source, line = block.split("data = [")[0], "tape.norms() * tape.n  #"
    assert line in source
    return source, line


def trained(build: Any, trainer: Any, steps: int, folder: Path, **options: Any) -> Any:
    torch.manual_seed(0)
    model = build()
    settings = transformers.TrainingArguments(
        str(folder), max_steps=steps, save_strategy="no", report_to="none", disable_tqdm=True,
        per_device_train_batch_size=4, use_cpu=True, **options,
    )  # fmt: skip
    made = trainer(model, settings, train_dataset=rows_of(model))
    made.train()
    return made


ACCUMULATED = "tape.norms() * tape.n * self.current_gradient_accumulation_steps  #"
FACTORS = [
    (bert, class_losses, "tape.norms() * tape.n  #"),
    (Mean, class_losses, ACCUMULATED),
    (gpt2, token_losses, "tape.norms() * rest[0]  #"),
]


@pytest.mark.parametrize("accumulation", [1, 2, 5])
@pytest.mark.parametrize(("build", "losses", "factor"), FACTORS)
def test_norms_in_a_trainer(
    build: Any, losses: Any, factor: str, accumulation: int, tmp_path: Path
) -> None:
    source, line = recipe_trainer()
    seen: list[tuple[Tensor, Tensor]] = []
    names: dict[str, Any] = {"torch": torch, "persample": persample}
    run(source.replace(line, factor), names)

    class Checked(names["NormTrainer"]):
        def training_step(self, model: nn.Module, inputs: Any, *rest: Any) -> Tensor:
            each = oracle(model, losses, dict(inputs))
            loss = super().training_step(model, inputs, *rest)
            norms = torch.cat([g.flatten(1) for g in each.values()], 1).norm(dim=1)
            if self.state.global_step % 10 == 0:
                seen.append((self.norms, norms))
            return loss

    options = {"gradient_accumulation_steps": accumulation}
    watched = trained(build, Checked, 11, tmp_path, **options)
    assert len(seen) == 2 * accumulation
    for found, expected in seen:
        assert torch.allclose(found, expected, rtol=1e-4)
    plain = trained(build, transformers.Trainer, 11, tmp_path, **options)
    for ours, theirs in zip(watched.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


# ------------------------------------------------------------------ the diff of the README


def test_the_step_of_the_readme_is_the_one_it_replaces() -> None:
    (step,) = blocks(README, "diff")
    lines = [(line[:2], line[2:]) for line in step.splitlines()]
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.randint(3, (6,))
    found = {}
    for sign in ("- ", "+ "):
        source = "\n".join(text for kind, text in lines if kind in ("  ", sign))
        names = {"torch": torch, "F": F, "persample": persample, "model": model, "x": x, "y": y}
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.0)
        exec(textwrap.dedent(source).replace("clipped_sum(1.0)", "clipped_sum(1e6)"), names)
        found[sign] = {n: p.grad for n, p in model.named_parameters()}
    assert relative_error(found["+ "], found["- "]) < 1e-6
