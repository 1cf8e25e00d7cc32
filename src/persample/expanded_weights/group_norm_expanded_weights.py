"""``F.group_norm`` with expanded weights."""

import torch.nn.functional as F

from .expanded_weights_impl import implements_per_sample_grads
from .recorded_rule import RecordedRule


@implements_per_sample_grads(F.group_norm)
class GroupNormPerSampleGrad(RecordedRule):
    """X (n, c, …), weight and bias (c): rows Σₜ x̂ₜ ⊙ gₜ and Σₜ gₜ, either of them alone as well."""
