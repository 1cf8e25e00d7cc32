"""Attacks by the way the interface is used: options, order of calls, changes behind its back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import persample
from persample.testing import oracle

from .attacks_base import (
    EITHER,
    EXACT,
    REFUSED,
    N,
    Net,
    Rows,
    Script,
    dense,
    ints,
    lin,
    rand,
    row_losses,
    seeded,
    spread,
    trainable,
)

Pair = tuple[Rows, Rows]
X, Y = rand(N, N), rand(N, N, seed=3)
LABELS = torch.tensor([1, 3, 1, 0])


def native(model: nn.Module, losses: Tensor) -> Rows:
    """Row i is the gradient of losses[i]."""
    named = trainable(model)
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    for loss in losses:
        model.zero_grad()
        loss.sum().backward(retain_graph=True)
        for name, parameter in named.items():
            rows[name].append(dense(parameter))
    model.zero_grad()
    return {name: torch.stack(r) for name, r in rows.items()}


def found(model: nn.Module, losses_of: Callable[[], Tensor], **options: Any) -> Rows:
    """What persample answers."""
    with persample.record(model, **options) as tape:
        tape.backward(losses_of())
    return tape.grads()


def both(model: nn.Module, losses_of: Callable[[], Tensor], **options: Any) -> Pair:
    """The answer and the native rows of the same losses."""
    return found(model, losses_of, **options), native(model, losses_of())


def scaled(
    model: nn.Module, scalar_of: Callable[[], Tensor], losses_of: Callable[[], Tensor]
) -> Pair:
    """A scalar; the rows expected are those of the losses that it is the sum of."""
    return found(model, scalar_of), native(model, losses_of())


def two() -> nn.Module:
    """Two layers."""
    return Net(lambda m, x: m.k(m.l(x).tanh()), l=lin(), k=lin(seed=2))


class Masked(nn.Module):
    """Attention with a mask for pairs of steps."""

    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.l, self.first = lin(), first

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q = self.l(x)
        scores = (q @ q.transpose(-1, -2)).masked_fill(mask, -1e9)
        return scores.softmax(-1) @ x


class MaskFirst(Masked):
    """The same, with the mask as first argument."""

    def forward(self, mask: Tensor, x: Tensor) -> Tensor:
        return super().forward(x, mask)


CUBE = rand(N, N, N)
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)
BIG = torch.ones(6, 6, dtype=torch.bool).triu(1)


def mask_cases() -> Iterator[Script]:
    """Inputs that only look like samples."""
    m = Masked()
    run = lambda: spread(m(CUBE, CAUSAL))
    yield Script("mask (t, t), undeclared", lambda: both(m, run), EITHER)
    yield Script("mask (t, t), declared", lambda: both(m, run, constants=("mask",)), EXACT)
    yield Script("mask (t, t), by position", lambda: both(m, run, constants=(1,)), EXACT)
    yield Script("mask (t, t), by tensor", lambda: both(m, run, constants=(CAUSAL,)), EXACT)
    wrong = lambda: both(m, run, constants=("x",))
    yield Script("the samples declared constant", wrong, EITHER)
    yield Script("a constant of no such name", lambda: both(m, run, constants=("maks",)), EITHER)
    first = MaskFirst()
    six = rand(N, 6, N)
    late = lambda: spread(first(BIG, six))
    yield Script("first argument tells a wrong n", lambda: both(first, late), EITHER)
    yield Script("first argument overruled by n", lambda: both(first, late, n=N), EXACT)
    table = lambda: spread(first.l(X) @ X)
    yield Script("another matrix outside the model", lambda: both(first, table), EITHER)


def time_first() -> Iterator[Script]:
    """Samples on axis 1; steps, samples and features agree in number."""
    gru = seeded(nn.GRU(N, N))
    run = lambda: gru(CUBE)[0].square().sum((0, 2))
    yield Script("time first, dim=1", lambda: both(gru, run, dim=1), EXACT)
    yield Script("time first, dim=0", lambda: both(gru, run), REFUSED)
    by_time = lambda: gru(CUBE)[0].square().sum((1, 2))
    yield Script("time first, a loss per step", lambda: both(gru, by_time, dim=1), REFUSED)
    mha = seeded(nn.MultiheadAttention(N, 2))
    padding = torch.ones(N, N, dtype=torch.bool).triu(1)
    attend = lambda: mha(CUBE, CUBE, CUBE, key_padding_mask=padding)[0].square().sum((0, 2))
    yield Script("time first, padding (n, t)", lambda: both(mha, attend, dim=1), EITHER)
    declared = lambda: both(mha, attend, dim=1, constants=("key_padding_mask",))
    yield Script("time first, padding declared constant", declared, EITHER)
    layer = seeded(nn.TransformerEncoderLayer(N, 2, N, 0.0))
    encode = lambda: layer(CUBE).square().sum((0, 2))
    yield Script("time first, encoder layer", lambda: both(layer, encode, dim=1), EXACT)
    last = Net(lambda m, x: m.l(x.permute(2, 0, 1)), l=lin())
    final = lambda: spread(last(CUBE))
    yield Script("samples on the last axis", lambda: both(last, final, dim=2), EXACT)
    yield Script("samples on axis -1", lambda: both(last, final, dim=-1), EITHER)


SCALARS: dict[str, tuple[str, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor] | None]] = {
    "sum": (EXACT, lambda v: v.sum(), lambda v: v),
    "mean": (EXACT, lambda v: v.mean(), lambda v: v / N),
    "mean plus one": (EXACT, lambda v: v.mean() + 1, lambda v: v / N),
    "sum divided": (EXACT, lambda v: v.sum() / 3, lambda v: v / 3),
    "dot with constants": (EITHER, lambda v: v @ rand(N), lambda v: v * rand(N)),
    "python sum": (EITHER, lambda v: sum(v), lambda v: v),
    "square of the mean": (REFUSED, lambda v: v.mean() ** 2, None),
    "log of the mean": (REFUSED, lambda v: v.square().mean().log(), None),
    "log-sum-exp": (REFUSED, lambda v: v.logsumexp(0), None),
    "product": (REFUSED, lambda v: v.prod(), None),
    "norm": (REFUSED, lambda v: v.norm(), None),
    "variance": (REFUSED, lambda v: v.var(), None),
    "sum times the detached sum": (
        EITHER,
        lambda v: v.sum() * v.detach().sum(),
        lambda v: v * v.detach().sum(),
    ),
    "sum times the sum": (REFUSED, lambda v: v.sum() * v.sum(), None),
    "sum times its inverse": (REFUSED, lambda v: v.sum() / (1 + v.square().sum()), None),
    "two sums": (EXACT, lambda v: v.sum() + v.square().mean(), lambda v: v + v.square() / N),
    "maximum": (EITHER, lambda v: v.max(), lambda v: v * (v == v.max())),
    "median": (EITHER, lambda v: v.median(), lambda v: v * (v == v.median())),
    "one sample": (EITHER, lambda v: v[2], lambda v: v * torch.tensor([0, 0, 1, 0])),
    "difference of two samples": (
        EITHER,
        lambda v: v[2] - v[0],
        lambda v: v * torch.tensor([-1, 0, 1, 0]),
    ),
    "half": (EITHER, lambda v: v[:2].sum(), lambda v: v * torch.tensor([1, 1, 0, 0])),
    "mean of a mask": (EITHER, lambda v: v[LABELS > 0].mean(), lambda v: v * (LABELS > 0) / 3),
    "softplus of the sum": (REFUSED, lambda v: F.softplus(v.sum()), None),
    "relu of the mean": (REFUSED, lambda v: v.mean().relu() + v.mean().neg().relu(), None),
    "clamped mean": (REFUSED, lambda v: v.mean().clamp(-1e9, 1e9), None),
    "absolute sum": (REFUSED, lambda v: v.sum().abs(), None),
    "where on the sum": (REFUSED, lambda v: torch.where(v.sum() > 0, v.sum(), 2 * v.sum()), None),
    "sum as a vector of one": (EITHER, lambda v: v.sum()[None], lambda v: v),
    "mean over (1, n)": (EXACT, lambda v: v[None].mean(), lambda v: v / N),
    "logcumsumexp, last": (REFUSED, lambda v: v.logcumsumexp(0)[-1], None),
    "cumsum, last": (EITHER, lambda v: v.cumsum(0)[-1], lambda v: v),
    "sum of a product with the flip": (REFUSED, lambda v: (v * v.flip(0)).sum(), None),
    "sum of the sorted": (EITHER, lambda v: v.sort()[0].sum(), lambda v: v),
    "weighted by rank": (
        EITHER,
        lambda v: v.sort()[0] @ torch.arange(N).double(),
        lambda v: v * v.argsort().argsort(),
    ),
}


def scalars() -> Iterator[Script]:
    """Losses that are a number."""
    model = two()
    for name, (expectation, scalar, parts) in SCALARS.items():
        parts = parts or (lambda v: v / N)
        run = lambda scalar=scalar, parts=parts: scaled(
            model, lambda: scalar(spread(model(X))), lambda: parts(spread(model(X)))
        )
        yield Script(f"scalar: {name}", run, expectation)
    ce = lambda **o: F.cross_entropy(model(X), LABELS, **o)
    yield Script(
        "scalar: cross entropy", lambda: scaled(model, ce, lambda: ce(reduction="none") / N), EXACT
    )
    yield Script(
        "scalar: cross entropy with ignored labels",
        lambda: scaled(
            model, lambda: ce(ignore_index=1), lambda: ce(ignore_index=1, reduction="none") / 2
        ),
        EITHER,
    )
    weights = torch.arange(1.0, 5).double()
    yield Script(
        "scalar: cross entropy with class weights",
        lambda: scaled(
            model,
            lambda: ce(weight=weights),
            lambda: ce(weight=weights, reduction="none") / weights[LABELS].sum(),
        ),
        EITHER,
    )
    yield Script(
        "scalar: batchmean",
        lambda: scaled(
            model,
            lambda: F.kl_div(model(X), Y.softmax(1), reduction="batchmean"),
            lambda: F.kl_div(model(X), Y.softmax(1), reduction="none").sum(1) / N,
        ),
        EXACT,
    )
    decay = lambda: spread(model(X)).sum() + model.l.weight.square().sum()
    yield Script(
        "scalar: sum and weight decay",
        lambda: scaled(model, decay, lambda: spread(model(X))),
        REFUSED,
    )
    mean_decay = lambda: (spread(model(X)) + model.l.weight.square().sum()).mean()
    yield Script(
        "scalar: mean of regularised losses",
        lambda: scaled(
            model, mean_decay, lambda: (spread(model(X)) + model.l.weight.square().sum()) / N
        ),
        EITHER,
    )
    learned = lambda: (spread(model(X)) * model(X)[:, 0]).sum() / model(X)[:, 0].sum()
    yield Script(
        "scalar: normalised by learned weights",
        lambda: scaled(model, learned, lambda: spread(model(X))),
        REFUSED,
    )
    by_weight = lambda: spread(model(X)).mean() * model.l.weight.sum()
    yield Script(
        "scalar: mean times a parameter",
        lambda: scaled(model, by_weight, lambda: spread(model(X)) * model.l.weight.sum() / N),
        EITHER,
    )


def marks() -> Iterator[Script]:
    """Samples named by the user."""
    model = two()
    ids = torch.tensor([0, 0, 1, 2, 2, 2])
    rows = rand(6, N)

    def grouped(n: int, chosen: Tensor) -> Rows:
        each = native(model, spread(model(rows)))
        shape = lambda g: g.new_zeros(n, *g.shape[1:])
        keep = chosen >= 0
        return {k: shape(g).index_add(0, chosen[keep], g[keep]) for k, g in each.items()}

    run = lambda: spread(model(rows))
    options = {"n": 3, "sample_ids": ids}
    yield Script("sample_ids", lambda: (found(model, run, **options), grouped(3, ids)), EITHER)
    mixed = torch.tensor([2, 0, 1, 0, 2, 1])
    options = {"n": 3, "sample_ids": mixed}
    yield Script(
        "sample_ids, interleaved", lambda: (found(model, run, **options), grouped(3, mixed)), EITHER
    )
    halves = lambda: spread(model(rows).view(3, 2, N).sum(1))
    yield Script(
        "sample_ids, grouped as declared by pairs",
        lambda: (
            found(model, halves, n=3, sample_ids=torch.arange(3).repeat_interleave(2)),
            native(model, halves()),
        ),
        EITHER,
    )
    yield Script(
        "sample_ids, grouped otherwise",
        lambda: (found(model, halves, n=3, sample_ids=mixed), native(model, halves())),
        REFUSED,
    )
    yield Script(
        "sample_ids out of range",
        lambda: (found(model, run, n=2, sample_ids=ids), grouped(3, ids)),
        REFUSED,
    )
    yield Script(
        "sample_ids, none for one row",
        lambda: (
            found(model, run, n=3, sample_ids=torch.tensor([0, -1, 1, 2, 2, 2])),
            grouped(3, torch.tensor([0, -1, 1, 2, 2, 2])),
        ),
        EITHER,
    )
    yield Script("mark with ids", lambda: (marked(model, rows, ids), grouped(3, ids)), EITHER)
    yield Script(
        "mark the wrong axis",
        lambda: (marked_axis(model, 1), native(model, spread(model(X)))),
        EITHER,
    )
    yield Script("gradient penalty of a marked input", penalty, EITHER)
    yield Script("input that requires a gradient", leaf_input, EXACT)
    yield Script("input from another model", other_model, EXACT)


def marked(model: nn.Module, rows: Tensor, ids: Tensor) -> Rows:
    """Mark instead of passing sample_ids."""
    with persample.record(model, n=3) as tape:
        tape.backward(spread(model(tape.mark(rows, ids=ids))))
    return tape.grads()


def marked_axis(model: nn.Module, dim: int) -> Rows:
    """A mark that contradicts the model: its layers mix what was marked."""
    with persample.record(model) as tape:
        tape.backward(spread(model(tape.mark(X.clone(), dim=dim))))
    return tape.grads()


def penalty() -> Pair:
    """The gradient by the input, differentiated again."""
    model = two()

    def losses(mark: Callable[[Tensor], Tensor]) -> Tensor:
        x = mark(X.clone().requires_grad_())
        (grad,) = torch.autograd.grad(model(x).tanh().sum(), x, create_graph=True)
        return (grad.norm(dim=1) - 1).square()

    with persample.record(model) as tape:
        tape.backward(losses(tape.mark))
    return tape.grads(), native(model, losses(lambda t: t))


def leaf_input() -> Pair:
    """Adversarial training, or a saliency map."""
    model, x = two(), X.clone().requires_grad_()
    return both(model, lambda: spread(model(x)))


def other_model() -> Pair:
    """Features with a gradient history that is not recorded."""
    model, encoder = two(), lin(seed=9)
    return both(model, lambda: spread(model(encoder(X))))


def doubled(rows: Rows, factor: float) -> Rows:
    """All rows times a number."""
    return {k: factor * g for k, g in rows.items()}


def after_block() -> Pair:
    """Backward after the block."""
    model = two()
    with persample.record(model) as tape:
        losses = spread(model(X))
    tape.backward(losses)
    return tape.grads(), native(model, spread(model(X)))


def backward_twice() -> Pair:
    """Two losses of one output: accumulated or refused."""
    model = two()
    with persample.record(model) as tape:
        out = model(X)
        tape.backward(spread(out), retain_graph=True)
        tape.backward(out.square().sum(1))
    return tape.grads(), native(model, spread(model(X)) + model(X).square().sum(1))


def interleaved() -> Pair:
    """Forward A, forward B, backward A, backward B, on one tape."""
    model = two()
    with persample.record(model) as tape:
        a, b = spread(model(X)), spread(model(Y))
        tape.backward(a)
        tape.backward(b)
    return tape.grads(), native(model, spread(model(X)) + spread(model(Y)))


def one_of_two() -> Pair:
    """Two forwards, one backward."""
    model = two()
    with persample.record(model) as tape:
        a, b = spread(model(X)), spread(model(Y))
        tape.backward(b)
    return tape.grads(), native(model, spread(model(Y)))


def two_tapes() -> Pair:
    """Two recordings; the first one's backward comes last."""
    model = two()
    with persample.record(model) as first:
        a = spread(model(X))
    with persample.record(model) as second:
        second.backward(spread(model(Y)))
    first.backward(a)
    joined = {f"a.{k}": g for k, g in first.grads().items()}
    joined |= {f"b.{k}": g for k, g in second.grads().items()}
    wanted = {f"a.{k}": g for k, g in native(model, spread(model(X))).items()}
    wanted |= {f"b.{k}": g for k, g in native(model, spread(model(Y))).items()}
    return joined, wanted


def nested_tapes() -> Pair:
    """A recording inside a recording."""
    model = two()
    with persample.record(model) as outer:
        a = spread(model(X))
        with persample.record(model) as inner:
            inner.backward(spread(model(Y)))
        outer.backward(a)
    return outer.grads(), native(model, spread(model(X)))


def nested_models() -> Pair:
    """A recording of a part inside the recording of the whole."""
    model = two()
    with persample.record(model) as outer:
        with persample.record(model.k) as inner:
            losses = spread(model(X))
        outer.backward(losses)
        del inner
    return outer.grads(), native(model, spread(model(X)))


def crossed_tapes() -> Pair:
    """The losses of one recording given to another."""
    model = two()
    with persample.record(model) as first:
        losses = spread(model(X))
    with persample.record(model) as second:
        model(Y)
        second.backward(losses)
    del first
    return second.grads(), native(model, spread(model(X)))


def several_forwards() -> Pair:
    """The same samples twice."""
    model = two()
    return both(model, lambda: spread(model(X)) + spread(model(X * 2)))


def other_samples() -> Pair:
    """A second batch whose samples are others: row i of both count as sample i."""
    model = two()
    return both(model, lambda: spread(model(X)) * spread(model(Y)))


def other_size() -> Pair:
    """A second batch of another size."""
    model = two()
    return both(model, lambda: spread(model(X)) + spread(model(Y[:2])).sum())


def fed_back() -> Pair:
    """The model's own output is its next input."""
    model = two()
    return both(model, lambda: spread(model(model(X))))


def fed_back_crossed() -> Pair:
    """The model's own output, in another order, is its next input."""
    model = two()
    return both(model, lambda: spread(model(X) * model(model(X).flip(0))))


def fed_back_transposed() -> Pair:
    """The model's own output, transposed, is its next input: it has n rows too."""
    model = two()
    return both(model, lambda: spread(model(model(X).T)))


def fed_back_mixed() -> Pair:
    """The model's own output, mixed over samples, is its next input."""
    model = two()
    return both(model, lambda: spread(model(model(X).softmax(0))))


def hidden_state() -> Pair:
    """A state carried between calls."""
    model = Net(lambda m, x, s: torch.tanh(m.l(x) + m.k(s)), l=lin(), k=lin(seed=2))

    def losses() -> Tensor:
        state = torch.zeros(N, N, dtype=torch.float64)
        for step in range(N):
            state = model(CUBE[:, step], state)
        return spread(state)

    return both(model, losses)


def exception_first() -> Pair:
    """A forward that fails, then a fresh recording."""
    model = two()
    try:
        with persample.record(model) as tape:
            model(X)
            raise ValueError
    except ValueError:
        pass
    del tape
    return both(model, lambda: spread(model(X)))


def failed_backward_first() -> Pair:
    """A refused backward, then a right one on the same tape."""
    model = two()
    with persample.record(model) as tape:
        out = model(X)
        try:
            tape.backward(spread(out.T), retain_graph=True)
        except persample.PersampleError:
            pass
        tape.backward(spread(out))
    return tape.grads(), native(model, spread(model(X)))


def user_backward_first() -> Pair:
    """A plain backward on the losses before the tape's: both count, as they do in ``.grad``."""
    model = two()
    with persample.record(model) as tape:
        losses = spread(model(X))
        losses.sum().backward(retain_graph=True)
        tape.backward(losses)
    return tape.grads(), doubled(native(model, spread(model(X))), 2.0)


def user_backward_only() -> Pair:
    """A plain backward instead of the tape's."""
    model = two()
    with persample.record(model) as tape:
        (3 * spread(model(X))).sum().backward()
    return tape.grads(), native(model, 3 * spread(model(X)))


def mixed_backward_first() -> Pair:
    """A plain backward of a loss that mixes, before the tape's."""
    model = two()
    with persample.record(model) as tape:
        out = model(X)
        (out.sum() ** 2).backward(retain_graph=True)
        tape.backward(spread(out))
    return tape.grads(), native(model, spread(model(X)))


def mixed_backward_after() -> Pair:
    """A plain backward of a loss that mixes, after the block."""
    model = two()
    with persample.record(model) as tape:
        out = model(X)
        tape.backward(spread(out), retain_graph=True)
    (out.sum() ** 2).backward()
    return tape.grads(), native(model, spread(model(X)))


def saliency_first() -> Pair:
    """autograd.grad of a loss that mixes, by a hidden tensor, before the tape's backward."""
    model = two()
    with persample.record(model) as tape:
        hidden = model.l(X).tanh()
        out = model.k(hidden)
        torch.autograd.grad(out.sum() ** 2, hidden, retain_graph=True)
        tape.backward(spread(out))
    return tape.grads(), native(model, spread(model(X)))


def kept_gradient() -> Pair:
    """A hook keeps a gradient; it is overwritten before the query."""
    model = two()
    kept: list[Tensor] = []
    with persample.record(model) as tape:
        out = model(X)
        out.register_hook(lambda grad: kept.append(grad))
        tape.backward(spread(out))
    kept[0].zero_()
    return tape.grads(), native(model, spread(model(X)))


def retained_gradient() -> Pair:
    """A retained gradient is overwritten before the query."""
    model = two()
    with persample.record(model) as tape:
        out = model(X)
        out.retain_grad()
        tape.backward(spread(out))
    out.grad.zero_()
    return tape.grads(), native(model, spread(model(X)))


def hidden_overwritten() -> Pair:
    """An activation is overwritten before the query."""
    model = two()
    with persample.record(model) as tape:
        hidden = model.l(X).tanh()
        tape.backward(spread(model.k(hidden)))
    with torch.no_grad():
        hidden.zero_()
    return tape.grads(), native(model, spread(model(X)))


def buffer_of_batches() -> Pair:
    """One input buffer for two batches inside one block."""
    model, buffer = two(), X.clone()
    with persample.record(model) as tape:
        tape.backward(spread(model(buffer)))
        buffer.copy_(Y)
        tape.backward(spread(model(buffer)))
    return tape.grads(), native(model, spread(model(X)) + spread(model(Y)))


def changed(when: str, what: str) -> Callable[[], Pair]:
    """A tensor is overwritten between forward, backward and the query."""

    def run() -> Pair:
        model, x = two(), X.clone()
        expected = native(model, spread(model(x)))
        with persample.record(model) as tape:
            losses = spread(model(x))
            if when == "before backward":
                overwrite(model, x, what)
            tape.backward(losses)
        if when == "before the query":
            overwrite(model, x, what)
        return tape.grads(), expected

    return run


def overwrite(model: nn.Module, x: Tensor, what: str) -> None:
    """Change the input or the parameters."""
    with torch.no_grad():
        if what == "input":
            x.mul_(2)
        if what == "input data":
            x.data.mul_(2)
        if what == "input numpy":
            x.numpy()[:] *= 2
        if what == "parameters":
            for parameter in model.parameters():
                parameter.mul_(2)
        if what == "parameter data":
            for parameter in model.parameters():
                parameter.data = parameter.data * 2
        if what == "optimizer step":
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            torch.optim.SGD(model.parameters(), 1.0).step()


def cached_outside() -> Pair:
    """A derived parameter that was computed before the recording."""
    model = Net(lambda m, x: x @ m.cache, w=rand(N, N, seed=6))
    object.__setattr__(model, "cache", model.w * 2)
    return both(model, lambda: spread(model(X)))


def cached_partly() -> Pair:
    """A parameter used directly and by a tensor from before the recording."""
    model = Net(lambda m, x: (x @ m.cache) * (x @ m.w), w=rand(N, N, seed=6))
    object.__setattr__(model, "cache", model.w * 2)
    return both(model, lambda: spread(model(X)))


def cached_between() -> Pair:
    """A derived parameter kept from another recording."""
    model = Net(cached_weight, w=rand(N, N, seed=6))
    found(model, lambda: spread(model(X)))
    return both(model, lambda: spread(model(Y)))


def cached_weight(m: nn.Module, x: Tensor) -> Tensor:
    """Computed at the first call only; a leaf afterwards keeps its graph."""
    if not hasattr(m, "cache"):
        object.__setattr__(m, "cache", m.w.tanh())
    return x @ m.w + (x @ m.cache).detach() * (x @ m.w)


def foreign_parameter() -> Pair:
    """A parameter of another module takes part."""
    model, other = two(), lin(seed=7)
    return both(model, lambda: spread(other(model(X))))


def foreign_mixing() -> Pair:
    """Another module mixes the samples."""
    model, norm = two(), nn.BatchNorm1d(N).double()
    return both(model, lambda: spread(norm(model(X))))


def replaced_parameter() -> Pair:
    """A parameter object is replaced inside the block."""
    model = two()
    with persample.record(model) as tape:
        model.l.weight = nn.Parameter(model.l.weight.detach() * 2)
        tape.backward(spread(model(X)))
    return tape.grads(), native(model, spread(model(X)))


def frozen_inside() -> Pair:
    """A parameter is frozen inside the block."""
    model = two()
    with persample.record(model) as tape:
        model.l.weight.requires_grad_(False)
        tape.backward(spread(model(X)))
    rows = native(model, spread(model(X)))
    answer = tape.grads()
    return {k: answer[k] for k in rows}, rows


def some_parameters() -> Pair:
    """Only some parameters are asked for."""
    model = two()
    rows = native(model, spread(model(X)))
    answer = found(model, lambda: spread(model(X)), params=["l.weight"])
    return answer, {"l.weight": rows["l.weight"]}


def mixing_before_chosen() -> Pair:
    """Samples mix in front of the only parameter asked for: exact natively, mixed alone."""
    model = Net(lambda m, x: m.k(m.l(x) - m.l(x).mean(0)), l=lin(), k=lin(seed=2))
    rows = native(model, spread(model(X)))
    answer = found(model, lambda: spread(model(X)), params=["k.weight"])
    return answer, {"k.weight": rows["k.weight"]}


def mixing_after_chosen() -> Pair:
    """Samples mix behind the only parameter asked for."""
    model = Net(lambda m, x: m.k(m.l(x) - m.l(x).mean(0)), l=lin(), k=lin(seed=2))
    rows = native(model, spread(model(X)))
    answer = found(model, lambda: spread(model(X)), params=["l.weight"])
    return answer, {"l.weight": rows["l.weight"]}


def loss_scale() -> Pair:
    """Loss scaling is divided out."""
    model = two()
    with persample.record(model) as tape:
        tape.backward(spread(model(X)), scale=1024.0)
    return tape.grads(), native(model, spread(model(X)))


def under_no_grad() -> Pair:
    """Nothing to differentiate."""
    model = two()
    with torch.no_grad():
        return found(model, lambda: spread(model(X))), native(model, spread(model(X)))


def first_result_spoilt() -> Pair:
    """The caller writes into the first answer."""
    model = two()
    with persample.record(model) as tape:
        tape.backward(spread(model(X)))
    for rows in tape.grads().values():
        rows.zero_()
    return tape.grads(), native(model, spread(model(X)))


def evaluation_between() -> Pair:
    """A forward of other data without gradients inside the block."""
    model = two()
    with persample.record(model) as tape:
        losses = spread(model(X))
        with torch.no_grad():
            model(rand(7, N))
        tape.backward(losses)
    return tape.grads(), native(model, spread(model(X)))


def evaluation_first() -> Pair:
    """A forward of fewer data, first."""
    model = two()
    with persample.record(model) as tape:
        with torch.no_grad():
            model(rand(7, N))
        tape.backward(spread(model(X)))
    return tape.grads(), native(model, spread(model(X)))


def micro_batches() -> Pair:
    """Gradient accumulation over two halves inside one block."""
    model = two()
    with persample.record(model) as tape:
        for half in X.chunk(2):
            tape.backward(spread(model(half)))
    each = native(model, spread(model(X)))
    return tape.grads(), {k: g[:2] + g[2:] for k, g in each.items()}


def loop(body: Callable[..., Tensor], **parts: Any) -> Callable[[], Pair]:
    """Mixing samples with unproven="loop": the rows of the native graph."""

    def run() -> Pair:
        model = Net(body, **parts)
        return both(model, lambda: seeded_rows(model), unproven="loop")

    return run


def seeded_rows(model: nn.Module) -> Tensor:
    """The default loss after setting the seed."""
    torch.manual_seed(5)
    return row_losses(model, (X,))


def frozen_model() -> Pair:
    """Nothing is trainable."""
    model = two().requires_grad_(False)
    with persample.record(model) as tape:
        tape.backward(spread(model(X)))
    return tape.grads(), {}


def lone_tokens() -> Pair:
    """The oracle of the package itself, on tokens."""
    model = nn.Sequential(seeded(nn.Embedding(N, N)), lin())
    loss = lambda m, b: spread(m(b[0]))
    return found(model, lambda: loss(model, (ints(N, N),))), oracle(model, loss, (ints(N, N),))


ORDERS: dict[str, tuple[str, Callable[[], Pair]]] = {
    "backward after the block": (EXACT, after_block),
    "two backwards": (EITHER, backward_twice),
    "forward A B, backward A B": (EITHER, interleaved),
    "two forwards, one backward": (EXACT, one_of_two),
    "two tapes, crossed in time": (EXACT, two_tapes),
    "tape in a tape": (EITHER, nested_tapes),
    "tape of a part in a tape": (EITHER, nested_models),
    "losses of another tape": (REFUSED, crossed_tapes),
    "several forwards": (EXACT, several_forwards),
    "two batches, row by row": (EITHER, other_samples),
    "two batches of different sizes": (EITHER, other_size),
    "fed back": (EXACT, fed_back),
    "fed back, crossed": (REFUSED, fed_back_crossed),
    "fed back, transposed": (REFUSED, fed_back_transposed),
    "fed back, mixed": (REFUSED, fed_back_mixed),
    "hidden state": (EXACT, hidden_state),
    "exception, then fresh": (EXACT, exception_first),
    "refused backward, then right": (EITHER, failed_backward_first),
    "plain backward first": (EITHER, user_backward_first),
    "plain backward only": (EITHER, user_backward_only),
    "plain mixing backward first": (REFUSED, mixed_backward_first),
    "plain mixing backward after": (EITHER, mixed_backward_after),
    "saliency first": (EITHER, saliency_first),
    "kept gradient overwritten": (EITHER, kept_gradient),
    "retained gradient overwritten": (EITHER, retained_gradient),
    "activation overwritten": (EITHER, hidden_overwritten),
    "one input buffer, two batches": (EITHER, buffer_of_batches),
    "cached before the block": (EITHER, cached_outside),
    "cached before the block, partly": (EITHER, cached_partly),
    "cached between blocks": (EITHER, cached_between),
    "foreign parameter": (EXACT, foreign_parameter),
    "foreign mixing": (REFUSED, foreign_mixing),
    "parameter replaced": (EITHER, replaced_parameter),
    "parameter frozen inside": (EITHER, frozen_inside),
    "some parameters": (EXACT, some_parameters),
    "mixing before the parameter": (EITHER, mixing_before_chosen),
    "mixing after the parameter": (REFUSED, mixing_after_chosen),
    "loss scale": (EXACT, loss_scale),
    "no_grad": (REFUSED, under_no_grad),
    "answer spoilt by the caller": (EXACT, first_result_spoilt),
    "evaluation between": (EXACT, evaluation_between),
    "evaluation first": (EITHER, evaluation_first),
    "micro batches": (EITHER, micro_batches),
    "frozen model": (EITHER, frozen_model),
    "tokens": (EXACT, lone_tokens),
    "loop: mean": (EXACT, loop(lambda m, x: m.l(x) - m.l(x).mean(0), l=lin())),
    "loop: transposed": (EXACT, loop(lambda m, x: m.l(x).T, l=lin())),
    "loop: dropout": (EXACT, loop(lambda m, x: F.dropout(m.l(x)).cumsum(0), l=lin())),
    "loop: batch norm": (
        EXACT,
        loop(lambda m, x: m.b(m.l(x)), l=lin(), b=seeded(nn.BatchNorm1d(N))),
    ),
    "loop: half opaque": (
        EXACT,
        loop(lambda m, x: m.l(x) + torch.linalg.solve(m.w, x.T).T, l=lin(), w=rand(N, N, seed=6)),
    ),
}


def scripts() -> Iterator[Script]:
    """All of this file."""
    yield from mask_cases()
    yield from time_first()
    yield from scalars()
    yield from marks()
    for name, (expectation, run) in ORDERS.items():
        yield Script(f"order: {name}", run, expectation)
    whats = ("input", "input data", "parameters", "parameter data", "optimizer step")
    for when in ("before backward", "before the query"):
        for what in whats:
            silent = "data" in what and when == "before backward"
            if not silent:  # autograd itself does not notice
                yield Script(f"changed {when}: {what}", changed(when, what), EITHER)
