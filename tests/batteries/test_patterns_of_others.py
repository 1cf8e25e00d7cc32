"""Patterns of models that others wrote: masks over weights, functions of weights, dotted sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

from ..models import Case, Fn, flat_loss, par

Maker = Callable[[int], Case]


def _knots(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Weights that all samples share, spread over them, and where the samples need them."""
    return s.knots.expand(len(x), -1, -1), x > -0.3


def masked_weights(n: int) -> Case:
    """A spline whose knots are weights, inside an interval only."""

    def f(s: Any, x: Tensor) -> Tensor:
        knots, inside = _knots(s, x)
        out = torch.zeros_like(x)
        out[inside] = (knots[inside, :].softmax(-1) * x[inside][:, None]).square().sum(-1)
        out[~inside] = x[~inside]
        return out

    return Fn(f, knots=par(4, 5)), (torch.randn(n, 4),)


def mask_between_axes(n: int) -> Case:
    """The mask takes two axes behind one that is kept; new axes and numbers beside it."""

    def f(s: Any, x: Tensor) -> Tensor:
        knots, inside = _knots(s, x)
        picked = knots[None, inside, 1:3]
        turned = knots.permute(2, 0, 1)[1:, inside]
        both = picked[0].T * turned[:2]
        return torch.zeros_like(x).masked_scatter(inside, both.sum(0)) * x

    return Fn(f, knots=par(4, 5)), (torch.randn(n, 4),)


def selected_weights(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        inside = x > -0.3
        picked = s.scale.expand_as(x).masked_select(inside)
        return torch.zeros_like(x).masked_scatter(inside, picked * x.masked_select(inside))

    return Fn(f, scale=par(4)), (torch.randn(n, 4),)


def classes_counted(n: int) -> Case:
    """The number of classes is read off the batch, and cut off again."""

    def f(s: Any, x: Tensor) -> Tensor:
        chosen = s.gate(x).argmax(-1)
        route = F.one_hot(chosen, max(chosen.max() + 2, torch.tensor(3)))[..., :3].to(x.dtype)
        return torch.einsum("nte,ntd,edo->nto", route, x, s.experts)

    return Fn(f, gate=nn.Linear(4, 3), experts=par(3, 4, 2)), (torch.randn(n, 5, 4),)


class Rebuilt(torch.autograd.Function):
    """A weight made of factors; what einsum returns is a view of a product."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(t, a, b)
        return torch.einsum("ijkl,jr,ip->prkl", t, b, a)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        t, a, b = ctx.saved_tensors
        return (
            torch.einsum("prkl,jr,ip->ijkl", g, b, a),
            torch.einsum("prkl,ijkl,jr->ip", g, t, b),
            torch.einsum("prkl,ijkl,ip->jr", g, t, a),
        )


def rebuilt_weight(n: int) -> Case:
    net = Fn(
        lambda s, x: F.conv2d(x, Rebuilt.apply(s.t, s.a, s.b)),
        t=par(2, 2, 3, 3), a=par(2, 4), b=par(2, 3),
    )  # fmt: skip
    return net, (torch.randn(n, 3, 5, 5),)


class Circular(torch.autograd.Function):
    """A circular convolution: the weight's gradient is a Fourier transform of a dotted sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        mixed = torch.einsum("...nb,mnb->...mb", torch.fft.ifft(x), torch.fft.fft(w))
        return torch.fft.fft(mixed).real

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        g = torch.fft.fft(g)
        of_x = torch.fft.fft(torch.einsum("...mb,mnb->...nb", g, torch.fft.ifft(w))).real
        of_w = torch.fft.fft(torch.einsum("...mb,...nb->mnb", g, torch.fft.ifft(x))).real
        return of_x, of_w


def circular(n: int) -> Case:
    def f(s: Any, x: Tensor) -> Tensor:
        return Circular.apply(s.first(x).unflatten(-1, (2, 4)), s.w).tanh()

    return Fn(f, first=nn.Linear(4, 8), w=par(3, 2, 4)), (torch.randn(n, 4, 4),)


def single_pixel(n: int) -> Case:
    """Tokens as a map of one pixel: torch takes its strides for channels-last."""

    def f(s: Any, x: Tensor) -> Tensor:
        h = s.first(x)
        line = s.line(h.view(len(x), 1, 6).permute(0, 2, 1))
        return line.mean(2) + s.plane(h.view(len(x), 1, 1, 6).permute(0, 3, 1, 2)).mean((2, 3))

    net = Fn(
        f,
        first=nn.Linear(4, 6),
        line=nn.ConvTranspose1d(6, 8, 2),
        plane=nn.ConvTranspose2d(6, 8, 2),
    )
    return net, (torch.randn(n, 1, 4),)


MAKERS: list[Maker] = [
    single_pixel,
    masked_weights, mask_between_axes, selected_weights, classes_counted, rebuilt_weight, circular,
]  # fmt: skip


@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("make", MAKERS)
def test_rows(make: Maker, n: int) -> None:
    torch.manual_seed(0)
    model, batch = make(n)
    model, batch = model.double(), tuple(x.double() for x in batch)
    expected = oracle(model, lambda m, b: flat_loss(m(*b)), batch)
    for lean in (False, True):
        with persample.record(model, lean=lean) as tape:
            tape.backward(flat_loss(model(*batch)))
        sizes = torch.stack([g.flatten(1).square().sum(1) for g in expected.values()]).sum(0)
        torch.testing.assert_close(tape.norms(), sizes.sqrt())
        assert relative_error(tape.grads(), expected) < 1e-10


class Quantised(nn.Module):
    """Activations and weights on learned grids, and activations on a grid that was observed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 2)
        self.step, self.zero = nn.Parameter(torch.full((1,), 0.1)), nn.Parameter(torch.zeros(1))
        self.steps, self.zeros = nn.Parameter(torch.rand(5) * 0.1), nn.Parameter(torch.zeros(5))
        self.register_buffer("range", torch.tensor([-2.0, 2.0]))
        self.register_buffer("grid", torch.tensor([0.03]))
        self.observing = torch.zeros(1, dtype=torch.long)

    def forward(self, x: Tensor) -> Tensor:
        h = torch._fake_quantize_learnable_per_tensor_affine(x, self.step, self.zero, -8, 7, 1.0)
        w = torch._fake_quantize_learnable_per_channel_affine(
            self.first.weight, self.steps, self.zeros, 0, -8, 7, 1.0
        )
        h = F.linear(h, w, self.first.bias)
        h = torch._fake_quantize_learnable_per_channel_affine(
            h, self.steps, self.zeros, h.dim() - 1, -8, 7, 1.0
        )
        on, shift = torch.ones(1, dtype=torch.long), torch.zeros(1, dtype=torch.int32)
        least, most = self.range
        h = torch.fused_moving_avg_obs_fake_quant(
            h, self.observing, on, least, most, self.grid, shift, 0.01, -128, 127, -1
        )
        return self.last(h)


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_quantised_training(shape: tuple[int, ...]) -> None:
    """In float32: torch's kernels know no other."""
    torch.manual_seed(0)
    model, x = Quantised(), torch.randn(4, *shape)
    expected = oracle(model, lambda m, b: flat_loss(m(b)), x)
    with persample.record(model) as tape:
        tape.backward(flat_loss(model(x)))
    assert relative_error(tape.grads(), expected) < 1e-5


def test_an_observer_of_the_batch_is_refused() -> None:
    model, x = Quantised(), torch.randn(4, 4)
    model.observing.fill_(1)
    with persample.record(model) as tape:
        losses = flat_loss(model(x))
        with pytest.raises(persample.MixedSamplesError) as caught:
            tape.backward(losses)
    assert "disable_observer" in caught.value.fix


USERS = torch.tensor([0, 1, 1, 0, 2, 2])
SUMS = {
    "ab,cb->": lambda h: (h.T, h.T),
    "ab,ac->bc": lambda h: (h, h.sin()),
    "...b,...c->bc": lambda h: (h, h.sin()),
    "a...,...->": lambda h: (h.T, h[:, 0]),
}


@pytest.mark.parametrize("equation", SUMS)
@pytest.mark.parametrize("users", [USERS, torch.arange(6)])
def test_einsum_over_samples_adds_up(equation: str, users: Tensor) -> None:
    model, x = nn.Linear(5, 6).double(), torch.randn(6, 5, dtype=torch.float64)
    n = int(users.max()) + 1
    with persample.record(model, n=n, sample_ids=users) as tape:
        tape.backward(torch.einsum(equation, *SUMS[equation](model(x))).sum())
    named = dict(model.named_parameters())
    for k in range(n):
        part = torch.einsum(equation, *SUMS[equation](model(x[users == k]))).sum()
        own = torch.autograd.grad(part, list(named.values()))
        found = {name: rows[k] for name, rows in tape.grads().items()}
        assert relative_error(found, dict(zip(named, own, strict=True))) < 1e-10


CROSSED = {
    "ab,ac->c": lambda h: (h.T, h),
    "ab,bc->c": lambda h: (h, h),
    "...a,...->a": lambda h: (h.T, h[:, 0]),
    "a...,...->": lambda h: (h, h[:, 0]),
}


@pytest.mark.parametrize("equation", CROSSED)
@pytest.mark.parametrize("users", [USERS, torch.arange(6)])
def test_einsum_that_multiplies_sums_is_refused(equation: str, users: Tensor) -> None:
    """Both factors hold their samples on contracted axes of one size, but not on the same one."""
    model, x = nn.Linear(5, 6).double(), torch.randn(6, 5, dtype=torch.float64)
    with persample.record(model, n=int(users.max()) + 1, sample_ids=users) as tape:
        total = torch.einsum(equation, *CROSSED[equation](model(x))).sum()
        with pytest.raises(persample.MixedSamplesError):
            tape.backward(total)


LISTS: dict[str, list[Any]] = {
    "slices": [slice(None), slice(1, 3)],
    "dots": [..., 0],
    "a list": [slice(None), [0, 2]],
    "tensors": [torch.arange(4), torch.tensor([1, 0, 3, 2])],
    "lists": [[0, 1, 2, 3], [1, 0, 3, 2]],
    "one list": [[0, 1, 2, 3]],
    "numbers": [0, 1, 2, 3],
}


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
@pytest.mark.parametrize("name", LISTS)
def test_lists_that_torch_takes_for_tuples(name: str) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 4).double(), torch.randn(4, 4, dtype=torch.float64)
    rows = []
    for loss in model(x)[LISTS[name]].reshape(4, -1).square().sum(1):
        rows.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
    with persample.record(model) as tape:
        tape.backward(model(x)[LISTS[name]].reshape(4, -1).square().sum(1))
    for found, own in zip(tape.grads().values(), zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(own))


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_a_list_in_a_list_moves_no_samples() -> None:
    model, x = nn.Linear(4, 4).double(), torch.randn(4, 4, dtype=torch.float64)
    with persample.record(model) as tape:
        over_samples = model(x)[[[0, 1, 2, 3]]].sum(0)
        with pytest.raises(persample.MixedSamplesError):
            tape.backward(over_samples)
