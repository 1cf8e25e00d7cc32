"""No operator with a rule goes through the generic path, whatever its arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import persample
from persample.forms import Outer, Rows, total
from persample.testing import oracle, relative_error

from ..forms.lengths import sq_norms
from ..models import Fn, flat_loss, par
from ..tape.test_queries import close, flat_rows

Build = Callable[[], tuple[nn.Module, tuple[Any, ...]]]
N = 3


def f(function: Callable[..., Any], *data: Any, **shapes: tuple[int, ...]) -> Build:
    return lambda: (Fn(function, **{k: par(*s) for k, s in shapes.items()}), data)


def module(make: Callable[[], nn.Module], *data: Any) -> Build:
    return lambda: (make(), data)


def x(*shape: int) -> Tensor:
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(0))


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(high, (N, *shape), generator=torch.Generator().manual_seed(0))


CHOSEN: dict[str, Build] = {
    "elements of a vector": f(lambda s, i: s.w[i].sin(), ids(6, 4), w=(6,)),
    "one element each": f(lambda s, i: s.w[i].sin().unsqueeze(1), ids(6), w=(6,)),
    "rows": f(lambda s, i: s.w[i].sin(), ids(6, 4), w=(6, 3)),
    "rows counted from the end": f(lambda s, i: s.w[i - 6].sin(), ids(6, 4), w=(6, 3)),
    "blocks": f(lambda s, i: s.w[i].sin(), ids(6, 4), w=(6, 3, 2)),
    "pairs": f(lambda s, i: s.w[i, i.flip(1)].sin(), ids(6, 4), w=(6, 6)),
    "pairs of blocks": f(lambda s, i: s.w[i, (i + 1) % 6].sin(), ids(6, 4), w=(6, 6, 2)),
    "a pair with a constant": f(
        lambda s, i: s.w[i, torch.arange(4)].sin(), ids(6, 4), w=(6, 4, 2)),
    "of a slice": f(lambda s, i: s.w[2:][i].sin(), ids(4, 4), w=(6, 3)),
    "index_select": f(
        lambda s, i: torch.index_select(s.w, 0, i.flatten()).view(*i.shape, -1).sin(),
        ids(6, 4), w=(6, 3)),
    "index_select of columns": f(
        lambda s, i: torch.index_select(s.w, 1, i.flatten()).T.reshape(*i.shape, -1).sin(),
        ids(6, 4), w=(3, 6)),
    "twice": f(lambda s, i: s.w[i].sin() * s.w[i.flip(1)], ids(6, 4), w=(6,)),
}  # fmt: skip

PRODUCTS: dict[str, Build] = {
    "linear": module(lambda: nn.Linear(5, 3), x(4, 5)),
    "linear of a vector": module(lambda: nn.Linear(5, 3), x(5)),
    "matmul": f(lambda s, x: torch.matmul(x, s.w), x(4, 5), w=(5, 3)),
    "@": f(lambda s, x: x @ s.w, x(5), w=(5, 3)),
    "parameter @ data": f(lambda s, x: s.w @ x, x(5, 4), w=(3, 5)),
    "matmul with a vector": f(lambda s, x: x @ s.w, x(4, 5), w=(5,)),
    "mm": f(lambda s, x: torch.mm(x, s.w), x(5), w=(5, 3)),
    "mv": f(lambda s, x: torch.mv(x, s.w).unsqueeze(1), x(5), w=(5,)),
    "addmm": f(lambda s, x: torch.addmm(s.b, x, s.w, beta=2, alpha=3), x(5), w=(5, 3), b=(3,)),
    "addmm of data": f(lambda s, x: torch.addmm(x[:, :3], x, s.w), x(5), w=(5, 3)),
    "bmm": f(lambda s, x: torch.bmm(x, s.w.expand(x.size(0), -1, -1)), x(4, 5), w=(1, 5, 3)),
    "bmm of one column": f(
        lambda s, x: torch.bmm(x, s.w.expand(x.size(0), 5, 3)), x(4, 5), w=(1, 5, 1)),
    "one column of each head": f(lambda s, x: x @ s.w.expand(2, 5, 3), x(2, 4, 5), w=(2, 5, 1)),
    "one row @ data": f(lambda s, x: s.w.expand(3, 5) @ x, x(5, 4), w=(1, 5)),
    "bmm of experts": f(
        lambda s, x: torch.bmm(x.transpose(0, 1), s.w).transpose(0, 1), x(2, 5), w=(2, 5, 3)),
    "baddbmm": f(
        lambda s, x: torch.baddbmm(s.b, x.transpose(0, 1), s.w, beta=2).transpose(0, 1),
        x(2, 5), w=(2, 5, 3), b=(2, 1, 3)),
    "baddbmm of data": f(
        lambda s, x: torch.baddbmm(x[:, :, :3], x, s.w.expand(x.size(0), -1, -1), alpha=2),
        x(4, 5), w=(1, 5, 3)),
    "einsum": f(lambda s, x: torch.einsum("btd,hde->bhte", x, s.w), x(4, 5), w=(2, 5, 3)),
    "einsum with dots": f(lambda s, x: torch.einsum("...d,de->...e", x, s.w), x(4, 5), w=(5, 3)),
    "einsum of blocks": f(lambda s, x: torch.einsum("bhd,hde->bhe", x, s.w), x(2, 5), w=(2, 5, 3)),
    "einsum of three": f(
        lambda s, x: torch.einsum("bi,ij,bj->b", x, s.w, x.sin()).unsqueeze(1), x(5), w=(5, 5)),
    "einsum of three, two parameters": f(
        lambda s, x: torch.einsum("bti,ij,jk->btk", x, s.a, s.b), x(4, 5), a=(5, 2), b=(2, 3)),
    "matmul of capsules": f(
        lambda s, x: s.w @ x[:, :, None, :, None], x(4, 5), w=(1, 4, 2, 3, 5)),
    "data @ matrices of heads": f(lambda s, x: x.unsqueeze(1) @ s.w, x(4, 5), w=(1, 2, 5, 3)),
    "a row for every head @ data": f(
        lambda s, x: s.w @ x.unsqueeze(1), x(5, 4), w=(2, 1, 5)),
    "one matrix of all heads": f(lambda s, x: x @ s.w, x(2, 4, 5), w=(1, 1, 5, 3)),
    "one head's matrix, one column": f(lambda s, x: x @ s.w, x(2, 4, 5), w=(1, 5, 1)),
    "einsum of axes of one": f(
        lambda s, x: torch.einsum("bhtd,hde->bhte", x.unsqueeze(1), s.w), x(4, 5), w=(2, 5, 3)),
    "einsum of a matrix for one": f(
        lambda s, x: torch.einsum("bhtd,hde->bhte", x, s.w), x(2, 4, 5), w=(1, 5, 3)),
    "einsum of a repeated sum": f(
        lambda s, x: torch.einsum("bd,de->be", x, s.w), x(5), w=(1, 3)),
    "low rank": f(lambda s, x: F.linear(F.linear(x, s.a), s.b), x(4, 5), a=(2, 5), b=(3, 2)),
    "low rank, merged": f(lambda s, x: F.linear(x, s.b @ s.a), x(4, 5), a=(2, 5), b=(3, 2)),
    "inner": f(lambda s, x: F.linear(x, s.w.t()), x(4, 5), w=(5, 3)),
    "bilinear": module(lambda: nn.Bilinear(5, 4, 3), x(5), x(4)),
    "bilinear of few positions": module(lambda: nn.Bilinear(5, 4, 3), x(2, 5), x(2, 4)),
    "bilinear of many positions": module(lambda: nn.Bilinear(5, 4, 3), x(6, 5), x(6, 4)),
    "bilinear of one input": f(
        lambda s, x: F.bilinear(x, x, s.w, s.b), x(5), w=(3, 5, 5), b=(3,)),
    "columns in two pieces": f(
        lambda s, x: F.linear(x[..., :2], s.w[:, :2]) * F.linear(x[..., 2:], s.w[:, 2:]),
        x(4, 5), w=(3, 5)),
    "columns in two pieces that overlap": f(
        lambda s, x: F.linear(x[..., :3], s.w[:, :3]) * F.linear(x[..., 2:], s.w[:, 2:]),
        x(4, 5), w=(3, 5)),
    "whole, and in pieces": f(
        lambda s, x: F.linear(x, s.w) * F.linear(x, s.w[:3]).sum(-1, True)
        * F.linear(x, s.w[3:]).sum(-1, True), x(4, 5), w=(6, 5)),
}  # fmt: skip

CONVOLUTIONS: dict[str, Build] = {
    f"{kind.__name__} {options}": module(lambda k=kind, o=options: k(4, 6, 3, **o), x(4, *size))
    for kind, size in ((nn.Conv1d, (9,)), (nn.Conv2d, (9, 8)), (nn.Conv3d, (5, 6, 5)))
    for options in (
        {}, {"stride": 2}, {"padding": 1}, {"padding": "same"}, {"padding": "valid"},
        {"padding": "same", "dilation": 2}, {"dilation": 2}, {"groups": 2},
        {"padding": 1, "padding_mode": "circular"}, {"padding": 1, "padding_mode": "reflect"},
        {"padding": 1, "padding_mode": "replicate"}, {"bias": False},
        {"padding": "same", "padding_mode": "circular"},
    )
} | {
    f"{kind.__name__} {options}": module(lambda k=kind, o=options: k(4, 6, 3, **o), x(4, *size))
    for kind, size in (
        (nn.ConvTranspose1d, (5,)), (nn.ConvTranspose2d, (5, 4)), (nn.ConvTranspose3d, (3, 3, 2)))
    for options in (
        {}, {"stride": 2, "output_padding": 1}, {"padding": 1}, {"dilation": 2}, {"groups": 2},
        {"stride": 2, "padding": 1, "groups": 2},
    )
} | {
    "channels last": module(
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        x(4, 7, 7).contiguous(memory_format=torch.channels_last)),
    "depthwise": module(lambda: nn.Conv2d(4, 4, 3, groups=4), x(4, 7, 7)),
    "patchify": module(lambda: nn.Conv2d(4, 6, 2, stride=2), x(4, 8, 8)),
    "frames": f(
        lambda s, x: F.conv2d(x.flatten(0, 1), s.w).unflatten(0, (-1, 2)), x(2, 3, 6, 6),
        w=(4, 3, 3, 3)),
}  # fmt: skip

TABLES: dict[str, Build] = {
    "embedding": module(lambda: nn.Embedding(7, 4), ids(7, 6)),
    "one id for each sample": module(lambda: nn.Embedding(7, 4), ids(7, 1)),
    "padding": module(lambda: nn.Embedding(7, 4, padding_idx=2), ids(7, 6)),
    "negative padding": module(lambda: nn.Embedding(7, 4, padding_idx=-2), ids(7, 6)),
    "frequencies": module(lambda: nn.Embedding(7, 4, scale_grad_by_freq=True), ids(7, 6)),
    "max_norm": module(lambda: nn.Embedding(7, 4, max_norm=0.5), ids(7, 6)),
    "one id": module(lambda: nn.Embedding(7, 4), ids(7)),
    "bag of sums": module(lambda: nn.EmbeddingBag(7, 4, mode="sum"), ids(7, 6)),
    "bag of means": module(lambda: nn.EmbeddingBag(7, 4, mode="mean"), ids(7, 6)),
    "bag of maxima": module(lambda: nn.EmbeddingBag(7, 4, mode="max"), ids(7, 6)),
    "bag with padding": module(lambda: nn.EmbeddingBag(7, 4, padding_idx=1), ids(7, 6)),
    "bag with frequencies": module(
        lambda: nn.EmbeddingBag(7, 4, mode="sum", scale_grad_by_freq=True), ids(7, 6)),
    "bag with frequencies, averaged": f(
        lambda s, i: F.embedding_bag(
            i.flatten(), s.e, torch.arange(0, i.numel(), 2), mode="mean", scale_grad_by_freq=True,
            padding_idx=1).view(-1, 3, 4),
        ids(7, 6), e=(7, 4)),
    "weighted bag": f(
        lambda s, i, w: F.embedding_bag(i, s.e, mode="sum", per_sample_weights=w),
        ids(7, 6), x(6), e=(7, 4)),
}  # fmt: skip

NORMS: dict[str, Build] = {
    "layer norm": module(lambda: nn.LayerNorm(5), x(4, 5)),
    "layer norm of two axes": module(lambda: nn.LayerNorm((4, 5)), x(2, 4, 5)),
    "layer norm without bias": module(lambda: nn.LayerNorm(5, bias=False), x(4, 5)),
    "layer norm of many numbers": module(lambda: nn.LayerNorm(64), x(512, 64)),
    "layer norm of many numbers, without bias": module(
        lambda: nn.LayerNorm((256, 64), bias=False), x(2, 256, 64)),
    "layer norm of many numbers, samples on the second axis": f(
        lambda s, x: F.layer_norm(x.transpose(0, 1), (64,), s.w, s.b).transpose(0, 1),
        x(512, 64), w=(64,), b=(64,)),
    "rms norm": module(lambda: nn.RMSNorm(5), x(4, 5)),
    "group norm": module(lambda: nn.GroupNorm(2, 4), x(4, 3, 3)),
    "instance norm": module(lambda: nn.InstanceNorm2d(4, affine=True), x(4, 3, 3)),
    "instance norm, running": module(
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval(), x(4, 5)),
    "batch norm": module(lambda: nn.BatchNorm1d(5).eval(), x(5)),
    "batch norm of pixels": module(lambda: nn.BatchNorm2d(4).eval(), x(4, 3, 3)),
}  # fmt: skip

ARITHMETIC: dict[str, Build] = {
    "scale": f(lambda s, x: x * s.w, x(4, 5), w=(5,)),
    "bias": f(lambda s, x: x + s.w, x(4, 5), w=(5,)),
    "reversed": f(lambda s, x: s.w - x * 2, x(4, 5), w=(5,)),
    "divided": f(lambda s, x: x / (s.w + 3), x(4, 5), w=(5,)),
    "dividend": f(lambda s, x: s.w / (x.square() + 1), x(4, 5), w=(5,)),
    "positions": f(lambda s, x: x + s.w[:, :4], x(4, 5), w=(1, 6, 5)),
    "class token": f(
        lambda s, x: torch.cat([s.c.expand(x.size(0), -1, -1), x], 1) * 2, x(4, 5), c=(1, 1, 5)),
    "learned queries": f(
        lambda s, x: F.scaled_dot_product_attention(
            s.q.expand(x.size(0), -1, -1) + 0 * x[:, :2], x, x),
        x(4, 5), q=(1, 2, 5)),
    "repeated queries": f(
        lambda s, x: s.q.repeat(x.size(0), 1, 1) * x[:, :2], x(4, 5), q=(1, 2, 5)),
    "layer scale": f(lambda s, x: x + s.g * x.tanh(), x(4, 5), g=(5,)),
    "number": f(lambda s, x: x * s.g, x(4, 5), g=(1,)),
    "looked up by constants": f(
        lambda s, x: x + F.embedding(torch.zeros(x.size(0), 4, dtype=torch.long), s.w),
        x(4, 5), w=(2, 5)),
    "looked-up positions": f(
        lambda s, x: x + F.embedding(torch.tensor([[3, 0, 3, 1]]), s.w).to(x.device),
        x(4, 5), w=(6, 5)),
    "looked-up positions, viewed": f(
        lambda s, x: (x.transpose(0, 1) * F.embedding(torch.arange(4), s.w)[:, None])
        .transpose(0, 1), x(4, 5), w=(6, 5)),
    "looked-up positions, turned": f(
        lambda s, x: x.mT - F.embedding(torch.arange(4), s.w).t(), x(4, 5), w=(6, 5)),
    "looked-up positions, scaled in place": f(
        lambda s, x: x + F.embedding(torch.arange(4), s.w).mul_(2).unsqueeze(0),
        x(4, 5), w=(6, 5)),
}  # fmt: skip


def packed(make: Callable[[], nn.Module], lengths: list[int], is_sorted: bool) -> Build:
    def run(s: Any, x: Tensor, counts: Tensor) -> Tensor:
        rows = pack_padded_sequence(x, counts, batch_first=True, enforce_sorted=is_sorted)
        out, last = s.r(rows)
        last = last if isinstance(last, Tensor) else last[0]
        out = pad_packed_sequence(out, batch_first=True, total_length=5)[0]
        return torch.cat([out.flatten(1), last.transpose(0, 1).flatten(1)], 1)

    return lambda: (Fn(run, r=make()), (x(5, 4), torch.tensor(lengths)))


def cells(make: Callable[[], nn.Module]) -> Build:
    def run(s: Any, x: Tensor) -> Tensor:
        state = None
        for k in range(x.size(1)):
            state = s.c(x[:, k], state)
        return torch.cat(state, 1) if isinstance(state, tuple) else state

    return lambda: (Fn(run, c=make()), (x(3, 4),))


RECURRENT: dict[str, Build] = {}
for _kind in (nn.RNN, nn.GRU, nn.LSTM):
    _name = _kind.__name__
    for _options in (
        {}, {"num_layers": 2}, {"bidirectional": True}, {"bias": False},
        {"num_layers": 2, "bidirectional": True},
        {"num_layers": 2, "dropout": 0.5},
        {"num_layers": 3, "bidirectional": True, "dropout": 0.3, "bias": False},
    ):  # fmt: skip
        _make = lambda k=_kind, o=_options: k(4, 3, batch_first=True, **o)
        RECURRENT[f"{_name} {_options}"] = module(_make, x(5, 4))
        RECURRENT[f"packed {_name} {_options}"] = packed(_make, [3, 5, 2], False)
    RECURRENT[f"packed, sorted {_name}"] = packed(
        lambda k=_kind: k(4, 3, batch_first=True), [5, 3, 2], True
    )
    RECURRENT[f"{_name}Cell"] = cells(lambda k=_name: getattr(nn, f"{k}Cell")(4, 3))
    RECURRENT[f"{_name}Cell without bias"] = cells(
        lambda k=_name: getattr(nn, f"{k}Cell")(4, 3, bias=False)
    )
RECURRENT["RNNCell relu"] = cells(lambda: nn.RNNCell(4, 3, nonlinearity="relu"))
RECURRENT["RNN relu"] = module(lambda: nn.RNN(4, 3, nonlinearity="relu", batch_first=True), x(5, 4))
for _options in ({}, {"num_layers": 2}, {"bidirectional": True, "num_layers": 2, "dropout": 0.4}):
    _make = lambda o=_options: nn.LSTM(4, 5, proj_size=2, batch_first=True, **o)
    RECURRENT[f"LSTM projected {_options}"] = module(_make, x(5, 4))
    RECURRENT[f"packed LSTM projected {_options}"] = packed(_make, [3, 5, 2], False)

CASES = CHOSEN | PRODUCTS | CONVOLUTIONS | TABLES | NORMS | ARITHMETIC | RECURRENT
# Left to the generic rule, with the reason.
_REPEATED = "one column or row is repeated as what the result has besides its positions"
GENERIC = {
    "index_select of columns": "rows of a table are along its first axis",
    **dict.fromkeys(("one column of each head", "one row @ data"), _REPEATED),
    "einsum of a repeated sum": "data are summed alone",
    "bag of maxima": "which rows win is known to torch's kernel alone",
}


def loss(model: nn.Module, batch: Any) -> Tensor:
    return flat_loss(model(*batch))


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    model = model.double()
    batch = tuple(b.double() if b.is_floating_point() else b for b in batch)
    if "dropout" not in name:
        expected = oracle(model, loss, batch, n=N)
    torch.manual_seed(1)
    with persample.record(model) as tape:
        tape.backward(loss(model, batch))
    state = torch.get_rng_state()
    if "dropout" in name:  # the plain program: same numbers drawn, one backward per loss
        torch.manual_seed(1)
        losses = loss(model, batch)
        assert torch.equal(torch.get_rng_state(), state)
        rows = [torch.autograd.grad(v, list(model.parameters()), retain_graph=True) for v in losses]
        names = [k for k, _ in model.named_parameters()]
        expected = {k: torch.stack(r) for k, r in zip(names, zip(*rows, strict=True), strict=True)}
    assert relative_error(tape.grads(), expected) < 1e-10
    assert bool({u.rule for u in tape.explain().uses} == {"generic"}) == (name in GENERIC)
    assert bool(tape.explain().slow) == (name in GENERIC)


def plain_sum(out: Any) -> Tensor:
    parts = [out] if isinstance(out, Tensor) else [plain_sum(o) for o in out]
    return torch.stack([part.sum() for part in parts]).sum()


@pytest.mark.parametrize("name", [name for name in CASES if "dropout" not in name])
def test_strided_data_and_the_gradient_of_a_plain_sum(name: str) -> None:
    """Such a gradient is one number seen everywhere: kernels must not read it as memory."""
    torch.manual_seed(0)
    model, batch = CASES[name]()
    model = model.double()
    strided = tuple(
        b.double().repeat_interleave(2, -1)[..., ::2] if b.is_floating_point() else b for b in batch
    )
    expected = oracle(model, lambda m, b: plain_sum(m(*b)).unsqueeze(0), strided, n=N)
    with persample.record(model, n=N) as tape:
        tape.backward(plain_sum(model(*strided)))
    assert relative_error(tape.grads(), expected) < 1e-10


@pytest.mark.parametrize("name", [name for name in CASES if "dropout" not in name])
def test_every_question(name: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[name]()
    model = model.double()
    batch = tuple(b.double() if b.is_floating_point() else b for b in batch)
    rows = oracle(model, loss, batch, n=N)
    with persample.record(model) as tape:
        tape.backward(loss(model, batch))
    flat = flat_rows(rows)
    norms = flat.norm(dim=1)
    close(tape.norms(), norms)
    close(tape.gram(), flat @ flat.T)
    close(tape.gram().diagonal(), tape.norms().square())
    c = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    bound = float(norms.median())
    clip = (bound / norms).clamp(max=1)
    direction = {k: torch.randn_like(g[0]) for k, g in rows.items()}
    close(tape.dots(direction), flat @ torch.cat([d.flatten() for d in direction.values()]))
    sketches = [
        persample.forms.Sketch(k, g.shape[1:], 6, 3, g.device).of_rows(g) for k, g in rows.items()
    ]
    close(tape.project(6, seed=3), torch.stack(sketches).sum(0))
    found = (tape.weighted_sum(c), tape.clipped_sum(bound), tape.second_moment(), tape.variance())
    for k, g in rows.items():
        top = float(g.abs().max())
        answers = [answer[k] for answer in found]
        sums = [torch.tensordot(c, g, 1), torch.tensordot(clip, g, 1)]
        for mine, theirs in zip(answers[:2], sums, strict=True):
            assert float((mine - theirs).abs().max()) <= 1e-10 * max(top, 1e-20)
        for mine, theirs in zip(answers[2:], [g.square().mean(0), g.var(0)], strict=True):
            assert float((mine - theirs).abs().max()) <= 1e-10 * max(top**2, 1e-20)


def test_looked_up_positions_are_a_slice_of_their_table() -> None:
    """Not a second backward pass through the look-up."""
    table, words = nn.Embedding(6, 5), nn.Embedding(9, 5)
    net = Fn(lambda s, i: s.w(i) + s.p(torch.arange(4)).unsqueeze(0).to(i.device), p=table, w=words)
    with persample.record(net) as tape:
        tape.backward(flat_loss(net(ids(9, 4))))
    ways = {use.parameter.split()[0]: use.norms for use in tape.explain().uses}
    assert ways["p.weight"] == "stored rows"


@pytest.mark.parametrize("count", [1, N])
@pytest.mark.parametrize("name", [name for name in CASES if "dropout" not in name])
def test_strides(name: str, count: int) -> None:
    """Axes in another order in memory: a reshape of one sample need not be contiguous."""
    torch.manual_seed(0)
    model, batch = CASES[name]()
    model = model.double()
    batch = tuple(_restrided(b[:count]) for b in batch)
    rows = oracle(model, _restrided_loss, batch, n=count)
    with persample.record(model, n=count) as tape:
        tape.backward(_restrided_loss(model, batch))
    assert relative_error(tape.grads(), rows) < 1e-10
    close(tape.norms(), flat_rows(rows).norm(dim=1))


def _restrided_loss(model: nn.Module, batch: Any) -> Tensor:
    out = model(*batch)
    return flat_loss(_restrided(out) if isinstance(out, Tensor) else out)


def _restrided(tensor: Tensor) -> Tensor:
    """The same values; the axis after the samples' is the last in memory."""
    same = tensor.double() if tensor.is_floating_point() else tensor
    return same if same.dim() < 3 else same.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.mark.parametrize("width", [3, 600])
@pytest.mark.parametrize("each", [0, 1, 40])
def test_equally_many_rows_need_no_sample_for_each(each: int, width: int) -> None:
    n, shape = 5, torch.Size((7, width))
    index = torch.randint(7, (n * each,))
    values = torch.randn(n * each, width, dtype=torch.float64)
    even = Rows(None, index, values, n, shape)
    told = Rows(torch.arange(n).repeat_interleave(each), index, values, n, shape)
    bad, c = torch.tensor([False, True, False, False, True]), torch.randn(n, dtype=torch.float64)
    rows = torch.zeros(n, *shape, dtype=torch.float64)
    for k in range(n * each):
        rows[k // each, index[k]] += values[k]
    for form in (even, told):
        assert torch.allclose(form.dense(), rows)
        assert torch.allclose(form.dense(1, 4), rows[1:4])
        assert torch.allclose(form.narrowed(2, 5).dense(), rows[2:])
        assert torch.allclose(form.without(bad).dense(), rows * ~bad.view(n, 1, 1))
        assert torch.allclose(form.weighted_sum(c), torch.tensordot(c, rows, 1))
        assert torch.allclose(sq_norms(form), rows.flatten(1).square().sum(1))
        assert torch.allclose(form.dot(rows[0]), (rows * rows[0]).flatten(1).sum(1))
        assert torch.allclose(form.fresh(), rows)
        buffer = torch.randn_like(rows)
        for _ in range(2):  # the second time, only what was written is cleared
            assert torch.allclose(form.write(buffer), rows)
        factors = torch.randn(n, 1, 2, 7).double(), torch.randn(n, 1, 2, width).double()
        outer = Outer(*factors, shape)
        assert torch.allclose(form.cross(outer), (rows * outer.dense()).flatten(1).sum(1))
        for other in (even, told):
            assert torch.allclose(total([form, other]).dense(), 2 * rows)


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        [torch.zeros(4, 6, 5), torch.zeros(4, 6)],
        [persample.forms.Dense(torch.zeros(4, 7))] * 2,
        [persample.forms.Dense(torch.zeros(2, 6, 5)), None],
    ],
    ids=["nothing", "too few", "tensors", "another shape", "another n"],
)
def test_rules_of_the_users_own_that_do_not_fit(found: Any) -> None:
    model = nn.Linear(5, 6)
    with (
        persample.record(model, rules={F.linear: lambda use, firing, n: found}) as tape,
        pytest.raises(persample.UsageError, match="rule given for linear"),
    ):
        tape.backward(model(torch.randn(4, 5)).square().sum(1))
    with persample.record(model) as tape:
        tape.backward(model(torch.randn(4, 5)).square().sum(1))
    assert tape.norms().all()
