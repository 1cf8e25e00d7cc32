"""Hugging Face models and their adapters."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

from .base import Cases, Missing, Outcome, alone, gradients, refusal, sums

CASES = Cases("Hugging Face models and adapters")
Batch = tuple[Tensor, Tensor, Tensor]


def llama(**config: Any) -> nn.Module:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise Missing("transformers") from error
    sizes = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes, **config)).double().train()


def texts() -> Batch:
    """Token ids, mask and labels of four texts padded to seven tokens."""
    ids = torch.randint(1, 37, (4, 7))
    mask = (torch.arange(7) < torch.tensor([7, 5, 3, 6])[:, None]).long()
    return ids, mask, ids.masked_fill(mask == 0, -100)


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    """One loss per text: the mean over its own tokens."""
    ids, mask, labels = batch
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    each = F.cross_entropy(logits.mT, labels[:, 1:], ignore_index=-100, reduction="none")
    return each.sum(1) / (labels[:, 1:] != -100).sum(1)


def adapted(make: Callable[[Any], Any], switch: bool | None = None) -> Outcome:
    """``switch``: gradient checkpointing by the model's own method, reentrant or not."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import peft
    except ImportError as error:
        raise Missing("peft") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(llama(), make(peft)).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    if switch is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": switch})
    return alone(model.train(), texts(), next_token)


PROJECTIONS = ["q_proj", "v_proj"]


def lora(peft: Any, **options: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=PROJECTIONS, **options)


ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "peft LoRA": lora,
    "peft DoRA": functools.partial(lora, use_dora=True),
    "peft rsLoRA with a trained head (modules_to_save)": functools.partial(
        lora, use_rslora=True, modules_to_save=["lm_head"]
    ),
    "peft LoRA on the embedding": lambda peft: peft.LoraConfig(
        r=2, target_modules=["embed_tokens", "q_proj"]
    ),
    "peft prefix tuning": lambda peft: peft.PrefixTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3
    ),
    "peft IA3": lambda peft: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "peft AdaLoRA": lambda peft: peft.AdaLoraConfig(target_modules=PROJECTIONS, total_step=9),
    "peft LoKr": lambda peft: peft.LoKrConfig(r=2, target_modules=PROJECTIONS),
    "peft OFT": lambda peft: peft.OFTConfig(oft_block_size=4, target_modules=PROJECTIONS),
    "peft VeRA": lambda peft: peft.VeraConfig(r=2, target_modules=["q_proj"]),
    "peft layer norm tuning": lambda peft: peft.LNTuningConfig(target_modules=["input_layernorm"]),
}
for _name, _make in ADAPTERS.items():
    CASES.right(_name, _make)(adapted)
CASES.right("peft LoRA, gradient checkpointing, not reentrant", lora, False)(adapted)
CASES.right("peft LoRA, gradient checkpointing, reentrant", lora, True)(adapted)
CASES.right(
    "peft LoHa (a custom autograd.Function on parameters)",
    lambda peft: peft.LoHaConfig(r=2, target_modules=PROJECTIONS),
)(adapted)


@CASES.right("a causal language model with padding and ignore_index, one loss per text")
def causal() -> Outcome:
    return alone(llama(use_cache=False), texts(), next_token)


@CASES.right("the same with the cache for generation left on (use_cache=True)")
def cached() -> Outcome:
    return alone(llama(use_cache=True), texts(), next_token)


def switched(reentrant: bool) -> Outcome:
    model: Any = llama()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return alone(model, texts(), next_token)


CASES.right("model.gradient_checkpointing_enable(), not reentrant", False)(switched)
CASES.right("model.gradient_checkpointing_enable(), reentrant", True)(switched)


def labelled(model: Any, batch: dict[str, Tensor], truth: Any = None, **options: Any) -> Outcome:
    """The model's own loss: rows add up to its gradient; ``truth``: the oracle's loss."""
    with persample.record(model) as tape:
        tape.backward(model(**batch, **options).loss)
    rows = tape.grads()
    model(**batch, **options).loss.backward()
    error = relative_error(sums(rows), gradients(model))
    if truth is not None:
        model.zero_grad()
        error = max(error, relative_error(rows, oracle(model, truth, tuple(batch.values()))))
    # the models compute their losses in float32
    return Outcome(error, 1e-6, "clipped_sum", refusal(lambda: tape.clipped_sum(1.0)))


def over_count(count: int) -> Callable[[nn.Module, Batch], Tensor]:
    """The share of each text in a mean over all tokens of the batch."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        own = (batch[2][:, 1:] != -100).sum(1)
        return next_token(model, batch) * own / count

    return loss


@CASES.right("called with labels: the model's own mean over the batch's tokens")
def labels() -> Outcome:
    ids, mask, wanted = texts()
    count = int((wanted[:, 1:] != -100).sum())
    batch = {"input_ids": ids, "attention_mask": mask, "labels": wanted}
    return labelled(llama(), batch, over_count(count))


@CASES.right("called with labels and num_items_in_batch")
def items() -> Outcome:
    ids, mask, wanted = texts()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": wanted}
    return labelled(llama(), batch, over_count(23), num_items_in_batch=torch.tensor(23))


@CASES.right("a classifier called with labels")
def classifier() -> Outcome:
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError as error:
        raise Missing("transformers") from error
    config = BertConfig(
        vocab_size=37, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids, mask, _ = texts()
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 1, 0])}
    return labelled(BertForSequenceClassification(config).double(), batch)
