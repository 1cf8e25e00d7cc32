"""Models that take the batch apart and compute sample by sample, with any operator of torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error

Compute = Callable[["Model", Tensor], Tensor]
EYE = torch.eye(4, dtype=torch.float64)


class Model(nn.Module):
    """A matrix, a vector, and what is computed with them."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).reshape(x.shape[0], -1).square().sum(1)


def each(compute: Compute) -> Compute:
    """The same for every sample on its own."""
    return lambda m, x: torch.stack([compute(m, row) for row in x])


def with_parameters(m: Model, row: Tensor) -> Tensor:
    return torch.cov(torch.cat([row, m.w]))


def kept_in_a_buffer(m: Model, x: Tensor) -> Tensor:
    buffer = x.new_zeros(x.shape[0], 16)
    for i in range(x.shape[0]):
        buffer[i] = torch.kron(m.b, x[i, 0])
    return buffer


ALONE: dict[str, Compute] = {
    "covariance": each(lambda m, row: torch.cov(row @ m.w)),
    "covariance beside parameters": each(with_parameters),
    "a token of its own": each(lambda m, row: torch.cat([m.b[None], row]).softmax(0) @ m.w),
    "padded before a layer": each(lambda m, row: torch.cat([row, row.new_ones(2, 4)]) @ m.w + m.b),
    "padded and added up": each(
        lambda m, row: torch.cat([row @ m.w, row.new_ones(2, 4)]).logsumexp(0).sum()
    ),
    "distances": each(lambda m, row: F.pdist(row * m.b)),
    "a distance to the parameter": each(lambda m, row: torch.dist(row, m.w)),
    "Kronecker product": each(lambda m, row: torch.kron(m.b, row[0])),
    "pairs": each(lambda m, row: torch.cartesian_prod(row[0] * m.b, row[1]).prod(1)),
    "inverse of a tensor": each(
        lambda m, row: torch.linalg.tensorinv((row * m.b + 3 * EYE).view(4, 2, 2), ind=1)
    ),
    "written by number": each(lambda m, row: (row * m.b).put(torch.tensor([0, 5]), m.b[:2])),
    "a buffer": kept_in_a_buffer,
}
BATCHED: dict[str, Compute] = {
    "added to its own product": lambda m, x: (h := x[:, 0] * m.b, torch.addmm(h, h, m.w))[1],
    "added to its own square": lambda m, x: (h := x @ m.w, torch.baddbmm(h, h, h))[1],
    "a solution by factors": lambda m, x: torch.linalg.lu_solve(
        *torch.linalg.lu_factor(x * m.b + 3 * EYE), x
    ),
    "sides of a factored parameter": lambda m, x: torch.lu_solve(
        x, *torch.linalg.lu_factor(m.w)
    ),
    "factors": lambda m, x: torch.cat(torch.lu_unpack(*torch.linalg.lu_factor(x @ m.w))[1:]).view(
        2, *x.shape
    ).transpose(0, 1),
    "a triangular system": lambda m, x: torch.triangular_solve(x, m.w.triu())[0],
    "softmax that survives empty rows": lambda m, x: torch.ops.aten._safe_softmax(x @ m.w, -1),
    "native group norm": lambda m, x: torch.native_group_norm(
        (x @ m.w).contiguous(), None, None, x.shape[0], 4, 4, 2, 1e-5
    )[0],
    "fractional pooling": lambda m, x: F.fractional_max_pool2d(
        (x @ m.w).unsqueeze(1), 2, output_size=2, _random_samples=x.new_full((len(x), 1, 2), 0.4)
    ),
}  # fmt: skip
MIXED: dict[str, Compute] = {
    "Kronecker product with the next": lambda m, x: torch.stack(
        [torch.kron(x[i, 0] * m.b, x[i - 1, 0]) for i in range(len(x))]
    ),
    "distance to the next": lambda m, x: torch.stack(
        [torch.dist(x[i] @ m.w, x[i - 1]) for i in range(len(x))]
    ),
    "padded beside the next": lambda m, x: torch.stack(
        [torch.cat([x[i] @ m.w, x.new_ones(2, 4), x[i - 1]]).logsumexp(0) for i in range(len(x))]
    ),
    "one token for two samples": lambda m, x: torch.stack(
        [torch.cat([m.b[None], x[i], x[i - 1]]).softmax(0) for i in range(len(x))]
    ),
    "what was there before": lambda m, x: torch.stack(
        [torch.kron(x[i, 0] * m.b, sum(x[j, 0] for j in range(i + 1))) for i in range(len(x))]
    ),
}


@pytest.mark.parametrize("compute", [*ALONE.values(), *BATCHED.values()], ids=[*ALONE, *BATCHED])
@pytest.mark.filterwarnings("ignore:torch.(triangular|lu)_solve:UserWarning")
@pytest.mark.parametrize("n", [3, 4])
def test_exact(compute: Compute, n: int) -> None:
    model, x = Model(compute), torch.randn(n, 4, 4, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    expected = oracle(model, losses, x)
    assert relative_error(tape.grads(), expected) < 1e-10
    sizes = sum(rows.flatten(1).square().sum(1) for rows in expected.values())
    torch.testing.assert_close(tape.norms().square(), sizes)


@pytest.mark.parametrize("compute", MIXED.values(), ids=list(MIXED))
def test_refused(compute: Compute) -> None:
    model, x = Model(compute), torch.randn(4, 4, 4, dtype=torch.float64)
    with pytest.raises(persample.MixedSamplesError), persample.record(model) as tape:
        tape.backward(losses(model, x))


class Alone(nn.Module):
    """BatchNorm in training mode sees one image at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        parts = [self.norm(self.conv(x[i : i + 1])).relu() for i in range(len(x))]
        return torch.cat(parts)


@pytest.mark.parametrize("n", [1, 3])
def test_batch_norm_of_single_images_updates_its_statistics_once(n: int) -> None:
    model, plain = Alone().double(), Alone().double()
    x = torch.randn(n, 3, 5, 5, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    assert relative_error(tape.grads(), oracle(plain, losses, x)) < 1e-10
    assert all(bool(torch.isfinite(v).all()) for v in tape.clipped_sum(1.0).values())
    for found, expected in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(found, expected)
