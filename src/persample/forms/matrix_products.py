"""Matrix products of factors, computed in the way that takes least time for their sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from .cost import spans
from .kernels import by_onednn, onednn_serves
from .rounding import THIN

_CUT = 256  # terms that few products add up in one go
_POSITIONS, _LENGTH = 32, 128  # of rows from which on products of stripes are computed once
_WORTH = 1 << 22  # multiplications that are worth a call of oneDNN's; half where nothing is copied
_TOGETHER = 1 << 20  # bytes of results that are copied side by side while they are in the cache
_TERMS_AT_ONCE = 512  # of a sum by oneDNN
_WIDE = 64  # rows and columns of such a product
_SMALL = 1 << 23  # multiplications that take less time than the calls of stripes
_LANES = 16  # numbers of one row of a product that are computed at once
_TERMS, _ROWS = 64, 64  # of a narrow product that are worth turning it
_PRODUCTS: dict[int, Callable[..., Tensor]] = {2: torch.mm, 3: torch.bmm}  # others broadcast


def sum_products(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """leftᵀ right of matrices (…, t, a) and (…, t, b): the sum over t of outer products."""
    if right.dim() < 4 and sums_by_onednn(left, right):
        return _sums_by_onednn(left, right, out)
    if not (right.shape[-1] < 2 * _LANES and _is_narrow(left, right)):
        return _PRODUCTS.get(left.dim(), torch.matmul)(left.mT, right, out=out)
    turned = _PRODUCTS.get(left.dim(), torch.matmul)(right.mT, left).mT
    return turned.contiguous() if out is None else out.copy_(turned)


def sums_by_onednn(left: Tensor, right: Tensor) -> bool:
    """Whether oneDNN serves them: each matrix is worth a call, and copies of its factors."""
    (t, a), b = left.shape[-2:], right.shape[-1]
    if left.dim() == 2:
        t = _TERMS_AT_ONCE if t >= _TERMS_AT_ONCE else 0
    if min(a, b) < _WIDE or t * a * b < _WORTH:
        return False
    return _is_dense(left) and _is_dense(right) and onednn_serves(left, right, (a, t, b))


def _is_dense(factor: Tensor) -> bool:
    """Whether each matrix lies in one piece of memory, by rows or by columns."""
    (rows, columns), strides = factor.shape[-2:], factor.stride()[-2:]
    return strides in ((columns, 1), (1, rows))


def _sums_by_onednn(left: Tensor, right: Tensor, out: Tensor | None) -> Tensor:
    """A matrix is copied to its transpose first: if there is one alone, the smaller one.

    Of one matrix, as many terms are added up at once whatever their number: batches differ in it.
    """
    if left.dim() == 2:
        turned = left.shape[1] > right.shape[1]
        one, two = (right, left) if turned else (left, right)
        whole = left.shape[0] // _TERMS_AT_ONCE * _TERMS_AT_ONCE
        found = by_onednn(one[:_TERMS_AT_ONCE].mT, two[:_TERMS_AT_ONCE].mT)
        for first in range(_TERMS_AT_ONCE, whole, _TERMS_AT_ONCE):
            part = slice(first, first + _TERMS_AT_ONCE)
            found += by_onednn(one[part].mT, two[part].mT)
        if whole < left.shape[0]:
            found.addmm_(one[whole:].mT, two[whole:])
        found = found.mT if turned else found
        return found.contiguous() if out is None else out.copy_(found)
    (n, _, a), b = left.shape, right.shape[2]
    if out is None:
        out = left.new_empty(n, a, b)
    lefts, rights = left.mT.unbind(), right.mT.unbind()
    for first, last in spans(n, a * b * left.itemsize, _TOGETHER):
        pairs = zip(lefts[first:last], rights[first:last], strict=True)
        torch.stack([by_onednn(one, two) for one, two in pairs], out=out[first:last])
    return out


def _is_narrow(left: Tensor, right: Tensor) -> bool:
    """Whether rows of rightᵀ left are computed in less time: those of leftᵀ right fill no lanes."""
    (t, a), b = left.shape[-2:], right.shape[-1]
    if t < _TERMS or b < 2 or b % _LANES == 0 or left.device.type != "cpu":
        return False
    if b <= _LANES // 2 and left.stride(-1) != 1:
        return False
    return a >= _LANES and (a >= _ROWS or a % _LANES == 0)


def rows_by_rows(one: Tensor, two: Tensor) -> Tensor:
    """⟨row t, row s⟩ of matrices (…, t, a) and (…, s, a).

    Products of few rows are added up in one go, however long they are: long ones are cut.
    """
    length = one.shape[-1]
    if one.dim() == two.dim() < 4 and _rows_by_onednn(one, two):
        if one.dim() == 2:
            return by_onednn(one, two)
        pairs = zip(one.unbind(), two.unbind(), strict=True)
        return torch.stack([by_onednn(x, y) for x, y in pairs])
    if length > _CUT and min(one.shape[-2], two.shape[-2]) < THIN:
        whole = length // _CUT * _CUT
        cut = [
            f[..., :whole].unflatten(-1, (-1, _CUT)).transpose(-2, -3).contiguous()
            for f in ((one,) if one is two else (one, two))
        ]
        found = torch.matmul(cut[0], cut[-1].mT).sum(-3)
        if whole < length:
            found += torch.matmul(one[..., whole:], two[..., whole:].mT)
        return found
    if one.dim() == two.dim() == 3:  # matmul would look for axes to broadcast
        t = one.shape[1]
        if one is two and t >= _POSITIONS and length > _LENGTH and one.numel() * t > _SMALL:
            return _by_stripes(one)
        return torch.bmm(one, two.mT)
    return torch.matmul(one, two.mT)


def _rows_by_onednn(one: Tensor, two: Tensor) -> bool:
    """Whether oneDNN serves them: nothing is copied."""
    (m, length), p = one.shape[-2:], two.shape[-2]
    if min(m, p) < _WIDE or m * p * length < _WORTH // 2:
        return False
    return _is_dense(one) and _is_dense(two) and onednn_serves(one, two, (m, length, p))


def _by_stripes(rows: Tensor) -> Tensor:
    """⟨row t, row s⟩ of (n, t, a) with themselves; those of two stripes of rows only once."""
    n, t, _ = rows.shape
    count = 2 if t < 3 * _POSITIONS else 3
    starts = [t // count // 8 * 8 * k for k in range(count)]  # none is thin
    found = rows.new_empty(n, t, t)
    for first, last in itertools.pairwise([*starts, t]):
        products = torch.bmm(rows[:, first:last], rows[:, first:].mT)
        found[:, first:last, first:] = products
        found[:, last:, first:last] = products[:, :, last - first :].mT
    return found
