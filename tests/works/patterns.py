"""Patterns of training programs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import persample
from persample import private
from persample.testing import oracle, relative_error

from ..models import Fn
from .base import (
    Cases,
    Outcome,
    alone,
    answers,
    data,
    gradients,
    net,
    refusal,
    squares,
    sums,
)

CASES = Cases("Training programs")


def same_as_plain(model: nn.Module, x: Tensor | None = None) -> Outcome:
    """Rows add up to the plain program's gradient; its buffers and random numbers are the same."""
    x = data() if x is None else x
    twin = copy.deepcopy(model)
    torch.manual_seed(5)
    squares(twin, x).sum().backward()
    state = torch.get_rng_state()
    torch.manual_seed(5)
    with persample.record(model) as tape:
        tape.backward(squares(model, x))
    same = torch.equal(torch.get_rng_state(), state)
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        same = same and torch.equal(mine, theirs)
    error = relative_error(sums(tape.grads()), gradients(twin))
    return Outcome(error if same else float("inf"))


@CASES.right("gradient accumulation: set_grad(..., accumulate=True)")
def accumulation() -> Outcome:
    model, twin, x = net(), net(), data(12, 5)
    for part in x.split(4):
        with persample.record(model) as tape:
            tape.backward(squares(model, part))
        tape.set_grad(tape.clipped_sum(0.5), accumulate=True)
    rows = oracle(twin, squares, x)
    norms = torch.cat([g.flatten(1) for g in rows.values()], 1).norm(dim=1)
    c = (0.5 / norms).clamp(max=1)
    expected = {name: torch.tensordot(c, g, 1) for name, g in rows.items()}
    return Outcome(relative_error(gradients(model), expected))


@CASES.right("several forwards of the same samples in one loss")
def several() -> Outcome:
    return alone(net(), data(), lambda m, x: squares(m, x) + squares(m, x.tanh()))


@CASES.refused("forwards of different numbers of samples in one recording")
def different() -> Outcome:
    model = net()
    with persample.record(model) as tape:
        tape.backward(squares(model, data(4, 5)))
        tape.backward(squares(model, data(3, 5)))
    return Outcome(0.0)


@CASES.right("one output in two losses, added or back-propagated one by one")
def two_losses() -> Outcome:
    model, x = net(), data()
    both = lambda m, x: m(x).square().sum(1) + m(x).abs().sum(1)
    expected = oracle(model, both, x)
    with persample.record(model) as tape:
        out = model(x)
        tape.backward(out.square().sum(1), retain_graph=True)
        tape.backward(out.abs().sum(1))
    return Outcome(max(answers(tape, expected), alone(model, x, both).error))


@CASES.refused("two micro-batches in one block, one backward each")
def micro_batches() -> Outcome:
    model = net()
    with persample.record(model) as tape:
        tape.backward(squares(model, data()))
        tape.backward(squares(model, data() * 2))
    return Outcome(0.0)


@CASES.refused("forward A, forward B, backward A, backward B")
def crossed() -> Outcome:
    model = net()
    with persample.record(model) as tape:
        first, second = squares(model, data()), squares(model, data() * 2)
        tape.backward(first)
        tape.backward(second)
    return Outcome(0.0)


def twice(record: Callable[[nn.Module], Any], backward: Callable[..., None]) -> Outcome:
    """Two views of the same samples, whose losses are added up."""
    model, a = net(), data()
    expected = oracle(model, lambda m, x: squares(m, x) + squares(m, 2 * x), a)
    with record(model) as tape:
        backward(tape, squares(model, a), squares(model, a.clone() * 2))
    return Outcome(answers(tape, expected))


def one_by_one(tape: persample.Tape, first: Tensor, second: Tensor) -> None:
    tape.backward(first)
    tape.backward(second)


CASES.right(
    "two views of the same samples: tape.backward(a + b)",
    persample.record, lambda tape, a, b: tape.backward(a + b),
)(twice)  # fmt: skip
CASES.right(
    "two views of the same samples, one backward each: record(..., same_samples=True)",
    lambda model: persample.record(model, same_samples=True), one_by_one,
)(twice)  # fmt: skip


@CASES.right("two recordings open one after the other, backward in the other order")
def later() -> Outcome:
    model, a, b = net(), data(), data(3, 5)
    with persample.record(model) as one:
        first = squares(model, a)
    with persample.record(model) as two:
        second = squares(model, b)
    two.backward(second)
    one.backward(first)
    errors = [
        answers(one, oracle(model, squares, a)),
        answers(two, oracle(model, squares, b)),
    ]
    return Outcome(max(errors))


def drawing(layer: Callable[[], nn.Module]) -> Outcome:
    return same_as_plain(nn.Sequential(nn.Linear(5, 6), layer(), nn.Linear(6, 3)).double())


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * torch.rand(x.shape[0], 1, dtype=x.dtype)


CASES.right("dropout", lambda: nn.Dropout(0.5))(drawing)
CASES.right("alpha dropout, RReLU", lambda: nn.Sequential(nn.AlphaDropout(0.3), nn.RReLU()))(
    drawing
)
CASES.right("noise drawn in forward (randn_like, stochastic depth)", Noise)(drawing)
CASES.right("spectral_norm in training: its buffers move as in the plain program",
            lambda: parametrizations.spectral_norm(nn.Linear(6, 6)))(drawing)  # fmt: skip


@CASES.refused("training BatchNorm")
def batch_norm() -> Outcome:
    return recorded(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)).double())


def recorded(model: nn.Module) -> Outcome:
    """For models that a single sample cannot run through."""
    with persample.record(model) as tape:
        tape.backward(squares(model, data()))
    return Outcome(float("inf"))


@CASES.right("train() and eval() between steps: BatchNorm in eval mode")
def modes() -> Outcome:
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double()
    model(data())  # moves the running statistics
    refusal(lambda: recorded(model))
    return alone(model.eval())


@CASES.right("no_grad segments and detached tensors")
def segments() -> Outcome:
    def f(s: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = s.m[:2](x)
        return s.m[2:](h) + s.m(x).detach()

    return alone(Fn(f, m=net()))


@CASES.right("freezing and unfreezing between steps")
def freezing() -> Outcome:
    model = net()
    errors = []
    for trainable in (True, False, True):
        model[0].requires_grad_(trainable)
        model[4].bias.requires_grad_(not trainable)
        errors.append(alone(model).error)
    return Outcome(max(errors))


@CASES.right("parameters and modules added between steps")
def added() -> Outcome:
    model = net()
    first = alone(model).error
    model.append(nn.Linear(3, 2).double())
    model[0].register_parameter("extra", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    return Outcome(max(first, alone(model).error))


@CASES.right("lazy modules after their first call")
def lazy() -> Outcome:
    model = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(2)).double()
    model(data())
    return alone(model)


@CASES.right("lazy modules that are called in the recording for the first time")
def uninitialised() -> Outcome:
    model = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(2)).double()
    with persample.record(model) as tape:
        tape.backward(squares(model, data()))
    return Outcome(answers(tape, oracle(model, squares, data())))


@CASES.right("torch.func.functional_call with other tensors")
def functional() -> Outcome:
    model, x = net(), data()
    others = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
    twin = net()
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter *= 1.5
    with persample.record(model) as tape:
        tape.backward(torch.func.functional_call(model, others, (x,)).square().sum(1))
    return Outcome(answers(tape, oracle(twin, squares, x)))


@CASES.refused("torch.func.functional_call with other tensors beside the model itself")
def both() -> Outcome:
    model, x = net(), data()
    others = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}
    with persample.record(model) as tape:
        out = model(x) + torch.func.functional_call(model, others, (x,))
        tape.backward(out.square().sum(1))
    return Outcome(float("inf"))


@CASES.right("torch.vmap over samples, with parameters inside")
def mapped() -> Outcome:
    model = nn.Sequential(nn.Linear(5, 5), Fn(lambda s, h: torch.vmap(s.m)(h), m=net())).double()
    return alone(model)


@CASES.right("a teacher by torch.func.functional_call, without gradients")
def taught() -> Outcome:
    model = net()
    others = {name: (p.detach() * 1.5).requires_grad_() for name, p in model.named_parameters()}

    def distance(model: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = torch.func.functional_call(model, others, (x,))
        out: Tensor = (model(x) - aim).square().sum(1)
        return out

    with persample.record(model) as tape:
        tape.backward(distance(model, data()))
    return Outcome(answers(tape, oracle(model, distance, data())))


class Labelled(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Labelled):
            out.label = "x"  # type: ignore[attr-defined]
        return out


@CASES.right("inputs of a class with a __torch_function__ of its own")
def labelled() -> Outcome:
    model, x = net(), data()
    with persample.record(model) as tape:
        tape.backward(squares(model, x.as_subclass(Labelled)))
    return Outcome(answers(tape, oracle(model, squares, x)))


def parametrized(wrap: Callable[[nn.Linear], Any]) -> Outcome:
    model = net()
    wrap(model[2])
    return alone(model.eval())


PARAMETRIZATIONS: dict[str, Callable[[nn.Linear], Any]] = {
    "parametrizations.weight_norm": parametrizations.weight_norm,
    "parametrizations.spectral_norm in eval mode": parametrizations.spectral_norm,
    "parametrizations.orthogonal": parametrizations.orthogonal,
    "prune.random_unstructured": lambda m: prune.random_unstructured(m, "weight", 0.4),
    "the older nn.utils.weight_norm": lambda m: _older(m),
}


def _older(module: nn.Linear) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.nn.utils.weight_norm(module)


for _name, _wrap in PARAMETRIZATIONS.items():
    CASES.right(_name, _wrap)(parametrized)


@CASES.right("deepcopy and pickle of the model, also while it is recorded")
def copies() -> Outcome:
    model, x = net(), data()
    expected = oracle(model, squares, x)
    with persample.record(model) as tape:
        losses = squares(model, x)
        twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        tape.backward(losses)
    errors = [answers(tape, expected)]
    for twin in twins:
        with persample.record(twin) as other:
            other.backward(squares(twin, x))
        errors.append(answers(other, expected))
    return Outcome(max(errors))


def penalised(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    losses = squares(model, x)
    (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + slope.square().sum(1)


@CASES.right("gradient penalty (create_graph=True)")
def penalty() -> Outcome:
    return alone(net(), data(), penalised)


@CASES.right('gradient penalty with record(..., unproven="loop")')
def penalty_loop() -> Outcome:
    model, x = net(), data()
    with persample.record(model, unproven="loop") as tape:
        tape.backward(penalised(model, x))
    rows = oracle(model, penalised, x)
    size = sum(r.flatten(1).square().sum(1) for r in rows.values()).sqrt()
    limit = float(size.median())
    scale = (limit / size).clamp(max=1)
    summed = {k: torch.einsum("n,n...->...", scale, r) for k, r in rows.items()}
    error = relative_error(tape.grads(), rows)
    return Outcome(max(error, relative_error(tape.clipped_sum(limit), summed)), 1e-6)


@CASES.right("saliency: torch.autograd.grad by the inputs, used as data")
def saliency() -> Outcome:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(squares(model, x).sum(), x)
        return squares(model, x + 0.1 * slope.sign())

    return alone(net(), data(), loss)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * g


class OwnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class Adjoint(torch.autograd.Function):
    """Two steps without a graph; backward runs the field again, and keeps one vector of all."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.field = field
        with torch.no_grad():
            path = [x, x + 0.5 * field(x)]
            path.append(path[1] + 0.5 * field(path[1]))
        ctx.save_for_backward(torch.stack(path), *weights)
        return path[-1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        path, *weights = ctx.saved_tensors
        state = torch.cat([g.flatten(), *(torch.zeros_like(w).flatten() for w in weights)])
        sizes = [g.numel(), *(w.numel() for w in weights)]
        for step in (1, 0):
            here = state[: g.numel()].view_as(g)
            with torch.enable_grad():
                x = path[step].detach().requires_grad_()
                found = torch.autograd.grad(ctx.field(x), (x, *weights), here, allow_unused=True)
            state = state + 0.5 * torch.cat([part.flatten() for part in found])
        parts = zip(state.split(sizes), (g, *weights), strict=True)
        return None, *(part.view(like.shape) for part, like in parts)


@CASES.right("an adjoint: a custom backward that takes gradients by parameters")
def adjoint() -> Outcome:
    def f(s: Any, x: Tensor) -> Tensor:
        return s.m[4](Adjoint.apply(s.m[1:4], s.m[0](x), *s.m[1:4].parameters()))

    return alone(Fn(f, m=net()))


@CASES.right("a custom autograd.Function on data")
def custom() -> Outcome:
    return alone(Fn(lambda s, x: s.m[4](Square.apply(s.m[:4](x))), m=net()))


@CASES.right("a custom autograd.Function on parameters and data")
def custom_parameters() -> Outcome:
    return alone(Fn(lambda s, x: OwnLinear.apply(s.m[:4](x), s.m[4].weight), m=net()))


def observed(hook: Callable[[nn.Sequential], Any]) -> Outcome:
    model = net()
    hook(model)
    return alone(model)


HOOKS: dict[str, Callable[[nn.Sequential], Any]] = {
    "forward hooks that change the output": lambda m: m[0].register_forward_hook(
        lambda module, args, out: out * 2
    ),
    "forward pre-hooks that change the input": lambda m: m[2].register_forward_pre_hook(
        lambda module, args: (args[0] + 1,)
    ),
    "full backward hooks that look": lambda m: m[2].register_full_backward_hook(
        lambda module, found, grads: None
    ),
    "tensor hooks that scale gradients": lambda m: m[2].register_forward_hook(
        lambda module, args, out: _scaling(out)
    ),
}


def _scaling(out: Tensor) -> None:
    if out.requires_grad:
        out.register_hook(lambda g: g * 0.5)


for _name, _hook in HOOKS.items():
    CASES.right(_name, _hook)(observed)
CASES.refused("a gradient hook on a parameter", lambda m: m[0].weight.register_hook(lambda g: g))(
    observed
)
CASES.refused("a post-accumulate-grad hook on a parameter (optimizer in backward)",
              lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda p: None)
              )(observed)  # fmt: skip


@CASES.right("a mean over samples, back-propagated by loss.backward()")
def mean() -> Outcome:
    model, x = net(), data()
    with persample.record(model) as tape:
        squares(model, x).mean().backward()
    expected = {name: g / 4 for name, g in oracle(model, squares, x).items()}
    error = relative_error(tape.grads(), expected)
    return Outcome(error, 1e-10, "clipped_sum", refusal(lambda: tape.clipped_sum(1.0)))


@CASES.right("F.cross_entropy with ignore_index and label_smoothing, one loss per sample")
def ignored() -> Outcome:
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 11)).double()
    ids = torch.randint(11, (4, 6))
    labels = ids.roll(-1, 1).masked_fill(torch.rand(4, 6) < 0.4, -100)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(batch[0]).transpose(1, 2)
        each = F.cross_entropy(
            logits, batch[1], ignore_index=-100, label_smoothing=0.1, reduction="none"
        )
        return each.sum(1) / (batch[1] != -100).sum(1).clamp(min=1)

    return alone(model, (ids, labels), loss)


@CASES.right("losses divided by the batch's token count")
def normalised() -> Outcome:
    model = nn.Sequential(nn.Embedding(11, 5), nn.Linear(5, 11)).double()
    ids = torch.randint(11, (4, 6))

    def loss(model: nn.Module, ids: Tensor, count: Tensor | None) -> Tensor:
        each = F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none")
        return (each * (ids > 3)).sum(1) / ((ids > 3).sum() if count is None else count)

    with persample.record(model) as tape:
        tape.backward(loss(model, ids, None))
    expected = oracle(model, lambda m, i: loss(m, i, (ids > 3).sum()), ids)
    error = relative_error(tape.grads(), expected)
    return Outcome(error, 1e-10, "clipped_sum", refusal(lambda: tape.clipped_sum(1.0)))


def looked_at(h: Tensor) -> Tensor:
    """Reads sizes, checks and a log of each sample's own, as models do."""
    if h.isnan().any() or not (h.abs() < 1e9).all():
        raise ValueError("not finite")
    return (
        torch.stack([row / row.norm().item() for row in h.detach()])
        * h[:, : int(h.detach().abs().max()) + 9]
    )


@CASES.right("numbers read in Python: logs after the losses, sizes, checks, each sample's own")
def numbers_read() -> Outcome:
    model = nn.Sequential(nn.Linear(5, 6), Fn(lambda s, h: looked_at(h)), nn.Linear(6, 3)).double()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        losses = squares(model, x)
        losses.mean().item()
        return losses

    return alone(model, data(), loss)


@CASES.refused("private training with a number of the batch (.item()) before the losses")
def number_of_the_batch() -> Outcome:
    model, x = net(), data(8, 5)
    plan = private.plan(noise_multiplier=1.0, delta=1e-3, size=8, sample_rate=1.0, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    training = private.Training(model, optimizer, x, plan)
    for parts in training.batches():
        for part in parts:
            with training.record() as tape:
                tape.backward(squares(model, part) / part.norm().item())
    return Outcome(0.0)


@CASES.right("a default device (torch.set_default_device, with torch.device(...))")
def default_device() -> Outcome:
    with torch.device(torch.get_default_device()):
        return alone(net())


@CASES.right("inputs named in constants=, also through a wrapper that takes *args")
def wrapped_names() -> Outcome:
    def f(s: Any, x: Tensor, table: Tensor) -> Tensor:
        return s.m(x + table.sum(0))

    class Named(Fn):
        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return f(self, x, table)

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = Named(f, m=net())

        def forward(self, *args: Any) -> Any:
            return self.module(*args)

    model, x, table = Wrapper(), data(), data(4, 5) * 0.1  # as many rows as samples
    expected = oracle(model, lambda m, x: m(x, table).square().sum(1), x)
    with persample.record(model, constants=("table",)) as tape:
        tape.backward(model(x, table).square().sum(1))
    return Outcome(answers(tape, expected))
