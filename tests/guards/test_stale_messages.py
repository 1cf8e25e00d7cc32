"""An answer that rests on parameters that were written to: the error says which write it can be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import persample


@pytest.mark.parametrize("lean", [False, True])
def test_after_load_state_dict(lean: bool) -> None:
    """There is no optimizer: the fix must not speak of one alone."""
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    with persample.record(model, lean=lean) as tape:
        tape.backward(model(torch.randn(5, 4)).square().sum(1))
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    with pytest.raises(persample.StaleError) as caught:
        tape.clipped_sum(1.0)
    assert "load_state_dict" in caught.value.fix
    assert "computed from its values" in caught.value.why


def test_the_fix_helps() -> None:
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    with persample.record(model) as tape:
        tape.backward(model(torch.randn(5, 4)).square().sum(1))
    before = tape.clipped_sum(1.0)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert all(g.isfinite().all() for g in before.values())
