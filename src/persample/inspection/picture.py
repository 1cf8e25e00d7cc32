"""A sample as HTML: a picture, coloured tokens, text or bars."""

from __future__ import annotations

import base64
import struct
import zlib
from html import escape

import torch
from torch import Tensor

from .plots import bars
from .show import Shown


def png(image: Tensor) -> bytes:
    """A (channels, height, width) tensor of bytes as a PNG file."""
    channels, high, wide = image.shape
    rows = image.permute(1, 2, 0).reshape(high, wide * channels)
    raw = b"".join(b"\0" + bytes(row.tolist()) for row in rows)
    kind = 2 if channels == 3 else 0

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    head = struct.pack(">IIBBBBB", wide, high, 8, kind, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def picture(shown: Shown, label: str, *, large: bool = False) -> str:
    """HTML of a sample; empty if nothing of it was kept."""
    if shown.image is not None:
        data = base64.b64encode(png(shown.image)).decode()
        size = "large" if large else "thumb"
        return f'<img class="{size}" alt="{escape(label)}" src="data:image/png;base64,{data}">'
    if shown.tokens is not None:
        limit = len(shown.tokens) if large else 14
        return _tokens(shown.tokens, shown.contributions, limit)
    if shown.text is not None:
        text = shown.text if large or len(shown.text) <= 90 else shown.text[:89] + "…"
        return f'<span class="text">{escape(text)}</span>'
    if shown.features is not None:
        return bars(shown.features)
    return ""


def _tokens(tokens: tuple[str, ...], contributions: Tensor | None, limit: int) -> str:
    """Tokens on a ground as strong as their part of the squared norm."""
    if contributions is None:
        spans = [f"<span>{_word(token)}</span>" for token in tokens[:limit]]
    else:
        fine = torch.nan_to_num(contributions.double(), nan=0.0, posinf=0.0, neginf=0.0)
        strength = (fine / fine.abs().max().clamp(min=1e-300)).tolist()
        share = (fine / (float(fine.sum()) or 1.0)).tolist()
        spans = [
            f'<span class="{"plus" if part >= 0 else "minus"}" style="--part:{abs(part):.2f}" '
            f'title="{whole:.0%} of the squared norm">{_word(token)}</span>'
            for token, part, whole in list(zip(tokens, strength, share, strict=True))[:limit]
        ]
    more = "<span>…</span>" if len(tokens) > limit else ""
    return f'<span class="tokens">{"<wbr>".join(spans)}{more}</span>'


def _word(token: str) -> str:
    return escape(token.replace(" ", "␣") if not token.strip() else token) or "·"
