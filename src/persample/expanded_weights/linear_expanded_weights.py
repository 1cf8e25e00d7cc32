"""``F.linear`` with expanded weights."""

import torch.nn.functional as F

from .expanded_weights_impl import implements_per_sample_grads
from .recorded_rule import RecordedRule


@implements_per_sample_grads(F.linear)
class LinearPerSampleGrad(RecordedRule):
    """X (n, …, i), weight (o, i), bias (o): rows Σₜ gₜ xₜᵀ and Σₜ gₜ."""
