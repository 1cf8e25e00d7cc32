"""Lists of lists of tensors: a list, or a tensor, is a sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample

from ..models import Fn

Groups = list[list[Tensor]]


def pooled(s: Any, groups: Groups) -> Tensor:
    """One output for each list."""
    return torch.stack([sum(s.a(image.mean((1, 2))) for image in group) for group in groups])


def packed(s: Any, groups: Groups) -> Tensor:
    """One output for each tensor."""
    return torch.stack([s.a(image.mean((1, 2))) for group in groups for image in group])


def images(*counts: int) -> Groups:
    torch.manual_seed(0)
    return [[torch.randn(2, 3 + j, 4).double() for j in range(count)] for count in counts]


def rows(model: nn.Module, alone: list[Groups]) -> list[Tensor]:
    found = []
    for groups in alone:
        model.zero_grad()
        model(groups).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


def check(function: Any, groups: Groups, alone: list[Groups], **options: Any) -> None:
    model = Fn(function, a=nn.Linear(2, 3)).double()
    expected = torch.stack(rows(model, alone))
    with persample.record(model, **options) as tape:
        tape.backward(model(groups).square().sum(1))
    found = torch.cat([g.flatten(1) for g in tape.grads().values()], 1)
    assert torch.allclose(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("counts", [(2, 1, 3, 2), (1, 2), (3, 1), (2, 3, 2)])
def test_a_list_is_a_sample(counts: tuple[int, ...]) -> None:
    groups = images(*counts)
    check(pooled, groups, [[group] for group in groups])


@pytest.mark.parametrize("counts", [(2, 2, 2), (1, 1), (3, 3)])
def test_lists_of_equal_lengths_need_n(counts: tuple[int, ...]) -> None:
    groups = images(*counts)
    check(pooled, groups, [[group] for group in groups], n=len(counts))


@pytest.mark.parametrize("counts", [(2, 2), (3, 1), (2, 3)])
def test_a_tensor_is_a_sample(counts: tuple[int, ...]) -> None:
    groups = images(*counts)
    check(packed, groups, [[[image]] for group in groups for image in group], n=sum(counts))


def test_samples_that_interact_are_refused() -> None:
    def centred(s: Any, groups: Groups) -> Tensor:
        out = pooled(s, groups)
        return out - out.mean(0)

    model = Fn(centred, a=nn.Linear(2, 3)).double()
    with pytest.raises(persample.MixedSamplesError), persample.record(model) as tape:
        tape.backward(model(images(2, 1, 3)).square().sum(1))


@pytest.mark.parametrize("scalar", [False, True])
def test_losses_must_decide(scalar: bool) -> None:
    """Three lists, six losses: the fix that is offered helps."""
    model, groups = Fn(packed, a=nn.Linear(2, 3)).double(), images(2, 1, 3)
    with pytest.raises(persample.UsageError) as caught, persample.record(model) as tape:
        losses = model(groups).square().sum(1)
        tape.backward(losses.mean() if scalar else losses)
    assert "n=6" in caught.value.fix
    check(packed, groups, [[[image]] for group in groups for image in group], n=6)
