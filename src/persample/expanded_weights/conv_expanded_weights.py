"""``F.conv1d``, ``F.conv2d`` and ``F.conv3d`` with expanded weights."""

import torch.nn.functional as F

from .expanded_weights_impl import implements_per_sample_grads
from .recorded_rule import RecordedRule


@implements_per_sample_grads(F.conv1d)
@implements_per_sample_grads(F.conv2d)
@implements_per_sample_grads(F.conv3d)
class ConvPerSampleGrad(RecordedRule):
    """X (n, c, …), weight (o, c / groups, *kernel), bias (o); all arguments of a convolution."""
