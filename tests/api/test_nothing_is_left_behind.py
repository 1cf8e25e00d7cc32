"""Nothing is left behind: hooks, attributes, grads, memory, global state."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.recording import recorder
from persample.recording.hidden_code import as_before, as_written
from persample.testing import oracle, relative_error

X = torch.randn(4, 5)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1)


def tensors() -> int:
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


def snapshot(model: nn.Module) -> Any:
    return [
        (name, sorted(m.__dict__), len(m._forward_pre_hooks), len(m._forward_hooks),
         len(m._backward_hooks), sorted(m._parameters), sorted(m._buffers))
        for name, m in model.named_modules()
    ] + [
        (name, id(p), p._version, sorted(p.__dict__), p.requires_grad, p.grad is None,
         p._backward_hooks)
        for name, p in model.named_parameters()
    ]  # fmt: skip


def test_nothing_is_left_after_success() -> None:
    model = net()
    before = snapshot(model)
    with persample.record(model) as tape:
        tape.backward(loss(model, X))
    tape.grads()
    assert snapshot(model) == before


class Stop(BaseException):
    pass


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
def test_nothing_is_left_after_an_exception(where: str, kind: type[BaseException]) -> None:
    model = net()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    before = snapshot(model)

    def fail(*_: Any) -> None:
        raise kind

    with pytest.raises(kind), persample.record(model) as tape:
        if where == "forward":
            handle = model[1].register_forward_hook(fail)
            try:
                model(X)
            finally:
                handle.remove()
        out = model(X)
        if where == "backward":
            out.register_hook(fail)
        losses = out.square().sum(1)
        if where == "loss":
            fail()
        tape.backward(losses)
    assert snapshot(model) == before
    with persample.record(model) as tape:
        tape.backward(loss(model, X))
    assert relative_error(tape.grads(), oracle(model, loss, X)) < 1e-5


def test_grad_is_left_alone() -> None:
    model = net()
    kept = torch.ones_like(model[0].weight)
    model[0].weight.grad = kept
    with persample.record(model) as tape:
        tape.backward(loss(model, X))
    assert model[0].weight.grad is kept
    assert bool((kept == 1).all())
    assert model[2].weight.grad is None


def test_the_oracle_gives_gradients_back_where_a_loss_fails() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = kept = torch.ones(1, 2)
    with pytest.raises(ZeroDivisionError):
        persample.testing.oracle(model, lambda m, x: m(x) / (1 // 0), torch.ones(3, 2))
    assert model.weight.grad is kept


def test_inputs_get_ordinary_gradients() -> None:
    model, x = net(), X.clone().requires_grad_()
    with persample.record(model) as tape:
        tape.backward(loss(model, x))
    found, x.grad = x.grad, None
    loss(model, x).sum().backward()
    assert torch.allclose(found, x.grad)


def test_the_random_generator_ends_as_without() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.5), nn.Linear(6, 3))
    torch.manual_seed(3)
    loss(model, X).sum().backward()
    expected = torch.get_rng_state()
    plain = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(3)
    with persample.record(model, verify=True) as tape:
        tape.backward(loss(model, X))
    rows = tape.grads()
    assert torch.equal(torch.get_rng_state(), expected)
    for name, g in rows.items():
        assert torch.allclose(g.sum(0), plain[name], atol=1e-6)


def test_five_hundred_steps_do_not_grow() -> None:
    model = net()

    def once() -> None:
        with persample.record(model) as tape:
            tape.backward(loss(model, X))
        tape.norms()

    for _ in range(20):
        once()
    gc.collect()
    before = tensors()
    for _ in range(500):
        once()
    gc.collect()
    after = tensors()
    assert after <= before + 2


def test_factors_die_with_the_tape() -> None:
    model = net()
    gc.collect()
    gc.disable()  # by reference counts alone
    try:
        before = tensors()
        with persample.record(model) as tape:
            tape.backward(loss(model, X))
        assert tensors() > before + 4
        del tape
        assert tensors() <= before + 1  # the anchor
    finally:
        gc.enable()


def test_backward_after_the_block_and_twice() -> None:
    model = net().double()
    x = X.double()
    with persample.record(model) as tape:
        losses = loss(model, x)
    tape.backward(losses, retain_graph=True)
    tape.backward(losses)
    expected = {name: 2 * g for name, g in oracle(model, loss, x).items()}
    assert relative_error(tape.grads(), expected) < 1e-12


def test_forward_a_forward_b_backward_a_backward_b() -> None:
    model = net().double()
    a, b = X.double(), torch.randn(4, 5).double()
    with persample.record(model, same_samples=True) as tape:
        first, second = loss(model, a), loss(model, b)
        tape.backward(first)
        tape.backward(second)
    expected = {
        name: g + h
        for (name, g), h in zip(
            oracle(model, loss, a).items(), oracle(model, loss, b).values(), strict=True
        )
    }
    assert relative_error(tape.grads(), expected) < 1e-12


def test_two_tapes_coexist() -> None:
    model = net().double()
    tapes = []
    for k in range(2):
        with persample.record(model) as tape:
            tape.backward(loss(model, X.double() * (k + 1)))
        tapes.append(tape)
    for k, tape in enumerate(tapes):
        expected = oracle(model, loss, X.double() * (k + 1))
        assert relative_error(tape.grads(), expected) < 1e-12


def test_two_threads() -> None:
    models = [net().double() for _ in range(2)]
    found: dict[int, Any] = {}

    def work(k: int) -> None:
        for _ in range(10):
            with persample.record(models[k]) as tape:
                tape.backward(loss(models[k], X.double() + k))
            found[k] = tape.grads()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(2):
        assert relative_error(found[k], oracle(models[k], loss, X.double() + k)) < 1e-12


@pytest.mark.parametrize("count", [4, 6])
def test_a_thread_that_uses_the_model_meanwhile(count: int) -> None:
    model, here = net().double(), threading.get_ident()
    inside, done = threading.Event(), threading.Event()

    def stay(*_: Any) -> None:
        if threading.get_ident() != here:
            inside.set()
            done.wait(10)

    model[1].register_forward_pre_hook(stay)
    thread = threading.Thread(target=lambda: model(torch.randn(count, 5).double()))
    with persample.record(model) as tape:
        thread.start()
        inside.wait(10)
        tape.backward(loss(model, X.double()))
        done.set()
        thread.join()
    assert relative_error(tape.grads(), oracle(model, loss, X.double())) < 1e-12
    assert not any(module._forward_hooks for module in model.modules())


def test_threads_that_ask_one_lean_tape() -> None:
    model = net().double()
    with persample.record(model, lean=True) as tape:
        tape.backward(loss(model, X.double()), retain_graph=True)
    expected, found = tape.gram(), []

    def work() -> None:
        for seed in range(10):
            tape.project(4, seed=seed)
            found.append(tape.gram())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 60
    assert all(torch.equal(gram, expected) for gram in found)


def test_copies_of_a_recorded_model() -> None:
    model = net()
    with persample.record(model) as tape:
        tape.backward(loss(model, X))
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
    for other in (twin, again):
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
        )
        with persample.record(other) as second:
            second.backward(loss(other, X))
        assert relative_error(second.grads(), tape.grads()) == 0


def test_freezing_between_steps() -> None:
    model = net()
    model[0].requires_grad_(False)
    with persample.record(model) as tape:
        tape.backward(loss(model, X))
    assert list(tape.grads()) == ["2.weight", "2.bias"]
    model[0].requires_grad_(True)
    with persample.record(model) as tape:
        tape.backward(loss(model, X))
    assert len(tape.grads()) == 4


def test_freezing_inside_the_block() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.b.requires_grad_(False)
            out = self.b(self.a(x)).tanh()
            self.b.requires_grad_(True)
            return self.b(out.detach()) + self.a(out)

    model, x = Frozen().double(), torch.randn(4, 5, 3, dtype=torch.float64)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().sum((1, 2))

    expected = oracle(model, losses, x)
    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    assert relative_error(tape.grads(), expected) < 1e-12


@pytest.mark.parametrize("lean", [False, True])
def test_ids_overwritten_before_backward(lean: bool) -> None:
    table, ids = nn.Embedding(7, 3), torch.arange(4).view(4, 1).repeat(1, 5)
    x = torch.randn(4, 5, 3)
    with persample.record(table, lean=lean) as tape:
        tape.mark(x)
        losses = (x * F.embedding(ids, table.weight)).sum((1, 2))
        ids.fill_(6)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            tape.backward(losses)
            tape.grads()


@pytest.mark.parametrize("how", ["data", "inference"])
def test_buffers_of_embeddings(how: str) -> None:
    table = nn.Embedding(20, 3).double()
    buffers = None
    with torch.inference_mode(how == "inference"):
        buffers = {"weight": torch.ones(4, 20, 3, dtype=torch.float64)}
    for _ in range(3):
        ids = torch.randint(20, (4, 2))
        with persample.record(table) as tape:
            tape.backward(table(ids).square().sum((1, 2)))
        with torch.inference_mode(how == "inference"):
            assert torch.equal(tape.grads(out=buffers)["weight"], tape.grads()["weight"])
        if how == "data":
            buffers["weight"].data = torch.ones(4, 20, 3, dtype=torch.float64)


def test_selected_parameters_only() -> None:
    model = net().double()
    expected = oracle(model, loss, X.double())
    with persample.record(model, params=lambda name: name.endswith("bias")) as tape:
        tape.backward(loss(model, X.double()))
    found = tape.grads()
    assert set(found) == {"0.bias", "2.bias"}
    assert relative_error(found, {name: expected[name] for name in found}) < 1e-12
    assert all(p.grad is None for p in model.parameters())


def test_set_grad() -> None:
    model = net()
    with persample.record(model) as tape:
        tape.backward(loss(model, X))
    total = tape.weighted_sum(torch.ones(4))
    tape.set_grad(total)
    tape.set_grad(total, accumulate=True)
    expected = torch.autograd.grad(loss(model, X).sum(), list(model.parameters()))
    for parameter, g in zip(model.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, 2 * g, atol=1e-5)
    with pytest.raises(persample.UsageError, match="sums over samples"):
        tape.set_grad(tape.grads())


def test_recordings_that_overlap_give_the_compiler_back() -> None:
    eval_frame = pytest.importorskip("torch._dynamo.eval_frame")
    before = eval_frame._stance.stance
    first, second = object(), object()
    as_written(first)
    as_written(second)
    as_before(first)
    assert eval_frame._stance.stance == "force_eager"
    as_before(second)
    assert eval_frame._stance.stance == before


def test_modules_of_a_recording_that_is_gone_are_forgotten() -> None:
    model = nn.Linear(2, 2)
    gone = persample.record(nn.Linear(2, 2))  # never left, as in a thread that ended
    recorder._OPEN.append((weakref.ref(gone), {id(model)}))  # its module's id is another's now
    with pytest.raises(persample.UsageError, match="already"), persample.record(model):
        pass
    del gone
    gc.collect()
    with persample.record(model) as tape:
        tape.backward(model(torch.randn(3, 2)).sum(1))
    assert tape.norms().shape == (3,)
    assert not recorder._OPEN
