"""One batch of texts in every kind of container that people have."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH = 11, 5


class Named(NamedTuple):
    input_ids: Tensor
    labels: Tensor
    idx: Any
    text: list[str]


@dataclass
class Plain:
    input_ids: Tensor
    labels: Tensor
    idx: Any
    text: list[str]


@dataclass(frozen=True, slots=True)
class Frozen:
    input_ids: Tensor
    labels: Tensor
    idx: Any
    text: list[str]


class Own:
    """An object of the caller's own class."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Inside(Mapping[str, Any]):
    """A mapping that cannot be written to, around a dictionary that a copy would share."""

    def __init__(self, **parts: Any) -> None:
        self._parts = parts

    def __getitem__(self, key: str) -> Any:
        return self._parts[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def encoding(**parts: Any) -> Any:
    """What tokenizers and collators of Hugging Face return."""
    import transformers

    return transformers.BatchEncoding(parts)


KINDS: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "UserDict": lambda **parts: UserDict(parts),
    "BatchEncoding": encoding,
    "proxy": lambda **parts: MappingProxyType(parts),
    "Mapping": Inside,
    "NamedTuple": Named,
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "object": Own,
}


def field(batch: Any, name: str) -> Any:
    return batch[name] if isinstance(batch, Mapping) else getattr(batch, name)


def parts(first: int = 0, n: int = 6) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(first)
    return {
        "input_ids": torch.randint(1, WORDS, (n, LENGTH), generator=generator),
        "labels": torch.randint(3, (n,), generator=generator),
        "idx": torch.arange(first, first + n) + 500,
        "text": [f"text {first + k}" for k in range(n)],
    }


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.words(input_ids).tanh()).sum(1)
        return found


def losses(model: nn.Module, batch: Any) -> Tensor:
    expected = f"text {int(field(batch, 'idx')[0]) - 500}"
    assert field(batch, "text")[0] == expected, "texts must go with their samples"
    scores = model(field(batch, "input_ids"))
    return F.cross_entropy(scores, field(batch, "labels"), reduction="none")


def coupled(model: nn.Module, batch: Any) -> Tensor:
    """A loss that looks at all of the batch, through numbers that nobody follows."""
    return losses(model, batch) * float(field(batch, "input_ids").sum())
