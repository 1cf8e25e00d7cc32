"""What changes while a recording is open, or after it, must not change an answer unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

import persample
from persample.testing import oracle, relative_error

from ..attacks.base import trainable
from ..models import Fn, par

X = torch.randn(4, 4, dtype=torch.float64)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum(1)
    return out


def rows_of(named: dict[str, Tensor], losses: Tensor) -> dict[str, Tensor]:
    """One native backward for each loss: also right where a program is no module's alone."""
    each = [torch.autograd.grad(loss, list(named.values()), retain_graph=True) for loss in losses]
    return {
        name: torch.stack([row.as_subclass(Tensor) for row in rows]).detach()
        for name, rows in zip(named, zip(*each, strict=True), strict=True)
    }


# ---------------------------------------------------------------- parameters that are exchanged


def others(model: nn.Module) -> dict[str, Tensor]:
    return {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}


def derived() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return F.linear(m.first(x).tanh(), m.w.exp())

    return Fn(run, first=nn.Linear(4, 4), w=par(4, 4)).double()


@pytest.mark.parametrize("option", [{}, {"lean": True}, {"verify": True}, {"unproven": "loop"}])
@pytest.mark.parametrize("build", [net, derived])
def test_two_tensors_for_one_parameter_are_refused(
    build: Callable[[], nn.Module], option: dict[str, Any]
) -> None:
    model = build()
    other = others(model)
    with pytest.raises(persample.UsageError, match="two tensors were used as the parameter"):
        with persample.record(model, **option) as tape:
            tape.backward(loss_fn(model, X) + functional_call(model, other, (X,)).sum(1))
        tape.grads()
    third = others(model)
    with pytest.raises(persample.UsageError, match="two tensors were used as the parameter"):
        with persample.record(model, **option) as tape:
            one, two = (functional_call(model, given, (X,)) for given in (other, third))
            tape.backward((one * two).sum(1))
        tape.grads()


@pytest.mark.parametrize("option", [{}, {"lean": True}, {"verify": True}, {"unproven": "loop"}])
@pytest.mark.parametrize("build", [net, derived])
def test_a_teacher_without_gradients_does_not_take_a_parameters_place(
    build: Callable[[], nn.Module], option: dict[str, Any]
) -> None:
    model = build()
    teacher = others(model)

    def losses(net: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = functional_call(net, teacher, (x,))
        out = net(x)
        if "unproven" in option and x.shape[0] > 1:
            out = out + 0 * out.detach().mean(0)
        distance: Tensor = (out - aim).square().sum(1)
        return distance

    expected = oracle(model, losses, X)
    with persample.record(model, **option) as tape:
        tape.backward(losses(model, X))
    assert relative_error(tape.grads(), expected) < 1e-10


# ---------------------------------------------------------------- parameters that are stepped


def lazy() -> nn.Module:
    """Gradients that are computed when they are asked for: no rule, and a derived parameter."""

    def run(m: Any, x: Tensor) -> Tensor:
        return F.linear(torch.inner(m.first(x).exp(), m.w), F.normalize(m.a, dim=1))

    return Fn(run, first=nn.Linear(4, 4), w=par(4, 4), a=par(4, 4)).double()


def fused(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.Adam(model.parameters(), lr=0.1, fused=True).step()


def by_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.add_(0.1)


def other_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = 2 * parameter.data


def by_numpy(model: nn.Module) -> None:
    for parameter in model.parameters():
        array = parameter.detach().numpy()
        array *= 2


def other_dtype(model: nn.Module) -> None:
    model.float()


@pytest.mark.parametrize("step", [fused, by_data, other_data, by_numpy, other_dtype])
@pytest.mark.parametrize("option", [{}, {"lean": True}, {"params": ["w"]}])
def test_steps_that_no_version_counter_shows(
    step: Callable[[nn.Module], None], option: dict[str, Any]
) -> None:
    model = lazy()
    with persample.record(model, **option) as tape:
        tape.backward(loss_fn(model, X), retain_graph=True)
    tape.norms()
    step(model)
    with pytest.raises(persample.StaleError, match="was modified after it was recorded"):
        tape.grads()


def test_inputs_of_a_lean_recording_may_not_be_refilled() -> None:
    model, x = net(), X.clone()
    with persample.record(model, lean=True) as tape:
        tape.backward(loss_fn(model, x))
    before = tape.norms()
    x.numpy()[:] = 1.0
    assert torch.equal(tape.norms(), before)
    with pytest.raises(
        persample.StaleError, match="a parameter, an input, a result or a constant was modified"
    ):
        tape.clipped_sum(1.0)


@pytest.mark.parametrize("option", [{}, {"lean": True}])
def test_buffers_that_are_written_to_in_place(option: dict[str, Any]) -> None:
    """Autograd itself notices: what it says comes with what to do."""
    model = nn.Linear(4, 4).double()
    model.mask = nn.Buffer(torch.ones(4, 4, dtype=torch.float64))
    with persample.record(model, **option) as tape:
        losses = (tape.mark(X) @ (model.weight * model.mask)).square().sum(1)
        tape.backward(losses, retain_graph=True)
    model.mask.add_(0.0)  # the same values: only the version counter tells
    with pytest.raises(persample.StaleError, match="overwritten in place"):
        tape.grads()


def test_positions_after_such_a_step() -> None:
    model = lazy()
    with persample.record(model, positions=True) as tape:
        tape.backward(model(torch.randn(4, 3, 4, dtype=torch.float64)).square().sum((1, 2)))
    tape.positions(params=["w", "a"])
    fused(model)
    with pytest.raises(persample.StaleError, match="was modified after it was recorded"):
        tape.positions(params=["w", "a"])


def test_what_holds_no_parameter_may_be_asked_after_such_a_step() -> None:
    model = net()
    expected = oracle(model, loss_fn, X)
    with persample.record(model) as tape:
        tape.backward(loss_fn(model, X))
    fused(model)
    assert relative_error(tape.grads(), expected) < 1e-10


@pytest.mark.parametrize("plain", [False, True])
def test_hooks_of_parameters_are_refused_in_every_backward(plain: bool) -> None:
    model = net()
    with (
        pytest.raises(persample.UsageError, match="has a gradient hook"),
        persample.record(model) as tape,
    ):
        losses = loss_fn(model, X)
        next(model.parameters()).register_hook(lambda grad: 2 * grad)
        if plain:
            losses.sum().backward()
        else:
            tape.backward(losses)


def test_a_direction_that_was_written_to_unseen() -> None:
    model = net()
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    with persample.record(model, lean=persample.Ahead(direction=direction)) as tape:
        tape.backward(loss_fn(model, X))
    before = tape.dots(direction)
    for value in direction.values():
        value.data.mul_(2)
    torch.testing.assert_close(tape.dots(direction), 2 * before)


@pytest.mark.parametrize("unproven", ["refuse", "loop"])
def test_losses_without_a_history_are_refused(unproven: Any) -> None:
    model = net()
    with persample.record(model, unproven=unproven) as tape:
        losses = loss_fn(model, X).detach().requires_grad_()
        with pytest.raises(persample.UsageError, match="the losses have no history"):
            tape.backward(losses)


# ---------------------------------------------------------------- memory that two counters watch


def around(change: Callable[[Tensor], Any]) -> nn.Module:
    """A change of what comes out of a layer, and of the input."""

    def run(m: Any, x: Tensor) -> Tensor:
        x = x * 1
        change(x)
        h = m.first(x)
        change(h)
        out: Tensor = m.last(h.tanh())
        return out

    return Fn(run, first=nn.Linear(4, 4), last=nn.Linear(4, 3)).double()


def set_data(tensor: Tensor, value: Tensor) -> None:
    tensor.data = value


def view_of_data(h: Tensor) -> None:
    part = h.data[:, 1:]
    part.sub_(part.mean(0))


def read_after(h: Tensor) -> None:
    alias = h.data
    h.detach().sub_(h.detach().mean(0))
    set_data(h, alias.clone())


def second_alias(h: Tensor) -> None:
    one, two = h.data, h.data
    one.sub_(one.mean(0))
    set_data(h, two.clone())


MIXING: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda h: h.data.sub_(h.data.mean(0)),
    "data of data": lambda h: h.data.data.sub_(h.data.mean(0)),
    "a view": view_of_data,
    "an item": lambda h: h.data.__setitem__(slice(None), h.data - h.data.mean(0)),
    "copied": lambda h: h.data.copy_(h.data / h.data.norm()),
    "out": lambda h: torch.sub(h.data, h.data.mean(0), out=h.data),
    "set": lambda h: set_data(h, h.data - h.data.mean(0)),
    "set, in place": lambda h: set_data(h, h.data.clone().sub_(h.data.mean(0))),
    "set, turned": lambda h: set_data(h, h.data.flip(0)),
    "read after a write": read_after,
    "a second alias": second_alias,
}
APART: dict[str, Callable[[Tensor], Any]] = {
    "scaled": lambda h: h.data.mul_(2),
    "clamped": lambda h: h.data.clamp_(min=-1),
    "normalised": lambda h: h.data.div_(h.data.norm(dim=1, keepdim=True)),
    "a column": lambda h: h.data[:, 0].zero_(),
    "filled": lambda h: h.data.fill_(0.5),
    "set": lambda h: set_data(h, h.data * 2),
    "set to constants": lambda h: set_data(h, torch.ones_like(h)),
    "out": lambda h: torch.mul(h.data, 2, out=h.data),
}


@pytest.mark.parametrize("name", MIXING)
def test_samples_that_meet_in_memory_known_by_data(name: str) -> None:
    model = around(MIXING[name])
    with pytest.raises(persample.MixedSamplesError), persample.record(model) as tape:
        tape.backward(loss_fn(model, X))


@pytest.mark.parametrize("name", APART)
def test_writes_by_data_that_keep_samples_apart(name: str) -> None:
    model = around(APART[name])
    expected = oracle(model, loss_fn, X)
    with persample.record(model) as tape:
        tape.backward(loss_fn(model, X))
    assert relative_error(tape.grads(), expected) < 1e-10


def test_a_result_written_under_a_view() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        buffer = x * 1
        view = buffer.view(-1, 2, 2)
        torch.sub(x, x.mean(0), out=buffer)
        out: Tensor = m.last(view.flatten(1) + 0)
        return out

    model = Fn(run, last=nn.Linear(4, 3)).double()
    with pytest.raises(persample.MixedSamplesError), persample.record(model) as tape:
        tape.backward(loss_fn(model, X))


# ---------------------------------------------------------------- code between call and operator


class Twice(Tensor):
    """Does something else than it was asked for."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * out if func is F.linear else out


class Labelled(Tensor):
    """Carries something along, as tensors with meta-data do."""

    label = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(out, Labelled):
            out.label = next((a.label for a in args if isinstance(a, Labelled)), "")
        return out


class Centred(Tensor):
    """Subtracts the mean of the batch, where nobody would look for it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out - out.mean(0) if func in (torch.tanh, Tensor.tanh) else out


class TwiceParameter(nn.Parameter):
    """A weight that doubles what it is multiplied by."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return 2 * out if func is F.linear else out


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is F.linear else out


def deep() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.first(x).tanh().view(-1, 2, 2).transpose(1, 2).flatten(1)
        return m.last(h[:, [0, 2, 1, 3]] + h.clone().mul_(2).chunk(2, 1)[0].repeat(1, 2))

    return Fn(run, first=nn.Linear(4, 4), last=nn.Linear(4, 3)).double()


@pytest.mark.parametrize("kind", [Twice, Labelled])
@pytest.mark.parametrize("build", [net, deep, derived])
def test_tensors_with_code_of_their_own(kind: type[Tensor], build: Callable[[], nn.Module]) -> None:
    model, x = build(), X.as_subclass(kind)
    expected = rows_of(trainable(model), loss_fn(model, x))
    with persample.record(model) as tape:
        tape.backward(loss_fn(model, x))
    assert relative_error(tape.grads(), expected) < 1e-10
    assert not any(isinstance(rows, kind) for rows in tape.grads().values())


def test_tensors_whose_own_code_mixes_samples() -> None:
    model, x = net(), X.as_subclass(Centred)
    with pytest.raises(persample.MixedSamplesError), persample.record(model) as tape:
        tape.backward(loss_fn(model, x))


def test_parameters_with_code_of_their_own() -> None:
    model = net()
    last = model[2]  # type: ignore[index]
    last.weight = TwiceParameter(last.weight.detach())
    expected = rows_of(trainable(model), loss_fn(model, X))
    with persample.record(model) as tape:
        tape.backward(loss_fn(model, X))
    assert relative_error(tape.grads(), expected) < 1e-10


@pytest.mark.parametrize("after", [False, True])
def test_a_mode_around_the_block(after: bool) -> None:
    model = net()
    with Doubling() as mode:
        expected = oracle(model, loss_fn, X)
        with persample.record(model) as tape:
            losses = torch.utils.checkpoint.checkpoint(loss_fn, model, X, use_reentrant=False)
            if not after:
                tape.backward(losses)
        if after:
            tape.backward(losses)
        assert torch.overrides._get_current_function_mode() is mode
    assert relative_error(tape.grads(), expected) < 1e-10


# ---------------------------------------------------------------- memory of the caller's


def test_buffers_that_share_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).double()
    expected = oracle(model, loss_fn, X)
    with persample.record(model) as tape:
        tape.backward(loss_fn(model, X))
    flat = torch.empty(5, 32, dtype=torch.float64)
    one = flat.view(-1)[:64].view(4, 4, 4)
    for other in (one, flat.view(-1)[63:127].view(4, 4, 4)):
        with pytest.raises(persample.UsageError, match="share memory"):
            tape.grads(out={"0.weight": one, "1.weight": other})
    columns = {
        name: flat[:4, k : k + 16].view(4, 4, 4) for name, k in (("0.weight", 0), ("1.weight", 16))
    }
    assert relative_error(tape.grads(out=columns), expected) < 1e-10


def test_a_buffer_that_rows_are_computed_from_is_refused() -> None:
    kept: list[Tensor] = []
    first, last = nn.Linear(2, 8, bias=False), nn.Linear(8, 8, bias=False)
    last.register_forward_pre_hook(lambda module, args: kept.append(args[0].detach()))
    model, x = nn.Sequential(first, last).double(), torch.randn(4, 2, 2, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(model(x).square().sum((1, 2)))
    buffers = {"0.weight": kept[0].view(4, 8, 2), "1.weight": kept[0].new_empty(4, 8, 8)}
    with pytest.raises(persample.StaleError):
        tape.grads(out=buffers)


def test_indices_of_the_callers_may_be_refilled() -> None:
    def run(m: Any, x: Tensor, where: Tensor) -> Tensor:
        out: Tensor = (m.first(x) + m.table(where)).tanh() * m.table(where)
        return out

    def losses(model: nn.Module, batch: Any) -> Tensor:
        out: Tensor = model(*batch).square().sum((1, 2))
        return out

    model = Fn(run, first=nn.Linear(4, 4), table=nn.Embedding(9, 4)).double()
    numbers = torch.arange(4).numpy()
    batch = torch.randn(5, 4, 4, dtype=torch.float64), torch.from_numpy(numbers)
    expected = oracle(model, losses, batch)
    with persample.record(model) as tape:
        tape.backward(losses(model, batch))
    numbers[:] = 7
    assert relative_error(tape.grads(), expected) < 1e-10
