"""Constants that samples were written to, and looked at under another name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.testing import oracle, relative_error


class Model(nn.Module):
    """A step between two layers, with a buffer at hand."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(6, 6), nn.Linear(6, 2), between
        self.register_buffer("mean", torch.zeros(6))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)))


def centre(h: Tensor) -> Tensor:
    return h.detach().mean((0, 1))


def by_data(m: Any, h: Tensor) -> Tensor:
    m.mean.data.copy_(centre(h))
    return h - m.mean


def by_running_data(m: Any, h: Tensor) -> Tensor:
    m.mean.data.mul_(0.9).add_(centre(h), alpha=0.1)
    return h - m.mean


def by_part_of_data(m: Any, h: Tensor) -> Tensor:
    m.mean.data[:3] = centre(h)[:3]
    return h - m.mean


def by_detached(m: Any, h: Tensor) -> Tensor:
    m.mean.detach().copy_(centre(h))
    return h - m.mean


def by_out(m: Any, h: Tensor) -> Tensor:
    torch.mean(h.detach(), (0, 1), out=m.mean.data)
    return h - m.mean


def by_bits(m: Any, h: Tensor) -> Tensor:
    m.mean.view(torch.int64).copy_(centre(h).view(torch.int64))
    return h - m.mean


def seen_by_an_older_view(m: Any, h: Tensor) -> Tensor:
    older = m.mean[None].expand(1, 6)
    m.mean.index_copy_(0, torch.arange(6), centre(h))
    return h - older


def of_a_row_buffer(m: Any, h: Tensor) -> Tensor:
    rows = torch.zeros(h.shape[0], 6)
    older = rows[:, :3]
    rows.copy_(h.detach()[:, 0])
    return h - older.mean(0).repeat(2)


def by_data_after_the_whole(m: Any, h: Tensor) -> Tensor:
    rows = torch.zeros(h.shape[0], 6)
    unseen = rows.data
    rows.copy_(h.detach()[:, 0])
    unseen.copy_(h.detach()[:, 0].roll(1, 0))
    return h + rows[:, None]


def by_data_after_a_part(m: Any, h: Tensor) -> Tensor:
    rows = torch.zeros(h.shape[0], 6)
    unseen, (left, right) = rows.data, rows.chunk(2, 1)
    left.copy_(h.detach()[:, 0, :3])
    right.add_(1)
    unseen.copy_(h.detach()[:, 0].roll(1, 0))
    return h + right.repeat(1, 2)[:, None]


def parameter_by_data(m: Any, h: Tensor) -> Tensor:
    m.last.weight.data.copy_(centre(h).expand(2, -1))
    return h


def parameter_exchanged(m: Any, h: Tensor) -> Tensor:
    m.last.bias.data = centre(h)[:2]
    return h


COUPLED = [
    by_data, by_running_data, by_part_of_data, by_detached, by_out, by_bits, seen_by_an_older_view,
    of_a_row_buffer, by_data_after_the_whole, by_data_after_a_part, parameter_by_data,
    parameter_exchanged,
]  # fmt: skip


@pytest.mark.parametrize("between", COUPLED, ids=lambda f: f.__name__)
def test_a_statistic_of_the_batch_in_a_constants_memory_is_seen(between: Any) -> None:
    torch.manual_seed(0)
    model, x = Model(between).double(), torch.randn(4, 5, 6, dtype=torch.float64)
    with pytest.raises(persample.MixedSamplesError), persample.record(model) as tape:
        tape.backward(model(x).square().sum((1, 2)))


def rows_through_an_older_view(m: Any, h: Tensor) -> Tensor:
    rows = torch.zeros(h.shape[0], 6, dtype=h.dtype)
    older = rows[:, 1:4]
    rows.copy_(h.detach()[:, 0])
    return h * older.repeat(1, 2).unsqueeze(1)


def rows_through_data(m: Any, h: Tensor) -> Tensor:
    rows = torch.zeros(6, h.shape[0], dtype=h.dtype).T
    rows.data.copy_(h.detach()[:, 0])
    return h * rows.unsqueeze(1)


def written_twice(m: Any, h: Tensor) -> Tensor:
    rows = torch.zeros(h.shape[0], 6, dtype=h.dtype)
    rows.data.copy_(h.detach()[:, 0])
    rows.data.add_(h.detach()[:, 1])
    return h * rows.unsqueeze(1)


def a_running_mean_that_is_not_used(m: Any, h: Tensor) -> Tensor:
    m.mean.data.mul_(0.9).add_(centre(h), alpha=0.1)
    return h.tanh()


@pytest.mark.parametrize(
    "between",
    [rows_through_an_older_view, rows_through_data, written_twice, a_running_mean_that_is_not_used],
    ids=lambda f: f.__name__,
)
def test_rows_of_the_samples_are_followed(between: Any) -> None:
    torch.manual_seed(0)
    model, x = Model(between).double(), torch.randn(4, 5, 6, dtype=torch.float64)

    def losses(m: nn.Module, batch: Tensor) -> Tensor:
        return m(batch).square().sum((1, 2))

    with persample.record(model) as tape:
        tape.backward(losses(model, x))
    assert relative_error(tape.grads(), oracle(model, losses, x)) < 1e-10
    assert tape.clipped_sum(1.0)


def test_a_table_that_is_shortened_is_still_a_table() -> None:
    model, words = nn.Embedding(7, 3, max_norm=0.5).double(), torch.tensor([[1, 2], [2, 3]])
    with persample.record(model) as tape:
        tape.backward(model(words).square().sum((1, 2)))
    assert tape.clipped_sum(1.0)["weight"].abs().sum() > 0
