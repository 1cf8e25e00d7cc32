"""Parameters times constants: masks, pruning, learning-rate scales, and views of such weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

import persample
from persample.forms import Dense, Form, Outer, Part, Patches, Pullback, Rows, Scaled, Total, total
from persample.testing import oracle, relative_error

from ..models import Fn, par
from ..tape.test_clipping_bound import normalised, size, taped
from .lengths import sq_bounds, sq_norms
from .test_no_wasted_work import Written

OPTIONS: list[dict[str, Any]] = [{}, {"lean": True}, {"budget": 1}]
Case = tuple[nn.Module, Tensor]


def mask(*shape: int) -> Tensor:
    kept = (torch.rand(*shape) < 0.6).float()
    kept.view(-1)[0], kept.view(-1)[-1] = 0, 1
    return kept


def linear(weight: Callable[[Any], Tensor], *inner: int, **members: Any) -> Case:
    members = {"w": par(4, 6), "m": mask(4, 6), **members}
    return Fn(lambda m, x: F.linear(x, weight(m)), **members), torch.randn(3, *inner, 6)


def pruned(module: nn.Module, x: Tensor) -> Case:
    prune.random_unstructured(module, "weight", amount=0.4)
    return module, x


def tied(m: Any, x: Tensor) -> Tensor:
    table = m.w * 0.3
    return F.linear(F.embedding(x, table), m.w * 0.3)


def grouped() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.einsum("nki,kji->nkj", x, m.w * m.m)

    return Fn(forward, w=par(2, 5, 4), m=mask(2, 5, 4)), torch.randn(3, 2, 4)


def embedded(weight: Callable[[Any], Tensor]) -> Case:
    model = Fn(lambda m, x: F.embedding(x, weight(m)), w=par(9, 4), m=mask(9, 4))
    return model, torch.randint(9, (3, 5))


def one_by_one() -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.stack([F.linear(row, m.w * m.m) for row in x])

    return Fn(forward, w=par(4, 6), m=mask(4, 6)), torch.randn(3, 2, 6)


def twice(other: Callable[[Any], Tensor]) -> Case:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, m.w * m.m).tanh(), other(m))

    return Fn(forward, w=par(6, 6), m=mask(6, 6)), torch.randn(3, 6)


CASES: dict[str, tuple[Callable[[], Case], type[Form]]] = {
    "one position": (lambda: linear(lambda m: m.w * m.m), Scaled),
    "mask first": (lambda: linear(lambda m: m.m * m.w), Scaled),
    "positions": (lambda: linear(lambda m: m.w * m.m, 5), Scaled),
    "two axes of positions": (lambda: linear(lambda m: m.w * m.m, 2, 5), Scaled),
    "bool": (lambda: linear(lambda m: m.w * (m.m > 0)), Scaled),
    "integers": (lambda: linear(lambda m: m.w * (3 * m.m).long()), Scaled),
    "a row of numbers": (lambda: linear(lambda m: m.w * m.m[0]), Scaled),
    "a column of numbers": (lambda: linear(lambda m: m.w * m.m[:, :1]), Scaled),
    "expanded": (lambda: linear(lambda m: m.w * m.m[:, :1].expand(4, 6)), Scaled),
    "divided": (lambda: linear(lambda m: m.w / (m.m + 0.5)), Scaled),
    "a number": (lambda: linear(lambda m: 0.7 * m.w), Scaled),
    "a number, positions": (lambda: linear(lambda m: m.w * -0.7, 5), Scaled),
    "one element": (lambda: linear(lambda m: m.w * m.m[:1, :1]), Scaled),
    "a number divides": (lambda: linear(lambda m: m.w / 3), Scaled),
    "zero": (lambda: linear(lambda m: m.w * 0), Scaled),
    "subtracted from a tensor": (lambda: linear(lambda m: torch.rsub(m.w, m.m, alpha=2)), Scaled),
    "tensor taken from a tensor": (lambda: linear(lambda m: m.m - m.w), Scaled),
    "all ones": (lambda: linear(lambda m: m.w * torch.ones_like(m.m)), Outer),
    "all alike": (lambda: linear(lambda m: m.w * torch.full_like(m.m, 2)), Scaled),
    "negative": (lambda: linear(lambda m: -m.w * m.m), Scaled),
    "shifted": (lambda: linear(lambda m: 1 - (m.w + m.m) * m.m), Scaled),
    "shifted only": (lambda: linear(lambda m: 1 + m.w), Outer),
    "shifted with alpha": (lambda: linear(lambda m: torch.add(m.m, m.w, alpha=3)), Scaled),
    "a chain": (lambda: linear(lambda m: (m.w * 0.5 * m.m / 3).clone()), Scaled),
    "written to": (lambda: linear(lambda m: m.w.clone().mul_(m.m).mul_(2)), Scaled),
    "transposed": (lambda: linear(lambda m: (m.w * m.m).t(), w=par(6, 4), m=mask(6, 4)), Part),
    "transposed, -1": (
        lambda: linear(lambda m: (m.w * m.m).transpose(-1, 0) * 2, w=par(6, 4), m=mask(6, 4)),
        Part,
    ),
    "transposed first": (lambda: linear(lambda m: m.w.mT * m.m, 5, w=par(6, 4)), Part),
    "permuted": (
        lambda: linear(
            lambda m: (m.w * m.m).permute(2, 0, 1).reshape(4, 6), w=par(2, 3, 4), m=mask(2, 3, 4)
        ),
        Part,
    ),
    "viewed": (lambda: linear(lambda m: (m.w.view(-1) * m.m.view(-1)).view(4, 6)), Scaled),
    "viewed as another": (
        lambda: linear(lambda m: (m.w[None] * m.m).view(4, 6), w=par(6, 4), m=mask(1, 6, 4)),
        Part,
    ),
    "blocks": (grouped, Scaled),
    "pruned": (lambda: pruned(nn.Linear(6, 4), torch.randn(3, 6)), Scaled),
    "pruned convolution": (
        lambda: pruned(nn.Conv2d(3, 4, 3, padding=1), torch.randn(3, 3, 7, 7)),
        Scaled,
    ),
    "pruned groups": (
        lambda: pruned(nn.Conv1d(4, 6, 3, groups=2), torch.randn(3, 4, 9)),
        Scaled,
    ),
    "scaled convolution": (
        lambda: (
            Fn(lambda m, x: F.conv2d(x, m.w * 0.2), w=par(4, 3, 2, 2)), torch.randn(3, 3, 4, 4)
        ),
        Scaled,
    ),
    "bias": (
        lambda: (Fn(lambda m, x: x + m.w * m.m, w=par(6), m=mask(6)), torch.randn(3, 5, 6)),
        Scaled,
    ),
    "generic": (
        lambda: (
            Fn(lambda m, x: torch.atan2(x, m.w * m.m + 1), w=par(6), m=mask(6)), torch.randn(3, 6)
        ),
        Scaled,
    ),
    "table": (lambda: embedded(lambda m: m.w * m.m), Rows),
    "scaled table": (lambda: embedded(lambda m: m.w * 3), Scaled),
    "tied table": (lambda: (Fn(tied, w=par(9, 4)), torch.randint(9, (3, 5))), Scaled),
    "one by one": (one_by_one, Scaled),
    "computed twice": (lambda: twice(lambda m: m.w * m.m), Scaled),
    "two masks": (lambda: twice(lambda m: m.w * (1 - m.m)), Total),
    "with and without": (lambda: twice(lambda m: m.w), Total),
    # what is none of it
    "broadcast parameter": (lambda: linear(lambda m: m.w * m.m, w=par(6)), Pullback),
    "divisor": (lambda: linear(lambda m: m.m / (m.w + 3)), Pullback),
    "squared": (lambda: linear(lambda m: m.w * m.w), Pullback),
    "used twice": (lambda: linear(lambda m: m.w * m.m + m.w), Pullback),
    "learned": (lambda: linear(lambda m: m.w * m.s, s=par(4, 1)), Pullback),
}  # fmt: skip


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).sin().flatten(1).sum(1)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def made(name: str, dtype: torch.dtype = torch.float64) -> Case:
    torch.manual_seed(0)
    model, x = CASES[name][0]()
    return model.to(dtype), x.to(dtype) if x.is_floating_point() else x


def recorded(model: nn.Module, x: Tensor, **options: Any) -> persample.Tape:
    with persample.record(model, **options) as tape:
        tape.backward(losses(model, x), retain_graph=True)
    return tape


def parameter(model: nn.Module) -> str:
    return "w" if hasattr(model, "w") else "weight_orig"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_question_is_exact(name: str, options: dict[str, Any]) -> None:
    model, x = made(name)
    tape, want = recorded(model, x, **options), oracle(model, losses, x)
    g = torch.cat([rows.flatten(1) for rows in want.values()], 1)
    n = g.shape[0]
    assert relative_error(tape.grads(), want) < 1e-10
    torch.testing.assert_close(tape.norms(), g.norm(dim=1))
    c = torch.arange(n, dtype=g.dtype)
    torch.testing.assert_close(flat(tape.weighted_sum(c)), c @ g)
    factors = (0.3 / g.norm(dim=1)).clamp(max=1)
    torch.testing.assert_close(flat(tape.clipped_sum(0.3)), factors @ g)
    torch.testing.assert_close(flat(tape.variance()), g.var(0))
    torch.testing.assert_close(flat(tape.second_moment()), g.square().mean(0))
    direction = {name: torch.randn_like(rows[0]) for name, rows in want.items()}
    torch.testing.assert_close(tape.dots(direction), g @ flat(direction))
    again = {name: Dense(rows) for name, rows in want.items()}
    sketched = sum(
        persample.forms.sums.project_parameter(name, form, 8, 0) for name, form in again.items()
    )
    torch.testing.assert_close(tape.project(8, seed=0), sketched)
    if "lean" not in options:
        torch.testing.assert_close(tape.gram(), g @ g.T)
        form = tape._forms.forms([parameter(model)])[parameter(model)]
        expected = Dense if name == "learned" and not options else CASES[name][1]  # written out
        assert type(form) is expected


@pytest.mark.parametrize("name", ["positions", "a number, positions", "pruned convolution"])
def test_positions_add_up(name: str) -> None:
    model, x = made(name)
    which = [parameter(model)]
    with persample.record(model, positions=True, params=which) as tape:
        tape.backward(losses(model, x))
    g = oracle(model, losses, x)[which[0]].flatten(1)
    torch.testing.assert_close(tape.positions().sum(1).to(g), g.square().sum(1))
    direction = {which[0]: torch.randn_like(model.get_parameter(which[0]))}
    found = tape.positions(direction=direction).sum(1)
    torch.testing.assert_close(found.to(g), g @ direction[which[0]].flatten())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["one position", "positions", "a number", "table", "scaled table"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    model, x = made(name, dtype)
    tape, want = recorded(model, x), oracle(model, losses, x)["w"].float()
    found = tape.grads()["w"]
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), want, rtol=3e-2, atol=3e-2)
    torch.testing.assert_close(tape.norms(), want.flatten(1).norm(dim=1), rtol=3e-2, atol=3e-2)


def test_autocast_rounds_the_weight_and_not_the_mask() -> None:
    model, x = made("positions", torch.float32)
    with persample.record(model) as tape, torch.autocast("cpu", torch.bfloat16):
        tape.backward(losses(model, x).float())
    want = oracle(model, losses, x)["w"]
    assert tape.grads()["w"].dtype == torch.float32
    torch.testing.assert_close(tape.grads()["w"], want, rtol=5e-2, atol=5e-2)
    assert bool((tape.grads()["w"][:, model.m == 0] == 0).all())


def test_complex_weights_go_through_the_graph() -> None:
    weight = nn.Parameter(torch.randn(4, 6, dtype=torch.complex128))
    factor = torch.randn(4, 6, dtype=torch.complex128)
    model = Fn(lambda m, x: (x.to(m.w.dtype) @ (m.w * m.m).T).abs(), w=weight, m=factor)
    x = torch.randn(3, 6, dtype=torch.float64)
    tape, want = recorded(model, x), oracle(model, losses, x)
    assert relative_error(tape.grads(), want) < 1e-10
    torch.testing.assert_close(tape.norms(), want["w"].flatten(1).abs().square().sum(1).sqrt())


def test_real_weights_times_complex_constants_go_through_the_graph() -> None:
    model = Fn(
        lambda m, x: (x.to(m.m.dtype) @ (m.w * m.m).T).abs(),
        w=par(4, 6), m=torch.randn(4, 6, dtype=torch.complex64),
    )  # fmt: skip
    x = torch.randn(3, 6)
    tape, want = recorded(model, x), oracle(model, losses, x)
    assert relative_error(tape.grads(), want) < 1e-5


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_frozen_factor_and_a_learned_one_that_nobody_asks_for(options: dict[str, Any]) -> None:
    for learns in (False, True):
        model, x = linear(lambda m: m.w * m.s, s=par(4, 6).requires_grad_(learns))
        tape = recorded(model, x, params=["w"], **options)
        want = oracle(model, losses, x)["w"]
        torch.testing.assert_close(tape.norms(), want.flatten(1).norm(dim=1))
        assert relative_error(tape.grads(), {"w": want}) < 1e-5


def test_a_factor_of_each_sample_is_data() -> None:
    model = Fn(lambda m, x: m.w * x, w=par(4, 6)).double()
    x = torch.randn(3, 4, 6, dtype=torch.float64)
    tape, want = recorded(model, x), oracle(model, losses, x)
    assert relative_error(tape.grads(), want) < 1e-10
    assert not isinstance(tape._forms.forms(["w"])["w"], Scaled)


def test_hooks_see_every_gradient() -> None:
    model, x = made("one position")
    model.w.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    try:
        tape = recorded(model, x)
    except persample.PersampleError:
        return
    assert relative_error(tape.grads(), oracle(model, losses, x)) < 1e-10


# ------------------------------------------------------------------ constants that change


@pytest.mark.parametrize("name", ["one position", "positions", "table"])
def test_constants_written_to_before_a_question_are_noticed(name: str) -> None:
    model, x = made(name)
    tape = recorded(model, x)
    model.m[0, 0] += 1
    with pytest.raises((persample.StaleError, RuntimeError)):
        tape.norms()


@pytest.mark.parametrize("name", ["one position", "positions", "table", "a row of numbers"])
def test_constants_written_to_between_questions_change_no_answer(name: str) -> None:
    model, x = made(name)
    tape, want = recorded(model, x), oracle(model, losses, x)["w"].flatten(1)
    tape.norms()
    model.m.data.mul_(3)  # no counter tells of it
    try:
        found = tape.weighted_sum(torch.ones(3))["w"]
    except persample.StaleError:
        return
    torch.testing.assert_close(found.flatten(), want.sum(0))


def test_two_versions_of_a_mask_are_two_masks() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        keep = m.m.clone()
        one = F.linear(x, m.w * keep)
        return one + F.linear(x.tanh(), m.w * keep.logical_not().double())

    model = Fn(forward, w=par(4, 6), m=mask(4, 6)).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    tape, want = recorded(model, x), oracle(model, losses, x)
    assert relative_error(tape.grads(), want) < 1e-10
    torch.testing.assert_close(tape.norms(), want["w"].flatten(1).norm(dim=1))


@pytest.mark.parametrize("again", [True, False])
def test_masks_that_nobody_keeps_are_not_taken_for_each_other(again: bool) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        for k in range(6):
            x = F.linear(x, m.w * (m.m + k)).tanh()
        return x

    torch.manual_seed(0)
    model = Fn(forward, w=par(6, 6), m=mask(6, 6)).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    with persample.record(model, lean=persample.Ahead(again=again, moments=True)) as tape:
        tape.backward(losses(model, x))
    want = oracle(model, losses, x)["w"]
    torch.testing.assert_close(tape.norms(), want.flatten(1).norm(dim=1))
    torch.testing.assert_close(tape.variance()["w"], want.var(0))


# ------------------------------------------------------------------ waste

QUESTIONS: dict[str, Callable[[persample.Tape], Any]] = {
    "norms": lambda tape: tape.norms(),
    "clipped_sum": lambda tape: tape.clipped_sum(0.5),
    "variance": lambda tape: tape.variance(),
    "weighted_sum": lambda tape: tape.weighted_sum(torch.ones(tape.n)),
    "dots": lambda tape: tape.dots({"w": torch.ones(60, 60)}),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("scale", [None, 0.5])
def test_no_rows_are_written(question: str, scale: float | None) -> None:
    n, width = 40, 60
    model = Fn(
        lambda m, x: F.linear(x, m.w * (m.m if scale is None else scale)),
        w=par(width, width), m=mask(width, width),
    )  # fmt: skip
    tape = recorded(model, torch.randn(n, width))
    assert isinstance(tape._forms.forms(["w"])["w"], Scaled)  # a number is none in that mode
    with Written() as written:
        QUESTIONS[question](tape)
    assert written.largest <= width * width
    assert written.elements <= 16 * width * (width + n)  # n · width² would be 144,000


def test_a_masked_table_has_only_the_rows_of_its_samples() -> None:
    model = Fn(lambda m, x: F.embedding(x, m.w * m.m), w=par(4000, 4), m=mask(4000, 4))
    tape = recorded(model, torch.randint(4000, (16, 3)))
    with Written() as written:
        tape.norms()
    assert written.largest <= 4 * 4000


def test_equal_masks_of_two_calls_are_merged() -> None:
    model, x = made("computed twice")
    kept = recorded(model, x)
    form = kept._forms.forms(["w"])["w"]
    assert isinstance(form, Scaled)
    assert isinstance(form.form, Outer)
    assert form.form.t == 2


# ------------------------------------------------------------------ bounds in float32


def forms() -> dict[str, Form]:
    left, right = torch.randn(3, 1, 30), torch.randn(3, 1, 20)
    many = torch.randn(3, 9, 30), torch.randn(3, 9, 20)
    shape = torch.Size((30, 20))
    outer = {"one": Outer(left, right, shape), "positions": Outer(*many, shape)}
    return {**outer, "rows": Dense(torch.randn(3, 30, 20)), "sum": Total([*outer.values()])}


@pytest.mark.parametrize("inner", ["one", "positions", "rows", "sum"])
@pytest.mark.parametrize("even", [False, True])
def test_bounds_are_bounds_and_tight(inner: str, even: bool) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        form = forms()[inner]
        factor = torch.randn(()) if even else torch.randn(30, 20) * mask(30, 20)
        whole = Scaled(form, factor, 0, torch.float32)
        exact = (form.wide_dense().double() * factor.double()).flatten(1).square().sum(1)
        found, bound = sq_norms(whole), sq_bounds(whole)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)
        assert bool((bound.double() >= exact * (1 - 1e-7)).all())
        assert bool((bound.double() <= exact * (1 + 1e-3)).all())
        for i in range(3):
            c = torch.zeros(3)
            c[i] = 1 / bound[i].sqrt()
            assert float(whole.weighted_sum(c, certain=True).double().norm()) <= 1 + 1e-6


BOUNDED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one position": (
        lambda: Fn(lambda m, x: F.linear(x, m.w * m.m), w=par(5, 5), m=mask(5, 5)), (5,)
    ),
    "positions": (
        lambda: Fn(lambda m, x: F.linear(x, m.w * m.m), w=par(5, 5), m=mask(5, 5)), (7, 5)
    ),
    "large constants": (
        lambda: Fn(lambda m, x: F.linear(x, m.w * m.m), w=par(5, 5), m=1e9 * torch.randn(5, 5)),
        (5,),
    ),
    "small constants": (
        lambda: Fn(lambda m, x: F.linear(x, m.w * m.m), w=par(5, 5), m=1e-9 * torch.randn(5, 5)),
        (5,),
    ),
    "large": (lambda: Fn(lambda m, x: F.linear(x, m.w * 1e12), w=par(5, 5)), (5,)),
    "small": (lambda: Fn(lambda m, x: F.linear(x, m.w * 1e-12), w=par(5, 5)), (7, 5)),
    "convolution": (
        lambda: Fn(lambda m, x: F.conv2d(x, m.w * m.m), w=par(3, 2, 2, 2), m=mask(3, 2, 2, 2)),
        (2, 5, 5),
    ),
    "scaled convolution": (
        lambda: Fn(lambda m, x: F.conv2d(x, m.w * 7), w=par(3, 2, 2, 2)), (2, 5, 5)
    ),
    "table": (lambda: Fn(lambda m, x: x + m.w * m.m, w=par(5), m=mask(5)), (5,)),
    "two masks": (lambda: Fn(both, w=par(5, 5), m=mask(5, 5)), (5,)),
}  # fmt: skip


def both(m: Any, x: Tensor) -> Tensor:
    return torch.cat([F.linear(x, m.w * m.m), F.linear(x, m.w * (1 - m.m) * 1e-3)], 1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("scale", [1e6, 1.0, 1e-19, 1e-22, 1e-26, 1e-36, 1e-42, 0.0])
@pytest.mark.parametrize("name", BOUNDED)
def test_no_sample_is_longer_than_its_bound(
    name: str, scale: float, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    make, shape = BOUNDED[name]
    model, x = make(), torch.randn(2, *shape)
    with torch.no_grad():
        g = torch.randn_like(model(x)) * scale
    g[1] = 0
    for bound in (1.0, 1e6):
        tape = taped(model, x, g, **options)
        assert size(tape.clipped_sum(bound, rule=normalised)) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("layer", ["linear", "conv", "two uses", "number"])
def test_positions_that_cancel(layer: str, gap: float, options: dict[str, Any]) -> None:
    for seed in range(6):
        torch.manual_seed(seed)
        half = torch.randn(1, 32, 1)
        g = torch.cat([half, -half * (1 + gap * torch.randn_like(half))], 2)
        if layer == "conv":
            weight, constants = par(32, 16, 2), mask(32, 16, 2)
            model = Fn(lambda m, x: F.conv1d(x, m.w * m.m), w=weight, m=constants)
            x = torch.randn(1, 16, 1).expand(1, 16, 3)
        else:
            constants = torch.randn(32, 16) * mask(32, 16)
            model = {
                "linear": Fn(lambda m, x: F.linear(x, m.w * m.m), w=par(32, 16), m=constants),
                "number": Fn(lambda m, x: F.linear(x, m.w * 0.1), w=par(32, 16)),
                "two uses": Fn(
                    lambda m, x: torch.stack([F.linear(row, m.w * m.m) for row in x.unbind(1)], 1),
                    w=par(32, 16), m=constants,
                ),
            }[layer]  # fmt: skip
            x, g = torch.randn(1, 1, 16).expand(1, 2, 16), g.mT
        c = 0.3 * gap
        assert size(taped(model, x, g, **options).clipped_sum(c, rule=normalised)) <= c * (1 + 1e-6)


def test_small_numbers_beside_a_large_one_are_not_swallowed() -> None:
    from ..tape.test_clipping_bound import dominated

    model = Fn(lambda m, x: F.linear(x, m.w * m.m), w=par(1, 4096), m=mask(1, 4096) + 0.5)
    x = dominated(4096)[None] / model.m
    assert size(taped(model, x, torch.ones(1, 1)).clipped_sum(1.0)) <= 1 + 1e-6


def test_merged_forms_keep_their_dtype() -> None:
    factor = torch.randn(30, 20)
    parts: list[Form] = [Scaled(f, factor, 0, torch.float32) for f in forms().values()]
    whole = total(parts)
    assert isinstance(whole, Scaled)
    want = sum((p.dense() for p in parts), torch.zeros(()))
    torch.testing.assert_close(whole.dense(), want, rtol=1e-4, atol=1e-4)


def test_patches_are_taken_by_rows_in_tiles() -> None:
    model, x = pruned(nn.Conv2d(32, 32, 3), torch.randn(3, 32, 8, 8))
    kept = recorded(model, x)
    form = kept._forms.forms(["weight_orig"])["weight_orig"]
    assert isinstance(form, Scaled)
    assert isinstance(form.form, Patches)
    assert form.plan().way == "rows"
