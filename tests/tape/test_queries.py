"""Every question of every model against the same quantity from one-sample gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing import oracle

from ..batteries.test_models import double, loss
from ..models import MODELS, Fn, flat_loss, par


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    assert found.shape == expected.shape
    top = float(expected.abs().max()) if expected.numel() else 0.0
    error = float((found - expected).abs().max()) if expected.numel() else 0.0
    assert error <= tolerance * max(top, 1e-30)


def flat_rows(rows: dict[str, Tensor]) -> Tensor:
    parts = [torch.view_as_real(g) if g.is_complex() else g for g in rows.values()]
    return torch.cat([g.reshape(g.shape[0], -1) for g in parts], 1)


@pytest.fixture(params=list(MODELS))
def case(request: Any) -> tuple[persample.Tape, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    model, batch = double(*MODELS[request.param](3))
    expected = oracle(model, loss, batch, n=3)
    with persample.record(model) as tape:
        tape.backward(loss(model, batch))
    return tape, expected, model


def test_norms(case: Any) -> None:
    tape, rows, _ = case
    flat = flat_rows(rows)
    close(tape.norms(), flat.norm(dim=1))
    for name, norms in tape.parameter_norms().items():
        part = flat_rows({name: rows[name]}).norm(dim=1)
        close(norms, part, 1e-9)


def test_weighted_and_clipped_sums(case: Any) -> None:
    tape, rows, _ = case
    c = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    for name, value in tape.weighted_sum(c).items():
        close(value, torch.tensordot(c.to(rows[name].dtype), rows[name], 1))
    norms = flat_rows(rows).norm(dim=1)
    bound = float(norms.median())
    clip = (bound / norms.clamp(min=1e-300)).clamp(max=1)
    for name, value in tape.clipped_sum(bound).items():
        close(value, torch.tensordot(clip.to(rows[name].dtype), rows[name], 1))


def test_inner_products(case: Any) -> None:
    tape, rows, _ = case
    flat = flat_rows(rows)
    close(tape.gram(), flat @ flat.T)
    close(tape.gram().diagonal(), tape.norms().square())
    direction = {name: torch.randn_like(g[0]) for name, g in rows.items()}
    v = flat_rows({name: d.unsqueeze(0) for name, d in direction.items()})[0]
    close(tape.dots(direction), flat @ v)
    close(tape.cross(tape), tape.gram())


def test_moments(case: Any) -> None:
    tape, rows, _ = case
    for name, value in tape.second_moment().items():
        close(value, rows[name].abs().square().mean(0))
    for name, value in tape.variance().items():
        size = float(rows[name].abs().square().mean(0).max())
        assert float((value - rows[name].var(0)).abs().max()) <= 1e-10 * max(size, 1e-30)
    flat = flat_rows(rows)
    m, big = flat.square().sum(1).mean(), flat.mean(0).square().sum()
    scale = tape.noise_scale()
    assert scale.trace == pytest.approx(float((m - big) * 1.5))
    assert scale.sq_gradient == pytest.approx(float((3 * big - m) / 2))


@pytest.mark.parametrize("lean", [False, True, persample.Ahead(moments=True)])
@pytest.mark.parametrize("positions", [(), (3,)], ids=["one position", "several"])
def test_the_spread_of_gradients_that_almost_agree(positions: Any, lean: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    x = torch.randn(1, *positions, 6) + 1e-3 * torch.randn(16, *positions, 6)

    def record(model: nn.Module, x: Tensor, lean: Any) -> persample.Tape:
        with persample.record(model, lean=lean) as tape:
            tape.backward(model(x).square().flatten(1).sum(1))
        return tape

    rows = record(copy.deepcopy(model).double(), x.double(), False).grads()
    tape = record(model, x, lean)
    for name, value in tape.variance().items():
        expected = rows[name].var(0)
        assert value.dtype == torch.float32
        assert float(((value - expected).abs() / expected).max()) < 1e-3
    assert tape.noise_scale().trace == pytest.approx(
        sum(float(g.var(0).sum()) for g in rows.values()), rel=1e-3
    )
    tape.variance()["bias"].zero_()
    assert tape.variance()["bias"].all()


def test_names_that_can_be_read_once() -> None:
    model = nn.Linear(6, 3)
    with persample.record(model) as tape:
        tape.backward(model(torch.randn(4, 6)).square().sum(1))
    for ask in (tape.variance, tape.noise_scale, tape.cosine, tape.norms, tape.second_moment):
        ask(params=(name for name in ["bias"]))


@pytest.mark.parametrize("lean", [False, True])
def test_questions_do_not_hear_of_autocast(lean: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)), []
    for inside in (False, True):
        cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside)
        with persample.record(model, lean=lean) as tape:
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                losses = model(torch.randn(4, 7, 16)).float().square().sum((1, 2))
            with cast:
                tape.backward(losses, retain_graph=True)
        with cast:
            x.append([tape.norms(), tape.gram(), tape.project(8, seed=0)])
            x[-1] += [*tape.clipped_sum(1.0).values(), *tape.grads().values()]
            x[-1] += [*tape.variance().values()]
    for plain, found in zip(*x, strict=True):
        assert found.dtype == torch.float32
        assert torch.equal(found, plain)


@pytest.mark.parametrize("lean", [False, True])
def test_a_backward_pass_under_autocast_is_clipped(lean: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False))
    with persample.record(model, lean=lean) as tape:
        losses = model(100 * torch.randn(1, 7, 16)).square().sum((1, 2))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            tape.backward(losses)
    found = torch.cat([g.flatten().double() for g in tape.clipped_sum(1.0).values()])
    assert 0.999 < float(found.norm()) <= 1 + 1e-6


def test_buffers_that_are_columns_of_one_matrix(case: Any) -> None:
    tape, rows, _ = case
    sizes = [g[0].numel() for g in rows.values()]
    if len({g.dtype for g in rows.values()}) > 1:
        pytest.skip("one matrix has one dtype")
    matrix = torch.zeros(3, sum(sizes), dtype=next(iter(rows.values())).dtype)
    parts = zip(rows, matrix.split(sizes, 1), strict=True)
    out = {name: part.view(rows[name].shape) for name, part in parts}
    tape.grads(out=out)
    for name, g in out.items():
        close(g, rows[name])


def test_projections_are_linear_and_do_not_depend_on_the_form(case: Any) -> None:
    tape, rows, _ = case
    found = tape.project(12, seed=5)
    expected = torch.zeros_like(found)
    for name, g in rows.items():
        shape = torch.Size((*g.shape[1:], 2)) if g.is_complex() else g.shape[1:]
        sketch = persample.forms.Sketch(name, shape, 12, 5, g.device)
        expected += sketch.of_rows(g)
    close(found, expected)


def test_reused_buffers(case: Any) -> None:
    tape, rows, _ = case
    first = tape.grads()
    for g in first.values():
        g.fill_(float("nan"))
    again = tape.grads(out=first)
    for name, g in again.items():
        assert g is first[name]
        close(g, rows[name])


@pytest.mark.parametrize("way", ["data", "numpy"])
def test_buffers_soiled_unseen(way: str) -> None:
    """What torch counts no version for: a table is not taken for clean."""
    net = nn.Embedding(4000, 3).double()
    ids = torch.arange(12).view(4, 3)
    with persample.record(net, n=4) as tape:
        tape.backward(net(ids).square().sum((1, 2)))
    expected = tape.grads()["weight"].clone()
    buffers = tape.grads(out=tape.grads())
    if way == "data":
        buffers["weight"].data.fill_(7.0)
    else:
        buffers["weight"].numpy()[...] += 1.0
    close(tape.grads(out=buffers)["weight"], expected)


def test_buffers_that_other_processes_may_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective writes single elements, and counts no version."""
    net, ids = nn.Embedding(4000, 3).double(), torch.arange(12).view(4, 3)
    with persample.record(net, n=4) as tape:
        tape.backward(net(ids).square().sum((1, 2)))
    expected = tape.grads()["weight"].clone()
    buffers = tape.grads(out=tape.grads())
    buffers["weight"].data[0, 3999, 2] = 7.0
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    close(tape.grads(out=buffers)["weight"], expected)


def test_small_rows_are_asked_together() -> None:
    """Biases of many layers in one product: the same numbers, each with its own shape."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)], nn.LayerNorm(4)).double()
    model[0].float()
    net = Fn(
        lambda s, x: s.m[1:](s.m[0](x).double()) * s.g + s.h,
        m=model,
        g=nn.Parameter(torch.tensor(1.5)),
        h=par(2, 4),
    )
    batch = (torch.randn(5, 2, 4),)
    rows = oracle(net, lambda m, b: flat_loss(m(*b)), batch, n=5)
    with persample.record(net) as tape:
        tape.backward(flat_loss(net(*batch)))
    flat = flat_rows(rows).double()
    close(tape.norms(), flat.norm(dim=1), 1e-5)
    c = (0.5 / flat.norm(dim=1)).clamp(max=1)
    for rule in (persample.flat, lambda norms, bound: (bound / norms).clamp(max=1)):
        total = tape.clipped_sum(0.5, rule=rule)
        assert {k: v.shape for k, v in total.items()} == {k: r.shape[1:] for k, r in rows.items()}
        for name, row in rows.items():
            close(total[name].double(), torch.einsum("n,n...->...", c, row.double()), 1e-5)


def test_adding_parts_leaves_them_alone() -> None:
    """Sums of parts are added in place, a few rows at a time, never into what the tape keeps."""
    net = Fn(lambda s, i, x: s.e(i).sum(1) + (s.e.weight * x).sum(1), e=nn.Embedding(9, 5)).double()
    batch = (torch.randint(9, (6, 4)), torch.randn(6, 9, 5).double())
    rows = oracle(net, lambda m, b: flat_loss(m(*b)), batch, n=6)
    with persample.record(net, budget=9 * 5 * 8 * 4) as tape:
        tape.backward(flat_loss(net(*batch)))
    for _ in range(2):
        close(tape.norms(), flat_rows(rows).norm(dim=1))
        close(tape.grads()["e.weight"], rows["e.weight"])
        close(tape.grads(out=tape.grads())["e.weight"], rows["e.weight"])


@pytest.mark.parametrize("words", [6000, 300])
def test_words_that_occur_again(words: int) -> None:
    """A few repeated words in a large batch, or many."""
    torch.manual_seed(0)
    net = Fn(lambda s, i: s.e(i).tanh() * s.w, e=nn.Embedding(words, 64), w=par(64)).double()
    batch = (torch.randint(words, (6, 400)),)
    rows = oracle(net, lambda m, b: flat_loss(m(*b)), batch, n=6)
    norms = flat_rows(rows).norm(dim=1)
    c = (float(norms.median()) / norms).clamp(max=1)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        net = net.to(dtype)
        with persample.record(net) as tape:
            tape.backward(flat_loss(net(*batch)))
        close(tape.norms().double(), norms, tolerance)
        total = tape.clipped_sum(float(norms.median()))
        expected = torch.einsum("n,nvd->vd", c, rows["e.weight"])
        close(total["e.weight"].double(), expected, tolerance)


@pytest.mark.parametrize("make", [lambda: nn.Linear(64, 64), lambda: nn.Conv1d(64, 64, 1)])
@pytest.mark.parametrize("lean", [False, True])
def test_norms_of_positions_that_cancel(make: Any, lean: bool) -> None:
    """Products of positions would leave nothing but rounding."""
    torch.manual_seed(0)
    model = make()
    x = torch.randn(4, 16, 64)
    x[1] = x[1, :1] + 1e-4 * torch.randn(16, 64)  # sixteen nearly equal positions
    x[2, 8:] = x[2, :8]
    signs = torch.ones(16, 1)
    signs[8:] = -1
    axes = (1, 2) if isinstance(model, nn.Linear) else (2, 1)
    with persample.record(model, lean=lean) as tape:
        out = model(x.transpose(*axes) if axes == (2, 1) else x)
        tape.backward(((out.transpose(*axes) if axes == (2, 1) else out) * signs).sum((1, 2)))
    exact = torch.einsum("nta,tb->nba", x.double(), signs.double().expand(16, 64)).flatten(1)
    expected = exact.norm(dim=1)
    found = tape.norms(params="weight").double()
    assert torch.allclose(found, expected, rtol=1e-3, atol=0)
    assert expected[1] < 1e-3 * expected[0]
    assert not float(expected[2])


@pytest.mark.parametrize("lean", [False, True])
def test_zeros_without_memory(lean: bool) -> None:
    """The derivative of a sign is a tensor that cannot be written to; answers can."""
    net = Fn(lambda s, x: torch.sgn(x * s.w) + torch.sgn(s.l(x)), w=par(5), l=nn.Linear(5, 5))
    with persample.record(net, lean=lean) as tape:
        tape.backward(net(torch.randn(3, 5)).sum(1), retain_graph=True)
    for rows in (*tape.grads().values(), *tape.clipped_sum(1.0).values(), tape.norms()):
        assert not rows.add_(1).sub_(1).any()


@pytest.mark.parametrize("large", [0, 1 << 25])
def test_rows_of_one_position(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are many, by the faster of two kernels, else by a broadcast product."""
    monkeypatch.setattr("persample.forms.kernels.LARGE", large)
    net = nn.Linear(5, 4).double()
    x = torch.randn(3, 5).double()
    with persample.record(net) as tape:
        tape.backward(net(x).square().sum(1))
    expected = torch.einsum("na,nb->nab", 2 * net(x).detach(), x)
    close(tape.grads()["weight"], expected)
    close(
        tape.grads(out={k: torch.ones_like(g) for k, g in tape.grads().items()})["weight"], expected
    )


@pytest.mark.parametrize("lean", [False, True])
def test_complex_pieces_and_parameters_without_gradient(lean: bool) -> None:
    torch.manual_seed(0)
    net = Fn(
        lambda m, x: F.linear(x, m.both[:2]) * F.linear(x, m.both[2:]), both=par(4, 3), idle=par(2)
    )
    net.both, net.idle = (nn.Parameter(p.to(torch.complex128)) for p in (net.both, net.idle))
    x = torch.randn(3, 4, 3, dtype=torch.complex128)
    rows = oracle(net, lambda m, x: flat_loss(m(x)), x)
    with persample.record(net, lean=lean) as tape:
        tape.backward(flat_loss(net(x)), retain_graph=True)
    flat = flat_rows(rows)
    close(tape.gram(), flat @ flat.T)
    close(tape.norms(), flat.norm(dim=1))
    assert tape.parameter_norms()["idle"].dtype == torch.float64
    assert tape.second_moment()["idle"].dtype == torch.float64
    spread = (rows["both"] - rows["both"].mean(0)).abs().square().sum(0) / 2
    close(tape.variance()["both"], spread)
    assert not tape.variance()["idle"].any()


@pytest.mark.parametrize("lean", [False, True])
def test_tables_without_columns(lean: bool) -> None:
    net = Fn(
        lambda m, i: torch.cat([m.table(i) + m.table(1 - i), i.unsqueeze(2) * m.scale], 2),
        table=nn.Embedding(2, 0), scale=par(3),
    )  # fmt: skip
    ids = torch.tensor([[0, 1], [1, 1], [1, 0]])
    rows = oracle(net, lambda m, i: flat_loss(m(i)), ids)
    with persample.record(net, lean=lean) as tape:
        tape.backward(flat_loss(net(ids)), retain_graph=True)
    assert tape.grads()["table.weight"].shape == (3, 2, 0)
    close(tape.norms(), flat_rows(rows).norm(dim=1), 1e-6)
    close(tape.clipped_sum(1e6)["scale"], rows["scale"].sum(0), 1e-6)


def test_long_rows_keep_their_digits() -> None:
    """Added up one after the other, a large product swallows a million small ones."""
    model = Fn(lambda s, x: x * s.w, w=par(1_500_000)).float()
    x = torch.full((3, 1_500_000), 0.4)
    x[:, 0] = 3000
    with persample.record(model) as tape:
        tape.backward(model(x).sum(1))
    close(tape.gram().double(), x.double() @ x.double().T, 1e-5)


@pytest.mark.parametrize("words", [50, 5000])
@pytest.mark.parametrize("each", [1, 7])
def test_inner_products_of_look_ups(words: int, each: int) -> None:
    """Row by row, or in a table of the words that occur; with another batch, with some absent."""
    torch.manual_seed(0)
    model = nn.Embedding(words, 3, padding_idx=1).double()
    batches = [torch.randint(words, (n, each)) for n in (40, 30)]
    tapes, rows = [], []
    for x in batches:
        with persample.record(model) as tape:
            tape.backward(model(x).pow(3).sum((1, 2)))
        tapes.append(tape)
        rows.append(flat_rows(tape.grads()))
    close(tapes[0].gram(), rows[0] @ rows[0].T)
    close(tapes[0].cross(tapes[1]), rows[0] @ rows[1].T)
    users = torch.randint(9, (40,))
    with persample.record(model, n=10, sample_ids=users) as tape:
        tape.backward(model(batches[0]).pow(3).sum((1, 2)))
    mine = flat_rows(tape.grads())
    close(tape.cross(tapes[1]), mine @ rows[1].T)


class TestSeveralDirections:
    """``dots`` with m directions, ``project`` with a scale, ``cross`` of unequal tapes."""

    def tapes(self, *options: dict[str, Any]) -> list[persample.Tape]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 2))
        found = []
        for k, option in enumerate(options):
            x = torch.randint(7, (4, 3), generator=torch.Generator().manual_seed(k))
            with persample.record(model.double(), **option) as tape:
                tape.backward(model(x).square().sum(1))
            found.append(tape)
        return found

    @pytest.mark.parametrize("lean", [False, True])
    def test_dots_with_several(self, lean: bool) -> None:
        (tape,) = self.tapes({"lean": lean})
        (kept,) = self.tapes({})
        many = {k: torch.randn(3, *g.shape[1:]).double() for k, g in kept.grads().items()}
        expected = torch.stack([kept.dots({k: v[j] for k, v in many.items()}) for j in range(3)], 1)
        assert torch.allclose(tape.dots(many), expected, rtol=1e-10)

    def test_a_parameter_whose_shape_is_several_of_another(self) -> None:
        (tape,) = self.tapes({})
        uneven = {k: torch.zeros(2 + ("3" in k), *g.shape[1:]) for k, g in tape.grads().items()}
        with pytest.raises(persample.UsageError, match="different numbers"):
            tape.dots(uneven)

    def test_params_select_from_a_direction(self) -> None:
        (tape,) = self.tapes({})
        whole = {k: torch.randn_like(g[0]) for k, g in tape.grads().items()}
        part = {"2.weight": whole["2.weight"]}
        one = tape.dots(whole, params="2.weight")
        assert torch.equal(one, tape.dots(part, params="2.weight"))
        with pytest.raises(persample.UsageError, match="names"):
            tape.dots(part)
        with pytest.raises(persample.UsageError, match="names"):
            tape.dots(part, params=["2.weight", "3.weight"])

    @pytest.mark.parametrize("lean", [False, True])
    def test_a_scaled_projection(self, lean: bool) -> None:
        (tape,) = self.tapes({"lean": lean})
        (kept,) = self.tapes({})
        scale = {k: torch.rand_like(g[0]) for k, g in kept.grads().items()}
        scaled = {k: g * scale[k] for k, g in kept.grads().items()}
        found = tape.project(4096, seed=3, scale=scale)
        exact = sum(g.flatten(1) @ g.flatten(1).T for g in scaled.values())
        assert torch.allclose(found @ found.T, exact, rtol=0.2, atol=0.2 * exact.max())
        ones = {k: torch.ones_like(s) for k, s in scale.items()}
        same = kept.project(64, seed=3, scale=ones)
        assert torch.allclose(same, kept.project(64, seed=3), rtol=1e-5, atol=1e-6)
        half = {k: s / 2 for k, s in scale.items()}
        twice = 2 * kept.project(4096, seed=3, scale=half)
        assert torch.allclose(twice, found, rtol=1e-4, atol=1e-5)

    def test_cross_of_unequal_parameters(self) -> None:
        a, b = self.tapes({"params": ["2.weight", "3.bias"]}, {"params": ["2.weight", "2.bias"]})
        g, h = a.grads()["2.weight"].flatten(1), b.grads()["2.weight"].flatten(1)
        assert torch.allclose(a.cross(b), g @ h.T, rtol=1e-5)
        assert torch.allclose(b.cross(a), h @ g.T, rtol=1e-5)
        c, d = self.tapes({"params": "2.weight"}, {"params": "2.bias"})
        with pytest.raises(persample.UsageError, match="in common"):
            c.cross(d)

    def test_cross_with_a_lean_tape(self) -> None:
        a, b = self.tapes({}, {})
        lean_a, lean_b = self.tapes({"lean": True}, {"lean": True})
        expected = a.cross(b)
        assert torch.allclose(lean_a.cross(b), expected, rtol=1e-5)
        (lean_b,) = self.tapes({}, {"lean": True})[1:]
        assert torch.allclose(a.cross(lean_b), expected, rtol=1e-5)
        lean_a, lean_b = self.tapes({"lean": True}, {"lean": True})
        with pytest.raises(persample.UsageError, match="keeps no gradients"):
            lean_a.cross(lean_b)


def test_a_printed_tape_says_what_it_holds() -> None:
    model = nn.Linear(3, 2)
    with persample.record(model) as tape:
        assert "0 backward passes" in repr(tape)
        tape.backward(model(torch.randn(4, 3)).square().sum(1))
    assert repr(tape) == ("<persample.Tape: n = 4, 2 parameters, 2 uses kept, 1 backward pass>")
    tape.close()
    assert "closed" in repr(tape)
