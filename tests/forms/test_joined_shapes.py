"""Products of one position that are joined give sums of their parameters' shapes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from persample.forms import Form, Joined, Outer
from persample.forms.fast.stacked import stack_forms


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 4), (3, 8, 1, 1)])
def test_sums_have_the_shape_of_the_parameter(shape: tuple[int, ...]) -> None:
    n, c = 5, torch.linspace(-1, 1, 5).double()
    forms: dict[str, Form] = {
        name: Outer(torch.randn(n, 3).double(), torch.randn(n, 8).double(), torch.Size(shape))
        for name in ("one", "other")
    }
    found: dict[str, Tensor] = {}
    for name, form in stack_forms(forms, squares=False).items():
        found |= form.sums(c) if isinstance(form, Joined) else {name: form.weighted_sum(c)}
    for name, form in forms.items():
        expected = torch.einsum("n,n...->...", c, form.dense())
        torch.testing.assert_close(found[name], expected)
