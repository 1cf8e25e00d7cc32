"""More samples made to break the bound of ``clipped_sum``, each by a way of rounding of its own."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.forms import Geometry, Norms, Patches, within

from ..forms.lengths import exact_sq_norms, sq_bounds, sq_norms
from ..models import Fn, par

OPTIONS: list[dict[str, Any]] = [{}, {"lean": True}, {"budget": 1}]


def normalised(norms: Tensor, max_norm: float) -> Tensor:
    return max_norm / norms


def taped(model: nn.Module, x: Tensor, g: Tensor, **options: Any) -> persample.Tape:
    """Losses ⟨gᵢ, model(x)ᵢ⟩: the output gradient is given."""
    with persample.record(model, **options) as tape:
        tape.backward((model(x) * g).flatten(1).sum(1), retain_graph=True)
    return tape


def size(sums: dict[str, Tensor]) -> float:
    exact = {k: torch.view_as_real(v) if v.is_complex() else v for k, v in sums.items()}
    return float(torch.cat([v.double().flatten() for v in exact.values()]).norm())


def bound_of(tape: persample.Tape) -> Tensor:
    """The certified norms that a rule is given."""
    seen: list[Tensor] = []

    def keep(norms: Tensor, max_norm: float) -> Tensor:
        seen.append(norms.clone())
        return max_norm / norms

    tape.clipped_sum(1.0, rule=keep)
    return seen[0].double()


def dominated(count: int, lead: int = 8, small: float = 2.4e-4) -> Tensor:
    """A few ones, then numbers whose squares a sum of squares does not notice one by one."""
    values = torch.full((count,), small)
    values[:lead] = 1
    return values


# ------------------------------------------------------------------ small ones beside a large one


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_large_element_swallows_no_small_ones(options: dict[str, Any]) -> None:
    model = Fn(lambda m, x: x + m.b, b=par(4096))
    tape = taped(model, torch.zeros(1, 4096), dominated(4096)[None], **options)
    assert size(tape.clipped_sum(1.0)) <= 1 + 1e-6


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_large_parameter_swallows_no_small_ones(options: dict[str, Any]) -> None:
    scales = nn.ParameterList([par(3, 3) for _ in range(300)])
    model = Fn(lambda m, x: torch.stack([x @ w for w in m.w], 1), w=scales)
    g = torch.zeros(1, 300, 3, 3)
    g[..., 0, 0] = 2.4e-4
    g[:, 0, 0, 0] = 1
    tape = taped(model, torch.eye(3)[None], g, **options)
    assert size(tape.clipped_sum(1.0)) <= 1 + 1e-6


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_large_token_swallows_no_small_ones(options: dict[str, Any], apart: bool) -> None:
    count = 3000
    tokens = torch.arange(count) if apart else torch.zeros(count, dtype=torch.long)
    g = torch.full((1, count, 4), 2.4e-4 if apart else 5e-8)
    g[:, 0] = 1
    tape = taped(nn.Embedding(4 * count, 4), tokens[None], g, **options)
    exact = g.double().norm() if apart else g.double().sum(1).norm()
    assert float(bound_of(tape)) * (1 + 1e-6) >= float(exact)


# ------------------------------------------------------------------ squares too small for float32

TINY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "bias": (lambda: Fn(lambda m, x: x + m.b, b=par(5)), (5,)),
    "linear": (lambda: nn.Linear(5, 5), (5,)),
    "positions": (lambda: nn.Linear(5, 5), (7, 5)),
    "patches": (lambda: nn.Conv2d(2, 3, 2), (2, 5, 5)),
    "derived": (lambda: Fn(lambda m, x: F.linear(x, m.w.tanh()), w=par(5, 5)), (7, 5)),
    "generic": (lambda: Fn(lambda m, x: torch.atan2(x, m.w), w=par(5)), (7, 5)),
}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scale", [1e-19, 1e-22, 1e-26, 1e-36, 1e-42, 0.0])
@pytest.mark.parametrize("name", TINY)
def test_tiny_gradients_that_a_rule_blows_up(
    name: str, scale: float, options: dict[str, Any], grouped: bool
) -> None:
    torch.manual_seed(0)
    make, shape = TINY[name]
    model, x = make(), torch.randn(2, *shape)
    with torch.no_grad():
        out = model(x)
    g = torch.randn_like(out) * scale
    g[1] = 0
    tape = taped(model, x, g, **options)
    groups = [[name] for name in tape.names]
    rule = persample.per_group(groups, within=normalised) if grouped else normalised
    for bound in (1.0, 1e6):
        found = size(tape.clipped_sum(bound, rule=rule))
        assert found <= bound * (1 + 1e-6)  # false for NaN, too


# ------------------------------------------------------------------ cancellation


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("gap", [1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_double_precision_cancels_too(layer: str, gap: float, options: dict[str, Any]) -> None:
    for seed in range(4):
        torch.manual_seed(seed)
        if layer == "linear":  # few positions: norms come from products of positions
            model: nn.Module = nn.Linear(64, 64, bias=False).double()
            x, g = torch.randn(2, 1, 1, 64).double().unbind(0)
            x, g = x.expand(1, 2, 64), torch.cat([g, -g * (1 + gap * torch.randn_like(g))], 1)
        else:
            model = nn.Conv2d(16, 32, 2, bias=False).double()
            x = torch.randn(1, 16, 1, 1).double().expand(1, 16, 2, 3)
            half = torch.randn(1, 32, 1, 1).double()
            g = torch.cat([half, -half * (1 + gap * torch.randn_like(half))], 3)
        tape = taped(model, x, g, **options)
        c = 0.3 * gap
        assert size(tape.clipped_sum(c, rule=normalised)) <= c * (1 + 1e-6)
        kept = taped(model, x, g)
        alone = kept._forms.forms(["weight"])["weight"]
        exact = float(exact_sq_norms(alone, torch.tensor([0])).sqrt())
        assert float(tape.norms()) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("use", ["bias", "derived", "generic"])
def test_uses_that_cancel_each_other(use: str, options: dict[str, Any]) -> None:
    def bias(m: Any, x: Tensor) -> Tensor:
        return torch.stack([x + m.w, 2 * x + m.w], 1)

    def derived(m: Any, x: Tensor) -> Tensor:
        w = m.w.tanh() * 1.5
        return torch.stack([x * w, x + w], 1)

    def generic(m: Any, x: Tensor) -> Tensor:
        return torch.stack([torch.logaddexp(x, m.w), torch.logaddexp(x * 1.0, m.w)], 1)

    for seed in range(6):
        torch.manual_seed(seed)
        model = Fn({"bias": bias, "derived": derived, "generic": generic}[use], w=par(40))
        half = torch.randn(3, 40)
        other = -half * (1 + 1e-6 * torch.randn(3, 40))
        tape = taped(model, torch.ones(3, 40), torch.stack([half, other], 1), **options)
        for i in range(3):
            alone = torch.arange(3) == i
            found = tape.clipped_sum(
                1.0, rule=lambda norms, c, alone=alone: torch.where(alone, c / norms, 0)
            )
            assert size(found) <= 1 + 1e-6


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("layer", ["linear", "conv"])
def test_complex_positions_that_cancel(layer: str, options: dict[str, Any]) -> None:
    for seed in range(6):
        torch.manual_seed(seed)
        w = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64))
        if layer == "linear":
            model = Fn(lambda m, x: x @ m.w.T, w=w)
            x, g = torch.randn(1, 40, 6, dtype=torch.complex64), torch.randn(1, 40, 5)
        else:
            model = Fn(lambda m, x: F.conv1d(x, m.w), w=nn.Parameter(w.detach().unsqueeze(2)))
            x, g = torch.randn(1, 6, 40, dtype=torch.complex64), torch.randn(1, 5, 40)
        axis = 1 if layer == "linear" else 2
        half = x.narrow(axis, 0, 20)
        x = torch.cat([half, half], axis)
        half = g.narrow(axis, 0, 20)
        g = torch.cat([half, -half * (1 + 1e-5)], axis)
        with persample.record(model, **options) as tape:
            out = model(x)
            tape.backward(((out.real + 2 * out.imag) * g).sum((1, 2)))
        c = 1e-6
        assert size(tape.clipped_sum(c)) <= c * (1 + 1e-6)


# ------------------------------------------------------------------ what is reported


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_who_contributes_nothing_is_reported(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(4, 8, 3)
    x, g = torch.randn(4, 4, 6, 6), torch.randn(4, 8, 4, 4)
    x[1] *= 3e17  # finite squares, but not those of all that may have cancelled
    x[2, 0, 0, 0] = float("inf")
    x[3] *= 1e12
    tape = taped(model, x, g, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", persample.NonFiniteWarning)
        for i in range(4):
            alone = torch.arange(4) == i
            found = tape.clipped_sum(
                1.0, rule=lambda norms, c, alone=alone: torch.where(alone, c / norms, 0)
            )
            assert (size(found) == 0) == (i in tape.nonfinite().tolist())
            assert size(found) <= 1 + 1e-6
    assert {2} <= set(tape.nonfinite().tolist()) <= {1, 2}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_positions_that_are_alike_are_rounded_alike(options: dict[str, Any]) -> None:
    a, half = 256, 63
    for seed in (25, 27, 49, 51):  # two positions, often repeated, that differ by some hundredths
        torch.manual_seed(seed)
        left, right = (torch.full((1, half, a), float(torch.rand(())) + 0.5) for _ in range(2))
        other = -left * (1.016 + 0.0004 * (seed % 30))
        model = nn.Linear(a, a, bias=False)
        x, g = torch.cat([right, right], 1), torch.cat([left, other], 1)
        tape = taped(model, x, g, **options)
        assert size(tape.clipped_sum(1.0)) <= 1 + 1e-6


@pytest.mark.parametrize("rule", [persample.flat, persample.automatic, normalised])
def test_a_coefficient_that_is_no_normal_number(rule: Any) -> None:
    """C / norm is 9.8e-44, which float32 rounds by percents: the sample is left out."""
    model = nn.Linear(1, 1, bias=False)
    tape = taped(model, torch.full((1, 1), 1.02e9), torch.full((1, 1), 1e9))
    assert size(tape.clipped_sum(1e-25, rule=rule)) <= 1e-25 * (1 + 1e-6)
    assert len(tape.nonfinite()) == 0


def channels(groups: int, images: int, *, cancelling: bool = False) -> tuple[Patches, Tensor]:
    """A convolution's form, and the exact squared norms; one channel's positions may cancel."""
    torch.manual_seed(0)
    n, c, side = 4, 16, 24
    conv = nn.Conv2d(c, c, 3, groups=groups, bias=False)
    x = torch.randn(n * images, c, side + 2, side + 2)
    grad = torch.randn(n * images, c, side, side)
    if cancelling:
        x[:, 0], grad[:, 0] = 1e4, 1e2
        grad[:, 0, ::2] *= -1
    geometry = Geometry((1, 1), (0, 0), (1, 1), False, (0, 0), groups)
    form = Patches(x, grad, conv.weight.detach(), geometry, images)
    rows = Patches(x.double(), grad.double(), conv.weight.detach(), geometry, images).dense()
    return form, rows.flatten(1).square().sum(1)


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("cancelling", [False, True])
def test_groups_of_channels_have_sizes_of_their_own(
    groups: int, images: int, cancelling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a depthwise convolution, nothing is in doubt unless a channel's own positions cancel."""
    form, exact = channels(groups, images, cancelling=cancelling)
    asked: list[Tensor] = []
    recomputed = Norms.recomputed

    def noted(norms: Norms, which: Tensor) -> Norms:
        asked.append(which)
        return recomputed(norms, which)

    monkeypatch.setattr(Norms, "recomputed", noted)
    found, bound = sq_norms(form), sq_bounds(form)
    assert bool(asked) == cancelling
    torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=0)
    assert bool((bound.double() >= exact).all())
    if not cancelling:  # else what a sum may be off by counts
        assert bool((bound.double() <= 1.01 * exact).all())


@pytest.mark.parametrize("images", [1, 2])
def test_doubtful_images_are_taken_again_together(images: int) -> None:
    form, exact = channels(16, images)
    which = torch.tensor([3, 0, 2])
    torch.testing.assert_close(exact_sq_norms(form, which), exact[which])
    with within(1):
        torch.testing.assert_close(exact_sq_norms(form, which), exact[which])
