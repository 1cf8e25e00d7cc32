"""What no question may do: make tensors of a table's size for rows, walk a graph per parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import persample
from persample.forms import Dense, Form, Outer, Part, Picked, Pieces, Rows, pullback, total
from persample.testing import oracle, relative_error

from .lengths import sq_bounds, sq_norms

TABLE = 4000


class Written(TorchDispatchMode):
    """Elements of all results that have memory of their own, and of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {id(a) for a in args}
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor._base is None and id(tensor) not in given:
                if "view" not in str(func) and "expand" not in str(func):
                    self.elements += tensor.numel()
                    self.largest = max(self.largest, tensor.numel())
        return out


class Lookups(nn.Module):
    """Rows chosen by data, rows chosen by constants that pass a function, elements of a bias."""

    def __init__(self, constants: list[int], *, padding: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.Embedding(TABLE, 4, padding_idx=padding)
        self.targets = nn.Embedding(TABLE, 4, padding_idx=padding)
        self.bias = nn.Parameter(torch.randn(TABLE))
        self.constants = torch.tensor(constants)
        self.double()

    def forward(self, index: Tensor) -> Tensor:
        rows = self.items(index).tanh()
        return (rows @ (2 * self.targets(self.constants)).sin().T).sum(2) + self.bias[index]


def losses(model: nn.Module, index: Tensor) -> Tensor:
    return model(index).square().sum(1)


def recorded(model: nn.Module, index: Tensor, **options: Any) -> persample.Tape:
    with persample.record(model, **options) as tape:
        tape.backward(losses(model, index), retain_graph=True)
    return tape


QUESTIONS: dict[str, Callable[[persample.Tape], Any]] = {
    "norms": lambda tape: tape.norms(),
    "clipped_sum": lambda tape: tape.clipped_sum(0.5),
    "gram": lambda tape: tape.gram(),
    "variance": lambda tape: tape.variance(),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_rows_of_a_table_cost_as_many_elements_as_there_are(question: str) -> None:
    model, index = Lookups([5, 9, 5, 40]), torch.randint(TABLE, (16, 3))
    tape = recorded(model, index)
    with Written() as written:
        QUESTIONS[question](tape)
    assert written.largest <= 4 * TABLE  # what a result takes; not one row for each sample
    assert written.elements <= 12 * (4 + 4 + 1) * TABLE


@pytest.mark.parametrize("constants", [[5, 9, 7, 40], [5, 9, 5, 40], [9]])
@pytest.mark.parametrize("options", [{}, {"lean": True}, {"budget": 300}])
@pytest.mark.parametrize("padding", [None, 9])
def test_looked_up_rows_are_exact(
    constants: list[int], options: dict[str, Any], padding: int | None
) -> None:
    model, index = Lookups(constants, padding=padding), torch.randint(12, (3, 4))
    tape, want = recorded(model, index, **options), oracle(model, losses, index)
    assert relative_error(tape.grads(), want) < 1e-10
    g = torch.cat([rows.flatten(1) for rows in want.values()], 1)
    torch.testing.assert_close(tape.norms(), g.norm(dim=1))
    torch.testing.assert_close(flat(tape.variance()), g.var(0))
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    torch.testing.assert_close(tape.dots(direction), g @ flat(direction))
    if "lean" not in options:
        torch.testing.assert_close(tape.gram(), g @ g.T)
        kinds = {"items.weight": Rows, "targets.weight": Picked, "bias": Part}
        for name, kind in kinds.items():
            assert isinstance(tape._forms.forms([name])[name], kind)
    factors = (0.5 / g.norm(dim=1)).clamp(max=1)
    torch.testing.assert_close(flat(tape.clipped_sum(0.5)), factors @ g)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors.values()])


def test_constants_written_to_later_are_noticed() -> None:
    model, index = Lookups([5, 9, 5]), torch.randint(12, (3, 4))
    tape = recorded(model, index)
    model.constants.fill_(1)
    with pytest.raises(persample.StaleError):
        tape.norms()


# ---------------------------------------------------------------------- pieces of a parameter


def pieces(count: int, *, dtype: torch.dtype = torch.float64) -> Pieces:
    """Blocks of one parameter, as experts have them."""
    torch.manual_seed(0)
    shape = torch.Size((count, 5, 4))
    parts = []
    for e in range(count):
        left, right = (
            torch.randn(3, 2 + e % 3, 5, dtype=dtype),
            torch.randn(3, 2 + e % 3, 4, dtype=dtype),
        )
        parts.append(Part(Outer(left, right, torch.Size((5, 4))), shape, (4, 1), e * 20))
    return Pieces(parts)


SUMS: dict[str, Callable[[Form], Any]] = {
    "norms": sq_norms,
    "bounds": sq_bounds,
    "sum": lambda form: form.weighted_sum(torch.arange(3.0)),
    "certain sum": lambda form: form.weighted_sum(torch.arange(3.0), certain=True),
    "moments": lambda form: form.moments(),
    "squares": lambda form: form.moments(form.dtype),
    "dots": lambda form: form.dots(form),
    "dot": lambda form: form.dot(torch.ones(form.shape, dtype=form.dtype)),
    "rows": lambda form: form.dense(1, 3),
    "without": lambda form: form.without(torch.tensor([True, False, False])).dense(),
    "narrowed": lambda form: sq_norms(form.narrowed(1, 3)),
}


@pytest.mark.parametrize("question", SUMS)
def test_pieces_are_what_their_rows_are(question: str) -> None:
    form = pieces(4)
    torch.testing.assert_close(SUMS[question](form), SUMS[question](Dense(form.dense())))


@pytest.mark.parametrize("question", ["sum", "certain sum", "moments", "squares", "rows"])
def test_no_piece_makes_a_whole_parameter(question: str) -> None:
    few, many = pieces(4), pieces(64)
    with Written() as written:
        SUMS[question](few)
    with Written() as more:
        SUMS[question](many)
    assert more.elements < 1.5 * 16 * written.elements


def test_pieces_of_two_uses_meet_where_they_overlap() -> None:
    one, other = pieces(4), pieces(4)
    both = total([one, other, one.parts[0]])
    assert isinstance(both, Pieces)
    want = 2 * one.dense()
    want[:, 0] += one.dense()[:, 0]
    torch.testing.assert_close(both.dense(), want)
    torch.testing.assert_close(sq_norms(both), want.flatten(1).square().sum(1))


@pytest.mark.parametrize(
    ("places", "apart"),
    [
        ([((3, 2), (5, 1), 0), ((3, 3), (5, 1), 2)], True),  # columns
        ([((3, 3), (5, 1), 0), ((3, 3), (5, 1), 2)], False),
        ([((2, 3), (1, 5), 0), ((3, 3), (1, 5), 2)], True),  # of the transpose
        ([((4,), (2,), 0), ((4,), (2,), 1)], True),  # interleaved
        ([((4,), (2,), 0), ((2,), (3,), 1)], False),
        ([((10,), (1,), 0), ((5,), (1,), 10)], True),
    ],
)
def test_pieces_that_share_no_element_are_recognised(places: list[Any], apart: bool) -> None:
    parts: list[Form] = [
        Part(Dense(torch.randn(2, *view, dtype=torch.float64)), torch.Size((3, 5)), strides, offset)
        for view, strides, offset in places
    ]
    form = total(parts)
    assert isinstance(form, Pieces) == apart
    rows = parts[0].dense() + parts[1].dense()
    torch.testing.assert_close(form.dense(), rows)
    torch.testing.assert_close(sq_norms(form), rows.flatten(1).square().sum(1))
    torch.testing.assert_close(form.weighted_sum(torch.ones(2)), rows.sum(0))


# ---------------------------------------------------------------------- experts


class Experts(nn.Module):
    """Tokens sorted by expert, one grouped product."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(count, 16, 8, dtype=torch.bfloat16))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        order = expert.flatten().argsort(stable=True)
        ends = expert.flatten().bincount(minlength=self.weight.shape[0]).cumsum(0)
        out = F.grouped_mm(x.flatten(0, 1)[order], self.weight, offs=ends.to(torch.int32))
        return out[order.argsort()].view(*x.shape[:2], -1)


def test_experts_are_exact_however_tokens_are_spread() -> None:
    model = Experts(4)
    x, expert = torch.randn(3, 6, 16, dtype=torch.bfloat16), torch.randint(4, (3, 6))
    expert[expert == 2] = 0  # nobody goes there

    def each(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(*batch).float().sin().flatten(1).sum(1)

    with persample.record(model) as tape:
        tape.backward(each(model, (x, expert)))
    form = tape._forms.forms(["weight"])["weight"]
    assert isinstance(form, Pieces)
    want = oracle(model, each, (x, expert))["weight"].float()
    torch.testing.assert_close(form.wide_dense(), want, rtol=2e-2, atol=2e-2)
    rows = form.wide_dense()
    torch.testing.assert_close(tape.norms(), rows.flatten(1).norm(dim=1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        tape.weighted_sum(torch.ones(3))["weight"].float(), rows.sum(0), rtol=2e-2, atol=2e-2
    )


# ---------------------------------------------------------------------- graphs behind parameters


class Behind(nn.Module):
    """Learned queries pass several layers before they meet any data."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries = nn.Parameter(torch.randn(3, 6))
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries
        for layer in self.layers:
            queries = layer(queries).tanh()
        return queries * x


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def walk(edges: Any, parameters: Any, *others: Any, **options: Any) -> Any:
            found.append(len(parameters))
            return function(edges, parameters, *others, **options)

        return walk

    monkeypatch.setattr(pullback, "walk", counted(pullback.walk))
    return found


def test_a_lean_recording_walks_to_all_parameters_at_once(walks: list[int]) -> None:
    model, x = Behind(), torch.randn(4, 3, 6, dtype=torch.float64)
    with persample.record(model, lean=True) as tape:
        tape.backward(model(x).flatten(1).square().sum(1))
    clipped = tape.clipped_sum(0.5)
    assert walks == [11, 11]  # once for the norms, once for the sum
    rows = oracle(model, lambda m, row: m(row).flatten(1).square().sum(1), x)
    g = torch.cat([r.flatten(1) for r in rows.values()], 1)
    torch.testing.assert_close(flat(clipped), (0.5 / g.norm(dim=1)).clamp(max=1) @ g)


def test_norms_and_bounds_come_from_one_walk(walks: list[int]) -> None:
    weight = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4, bias=False)).double()
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    with persample.record(weight, lean=True, params=["parametrizations.weight.original1"]) as tape:
        tape.backward(weight(x).flatten(1).square().sum(1))
    assert walks == [1]


def test_norms_and_sum_come_from_one_walk(walks: list[int]) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4, bias=False)).double()
    x = torch.randn(3, 2, 5, dtype=torch.float64)
    name = "parametrizations.weight.original1"
    with persample.record(layer, params=[name]) as tape:
        tape.backward(layer(x).flatten(1).square().sum(1))
    clipped = tape.clipped_sum(0.5)
    assert walks == [1]
    rows = oracle(layer, lambda m, row: m(row).flatten(1).square().sum(1), x)[name].flatten(1)
    expected = (0.5 / rows.norm(dim=1)).clamp(max=1) @ rows
    torch.testing.assert_close(clipped[name].flatten(), expected)
    with persample.record(layer, params=[name], budget=64) as small:  # rows do not fit
        small.backward(layer(x).flatten(1).square().sum(1))
    torch.testing.assert_close(small.clipped_sum(0.5)[name].flatten(), expected)
    assert len(walks) > 2
