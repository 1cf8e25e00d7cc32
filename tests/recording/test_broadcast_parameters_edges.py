"""What happens to repeated parameters between where they are made and where they meet data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import persample
from persample.testing import relative_error

from ..models import Fn, par
from .test_broadcast_parameters import (
    OPTIONS,
    D,
    K,
    N,
    attended,
    expected,
    layers,
    learned,
    plain,
    pulled_back,
    recorded,
)


def detached(m: Any, x: Tensor) -> Tensor:
    latents = layers(m, m.w.repeat(len(x), 1, 1))
    latents.detach_()
    return attended(latents, x) + m.v * x.mean(1, True)


def detached_before_last(m: Any, x: Tensor) -> Tensor:
    rows = m.norm(m.w.repeat(len(x), 1, 1))
    latents = m.q(rows)
    rows.detach_()
    return attended(latents, x) + m.v * rows


def frozen_meanwhile(m: Any, x: Tensor) -> Tensor:
    latents = m.q(m.w.repeat(len(x), 1, 1))
    m.q.requires_grad_(False)
    out = attended(latents, x)
    m.q.requires_grad_(True)
    return out


def lists_refilled(m: Any, x: Tensor) -> Tensor:
    """Both parameters are zero: values do not tell them apart."""
    with torch.no_grad():
        m.w.zero_()
        m.v.zero_()
    parts = [m.w.repeat(len(x), 1, 1), m.v.repeat(len(x), 1, 1)]
    index = [0, 1]
    latents = torch.cat(parts, 1)[:, index]
    parts.reverse()
    index.reverse()
    return attended(m.q(latents), x)


def negative_zeros(m: Any, x: Tensor) -> Tensor:
    signs = (-0.0 * m.w.abs()).repeat(len(x), 1, 1)
    return attended(m.q(torch.copysign(m.v.repeat(len(x), 1, 1), signs)), x)


def hooked_by_torch(m: Any, x: Tensor) -> Tensor:
    rows = m.norm(m.w.repeat(len(x), 1, 1))
    latents = 2 * rows
    node = torch.autograd.graph.get_gradient_edge(latents).node.next_functions[0][0]
    node.register_prehook(lambda grads: tuple(3 * g for g in grads))
    return attended(m.q(rows), x) + attended(latents, x)


def in_place(m: Any, x: Tensor) -> Tensor:
    """What a layer returns is a view of its matrix product."""
    one, two = m.q(m.w.repeat(len(x), 1, 1)), m.q(m.v.repeat(len(x), 1, 1)).mT
    one += x[:, :K]
    two *= x[:, :K].mT
    return attended(one, x) + attended(two.mT, x)


def through_other_tensors(m: Any, x: Tensor) -> Tensor:
    one = m.q(m.w.repeat(len(x), 1)).to_sparse().to_dense().view(-1, K, D)
    rows = torch.nested.as_nested_tensor([*m.norm(m.v.repeat(len(x), 1, 1)).unbind()])
    return attended(one, x) + attended(rows.to_padded_tensor(0.0), x)


MEANWHILE = [
    through_other_tensors, detached, detached_before_last, frozen_meanwhile, lists_refilled,
    negative_zeros, hooked_by_torch, in_place,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("make", MEANWHILE, ids=lambda make: make.__name__)
def test_what_happens_before_data_are_met(
    make: Callable[[Any, Tensor], Tensor], count: int, options: dict[str, Any]
) -> None:
    model, _ = learned(lambda m, x: x, v=par(K, D))
    model.function = make
    x = torch.randn(count, 5, D, dtype=torch.float64)
    want = expected(model, x)
    assert relative_error(recorded(model, x, **options).grads(), want) < 1e-10


def test_written_to_unseen_between_two_meetings() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        latents = m.q(m.w.repeat(len(x), 1, 1))
        out = attended(latents, x)
        latents.data.mul_(2)
        return out + attended(latents, x)

    model, x = plain(forward), torch.randn(N, 5, D, dtype=torch.float64)
    with pytest.raises(persample.StaleError, match="written to unseen"):
        recorded(model, x).norms()


def test_autocast_where_they_were_made() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            latents = m.q(m.w.repeat(len(x), 1, 1)).float()
        return attended(latents, x)

    model, x = plain(forward).float(), torch.randn(N, 5, D)
    tape = recorded(model, x)
    assert relative_error(tape.grads(), expected(model, x)) < 1e-2
    assert not any(pulled_back(form) for form in tape._forms.forms(["w", "q.weight"]).values())


def test_nodes_behind_are_not_hooked() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        latents = 2 * m.norm(m.w.repeat(len(x), 1, 1))
        latents.grad_fn.next_functions[0][0].register_prehook(lambda grads: grads)
        return attended(latents, x)

    model, x = plain(forward), torch.randn(N, 5, D, dtype=torch.float64)
    with pytest.raises(persample.UsageError, match="hook on a graph node"):
        recorded(model, x)


def test_an_attempt_leaves_no_zeros_behind() -> None:
    """A permutation with as many rows as there are samples, times a weight: invertible layers."""
    eye = torch.eye(N, dtype=torch.float64)
    order = eye.flip(0)
    model = Fn(lambda s, x: x @ (order @ (s.w.tril(-1) + eye) @ s.w.triu()), w=par(N, N)).double()
    x = torch.randn(N, N, dtype=torch.float64)
    with persample.record(model) as tape:
        tape.backward(model(x).square().sum(1))
    truth = tape.grads()
    x[1] = float("nan")
    with persample.record(model) as tape:
        tape.backward(model(x).square().sum(1))
    assert tape.nonfinite().tolist() == [1]
    rest = [0, *range(2, N)]
    assert relative_error({"w": tape.grads()["w"][rest]}, {"w": truth["w"][rest]}) < 1e-12
