"""Attacks by constants whose zeros keep samples apart, or nearly so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .base import EITHER, EXACT, REFUSED, Case, N, Table, case, lin, on_module, rand

T = 3
IDS = torch.arange(N).repeat_interleave(T)
BLOCKS = torch.block_diag(*[rand(T, T, seed=k) for k in range(N)])
ALMOST = BLOCKS.clone()
ALMOST[0, -1] = 1e-9
TURNED = torch.eye(N * T, dtype=torch.float64).roll(T, 0)
SAME = IDS[:, None] == IDS
OPEN = SAME.clone()
OPEN[0, -1] = True
EACH = torch.arange(N)[:, None] == IDS  # a query for every sample
BOTH = EACH.clone()
BOTH[2, -1] = True
SHUT = EACH & (IDS != 1)
SQUARES = torch.zeros(1, N * T, dtype=torch.float64)
SQUARES[:, [0, 3, 4, 9, 10]] = 1  # 0, 1, 1, 3, 3: mean 1.6, and as many squares as five times 2
ALIKE = torch.block_diag(*[rand(T, T)] * N)
FAR = torch.zeros(N * T, N * T, dtype=torch.float64)


def flat(m: Any, x: Tensor) -> Tensor:
    """All rows of all samples below each other."""
    return m.l(x).reshape(-1, N)


def nodes(matrix: Tensor, m: Any, x: Tensor) -> Tensor:
    """A step of a graph network, and a layer behind it."""
    return m.k(matrix @ flat(m, x)).view(N, T, N)


def attended(m: Any, x: Tensor, **options: Any) -> Tensor:
    """Attention among all rows, and a layer behind it."""
    h = flat(m, x)
    return m.k(F.scaled_dot_product_attention(h, h, h, **options)).view(N, T, N)


def packed(m: Any, x: Tensor, mask: Tensor, padding: int = 0) -> Tensor:
    """Two packs of two samples each, and rows of nobody behind them."""
    h = F.pad(flat(m, x).view(2, N * T // 2, N), (0, 0, 0, padding))
    out = F.scaled_dot_product_attention(h, h, h, attn_mask=mask)[:, : N * T // 2]
    return m.k(out.reshape(-1, N)).view(N, T, N)


def asked(m: Any, x: Tensor, mask: Tensor, *, later: Any = None, **more: Any) -> Tensor:
    """Queries that are parameters, each for the sample whose rows its mask leaves to it."""
    h = flat(m, x)
    out = F.scaled_dot_product_attention(more.get("q", m.w), h, more.get("v", h), attn_mask=mask)
    if later is not None:
        later(mask)
    return m.k(out)


HALVES = (IDS.view(2, -1), F.pad(IDS.view(2, -1), (0, 2), value=-1))
OWN, PADDED = (ids[:, :, None] == ids[:, None] for ids in HALVES)
UNEVEN = IDS.view(2, -1)[:, :, None] // 3 == IDS.view(2, -1)[:, None] // 3
SPILLED = PADDED.clone()
SPILLED[0, 0, -1] = SPILLED[0, -1, 0] = SPILLED[0, -1, 5] = True


def dispatched(m: Any, x: Tensor, slots: Tensor) -> Tensor:
    """Rows to slots and back by one-hot matrices."""
    h = flat(m, x)
    way = F.one_hot(slots, N * T).to(h.dtype)
    return torch.einsum("sc,cd->sd", way, m.k(torch.einsum("sc,sd->cd", way, h))).view(N, T, N)


def opened(m: Any, x: Tensor, *, einsum: bool = False) -> Tensor:
    """A matrix that is filled after the product, unseen by autograd."""
    matrix = BLOCKS.clone()
    h = torch.einsum("ab,bd->ad", matrix, flat(m, x)) if einsum else matrix @ flat(m, x)
    matrix.data.fill_(1.0)
    return m.k(h).view(N, T, N)


def unmasked(m: Any, x: Tensor) -> Tensor:
    """A mask that is opened after the attention: the fused operator reads it again."""
    mask = FAR.masked_fill(~SAME, -torch.inf)[None, None]
    h = flat(m, x)[None, None]
    out = m.k(F.scaled_dot_product_attention(h, h, h, attn_mask=mask)).view(N, T, N)
    mask.data.zero_()
    return out


def tidied(m: Any, x: Tensor, scale: Tensor) -> Tensor:
    """A hook makes numbers of what the overflow of one sample left of all gradients."""
    h = flat(m, x)
    h.register_hook(lambda grad: grad.nan_to_num(0.0, 0.0, 0.0))
    return (ALIKE[: len(h), : len(h)] @ h).view(-1, T, N) * scale[:, None, None].square()


PRODUCTS: Table = {
    "blocks": (EXACT, lambda m, x: nodes(BLOCKS, m, x)),
    "blocks by keyword": (
        EXACT, lambda m, x: m.k(torch.matmul(BLOCKS, other=flat(m, x))).view(N, T, N)),
    "blocks from the right": (EXACT, lambda m, x: m.k((flat(m, x).T @ BLOCKS.T).T).view(N, T, N)),
    "blocks by einsum": (
        EXACT, lambda m, x: m.k(torch.einsum("ab,bd->ad", BLOCKS, flat(m, x))).view(N, T, N)),
    "blocks, twice": (EXACT, lambda m, x: nodes(BLOCKS, m, nodes(BLOCKS, m, x))),
    "almost blocks": (REFUSED, lambda m, x: nodes(ALMOST, m, x)),
    "blocks, filled later": (REFUSED, opened),
    "blocks by einsum, filled later": (REFUSED, lambda m, x: opened(m, x, einsum=True)),
    "blocks, then almost": (REFUSED, lambda m, x: nodes(ALMOST, m, nodes(BLOCKS, m, x))),
    "almost, then blocks, of the same shape": (
        EXACT, lambda m, x: (nodes(ALMOST, m, x), nodes(BLOCKS, m, x))[1]),
    "turned": (EXACT, lambda m, x: (TURNED @ flat(m, x)).view(N, T, N).roll(-1, 0)),
    "turned, residual": (REFUSED, lambda m, x: nodes(TURNED, m, x) + m.l(x)),
    "a parameter with zeros": (REFUSED, lambda m, x: nodes(m.w, m, x)),
    "a parameter times blocks": (REFUSED, lambda m, x: nodes(m.w * BLOCKS.ne(0), m, x)),
    "blocks of the detached": (
        REFUSED, lambda m, x: nodes((flat(m, x) @ flat(m, x).T).detach() * SAME, m, x)),
    "ranks as coefficients": (
        REFUSED, lambda m, x: m.k(torch.tensor([[1.0, 1, 0, 0] * T] * N).double() @ flat(m, x))),
    "slots": (EXACT, lambda m, x: dispatched(m, x, torch.arange(N * T).flip(0))),
    "slots, shared": (REFUSED, lambda m, x: dispatched(m, x, torch.arange(N * T) % 5)),
    "numbers with the same sums of squares": (
        REFUSED, lambda m, x: m.k(SQUARES @ flat(m, x)).expand(N, N)),
}  # fmt: skip

MASKS: Table = {
    "of a pack": (EXACT, lambda m, x: attended(m, x, attn_mask=SAME)),
    "of a pack, infinite": (
        EXACT, lambda m, x: attended(m, x, attn_mask=FAR.masked_fill(~SAME, -torch.inf))),
    "of a pack, smallest number": (
        EXACT, lambda m, x: attended(
            m, x, attn_mask=FAR.masked_fill(~SAME, torch.finfo(torch.float64).min))),
    "products as large as what a mask of numbers adds": (
        REFUSED, lambda m, x: m.k(F.scaled_dot_product_attention(
            flat(m, x) * 1e155, flat(m, x) * 1e155, flat(m, x),
            attn_mask=FAR.masked_fill(~SAME, torch.finfo(torch.float64).min))).view(N, T, N)),
    "of a pack, opened later": (REFUSED, unmasked),
    "of a pack, large numbers": (
        REFUSED, lambda m, x: attended(m, x, attn_mask=FAR.masked_fill(~SAME, -1e4))),
    "open at one place": (REFUSED, lambda m, x: attended(m, x, attn_mask=OPEN)),
    "closed rows": (EITHER, lambda m, x: attended(m, x, attn_mask=SAME & (IDS > 0))),
    "causal": (REFUSED, lambda m, x: attended(m, x, is_causal=True)),
    "of two packs": (EXACT, lambda m, x: packed(m, x, OWN)),
    "of two packs, the same": (EXACT, lambda m, x: packed(m, x, OWN[:1])),
    "of two packs, open in one": (REFUSED, lambda m, x: packed(m, x, UNEVEN)),
    "of two packs, padded": (EXACT, lambda m, x: packed(m, x, PADDED, 2)),
    "of two packs, rows of nobody see two": (REFUSED, lambda m, x: packed(m, x, SPILLED, 2)),
    "by heads": (
        EXACT, lambda m, x: m.k(F.scaled_dot_product_attention(
            *[flat(m, x).view(1, N * T, 2, 2).transpose(1, 2)] * 3, attn_mask=SAME
        ).transpose(1, 2).reshape(N, T, N))),
}  # fmt: skip

QUERIES: Table = {
    "learned": (EXACT, lambda m, x: asked(m, x, EACH)),
    "learned, infinite": (
        EXACT, lambda m, x: asked(m, x, FAR[:N].masked_fill(~EACH, -torch.inf))),
    "learned, one of another sample": (REFUSED, lambda m, x: asked(m, x, BOTH)),
    "learned, turned": (EXACT, lambda m, x: asked(m, x, EACH.roll(1, 0))),
    "learned, turned back": (EXACT, lambda m, x: asked(m, x, EACH.roll(1, 0)).roll(-1, 0)),
    "learned, a closed row": (EXACT, lambda m, x: asked(m, x, SHUT) * 1.0),
    "learned, a closed row, numbers": (
        REFUSED, lambda m, x: asked(
            m, x, FAR[:N].masked_fill(~SHUT, torch.finfo(torch.float64).min))),
    "learned, nearly closed": (
        REFUSED, lambda m, x: asked(m, x, FAR[:N].masked_fill(~EACH, -1e4))),
    "learned, opened unseen": (
        REFUSED, lambda m, x: asked(
            m, x, FAR[:N].masked_fill(~EACH, -torch.inf),
            later=lambda mask: mask.data.zero_())),
    "learned, a mask of parameters": (REFUSED, lambda m, x: asked(m, x, m.w[:, :1] * EACH)),
    "learned, also the values": (REFUSED, lambda m, x: asked(m, x, EACH, v=m.w.repeat(T, 1))),
    "learned, with a gradient of its own": (
        EXACT, lambda m, x: asked(m, x, EACH, q=torch.tanh(m.w @ m.w.T))),
    "learned, no gradient of the data": (
        EXACT, lambda m, x: F.scaled_dot_product_attention(
            m.w, x.reshape(-1, N), x.reshape(-1, N), attn_mask=EACH)),
    "constant": (EXACT, lambda m, x: asked(m, x, EACH, q=m.w.detach())),
    "learned, twice": (
        EXACT, lambda m, x: asked(m, x, EACH) + asked(m, x.flip(1), EACH)),
    "learned, after its mask was open": (
        EXACT, lambda m, x: (asked(m, x, BOTH), asked(m, x, EACH))[1]),
    "learned, before its mask is open": (
        REFUSED, lambda m, x: (asked(m, x, EACH), asked(m, x, BOTH))[1]),
}  # fmt: skip


def cases() -> Iterator[Case]:
    """Products and attention masks."""
    weight = BLOCKS.clone()
    parts = {"l": lin(), "k": lin(seed=3), "w": weight}
    yield from on_module("zeros", PRODUCTS, rand(N, T, N), **parts)
    huge = torch.tensor([1e300, 1, 1, 1], dtype=torch.float64)
    for name, expectation, scale in (("", EXACT, huge.clamp(max=2)), (" it has", REFUSED, huge)):
        yield case(f"zeros: a hook that hides overflow{name}", expectation, tidied,
                   rand(N, T, N), scale, l=lin())  # fmt: skip
    yield from on_module("mask", MASKS, rand(N, T, N), l=lin(), k=lin(seed=3))
    parts = {"l": lin(), "k": lin(seed=3), "w": rand(N, N, seed=5)}
    yield from on_module("queries", QUERIES, rand(N, T, N), **parts)
