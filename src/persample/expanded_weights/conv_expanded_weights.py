"""``F.conv1d``, ``F.conv2d`` and ``F.conv3d`` with expanded weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .conv_utils import conv_backward, conv_picker
from .expanded_weights_impl import implements_per_sample_grads
from .recorded_rule import Arguments, recorded_forward


@implements_per_sample_grads(F.conv1d)
@implements_per_sample_grads(F.conv2d)
@implements_per_sample_grads(F.conv3d)
class ConvPerSampleGrad(torch.autograd.Function):
    """X (n, c, …), weight (o, c / groups, *kernel), bias (o); all arguments of a convolution."""

    @staticmethod
    def forward(
        ctx: Any, kwarg_names: Sequence[str], conv_fn: Callable[..., Any], *values: Any
    ) -> Tensor:
        """The result for all samples."""
        rank = conv_picker(conv_fn, 3, 4, 5)

        def unfit(data: Tensor, _: Arguments) -> str:
            if data.dim() == rank:
                return ""
            return f"a batch of images has rank {rank}, got rank {data.dim()}"

        ctx.conv_fn = conv_fn
        return recorded_forward(ctx, kwarg_names, conv_fn, values, unfit=unfit)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """Rows for weight and bias; the gradient of the input."""
        return conv_backward(ctx.conv_fn, ctx, grad_outputs[0])
