"""One block is one batch: what follows in it is refused, unless it holds the same samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

import persample
from persample.testing import oracle, relative_error
from persample.uses.contents import CallerMemory


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None, state: Tensor | None = None) -> Tensor:
        x = x if mask is None else x * mask
        h = self.a(x).tanh()
        return self.b(h if state is None else h + state)


class Two(nn.Module):
    """A trunk with two heads, each called by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(self.trunk(x)) * self.two(self.trunk(x))).squeeze(1)


def squares(out: Tensor) -> Tensor:
    return out.square().sum(1)


@pytest.fixture
def model() -> Masked:
    torch.manual_seed(0)
    return Masked().double()


def x(seed: int = 1, n: int = 4) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)).double()


MASK = torch.ones(4, 3, dtype=torch.float64)

# what comes second in the block, after ``squares(model(x(1), MASK))`` was back-propagated
SECOND: dict[str, Callable[[nn.Module, persample.Tape], Tensor]] = {
    "other inputs": lambda m, t: squares(m(x(2))),
    "other inputs, mask seen before": lambda m, t: squares(m(x(2), MASK)),
    "other inputs, mask seen before in another dtype": lambda m, t: squares(
        m(x(2), MASK.float().double())
    ),
    "marked data": lambda m, t: squares(m.b(m.a(t.mark(x(2))).tanh())),
    "scaled by a number of the first batch": lambda m, t: (
        squares(m(x(2))) / squares(m(x(1))).detach().mean()
    ),
    "an evaluation in between": lambda m, t: (m(x(3)).detach(), squares(m(x(2))))[1],
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("early", [False, True], ids=["after", "before"])
def test_a_second_batch_is_refused_and_the_first_one_answers(
    name: str, early: bool, model: Masked
) -> None:
    expected = oracle(model, lambda m, x: squares(m(x)), x(1))
    with persample.record(model) as tape:
        losses = squares(model(x(1), MASK))
        second = SECOND[name](model, tape) if early else None
        tape.backward(losses, retain_graph=True)
        first = tape.norms()
        with pytest.raises(persample.UsageError, match="second batch") as caught:
            tape.backward(SECOND[name](model, tape) if second is None else second)
        assert torch.equal(tape.norms(), first)
        assert relative_error(tape.grads(), expected) < 1e-12
        tape.backward(losses)  # the first batch may go on
    fixes = ["set_grad(..., accumulate=True)", "tape.backward(a + b)", "same_samples=True"]
    places = [caught.value.fix.index(fix) for fix in fixes]
    assert places == sorted(places)
    assert relative_error(tape.grads(), {k: 2 * g for k, g in expected.items()}) < 1e-12


def test_an_input_buffer_that_is_refilled_is_another_batch(model: Masked) -> None:
    buffer = x(1)
    with persample.record(model) as tape:
        tape.backward(squares(model(buffer)))
        first = tape.norms()
        buffer.copy_(x(2))
        with pytest.raises(persample.UsageError, match="second batch"):
            tape.backward(squares(model(buffer)))
        assert torch.equal(tape.norms(), first)


@pytest.mark.parametrize("name", SECOND)
def test_the_same_samples_by_the_callers_word(name: str, model: Masked) -> None:
    with persample.record(model, same_samples=True) as tape:
        tape.backward(squares(model(x(1), MASK)))
        tape.backward(SECOND[name](model, tape))
    with persample.record(model) as one:
        one.backward(squares(model(x(1), MASK)) + SECOND[name](model, one))
    assert relative_error(tape.grads(), one.grads()) < 1e-12


def test_removing_a_sample_moves_the_sum_by_its_bound(model: Masked) -> None:
    """The fix that is offered first: a block for each micro-batch."""

    def summed(parts: list[Tensor]) -> dict[str, Tensor]:
        model.zero_grad()
        for part in parts:
            with persample.record(model) as tape:
                tape.backward(squares(model(part)))
            tape.set_grad(tape.clipped_sum(0.1), accumulate=True)
        return {k: p.grad.clone() for k, p in model.named_parameters()}

    whole, without = summed([x(1), x(2)]), summed([x(1), x(2)[:3]])
    moved = torch.cat([(whole[k] - without[k]).flatten() for k in whole]).norm()
    assert 0.09 < float(moved) <= 0.1 * (1 + 1e-9)


def two_heads(model: Two, tape: persample.Tape) -> list[Tensor]:
    with torch.no_grad():
        h = model.trunk(x(1).float())
    return [model.one(h).squeeze(1), model.two(h).squeeze(1)]


def actor_and_critic(model: Two, tape: persample.Tape) -> list[Tensor]:
    seen = x(1).float()
    return [
        model.one(model.trunk(seen)).squeeze(1),
        model.two(model.trunk(seen)).square().squeeze(1),
    ]


def two_losses(model: Two, tape: persample.Tape) -> list[Tensor]:
    out = model(x(1).float())
    return [out.square(), out.abs()]


def augmented(model: Two, tape: persample.Tape) -> list[Tensor]:
    """The second view is made from the first one's inputs in the block."""
    seen = x(1).float()
    return [model(seen), model(seen.flip(1))]


def with_a_target(model: Two, tape: persample.Tape) -> list[Tensor]:
    """Q-learning: values of other observations, without gradients, in both losses."""
    with torch.no_grad():
        target = model(x(2).float())
    out = model(x(1).float())
    return [(out - target).square(), (out - target).abs()]


def checkpointed(model: Two, tape: persample.Tape) -> list[Tensor]:
    seen = x(1).float().requires_grad_()
    out = checkpoint(model, seen, use_reentrant=True)
    return [out.square(), out.sin()]


@pytest.mark.parametrize(
    "losses", [two_heads, actor_and_critic, two_losses, augmented, with_a_target, checkpointed]
)
def test_one_batch_stays_one(losses: Callable[[Two, persample.Tape], list[Tensor]]) -> None:
    torch.manual_seed(0)
    model = Two()
    with persample.record(model) as tape:
        for part in losses(model, tape):
            tape.backward(part, retain_graph=True)
    with persample.record(model) as one:
        one.backward(sum(losses(model, one)))
    assert relative_error(tape.grads(), one.grads()) < 1e-5


def test_truncated_backpropagation_goes_on_with_its_batch() -> None:
    torch.manual_seed(0)
    model, data = nn.LSTM(3, 4, batch_first=True).double(), torch.randn(4, 9, 3).double()

    def losses(model: nn.LSTM, tape: persample.Tape | None, data: Tensor) -> Tensor:
        state, total = None, torch.zeros(len(data), dtype=data.dtype)
        for part in data.split(3, 1):
            out, state = model(part.contiguous(), state)
            state = tuple(s.detach() for s in state)
            loss = out.square().sum((1, 2))
            total = total + loss
            if tape is not None:
                tape.backward(loss)
        return total

    expected = oracle(model, lambda m, x: losses(m, None, x), data)
    with persample.record(model) as tape:
        losses(model, tape, data)
    assert relative_error(tape.grads(), expected) < 1e-10


def test_learned_rows_belong_to_no_batch() -> None:
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latent, self.layer = nn.Parameter(torch.randn(1, 3)), nn.Linear(3, 3)

        def forward(self, x: Tensor, rows: Tensor) -> Tensor:
            return x * rows

    torch.manual_seed(0)
    model = Latents().double()
    with persample.record(model, n=4) as tape:
        rows = model.layer(model.latent.expand(4, -1))
        tape.backward(squares(model(x(1), rows)), retain_graph=True)
        first = tape.norms()
        with pytest.raises(persample.UsageError, match="second batch"):
            tape.backward(squares(model(x(2), rows)))
        assert torch.equal(tape.norms(), first)


@pytest.mark.parametrize("options", [{"unproven": "loop"}, {"verify": True}])
def test_a_second_batch_by_the_graph_itself(options: dict[str, object], model: Masked) -> None:
    with persample.record(model, **options) as tape:
        tape.backward(squares(model(x(1))), retain_graph=True)
        first = tape.norms()
        with pytest.raises(persample.UsageError, match="second batch"):
            tape.backward(squares(model(x(2))))
        assert torch.equal(tape.norms(), first)


def test_a_second_batch_where_each_loss_is_looped(model: Masked) -> None:
    def coupled(out: Tensor) -> Tensor:
        return squares(out) / squares(out).sum()

    with persample.record(model, unproven="loop") as tape:
        tape.backward(coupled(model(x(1))))
        first = tape.norms()
        with pytest.raises(persample.UsageError, match="second batch"):
            tape.backward(coupled(model(x(2))))
        assert torch.equal(tape.norms(), first)


def test_another_number_of_samples_says_so(model: Masked) -> None:
    with persample.record(model) as tape:
        tape.backward(squares(model(x(1))))
        with pytest.raises(persample.UsageError, match="4 samples, then 2") as caught:
            tape.backward(squares(model(x(2, n=2))))
        assert "regulariser" not in str(caught.value)
        tape.norms()


def test_a_plain_backward_is_a_backward(model: Masked) -> None:
    with persample.record(model) as tape:
        squares(model(x(1))).sum().backward()
        with pytest.raises(persample.UsageError, match="second batch"):
            squares(model(x(2))).sum().backward()
        tape.norms()


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("how", ["copy_", ".data", "NumPy", "a view of NumPy's memory"])
def test_a_buffer_that_is_filled_again(model: Masked, how: str, joined: bool) -> None:
    memory = x(1).numpy().copy()
    buffer = x(1) if how in ("copy_", ".data") else torch.from_numpy(memory)
    given = buffer.view(4, 3) if "view" in how else buffer
    with persample.record(model) as tape:
        first = squares(model(given))
        if not joined:
            tape.backward(first)
        if how == "copy_":
            buffer.copy_(x(2))
        elif how == ".data":
            buffer.data.copy_(x(2))
        else:
            memory[:] = x(2).numpy()
        with pytest.raises((persample.PersampleError, RuntimeError)):
            second = squares(model(given))
            tape.backward(first + second if joined else second)
    if not joined:
        expected = oracle(model, lambda m, batch: squares(m(batch)), x(1))
        assert relative_error(tape.grads(), expected) < 1e-12


def test_a_tensor_that_is_given_twice(model: Masked) -> None:
    data = x(1)
    with persample.record(model) as tape:
        tape.backward(squares(model(data)))
        tape.backward(2 * squares(model(data)))
    expected = oracle(model, lambda m, batch: 3 * squares(m(batch)), x(1))
    assert relative_error(tape.grads(), expected) < 1e-12


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, which cannot be looked at element by element."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "as_strided" in str(func):
            raise NotImplementedError
        plain = tree_map_only(Wrapper, lambda t: t.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapper, func(*plain[0], **plain[1]))


def test_an_input_that_wraps_another_is_not_looked_into() -> None:
    context = CallerMemory(lean=False)
    context.enter([Wrapper(x(1)), x(2)])
    context.expect_not_refilled([Wrapper(x(1))])
