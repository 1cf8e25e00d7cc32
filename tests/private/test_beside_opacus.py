"""Models that Opacus does not take as they are train here, with the lines of the digits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from persample import private

SIZE = 24
EQUAL = "stack expects each tensor to be equal size"
opacus = pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore")  # what Opacus and torch's hooks say


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(30, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.table(x))[0][:, -1])
        return out


class Experts(nn.Module):
    """Every position goes to the expert that its gate likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.gate = nn.Embedding(30, 8), nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        weight, chosen = self.gate(h).softmax(-1).max(-1)
        added = torch.zeros_like(h)
        for k, expert in enumerate(self.experts):
            sample, place = (chosen == k).nonzero(as_tuple=True)
            routed = weight[sample, place, None] * expert(h[sample, place])
            added = added.index_put((sample, place), routed)
        out: Tensor = self.head((h + added).mean(1))
        return out


def tied_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=30,
        bos_token_id=1,
        eos_token_id=2,
        n_positions=8,
        n_embd=16,
        n_layer=1,
        n_head=2,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def language(out: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].mT, x[:, 1:], reduction="none").mean(1)


def sequence(out: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.logits, y, reduction="none")


def classes(out: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out, y, reduction="none")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], str]] = {
    "GPT-2 with a tied head": (tied_gpt2, language, EQUAL),
    "BERT as it is": (bert, sequence, EQUAL),
    "LSTM": (LSTM, classes, "We do not support nn.LSTM"),
    "mixture of experts": (Experts, classes, EQUAL),
}


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(30, (SIZE, 8), generator=generator)
    return ids, torch.randint(3, (SIZE,), generator=generator)


@pytest.mark.parametrize("name", MODELS)
def test_they_train_with_the_same_lines(name: str) -> None:
    torch.manual_seed(0)
    build, losses, _ = MODELS[name]
    model = build()
    before = copy.deepcopy(model.state_dict())

    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    plan = private.plan(noise_multiplier=1.0, delta=1e-3, size=SIZE, batch_size=8, steps=2)
    training = private.Training(model, optimizer, samples(), plan)
    for parts in training.batches():
        for a, b in parts:
            with training.record() as tape:
                tape.backward(losses(model(a), a, b))
        training.step()

    assert training.epsilon() == plan.epsilon()
    moved = [not torch.equal(p, before[n]) for n, p in model.named_parameters()]
    assert all(moved)


@pytest.mark.parametrize("name", MODELS)
def test_opacus_does_not_take_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Opacus sets a global flag, which torch.testing forbids once another test has imported it.
    flags = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(flags, "__allow_nonbracketed_mutation_flag", True)
    torch.manual_seed(0)
    build, losses, said = MODELS[name]
    model, (x, y) = build(), samples()
    with pytest.raises(Exception, match=said):
        wrapped, optimizer, _ = opacus.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=8),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )
        losses(wrapped(x[:8]), x[:8], y[:8]).mean().backward()
        optimizer.step()
