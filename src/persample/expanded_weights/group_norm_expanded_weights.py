"""``F.group_norm`` with expanded weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .expanded_weights_impl import implements_per_sample_grads
from .recorded_rule import recorded_backward, recorded_forward


@implements_per_sample_grads(F.group_norm)
class GroupNormPerSampleGrad(torch.autograd.Function):
    """X (n, c, …), weight and bias (c): rows Σₜ x̂ₜ ⊙ gₜ and Σₜ gₜ, either of them alone as well."""

    @staticmethod
    def forward(ctx: Any, kwarg_names: Sequence[str], function: Any, *values: Any) -> Tensor:
        """The result for all samples."""
        return recorded_forward(ctx, kwarg_names, function, values)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Rows for weight and bias; the gradient of the input."""
        return recorded_backward(ctx, grad_output)
