"""``F.layer_norm`` with expanded weights."""

import torch.nn.functional as F

from .expanded_weights_impl import implements_per_sample_grads
from .recorded_rule import RecordedRule


@implements_per_sample_grads(F.layer_norm)
class LayerNormPerSampleGrad(RecordedRule):
    """X (n, …, *shape), weight and bias (*shape): rows Σₜ x̂ₜ ⊙ gₜ and Σₜ gₜ."""
