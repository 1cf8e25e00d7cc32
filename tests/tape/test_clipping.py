"""The edge-case table of ``clipped_sum``, and samples made to break its bound."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.forms import Outer
from persample.forms.fast.written_rows import kept_rows

from ..models import Fn, par

C = 1.0
T, I, O = 12, 6, 5  # noqa: E741


def positions(kind: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One sample: inputs (t, i) and the output gradient (t, o) its linear loss will have."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    x = torch.randn(T, I, generator=generator, dtype=torch.float64)
    g = torch.randn(T, O, generator=generator, dtype=torch.float64)
    if kind == "cancelling":
        x[T // 2 :], g[T // 2 :] = x[: T // 2], -g[: T // 2]
        g[0] *= 1 + 2e-3
    elif kind == "cancelling large":
        x[T // 2 :], g[T // 2 :] = x[: T // 2], -g[: T // 2]
        x, g = x * 100, g * 100
        g[0] += 0.25
    elif kind == "cancelling exactly":
        x[T // 2 :], g[T // 2 :] = x[: T // 2], -g[: T // 2]
    elif kind == "large":
        x = x * (100 if dtype == torch.float16 else 1e6)
    elif kind == "overflowing":
        x = x * (6e4 if dtype == torch.float16 else 1e30)
        g = g * (1 if dtype == torch.float16 else 1e30)
    elif kind == "denormal":
        x = x * (6e-8 if dtype == torch.float16 else 1e-40)
    elif kind == "nan":
        x[2, 1] = float("nan")
    elif kind == "inf":
        x[2, 1] = float("inf")
    elif kind == "zeros":
        x = x * 0
    elif kind == "one large among small":
        x[0] *= 1e4
    return x.to(dtype), g.to(dtype)


def test_a_rule_that_writes_to_its_norms() -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    with persample.record(model) as tape:
        tape.backward(1e3 * model(torch.randn(1, 6)).square().sum(1))

    def ones(norms: Tensor) -> Tensor:
        return norms.fill_(1.0)

    found = torch.cat([g.flatten().double() for g in tape.clipped_sum(C, rule=ones).values()])
    assert float(found.norm()) <= C * (1 + 1e-6)


def test_a_rule_that_fails_says_how() -> None:
    model = nn.Linear(6, 5)
    with persample.record(model) as tape:
        tape.backward(model(torch.randn(2, 6)).square().sum(1))
    with pytest.raises(TypeError, match="unsupported operand"):
        tape.clipped_sum(C, rule=lambda norms, max_norm: norms + None)  # type: ignore[operator]


KINDS = [
    "ordinary", "cancelling", "cancelling large", "cancelling exactly", "large", "overflowing",
    "denormal", "nan", "inf", "zeros", "one large among small",
]  # fmt: skip
NOT_FINITE = {"nan", "inf", "overflowing"}


class Weighted(nn.Module):
    """Losses Σₜ ⟨gₜ, layer(x)ₜ⟩: the output gradient is given."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer: nn.Module = {
            "linear": lambda: nn.Linear(I, O),
            "conv": lambda: nn.Conv1d(I, O, 3, padding=1),
            "scale": lambda: Fn(lambda s, x: (x * s.w)[..., :O], w=par(I)),
            "twice": lambda: Fn(lambda s, x: s.l(x) + F.linear(x, s.l.weight), l=nn.Linear(I, O)),
        }[kind]().to(dtype)
        self.kind = kind

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        out = self.layer(x.mT).mT if self.kind == "conv" else self.layer(x)
        return (out * g).sum((1, 2))


def contribution(layer: str, kind: str, dtype: torch.dtype, lean: bool = False) -> Tensor:
    """What one sample adds to the clipped sum, as one float64 vector."""
    x, g = positions(kind, dtype)
    model = Weighted(layer, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", persample.NonFiniteWarning)
        with persample.record(model, lean=lean) as tape:
            tape.backward(model(x[None], g[None]))
        total = tape.clipped_sum(C)
    for value in total.values():
        assert value.dtype == torch.promote_types(dtype, torch.float32)
    return torch.cat([v.double().flatten() for v in total.values()])


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layer", ["linear", "conv", "scale", "twice"])
def test_no_sample_exceeds_the_bound(layer: str, kind: str, dtype: torch.dtype, lean: bool) -> None:
    found = contribution(layer, kind, dtype, lean)
    assert bool(torch.isfinite(found).all())
    assert float(found.norm()) <= C * (1 + 1e-6)


@pytest.mark.parametrize("layer", ["linear", "conv", "twice"])
def test_the_bound_is_tight_where_nothing_cancels(layer: str) -> None:
    assert float(contribution(layer, "ordinary", torch.float32).norm()) >= C * (1 - 1e-4)


@pytest.mark.parametrize("kind", sorted(NOT_FINITE))
def test_a_sample_that_is_not_finite_is_reported_and_harms_nobody(kind: str) -> None:
    good, bad = positions("ordinary", torch.float32), positions(kind, torch.float32)
    model = Weighted("linear", torch.float32)
    x, g = torch.stack([good[0], bad[0], good[0]]), torch.stack([good[1], bad[1], good[1]])
    with persample.record(model) as tape:
        tape.backward(model(x, g))
    assert tape.nonfinite().tolist() == [1]
    with pytest.warns(persample.NonFiniteWarning, match="1"):
        total = tape.clipped_sum(C)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tape.clipped_sum(C)  # once
    with persample.record(model) as tape:
        tape.backward(model(x[[0, 2]], g[[0, 2]]))
    for name, value in tape.clipped_sum(C).items():
        assert torch.allclose(total[name], value, atol=1e-6)


def tape_of(n: int = 3) -> persample.Tape:
    model = nn.Linear(4, 2)
    with persample.record(model, n=n) as tape:
        tape.backward(model(torch.randn(n, 4)).square().sum(1))
    return tape


def test_zero_and_empty() -> None:
    assert all(bool((v == 0).all()) for v in tape_of().clipped_sum(0.0).values())
    empty = tape_of(0).clipped_sum(1.0)
    assert {k: tuple(v.shape) for k, v in empty.items()} == {"weight": (2, 4), "bias": (2,)}
    assert all(bool((v == 0).all()) for v in empty.values())


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_bad_bounds_are_refused_and_the_tape_stays_usable(value: float) -> None:
    tape = tape_of()
    with pytest.raises(persample.UsageError, match="max_norm"):
        tape.clipped_sum(value)
    tape.clipped_sum(1.0)


def test_rules() -> None:
    tape = tape_of(5)
    rows = tape.grads()
    flat = torch.cat([g.flatten(1) for g in rows.values()], 1)
    norms = flat.norm(dim=1)

    def added(c: Tensor, name: str) -> Tensor:
        return torch.tensordot(c, rows[name], 1)

    found = tape.clipped_sum(0.5, rule=persample.automatic)
    for name in rows:
        assert torch.allclose(found[name], added(0.5 / (norms + 0.01), name), atol=1e-4)
    found = tape.clipped_sum(0.5, rule=persample.per_layer())
    for name in rows:
        c = (0.5 / 2**0.5 / rows[name].flatten(1).norm(dim=1)).clamp(max=1)
        assert torch.allclose(found[name], added(c, name), atol=1e-4)
    found = tape.clipped_sum(0.5, rule=persample.per_group([["weight"], ["bias"]]))
    assert torch.allclose(
        found["weight"], tape.clipped_sum(0.5, rule=persample.per_layer())["weight"]
    )
    greedy = tape.clipped_sum(0.5, rule=lambda norms: torch.full_like(norms, 100.0))
    for name, value in greedy.items():  # a rule cannot break the bound
        assert torch.allclose(value, added(0.5 / norms, name), atol=1e-4)


@pytest.mark.parametrize(
    ("rule", "phrase"),
    [
        (lambda norms: norms[:1], "coefficients"),
        (lambda norms: -norms, "negative"),
        (lambda norms: norms * float("nan"), "non-finite"),
        (persample.per_group([["weight"]]), "every recorded parameter"),
    ],
)
def test_bad_rules_are_refused(rule: Any, phrase: str) -> None:
    with pytest.raises(persample.UsageError, match=phrase):
        tape_of().clipped_sum(1.0, rule=rule)


def test_bad_arguments_of_other_questions() -> None:
    tape = tape_of()
    for c in (torch.ones(2), torch.tensor([1.0, float("nan"), 0.0]), [1, 1, 1]):
        with pytest.raises(persample.UsageError, match="coefficients"):
            tape.weighted_sum(c)  # type: ignore[arg-type]
    with pytest.raises(persample.UsageError, match="names"):
        tape.dots({"weight": torch.zeros(2, 4)})
    with pytest.raises(persample.UsageError, match="direction"):
        tape.dots({"weight": torch.zeros(4, 2), "bias": torch.zeros(2)})
    with pytest.raises(persample.UsageError, match="different models"):
        other = nn.Linear(3, 2)
        with persample.record(other) as second:
            second.backward(other(torch.randn(3, 3)).sum(1))
        tape.cross(second)
    with pytest.raises(persample.UsageError, match="dim"):
        tape.project(0, seed=1)
    with pytest.raises(persample.UsageError, match="out"):
        tape.grads(out={})
    tape.norms()


def cancelling_images() -> tuple[nn.Module, Tensor, Tensor]:
    """Nearly constant images, and output gradients that cancel over their positions."""
    images = 1e4 + 1e-3 * torch.randn(1, 16, 8, 8)
    half = torch.randn(1, 32, 3, 6)
    return nn.Conv2d(16, 32, 3, bias=False), images, torch.cat([half, -half], 2)


def cancelling_tokens() -> tuple[nn.Module, Tensor, Tensor]:
    """Every token occurs often, with gradients that cancel."""
    tokens, half = torch.randint(3, (1, 32)), 1e5 * torch.randn(1, 32, 8)
    other = 1e-3 * torch.randn(1, 32, 8) - half
    order = torch.randperm(64)
    return (
        nn.Embedding(300, 8),
        tokens.repeat(1, 2)[:, order],
        torch.cat([half, other], 1)[:, order],
    )


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("make", [cancelling_images, cancelling_tokens])
def test_rounding_of_the_sum_counts(make: Any, lean: bool) -> None:
    for seed in range(8):
        torch.manual_seed(seed)
        layer, x, g = make()
        with persample.record(layer, lean=lean) as tape:
            tape.backward((layer(x) * g).flatten(1).sum(1))
        bound = 0.3 * float(tape.norms())
        found = tape.clipped_sum(bound)["weight"].double().norm()
        assert float(found) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e5])
@pytest.mark.parametrize("lean", [False, True])
def test_a_tied_table_that_cancels_keeps_the_bound(scale: float, lean: bool) -> None:
    def f(s: Any, x: Tensor) -> Tensor:
        return F.linear(s.e(x).tanh() * scale, s.e.weight)

    for seed in range(4):
        torch.manual_seed(seed)
        model = Fn(f, e=torch.nn.Embedding(20, 8))
        x = torch.randint(3, (4, 1)).expand(4, 6)
        weights = torch.randn(4, 6, 20)
        weights = weights - weights.mean(1, keepdim=True)  # positions cancel
        with persample.record(model, lean=lean) as tape:
            tape.backward((model(x) * weights).sum((1, 2)), retain_graph=True)
        for i in range(4):
            alone = torch.arange(4) == i
            found = tape.clipped_sum(1e-3, rule=lambda norms, c: torch.where(alone, c / norms, 0))
            assert float(found["e.weight"].double().norm()) <= 1e-3 * (1 + 1e-6)


def many_positions(bad: int | None = None, **options: Any) -> persample.Tape:
    """Sizes for which rows serve norms and a sum for less than products of positions."""
    torch.manual_seed(0)
    model, x = nn.Linear(160, 160), torch.randn(4, 64, 160)
    if bad is not None:
        x[bad, 0, 0] = float("nan")
    with persample.record(model, **options) as tape:
        tape.backward(model(x).square().mean((1, 2)))
    return tape


def test_rows_that_are_kept_for_a_sum_change_no_answer() -> None:
    tape, small = many_positions(), many_positions(budget=1 << 16)
    forms = tape._forms.forms(tape.names)
    assert list(kept_rows(forms, lambda wanted: wanted)) == ["weight"]
    few = Outer(torch.randn(4, 1, 8, 300), torch.randn(4, 1, 8, 300), torch.Size((300, 300)))
    assert not kept_rows({"weight": few}, lambda wanted: wanted)
    bound = float(tape.norms().mean())
    scale = (bound / tape.norms()).clamp(max=1)
    expected = {k: torch.einsum("n,n...->...", scale, g) for k, g in tape.grads().items()}
    for found in (tape.clipped_sum(bound), tape.clipped_sum(bound), small.clipped_sum(bound)):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert tape._forms.forms(["weight"])["weight"] is forms["weight"]


def test_rows_that_are_kept_leave_out_a_sample_that_is_not_finite() -> None:
    tape = many_positions(bad=1)
    with pytest.warns(persample.NonFiniteWarning):
        found = tape.clipped_sum(1e6)
    others = {k: g[[0, 2, 3]].sum(0) for k, g in tape.grads().items()}
    for name, value in others.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)


class TiedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x.new_tensor([1, 4, 4], dtype=torch.long).expand(x.shape[0], 3))
        return torch.cat([(1e-6 * rows).flatten(1), F.linear(x, self.table.weight).flatten(1)], 1)


VANISHING: dict[str, tuple[Any, tuple[int, ...]]] = {
    "one position": (lambda: nn.Linear(4, 3), (4,)),
    "one position of many blocks": (
        lambda: Fn(lambda m, x: torch.einsum("nki,kio->nko", x, m.w), w=par(3, 4, 4)), (3, 4)),
    "products of positions": (lambda: nn.Linear(64, 64, bias=False), (4, 64)),
    "products of patches": (lambda: nn.Conv2d(16, 16, 3, bias=False), (16, 4, 4)),
    "rows": (lambda: nn.Linear(2, 2, bias=False), (40, 2)),
    "a tied head": (TiedHead, (3, 8)),
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"lean": True}, {"budget": 1}], ids=str)
@pytest.mark.parametrize("sizes", [(1e18, 2e-23), (2e-23, 1e18), (1e15, 1e-22)], ids=str)
@pytest.mark.parametrize("name", VANISHING)
def test_squares_that_vanish_meet_huge_ones(
    name: str, sizes: tuple[float, float], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    make, shape = VANISHING[name]
    net, bound = make(), 1e-9
    x = torch.rand(2, *shape) * sizes[0]
    with persample.record(net, **options) as tape:  # the second sample has no gradient
        losses = (net(x).flatten(1) * sizes[1]).sum(1)
        tape.backward(losses * torch.tensor([1.0, 0.0]))
    found = sum(float(v.double().square().sum()) for v in tape.clipped_sum(bound).values())
    assert 0 < found**0.5 <= bound * (1 + 1e-6)


@pytest.mark.parametrize("ask", ["clipped_sum", "set_clipped_grad"])
def test_warnings_show_the_line_of_the_caller(ask: str) -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    x[1] = torch.nan
    with persample.record(model) as tape:
        tape.backward(model(x).square().sum(1))
    with pytest.warns(persample.NonFiniteWarning) as seen:
        getattr(tape, ask)(1.0)
    assert [warning.filename for warning in seen] == [__file__]
