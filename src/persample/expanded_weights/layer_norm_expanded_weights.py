"""``F.layer_norm`` with expanded weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .expanded_weights_impl import implements_per_sample_grads
from .recorded_rule import Arguments, recorded_backward, recorded_forward


@implements_per_sample_grads(F.layer_norm)
class LayerNormPerSampleGrad(torch.autograd.Function):
    """X (n, …, *shape), weight and bias (*shape): rows Σₜ x̂ₜ ⊙ gₜ and Σₜ gₜ."""

    @staticmethod
    def forward(ctx: Any, kwarg_names: Sequence[str], function: Any, *values: Any) -> Tensor:
        """The result for all samples."""
        return recorded_forward(ctx, kwarg_names, function, values, unfit=_unfit)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Rows for weight and bias; the gradient of the input."""
        return recorded_backward(ctx, grad_output)


def _unfit(data: Tensor, arguments: Arguments) -> str:
    args, kwargs = arguments
    normal = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    whole = len(normal) >= data.dim()
    return f"layer_norm over {tuple(normal)} normalises over the batch dimension" if whole else ""
