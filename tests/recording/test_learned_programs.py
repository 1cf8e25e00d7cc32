"""A model's calls are learned, and followed without being looked at again; what deviates is seen.

Every row records a model twice, so that its program is learned, and a third time with something
else: another branch, hooks, dtypes, writes. The answer must be autograd's, or a refusal.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import persample
from persample.recording.program import _PROGRAMS

N = 4
Step = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two layers, something between them that a test can exchange, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head, self.cell = nn.Linear(4, 2), nn.RNN(4, 4, batch_first=True)
        self.register_buffer("rows", torch.rand(N, 4))
        self.register_buffer("blocks", torch.eye(N))
        self.register_buffer("order", torch.tensor([2, 0, 1, 3]))

    def forward(self, x: Tensor, between: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """X: (samples, 3), or with positions."""
        h = self.first(x).tanh()
        h = h if between is None else between(h)
        return self.head(self.second(h).tanh()).flatten(1).square().sum(1)


def learned(model: nn.Module, x: Tensor, run: Any = None, **options: Any) -> None:
    """Record ordinary steps until nothing is new."""
    for _ in range(2):
        with persample.record(model, **options) as tape:
            tape.backward((run or (lambda m, x: m(x)))(model, x.detach().clone()))
        tape.norms()


def truth(model: nn.Module, x: Tensor, run: Any) -> dict[str, Tensor]:
    """Every loss's gradient by a backward pass of its own."""
    losses, rows = run(model, x), []
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for loss in losses:
        found = torch.autograd.grad(
            loss, list(named.values()), retain_graph=True, allow_unused=True
        )
        pairs = zip(found, named.values(), strict=True)
        rows.append([torch.zeros_like(p) if g is None else g for g, p in pairs])
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(named)}


def test_a_learned_program_is_only_compared(handled: list[str]) -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(N, 3).double()
    learned(model, x)
    handled.clear()
    for _ in range(3):
        x = torch.randn(N, 3).double()
        with persample.record(model) as tape:
            tape.backward(model(x))
        for name, rows in truth(model, x, lambda m, x: m(x)).items():
            torch.testing.assert_close(tape.grads()[name], rows)
    assert handled == []


# What is called between two layers, and which of it is handled in full at every step.
BETWEEN: dict[str, tuple[Callable[[Net, Tensor], Tensor], list[str]]] = {
    "subscripts": (lambda m, h: h[:, [0, 2, 1, 3]] + h[..., None, 0], []),
    "an attribute": (lambda m, h: h.view(N, 2, 2).mT.flatten(1), []),
    "gates": (lambda m, h: torch.nn.functional.glu(torch.cat([h, h], 1), 1), []),
    "a derived weight": (lambda m, h: h @ (2 * m.third.weight), []),
    "a weight's transposed view": (lambda m, h: h @ m.third.weight.t(), []),
    "a shifted bias": (lambda m, h: h + (m.third.bias + 1), []),
    "indices in a tensor": (lambda m, h: h[:, m.order], ["getitem"]),
}


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_learned(name: str, lean: bool, handled: list[str]) -> None:
    torch.manual_seed(0)
    change, rest = BETWEEN[name]
    model, run = Net().double(), between(change)
    learned(model, torch.randn(N, 3).double(), run, lean=lean)
    for _ in range(2):
        x = torch.randn(N, 3).double()
        handled.clear()
        with persample.record(model, lean=lean) as tape:
            tape.backward(run(model, x))
        assert handled == rest
        found = tape.grads()
        for key, rows in truth(model, x, run).items():
            torch.testing.assert_close(found.get(key, torch.zeros_like(rows)), rows)


# Tensors of one shape, derived from parameters in another way than the one that was learned.
DERIVED: dict[str, Callable[[Net], Tensor]] = {
    "of another parameter": lambda m: 3 * m.second.weight,
    "repeated for every sample": lambda m: m.third.bias.expand(N, 4),
    "repeated, then changed": lambda m: (m.third.bias.expand(N, 4) * 2).tanh(),
    "a view": lambda m: m.third.weight.t(),
    "written to": lambda m: (2 * m.third.weight).mul_(3),
    "hooked": lambda m: hooked(2 * m.third.weight, 3.0),
    "rows of a table": lambda m: nn.functional.embedding(m.order, m.third.weight),
    "a constant": lambda m: m.rows,
    "a parameter": lambda m: m.third.weight,
    "detached": lambda m: (2 * m.third.weight).detach(),
}


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", DERIVED)
def test_what_is_derived_in_another_way(name: str, lean: bool) -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(N, 3).double()
    learned(model, x, between(lambda m, h: h * (2 * m.third.weight)), lean=lean)
    run = between(lambda m, h: h * DERIVED[name](m))
    for _ in range(3):
        with persample.record(model, lean=lean) as tape:
            tape.backward(run(model, x))
        found = tape.grads()
        for key, rows in truth(model, x, run).items():
            torch.testing.assert_close(found.get(key, torch.zeros_like(rows)), rows)


@contextlib.contextmanager
def packed() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        yield


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Doubling(TorchFunctionMode):
    """A user's mode that changes what a function does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


class Tanh(torch.autograd.Function):
    """A function of the user's own that does what the program does at this place."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def test_calls_after_custom_functions_are_learned_at_once(handled: list[str]) -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(N, 3).double()

    def step(model: Net, x: Tensor) -> Tensor:
        h = model.first(x)
        for layer in (model.second, model.third, model.second):
            spike = Tanh.apply(h)
            h = layer(spike) + 0.9 * (h - spike)
        return h.square().sum(1)

    counts = []
    for _ in range(4):
        handled.clear()
        with persample.record(model) as tape:
            tape.mark(x)
            losses = step(model, x)
            counts.append(len(handled))
            tape.backward(losses)
    assert counts[1] < counts[0] / 2
    assert counts[1] == counts[2] == counts[3]
    for name, rows in truth(model, x, step).items():
        torch.testing.assert_close(tape.grads()[name], rows, rtol=1e-10, atol=1e-12)


def within(manager: Callable[[], Any]) -> Step:
    """The whole model inside a context manager."""

    def run(model: Net, x: Tensor) -> Tensor:
        with manager():
            return model(x)

    return run


def between(change: Callable[[Net, Tensor], Tensor]) -> Step:
    return lambda model, x: model(x, lambda h: change(model, h))


def hooked(h: Tensor, factor: float) -> Tensor:
    h.register_hook(lambda g: g * factor)
    return h


def scaled_in_part(model: Net, h: Tensor) -> Tensor:
    h = h * 1
    h[:, :2].mul_(3)
    return h


def frozen(model: Net, h: Tensor) -> Tensor:
    model.second.weight.requires_grad_(False)
    return h


def interrupted(model: Net, x: Tensor) -> Tensor:
    def fail(h: Tensor) -> Tensor:
        raise KeyError

    with pytest.raises(KeyError):
        model(x, fail)
    return model(x)


def without_gradients(model: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        shift = model.second(h).tanh()
    return h + shift


def recurrent(model: Net, x: Tensor) -> Tensor:
    """Its steps are calls inside one call."""
    return model(x, lambda h: model.cell(h.unsqueeze(1))[0].squeeze(1) + h)


def outside(model: Net, x: Tensor) -> Tensor:
    h = model.first(x).tanh()
    return model.head(model.second(h * 1).tanh()).square().sum(1) + h.square().sum(1)


RIGHT: dict[str, Step] = {
    "another branch": between(lambda m, h: h.relu()),
    "a call more": between(lambda m, h: h * 2 + 1),
    "a call less": lambda m, x: m.head(m.first(x).tanh()).square().sum(1),
    "another layer": lambda m, x: m.head(m.third(m.first(x).tanh()).tanh()).square().sum(1),
    "another order": lambda m, x: m.head(m.second(m.first(x).tanh())).tanh().square().sum(1),
    "a result of another call": outside,
    "a hook that changes gradients": between(lambda m, h: hooked(h, 2.0)),
    "a custom function": between(lambda m, h: Scaled.apply(h)),
    "a custom function of learned calls": lambda m, x: (
        m.head(m.second(Tanh.apply(m.first(x))).tanh()).square().sum(1)
    ),
    "a parameter frozen on the way": between(frozen),
    "written to in place": between(lambda m, h: (h * 1).add_(1)),
    "written to through a view": between(scaled_in_part),
    "written to through .data": between(lambda m, h: (h.data.mul_(2), h * 1)[1]),
    "detached": between(lambda m, h: h.detach()),
    "detached in place": between(lambda m, h: (h * 1).detach_()),
    "without gradients": between(without_gradients),
    "an exception half-way": interrupted,
    "checkpointed": lambda m, x: m(x, lambda h: checkpoint(m.second, h, use_reentrant=False)),
    "hooks on saved tensors": within(packed),
    "a dispatch mode": within(Watching),
    "a function mode of the user": within(Doubling),
    "autocast": within(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "a parameter beside the layers": between(lambda m, h: h * m.second.bias),
    "a constant": between(lambda m, h: h * m.rows),
    "a Python function of torch": between(lambda m, h: torch.einsum("ni,ij->nj", h, m.rows)),
    "functions with several results": between(lambda m, h: torch.cat(h.split(2, 1)[::-1], 1)),
    "a norm": between(lambda m, h: h / torch.norm(h, dim=1, keepdim=True)),
    "a recurrent layer": recurrent,
    "twice": lambda m, x: m(x) + m(x).sin(),
}


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("name", RIGHT)
def test_what_deviates_is_followed(name: str, lean: bool) -> None:
    torch.manual_seed(0)
    run, dtype = RIGHT[name], torch.float32 if name == "autocast" else torch.float64
    model, x = Net().to(dtype), torch.randn(N, 3, dtype=dtype)
    other = copy.deepcopy(model)
    learned(model, x, lean=lean)
    for each in (model, other):  # the other was never recorded before
        with persample.record(each, lean=lean) as tape:
            tape.backward(run(each, x))
        expected = truth(copy.deepcopy(each).requires_grad_(True), x, run)
        tolerance = {"rtol": 2e-2, "atol": 2e-2} if name == "autocast" else {}
        found = tape.grads()
        for key, rows in found.items():
            wanted = expected.get(key, torch.zeros_like(rows))  # frozen on the way
            torch.testing.assert_close(rows, wanted, **tolerance)


@pytest.mark.parametrize("name", RIGHT)
def test_what_deviates_is_learned(name: str) -> None:
    """The third step with the same deviation, after two without and one with."""
    torch.manual_seed(0)
    run, dtype = RIGHT[name], torch.float32 if name == "autocast" else torch.float64
    model, x = Net().to(dtype), torch.randn(N, 3, dtype=dtype)
    learned(model, x)
    for _ in range(3):
        model.requires_grad_(True)
        with persample.record(model) as tape:
            tape.backward(run(model, x))
    again = copy.deepcopy(model).requires_grad_(True)
    with persample.record(again) as fresh:
        fresh.backward(run(again, x))
    for key, rows in fresh.grads().items():
        torch.testing.assert_close(tape.grads()[key], rows)


def unseen_write(model: Net, h: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction(), torch.no_grad():
        h.mul_(2)
    return h


def mixed_write(model: Net, h: Tensor) -> Tensor:
    h.data.copy_(h.mean(0).expand_as(h))
    return h


def threaded(model: Net, x: Tensor) -> Tensor:
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda: found.append(model(x)))
    thread.start()
    thread.join()
    return found[0]


REFUSED: dict[str, Step] = {
    "samples meet": between(lambda m, h: h - h.mean(0)),
    "samples meet in place": between(lambda m, h: h.sub_(h.detach().mean(0))),
    "samples meet through .data": between(mixed_write),
    "written to unseen": between(unseen_write),
    "another thread": threaded,
    "samples change places": between(lambda m, h: h.flip(0) + h),
    "scripted": between(lambda m, h: torch.jit.script(nn.ReLU())(h)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_samples_is_refused(name: str) -> None:
    model, x = Net().double(), torch.randn(N, 3).double()
    learned(model, x)
    for _ in range(2):
        with pytest.raises(persample.PersampleError), persample.record(model) as tape:
            tape.backward(REFUSED[name](model, x))
            tape.grads()


# A call that is learned, and one that differs in a value and mixes samples.
VALUES: dict[str, tuple[Any, Any]] = {
    "a number": (lambda h: h.softmax(1), lambda h: h.softmax(0)),
    "a keyword": (lambda h: h.softmax(dim=1), lambda h: h.softmax(dim=0)),
    "another keyword": (lambda h: h.sum(dim=1, keepdim=True), lambda h: h.sum(0, keepdim=True)),
    "a sequence": (
        lambda h: h.view(N, 2, 2).permute((0, 2, 1)).flatten(1),
        lambda h: h.view(N, 2, 2).permute((1, 0, 2)).flatten(1).view(N, 4),
    ),
    "a list of tensors": (
        lambda h: torch.cat([h, h], 1)[:, 2:6],
        lambda h: torch.cat([h, h.flip(0)], 1)[:, 2:6],
    ),
    "a type": (lambda h: h.transpose(1, 1), lambda h: h.transpose(1, False)),
    "a subscript": (lambda h: h + h[0:N], lambda h: h + h[[1, 0, 2, 3]]),
    "indices in a tensor": (
        lambda h: h + h[torch.arange(N)],
        lambda h: h + h[torch.tensor([1, 0, 2, 3])],
    ),
    "an attribute": (lambda h: h.view(N, 2, 2).mT.flatten(1), lambda h: h.mT),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_compared(name: str) -> None:
    model, x = Net().double(), torch.randn(N, 3).double()
    right, wrong = VALUES[name]
    run = between(lambda m, h: right(h) * m.rows)
    learned(model, x, run)
    check(model, x, run)
    with pytest.raises((persample.PersampleError, TypeError)), persample.record(model) as tape:
        tape.backward(model(x, lambda h: wrong(h) * model.rows))


@pytest.mark.parametrize("before", [(), (slice(None),)])
def test_classes_in_a_sequence_are_compared(before: tuple[Any, ...]) -> None:
    """A subscript of 1 takes an axis away, one of True adds one: samples are elsewhere."""

    def pick(which: int) -> Any:
        def picked(h: Tensor) -> Tensor:
            some = h.view(N, 2, 2).permute(1, 2, 0)[(*before, which)]
            return some.sum((0, 1, 2) if which is True else 0)

        return between(lambda m, h: picked(h).unsqueeze(1) * m.rows)

    model, x = Net().double(), torch.randn(N, 3).double()
    for which in (1, True, 1):
        learned(model, x, pick(which))
        check(model, x, pick(which))


def test_shapes_are_compared() -> None:
    """Positions are beside each other after a reshape: how many, the shape alone tells."""
    model = Net().double()
    for t in (1, 1, 2, 2, 3, 1):
        x = torch.randn(N, t, 3).double()
        check(model, x, lambda m, x: m(x, lambda h: h.reshape(-1, 4)).view(N, -1).sum(1))


def check(model: nn.Module, x: Tensor, run: Any = None, **options: Any) -> None:
    run = run or (lambda m, x: m(x))
    with persample.record(model, **options) as tape:
        tape.backward(run(model, x))
    found = tape.grads()
    for key, rows in truth(model, x, run).items():
        if key in found:
            torch.testing.assert_close(found[key], rows)


def test_other_samples_shapes_dtypes_and_parameters() -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(N, 3)
    learned(model, x)
    check(model, torch.randn(N + 1, 3))
    check(model, torch.randn(1, 3))
    check(model, torch.randn(N, 5, 3))
    check(model, torch.randn(N, N, 3))
    check(model, x.clone().requires_grad_())
    check(model, x, params="second.weight")
    model.second.weight = nn.Parameter(torch.randn(4, 4))
    check(model, x)
    model.second = nn.Linear(4, 4, bias=False)
    check(model, x)
    model.head.weight.requires_grad_(False)
    check(model, x)
    check(model.double(), x.double())
    weights = {
        name: p.detach().clone().requires_grad_(p.requires_grad)
        for name, p in model.named_parameters()
    }
    with persample.record(model) as tape:
        tape.backward(torch.func.functional_call(model, weights, (x.double(),)))
    expected = truth(model, x.double(), lambda m, x: m(x))
    torch.testing.assert_close(tape.grads()["second.weight"], expected["second.weight"])


def test_another_axis_of_samples() -> None:
    """(4, 4, 3): the samples may be on either axis."""
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)).double(), None
    x = torch.randn(N, N, 3).double()
    runs = [lambda m, x, d=d: m(x).square().sum((1 - d, 2)) for d in (0, 1)]
    for axis in (0, 0, 1, 1, 0):
        check(model, x, runs[axis], dim=axis)


def test_strides_that_make_a_view_a_copy() -> None:
    torch.manual_seed(0)
    model = Net().double()

    def run(model: Net, x: Tensor) -> Tensor:
        flat = x.reshape(N, -1)
        changed = flat.mul_(2)  # the input, too, where this is a view of it
        return model(changed[:, :3]) + model(x.flatten(1)[:, 3:])

    plain, turned = torch.randn(N, 2, 3).double(), torch.randn(N, 3, 2).double().mT
    for x in (plain, plain, turned, turned, plain):
        expected = truth(model, x.clone(), run)
        with persample.record(model) as tape:
            tape.backward(run(model, x.clone()))
        for key, rows in tape.grads().items():
            torch.testing.assert_close(rows, expected[key])


def test_constants_that_keep_samples_apart_are_read_every_time() -> None:
    model, x = Net().double(), torch.randn(N, 3).double()
    run = between(lambda m, h: m.blocks @ h)
    learned(model, x, run)
    check(model, x, run)
    model.blocks[0, 1] = 1.0
    with pytest.raises(persample.PersampleError), persample.record(model) as tape:
        tape.backward(run(model, x))


def test_products_that_pick_samples_are_read_every_time() -> None:
    """By its shapes a sum over samples, by its values not."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(N, 3).double()
    pick = torch.eye(N).double().repeat_interleave(2, 0)
    run = between(lambda m, h: (pick @ h).view(N, 2, 4).sum(1))
    for _ in range(3):
        check(model, x, run)
    pick[0, 1] = 1.0
    with pytest.raises(persample.PersampleError), persample.record(model) as tape:
        tape.backward(run(model, x))


REDUCED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "the loss itself": lambda out, y: nn.functional.cross_entropy(out, y),
    "a sum of losses": lambda out, y: nn.functional.cross_entropy(out, y, reduction="none").sum(),
    "a mean": lambda out, y: out.square().mean(),
}


@pytest.mark.parametrize("name", REDUCED)
def test_sums_over_samples_are_learned(name: str, handled: list[str]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    y, loss = torch.tensor([0, 1, 1, 0]), REDUCED[name]
    for step in range(4):
        x = torch.randn(N, 3).double()
        handled.clear()
        with persample.record(model) as tape:
            tape.backward(loss(model(x), y))
        found = {key: rows.sum(0) for key, rows in tape.grads().items()}
        grads = torch.autograd.grad(loss(model(x), y), list(model.parameters()))
        torch.testing.assert_close(list(found.values()), list(grads))
        assert step < 2 or handled in ([], ["cross_entropy"])  # whose body is entered


def test_a_learned_sum_that_is_used_otherwise_is_refused() -> None:
    """The next call takes the batch's mean, or adds it to every sample."""
    model, x = Net().double(), torch.randn(N, 3).double()
    learned(model, x, lambda m, x: m(x).mean())
    with persample.record(model) as tape:
        losses = model(x)
        with pytest.raises(persample.MixedSamplesError):
            tape.backward(losses - losses.mean())


def test_a_constant_that_is_marked() -> None:
    """What was a constant holds samples this time, on another axis than the others."""
    model, x = Net().double(), torch.randn(N, 3).double()
    learned(model, x, between(lambda m, h: h * m.rows))
    with pytest.raises(persample.MixedSamplesError), persample.record(model) as tape:
        tape.backward(model(x, lambda h: h * tape.mark(model.rows, dim=1)))


def test_a_second_batch_is_still_refused() -> None:
    model, x, other = Net().double(), torch.randn(N, 3).double(), torch.randn(N, 3).double()
    for _ in range(3):
        with persample.record(model) as tape:
            tape.backward(model(x))
            with pytest.raises(persample.UsageError):
                tape.backward(model(other))


def test_a_hook_after_the_block_is_seen() -> None:
    model, x = Net().double(), torch.randn(N, 3).double()
    learned(model, x)
    kept: list[Tensor] = []
    with persample.record(model) as tape:
        losses = model(x, lambda h: (kept.append(h), h)[1])
    kept[0].register_hook(lambda g: g * 2)
    tape.backward(losses)
    expected = truth(model, x, between(lambda m, h: hooked(h, 2.0)))
    torch.testing.assert_close(tape.grads()["first.weight"], expected["first.weight"])


def test_guards_hear_of_constants() -> None:
    """A constant that a lean recording depends on is refilled unseen."""
    model, x = Net().double(), torch.randn(N, 3).double()
    run = between(lambda m, h: h * m.rows)
    learned(model, x, run, lean=True)
    with persample.record(model, lean=True) as tape:
        tape.backward(run(model, x))
    model.rows.numpy()[...] = 0.5
    with pytest.raises(persample.StaleError):
        tape.clipped_sum(1.0)


def test_programs_go_with_their_models() -> None:
    model, x = Net().double(), torch.randn(N, 3).double()
    learned(model, x)
    kept: list[Tensor] = []
    with persample.record(model) as tape:
        losses = model(x, lambda h: (kept.append(h), h)[1])
        tape.backward(losses)
    results = [weakref.ref(t) for t in (*kept, losses)]
    count = len(_PROGRAMS)
    del tape, losses
    kept.clear()
    assert all(ref() is None for ref in results)
    del model
    gc.collect()
    assert len(_PROGRAMS) < count


def test_many_programs_of_one_model() -> None:
    """Every length is another program; the tree stays small, and answers stay right."""
    model = Net().double()
    for t in [*range(1, 40), 3, 3]:
        check(model, torch.randn(N, t, 3).double())


class Spike(torch.autograd.Function):
    """A step with a smooth gradient; ``crossed`` takes that of other samples."""

    crossed = False

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.save_for_backward(h)
        return (h > 0).to(h.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (h,) = ctx.saved_tensors
        grad = grad / (1 + h.abs()) ** 2
        return grad.flip(0) if Spike.crossed else grad


def spiking(model: Net, x: Tensor) -> Tensor:
    """Membranes that leak, and a function of the user's own between layers."""
    h = model.first(x)
    state = h - model.third.bias
    for layer in (model.second, model.third):
        spike = Spike.apply(state)
        state = 0.9 * state + layer(h) - spike.detach()
        h = Spike.apply(state) + 0.1 * h
    return model.head(h).square().sum(1)


def test_calls_inside_custom_functions_are_learned(
    handled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Net().double()
    for _ in range(4):
        x = torch.randn(N, 3).double()
        handled.clear()
        with persample.record(model) as tape:
            losses = spiking(model, x)
            seen = list(handled)
            tape.backward(losses)
        for key, rows in truth(model, x, spiking).items():
            found = tape.grads().get(key, torch.zeros_like(rows))
            torch.testing.assert_close(found, rows)
    assert not {"gt", "to", "linear", "sub"}.intersection(seen)
    monkeypatch.setattr(Spike, "crossed", True)
    with pytest.raises(persample.PersampleError), persample.record(model) as tape:
        tape.backward(spiking(model, x))
        tape.norms()


def statistics(model: Net, h: Tensor) -> Tensor:
    """What is computed without gradients is a constant for them, of each sample's own."""
    with torch.no_grad():
        scale = h.square().mean(1, keepdim=True).sqrt() + model.third.bias.abs().sum()
    return h / scale


def mixed_statistics(model: Net, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h.square().mean(0, keepdim=True).sqrt() + 1
    return h / scale


def test_calls_without_gradients_are_learned(handled: list[str]) -> None:
    torch.manual_seed(0)
    model, run = Net().double(), between(statistics)
    for _ in range(3):
        x = torch.randn(N, 3).double()
        handled.clear()
        with persample.record(model) as tape:
            tape.backward(run(model, x))
        for key, rows in truth(model, x, run).items():
            torch.testing.assert_close(tape.grads().get(key, torch.zeros_like(rows)), rows)
    assert not {"square", "mean", "sqrt", "div"}.intersection(handled)
    with pytest.raises(persample.PersampleError), persample.record(model) as tape:
        tape.backward(between(mixed_statistics)(model, x))


def test_parameters_alone_under_hooks_on_saved_tensors() -> None:
    """What they make is kept without such hooks, learned or not."""
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(N, 3).double()
    run = between(lambda m, h: h * (2 * m.third.weight).tanh().t())
    learned(model, x, run)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    for _ in range(2):
        with (
            persample.record(model) as tape,
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            tape.backward(run(model, x))
        for key, rows in truth(model, x, run).items():
            torch.testing.assert_close(tape.grads().get(key, torch.zeros_like(rows)), rows)
    assert all(tensor is not model.third.weight for tensor in kept)


@pytest.mark.parametrize("formats", ["cco", "oco", "coc", "occ"])
def test_a_parameter_that_is_returned_as_it_is_or_copied(formats: str) -> None:
    """``weight.contiguous()`` is the weight itself, or a copy: results behind keep their places."""

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = nn.Conv2d(2, 3, 3), nn.Linear(3, 2)
            self.shift = nn.Parameter(torch.rand(3))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.conv.weight.contiguous()
            h = nn.functional.conv2d(x, weight, self.conv.bias).mean((2, 3))
            return self.last(h * torch.neg(self.shift)).square().sum(1)

    torch.manual_seed(0)
    model = Convolution().double()
    kinds = {"c": torch.channels_last, "o": torch.contiguous_format}
    for kind in formats + formats[-1]:
        model = model.to(memory_format=kinds[kind])
        x = torch.randn(N, 2, 5, 5).double()
        with persample.record(model) as tape:
            tape.backward(model(x))
        for key, rows in truth(model, x, lambda m, x: m(x)).items():
            torch.testing.assert_close(tape.grads()[key], rows)


VIEWS: dict[str, Callable[[Net, Tensor, Tensor], Tensor]] = {
    "a factor": lambda m, h, v: h @ v,
    "a weight": lambda m, h, v: nn.functional.linear(h, v),
    "its diagonal": lambda m, h, v: h * v.diagonal(),
    "viewed again": lambda m, h, v: nn.functional.linear(h, v.t()),
    "in parts": lambda m, h, v: nn.functional.linear(h, torch.cat([v[:2] * 2, v[2:]])),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_parameters_without_gradients_lead_nowhere(name: str) -> None:
    torch.manual_seed(0)

    def change(model: Net, h: Tensor) -> Tensor:
        with torch.no_grad():
            view = model.third.weight.t()
        return VIEWS[name](model, h, view)

    model = Net().double()
    for _ in range(3):
        x = torch.randn(N, 3).double()
        with persample.record(model) as tape:
            tape.backward(between(change)(model, x))
        found = tape.grads()
        for key, rows in backward_of_each(model, x, between(change)).items():
            torch.testing.assert_close(found.get(key, torch.zeros_like(rows)), rows)


def backward_of_each(model: nn.Module, x: Tensor, run: Any) -> dict[str, Tensor]:
    """By ``backward()``, which passes what has no graph."""
    losses, rows = run(model, x), []
    for loss in losses:
        model.zero_grad()
        loss.backward(retain_graph=True)
        named = model.named_parameters()
        rows.append({k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in named})
    model.zero_grad()
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
