"""Numbers that are alike are rounded alike: what long sums of them are off by, and half precision.

Kernels add up in lanes and blocks, or in one go where a result is narrow or memory is strided.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.forms import Dense, Form, Outer, Picked, Rows, total, within
from persample.forms.table_kernels import is_worth_picking

from ..models import Fn, par
from ..tape.test_clipping_bound import OPTIONS, bound_of, dominated, size, taped
from .lengths import exact_sq_norms, sq_bounds, sq_norms


def one_of(i: int, n: int) -> Callable[[Tensor, float], Tensor]:
    """A rule that leaves all samples out but one."""
    alone = torch.arange(n) == i
    return lambda norms, c: torch.where(alone, c / norms, 0)


# ------------------------------------------------------------------ memory and kernels


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [1000, 4096, 5000])
@pytest.mark.parametrize("layer", ["bias", "linear"])
def test_samples_that_lie_side_by_side(layer: str, count: int, options: dict[str, Any]) -> None:
    """Rows are strided then, and their squares are not to be added up in one lane."""
    values = dominated(count, lead=1).unsqueeze(1).expand(-1, 3).contiguous()
    if layer == "bias":
        model = Fn(lambda m, x: (x + m.w.unsqueeze(1)).T, w=par(count))
        x, g = torch.zeros(count, 3), values.T
    else:
        model = Fn(lambda m, x: F.linear(x.T, m.w), w=par(1, count))
        x, g = values, torch.ones(3, 1)
    with persample.record(model, dim=1, **options) as tape:
        tape.backward((model(x) * g).sum(1), retain_graph=True)
    assert size(tape.clipped_sum(1.0, rule=one_of(1, 3))) <= 1 + 1e-6


def halves(t: int, a: int, b: int, ratio: float) -> tuple[Tensor, Tensor]:
    """Inputs (3, t, b) and output gradients (3, t, a): two positions, often repeated."""
    x, g = torch.full((3, t, b), 1.0123), torch.full((3, t, a), 0.8471)
    x *= torch.tensor([1.0, 1.27, 0.61]).view(3, 1, 1)
    g[:, t // 2 :] *= -ratio
    return x, g


@pytest.mark.parametrize("ratio", [-1.0, 1.02, 1.002])
@pytest.mark.parametrize("options", [{}, {"lean": True}, {"budget": 1 << 14}], ids=str)
@pytest.mark.parametrize(
    "sizes", [(2, 4096, 4096), (6, 5000, 600), (600, 1, 100), (2000, 7, 7), (140, 300, 300)]
)
def test_positions_that_are_alike(
    sizes: tuple[int, int, int], options: dict[str, Any], ratio: float
) -> None:
    t, a, b = sizes
    x, g = halves(t, a, b, ratio)
    model = nn.Linear(b, a, bias=False)
    tape = taped(model, x, g, **options)
    for i in range(3):
        assert size(tape.clipped_sum(1.0, rule=one_of(i, 3))) <= 1 + 1e-6
    exact = torch.einsum("nta,ntb->nab", g.double(), x.double()).flatten(1).norm(dim=1)
    if t <= 140:  # else rows are rounded by more
        torch.testing.assert_close(tape.norms().double(), exact, rtol=1e-3, atol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("ratio", [-1.0, 1.0, 1.01])
@pytest.mark.parametrize("channels", [(3, 3, 1), (1, 16, 1), (16, 16, 16)], ids=str)
def test_pixels_that_are_alike(
    channels: tuple[int, int, int], ratio: float, options: dict[str, Any]
) -> None:
    c, o, groups = channels
    model = nn.Conv2d(c, o, 3, groups=groups, bias=False)
    x = torch.full((2, c, 80, 80), 0.7173)
    x[1] *= 1.4171
    g = torch.full((2, o, 78, 78), 0.9137)
    g[:, :, 39:] *= -ratio
    tape = taped(model, x, g, **options)
    kept = taped(model, x, g)
    form = kept._forms.forms(["weight"])["weight"]
    exact = exact_sq_norms(form, torch.arange(2)).sqrt()
    for i in range(2):
        assert size(tape.clipped_sum(1.0, rule=one_of(i, 2))) <= 1 + 1e-6
    if ratio != 1:
        assert bool((bound_of(tape) >= exact * (1 - 1e-6)).all())


# ------------------------------------------------------------------ forms made of forms


def contribution(form: Form, i: int, bad: Tensor | None = None) -> float:
    """What sample i adds to a sum, as a multiple of its bound."""
    bound = sq_bounds(form).sqrt()
    c = torch.where(torch.arange(form.n) == i, 1 / bound, 0)
    form = form if bad is None else form.without(bad)
    return float(form.weighted_sum(c, certain=True).double().norm())


@pytest.mark.parametrize("budget", [1, 1 << 16, 1 << 26])
def test_rows_are_not_computed_in_another_way_without_a_sample(budget: int) -> None:
    """Picked again and again from products that cancel, beside a sample that is not finite."""
    for seed in range(20):
        torch.manual_seed(seed)
        left, right = torch.randn(2, 130, 16, 2)[..., 0], torch.randn(2, 130, 1)
        left[:, 65:], right[:, 65:] = left[:, :65], -right[:, :65] * (1 + 1e-6)
        left[0, 0, 0] = float("nan")
        inner = Outer(left, right, torch.Size((16, 1)))
        picked = Picked(inner, torch.Size((2, 1)), torch.arange(16) % 2, -1, "key")
        with within(budget):
            assert contribution(picked, 1, torch.tensor([True, False])) <= 1 + 1e-6


def test_a_table_of_many_rows_that_cancels_with_its_head() -> None:
    """Rows that occur once are not added to each other, but to the head's."""
    torch.manual_seed(0)
    left, right = torch.rand(1, 1, 256), torch.rand(1, 1, 600)
    values = -(left.mT * right)[0] * (1 + 1e-8 * torch.randn(256, 600))
    outer = Outer(left, right, torch.Size((256, 600)))
    rows = Rows(None, torch.arange(256), values, 1, torch.Size((256, 600)))
    assert is_worth_picking(rows, 0)
    assert contribution(total([outer, rows]), 0) <= 1 + 1e-6


@pytest.mark.parametrize("t", [3, 41])
def test_small_factors_that_cancel_meet_huge_ones(t: int) -> None:
    """Squares of the small ones vanish, but not what their sums are off by."""
    for seed in range(20):
        torch.manual_seed(seed)
        left, right = 1e-24 * torch.randn(1, t, 6), 1e16 * torch.randn(1, 1, 8).expand(1, t, 8)
        left[:, -1] = -left[:, :-1].sum(1) * (1 + 1e-5)
        assert contribution(Outer(left, right, torch.Size((6, 8))), 0) <= 1 + 1e-6


# ------------------------------------------------------------------ half precision

HALF = [torch.bfloat16, torch.float16]


def repeated(dtype: torch.dtype, **options: Any) -> tuple[persample.Tape, Tensor]:
    """One token, five thousand times; the first sample's exact gradient of it."""
    torch.manual_seed(0)
    model = nn.Embedding(3, 4).to(dtype)
    g = (torch.rand(2, 5000, 4) / 64).to(dtype)
    return taped(model, torch.ones(2, 5000, dtype=torch.long), g, **options), g.double().sum(1)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_rows_of_one_index_are_added_up_in_float32(dtype: torch.dtype, lean: bool) -> None:
    tape, exact = repeated(dtype, lean=lean)
    unit = float(torch.finfo(dtype).eps)
    rows = tape.grads()["weight"]
    assert rows.dtype == dtype
    torch.testing.assert_close(rows[:, 1].double(), exact, rtol=unit, atol=0)
    again = tape.grads(out={"weight": torch.full_like(rows, 7)})["weight"]
    torch.testing.assert_close(again, rows)
    torch.testing.assert_close(tape.gram().double(), exact @ exact.T, rtol=1e-5, atol=0)
    torch.testing.assert_close(tape.norms().double(), exact.norm(dim=1), rtol=1e-5, atol=0)
    if not lean:
        torch.testing.assert_close(tape.cross(tape).double(), exact @ exact.T, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", HALF)
def test_uses_are_added_up_in_float32(dtype: torch.dtype) -> None:
    parts = [torch.full((1, 3), 256.0, dtype=dtype), *[torch.ones(1, 3, dtype=dtype)] * 64]
    form = total([Dense(part) for part in parts])
    assert float(sq_norms(form)) == pytest.approx(3 * 320.0**2, rel=1e-6)


def swallowing(length: int) -> tuple[Tensor, Tensor]:
    """In products with themselves, one large term swallows all that follow it.

    The second is the first with every other small number negative.
    """
    one = torch.full((length,), 2.0**-12 * (1 - 2.0**-12))
    one[0] = 1
    other = one.clone()
    other[2::2] *= -1
    return one, other


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize(
    ("t", "alike", "a", "b"), [(32, 17, 192, 192), (32, 17, 100, 100), (64, 37, 512, 300)]
)
def test_products_that_swallow_what_is_left(t: int, alike: int, a: int, b: int, lean: bool) -> None:
    """Two groups of positions nearly cancel, and what is swallowed is most of their difference."""
    (x, y), (g, h) = swallowing(a), swallowing(b)
    inputs = torch.stack([x] * alike + [y] * (t - alike)).unsqueeze(0)
    seeds = torch.stack([g] * alike + [-h] * (t - alike)).unsqueeze(0)
    exact = float((seeds[0].double().T @ inputs[0].double()).norm())
    model, bound = nn.Linear(a, b, bias=False), exact / 2
    with persample.record(model, lean=lean) as tape:
        tape.backward((model(inputs) * seeds).sum((1, 2)))
    clipped = tape.clipped_sum(bound)["weight"]
    assert float(clipped.double().norm()) <= bound * (1 + 1e-6)


def going_astray(count: int, scale: float) -> Tensor:
    """Numbers whose sum, one after the other, is rounded down; times ``scale``, it is rounded up.

    They are chosen one by one, as those that widen the gap most.
    """
    fractions = torch.tensor([0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.45, 0.49], dtype=torch.float64)
    found: list[float] = []
    low = high = torch.zeros((), dtype=torch.float32)
    usual = 1 / (0.7 * count)
    while len(found) < count:
        unit = 2.0 ** (math.floor(math.log2(float(low))) - 23) if low > 0 else 1.0
        some = (math.floor(usual / unit) + fractions) * unit if unit <= usual else None
        if low >= 1:
            some = fractions.new_full((1,), 2.0**-24 * (1 - 2.0**-19))
        elif some is None:
            some = fractions.new_full((1,), usual)
        tries = some.float().double()
        down, up = (low.double() + tries).float(), (high.double() + scale * tries).float()
        lost = low.double() + tries - down.double()
        won = (up.double() - high.double() - scale * tries) / scale
        best = int((lost + won).argmax())
        found.append(float(tries[best]))
        low, high = down[best], up[best]
    return torch.tensor(found, dtype=torch.float64).float()


@pytest.mark.parametrize("t", [2000, 5000])
def test_rows_that_are_rounded_down_and_their_sum_up(t: int) -> None:
    scale = 0.5 * (1 + 2.0**-17)
    x = going_astray(t, scale).view(1, t, 1).expand(1, t, 3).contiguous()
    model = nn.Linear(3, 3, bias=False)

    def tape() -> persample.Tape:
        with persample.record(model, lean=True) as found:
            found.backward(model(x).sum((1, 2)))
        return found

    seen: list[Tensor] = []

    def rule(norms: Tensor) -> Tensor:
        seen.append(norms)
        return 1 / norms

    tape().clipped_sum(1.0, rule=rule)
    bound = float(seen[0]) * scale
    clipped = tape().clipped_sum(bound)["weight"]
    assert float(clipped.double().norm()) <= bound * (1 + 1e-6)
