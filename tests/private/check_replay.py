"""Replay of many models: each with ten records removed one after the other, some adversarial."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import private

from ..models import MODELS, flat_loss
from .check import Row

SIZE, RATE, STEPS = 24, 0.3, 2
REMOVED = range(10)
# what the first records are multiplied by
ADVERSARIAL = (float("nan"), float("inf"), 1e3, -1e3, 1e-3, 0.0)
Make = Callable[[Any], private.Training]
Subject = tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Tensor], Any]


def attacked(value: Tensor) -> Tensor:
    """The same data with adversarial rows, where numbers can be anything."""
    found = value.clone()
    if found.is_floating_point() or found.is_complex():
        for row, factor in enumerate(ADVERSARIAL):
            found[row] *= factor
    return found


def tiny(name: str) -> Subject:
    """A model of the tests in float32."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return MODELS[name](SIZE)[0]

    torch.manual_seed(0)
    batch = MODELS[name](SIZE)[1]
    if not all(isinstance(x, Tensor) and x.dim() and len(x) == SIZE for x in batch):
        raise ValueError("inputs that are not one per sample")
    return build, lambda m, b: flat_loss(m(*b)), tuple(map(attacked, batch))


# ---------------------------------------------------------------------- larger models


def tokens(size: int = 12) -> Tensor:
    return torch.randint(1, 50, (SIZE, size), generator=torch.Generator().manual_seed(0))


def language_losses(model: nn.Module, batch: Any) -> Tensor:
    logits = model(input_ids=batch).logits[:, :-1]
    return F.cross_entropy(logits.mT, batch[:, 1:], reduction="none").mean(1)


def gpt2() -> Subject:
    """Tied embedding and head, dropout as it comes."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16,
                        bos_token_id=None, eos_token_id=None)  # fmt: skip
    return seeded(lambda: GPT2LMHeadModel(config).train()), language_losses, tokens()


def llama() -> Subject:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    return seeded(lambda: LlamaForCausalLM(config).train()), language_losses, tokens()


def mixtral() -> Subject:
    """A mixture of experts: which of them are used depends on the tokens."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_local_experts=4,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    return seeded(lambda: MixtralForCausalLM(config).train()), language_losses, tokens()


def bert() -> Subject:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                        intermediate_size=32, num_labels=3)  # fmt: skip

    def losses(model: nn.Module, batch: Any) -> Tensor:
        logits = model(input_ids=batch["x"], attention_mask=batch["mask"]).logits
        return F.cross_entropy(logits, batch["y"], reduction="none")

    lengths = 4 + torch.arange(SIZE) % 9
    data = {"x": tokens(), "mask": (torch.arange(12) < lengths[:, None]).long(),
            "y": torch.arange(SIZE) % 3}  # fmt: skip
    return seeded(lambda: BertForSequenceClassification(config).train()), losses, data


def vit() -> Subject:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=16,
                       intermediate_size=32, patch_size=8, num_labels=3)  # fmt: skip

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(pixel_values=batch[0]).logits, batch[1], reduction="none")

    images = torch.randn(SIZE, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    data = (attacked(images), torch.arange(SIZE) % 3)
    return seeded(lambda: ViTForImageClassification(config).train()), losses, data


class Words(nn.Module):
    """An embedding, an LSTM and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(50, 8), nn.LSTM(8, 8, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(self.table(x))[0][:, -1])
        return scores


def lstm_text() -> Subject:
    def losses(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return seeded(Words), losses, (tokens(), torch.arange(SIZE) % 3)


def cnn() -> Subject:
    def build() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True),
            nn.Conv2d(4, 8, 3, stride=2), nn.ReLU(), nn.Dropout(0.3), nn.Flatten(),
            nn.Linear(72, 3),
        )  # fmt: skip

    def losses(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    images = torch.randn(SIZE, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return seeded(build), losses, (attacked(images), torch.arange(SIZE) % 3)


def lora_of_llama() -> Subject:
    from peft import LoraConfig, get_peft_model

    build, losses, data = llama()
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return seeded(lambda: get_peft_model(build(), config)), losses, data


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return made


LARGER = {f.__name__: f for f in (gpt2, llama, mixtral, bert, vit, lstm_text, cnn, lora_of_llama)}


# ---------------------------------------------------------------------- the check


def maker(subject: Subject, clipping: str) -> Make:
    build, losses, _ = subject

    def make(data: Any) -> private.Training:
        model = build()
        plan = private.plan(noise_multiplier=1.0, delta=1e-3, size=SIZE, sample_rate=RATE,
                            steps=STEPS, max_norm=1.0, clipping=clipping)  # fmt: skip
        moved = [p for p in model.parameters() if p.requires_grad]
        return private.Training(
            model, torch.optim.SGD(moved, 0.05), data, plan, losses, micro_batch=5
        )

    return make


def checked(name: str, subject: Subject, clipping: str) -> Row:
    """Ten removals of one model."""
    report = private.replay(maker(subject, clipping), subject[2], remove=REMOVED, steps=STEPS)
    worst = max(max(c.aligned or 0.0, c.dropped) for c in report.compared)
    limit = max(max(c.aligned or 0.0, c.dropped) / c.limit for c in report.compared)
    largest = max(c.contribution for c in report.compared)
    problems = sorted({problem for c in report.compared for problem in c.problems})
    found = f"off by {worst:.1e} C, contribution {largest:.6f} C"
    return Row(
        proof=f"replay: {name}, {clipping}",
        cases=len(report.compared),
        found="; ".join([found, *problems]),
        demanded=f"rounding ({limit:.0%} of it), 1 C",
        ok=report.ok,
    )


def proofs() -> Iterator[Row]:
    """A row for each model: two steps, ten records removed one after the other."""
    torch.set_num_threads(1)
    subjects: dict[str, Callable[[], Subject]] = {
        **LARGER,
        **{name: lambda name=name: tiny(name) for name in MODELS},  # type: ignore[misc]
    }
    models = 0
    for number, (name, build) in enumerate(subjects.items()):
        clipping = ("flat", "automatic", "per_layer")[number % 3]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                subject = build()
            except (ImportError, ValueError):
                continue  # a package that is missing, or inputs that are not one per sample
            yield checked(name, subject, clipping)
        models += 1
    removed = models * len(REMOVED)
    yield Row("replay: models, removed records", removed, f"{models} models", "≥ 20", models >= 20)
