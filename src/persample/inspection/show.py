"""How samples are shown: small pictures, tokens, text or a few features, kept while streaming."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError
from ..inputs.batch_samples import tensors
from .store import Ragged, Rows, Scratch, Texts

EDGE = 48  # pixels that a thumbnail keeps at most
TOKENS = 512  # positions that are kept at most
FEATURES = 64  # features that are kept at most

Decode = Callable[[int], str] | Sequence[str] | Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Show:
    """How to show a sample; every field is optional.

    ``images(batch)`` gives (n, channels, height, width) or (n, height, width) with values in 0 … 1
    (others are scaled); ``tokens(batch)`` gives (n, positions) of integers, written with
    ``decode``, negative ones are left out; ``text(batch)`` gives n strings; ``classes`` are the
    names of the labels. Only a small copy is kept of each sample.
    """

    images: Callable[[Any], Tensor] | None = None
    tokens: Callable[[Any], Tensor] | None = None
    decode: Decode | None = None
    text: Callable[[Any], Sequence[str]] | None = None
    classes: Sequence[str] | None = None

    def class_name(self, label: int) -> str:
        """The label's name, or the label."""
        if self.classes is not None and 0 <= label < len(self.classes):
            return str(self.classes[label])
        return str(label)

    def token(self, number: int) -> str:
        """The token as text."""
        decode = self.decode
        if decode is None:
            return str(number)
        if callable(decode):
            return str(decode(number))
        try:
            return str(decode[number])
        except (KeyError, IndexError):
            return str(number)


@dataclass(frozen=True, slots=True)
class Shown:
    """One sample as it is shown: at most one of the fields is set."""

    image: Tensor | None = None
    tokens: tuple[str, ...] | None = None
    contributions: Tensor | None = None
    text: str | None = None
    features: Tensor | None = None


class Gallery:
    """The small copies of all samples."""

    def __init__(self, show: Show, scratch: Scratch) -> None:
        self.show = show
        self.images, self.features = Rows(scratch), Rows(scratch)
        self.tokens = Ragged(scratch)
        self.contributions: dict[int, Tensor] = {}
        self.texts = Texts(scratch)
        self._count = 0

    def add(self, batch: Any, n: int) -> None:
        """Keep small copies of one batch."""
        self._keep(batch, n)
        self._count += n

    def _keep(self, batch: Any, n: int) -> None:
        """A kind that an earlier batch did not have is left out: its rows would be of others."""
        if self.show.text is not None:
            self._add_texts(list(self.show.text(batch)), n)
            return
        tokens = self._tokens(batch)
        if tokens is not None:
            self._expect(tokens.shape[0], n, "tokens")
            if len(self.tokens) == self._count:
                kept = tokens.detach()[:, :TOKENS].to("cpu", torch.int32)
                self.tokens.append(kept.flatten(), [kept.shape[1]] * n)
            return
        first = first_tensor(batch)
        images = self.show.images(batch) if self.show.images is not None else first
        if images is None or (not images.dtype.is_floating_point and self.show.images is None):
            return
        if self.show.images is not None or (images.dim() == 4 and images.shape[1] in (1, 3)):
            self._expect(images.shape[0], n, "images")
            if len(self.images) == self._count:
                self.images.append(_thumbnails(images.detach()))
        elif images.dim() == 2 and images.shape[0] == n and len(self.features) == self._count:
            self.features.append(images.detach()[:, :FEATURES].float())

    def __getitem__(self, index: int) -> Shown:
        if len(self.texts) > index:
            return Shown(text=self.texts[index])
        if len(self.images) > index:
            return Shown(image=self.images.tensor()[index])
        if len(self.tokens) > index:
            row = self.tokens[index].tolist()
            kept = [k for k, number in enumerate(row) if number >= 0]
            words = tuple(self.show.token(row[k]) for k in kept)
            parts = self.contributions.get(index)
            fits = parts is not None and len(parts[:TOKENS]) == len(row)
            return Shown(
                tokens=words, contributions=parts[kept] if fits and parts is not None else None
            )
        if len(self.features) > index:
            return Shown(features=self.features.tensor()[index])
        return Shown()

    def _tokens(self, batch: Any) -> Tensor | None:
        if self.show.tokens is not None:
            return self.show.tokens(batch)
        if self.show.images is not None or self.show.text is not None:
            return None
        first = first_tensor(batch)
        whole = first is not None and first.dtype in (torch.int32, torch.int64)
        return first if whole and first is not None and first.dim() == 2 else None

    def _add_texts(self, texts: list[str], n: int) -> None:
        self._expect(len(texts), n, "text")
        self.texts.append([str(text)[:2000] for text in texts])

    def _expect(self, got: int, n: int, what: str) -> None:
        if got != n:
            raise UsageError(
                f"Show.{what} gave {got} samples for a batch of {n}",
                fix=f"{what}(batch) must give one entry per sample, in order",
            )


def first_tensor(batch: Any) -> Tensor | None:
    """The first tensor of a batch, in the order in which it is written."""
    return next(iter(tensors(batch)), None)


def _thumbnails(images: Tensor) -> Tensor:
    """(n, channels, height, width) in bytes, at most 48 pixels wide and high."""
    images = images.float()
    if images.dim() == 3:
        images = images.unsqueeze(1)
    if images.dim() != 4 or images.shape[1] not in (1, 3, 4):
        raise UsageError(
            f"images must be (n, channels, height, width), got {tuple(images.shape)}",
            fix="give 1 or 3 channels, or leave Show.images out",
        )
    images = images[:, :3]
    high, wide = (min(EDGE, size) for size in images.shape[2:])
    if (high, wide) != tuple(images.shape[2:]):
        images = F.adaptive_avg_pool2d(images, (high, wide))
    flat = torch.nan_to_num(images).flatten(1)
    low, top = flat.amin(1).view(-1, 1, 1, 1), flat.amax(1).view(-1, 1, 1, 1)
    proper = (low >= 0) & (top <= 1)
    spread = (top - low).clamp(min=1e-12)
    scaled = torch.where(proper, images, (images - low) / spread)
    return torch.nan_to_num(scaled * 255).round().clamp(0, 255).to(torch.uint8)
