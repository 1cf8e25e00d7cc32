"""``F.instance_norm`` with expanded weights."""

import torch.nn.functional as F

from .expanded_weights_impl import implements_per_sample_grads
from .recorded_rule import RecordedRule


@implements_per_sample_grads(F.instance_norm)
class InstanceNormPerSampleGrad(RecordedRule):
    """X (n, c, …), weight and bias (c), by each sample's statistics or by running ones."""
