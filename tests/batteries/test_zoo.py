"""A few real architectures on every run; ``make zoo`` runs several hundred."""

from __future__ import annotations

import pytest

from .. import zoo

CHOSEN = {
    ("causal", "gpt2"), ("causal", "llama"), ("causal", "mixtral"), ("causal", "deepseek_v3"),
    ("masked", "bert"), ("masked", "longformer"), ("seq2seq", "t5"), ("seq2seq", "bart"),
    ("classify", "opt"), ("images", "swin"), ("images", "vit"), ("images", "resnet"),
}  # fmt: skip
CASES = {
    f"{family} {name}": builder
    for family, name, builder in zoo.cases()
    if (family, name) in CHOSEN or family not in zoo.zoo_transformers.FAMILIES
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_exact(name: str) -> None:
    verdict = zoo.judge(CASES[name])
    assert verdict.kind == "exact", verdict.detail


def test_the_chosen_are_there() -> None:
    assert len(CASES) >= len(CHOSEN) + 8
