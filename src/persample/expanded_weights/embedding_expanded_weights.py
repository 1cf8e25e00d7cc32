"""``F.embedding`` with an expanded table."""

import torch.nn.functional as F

from .expanded_weights_impl import implements_per_sample_grads
from .recorded_rule import RecordedRule


@implements_per_sample_grads(F.embedding)
class EmbeddingPerSampleGrad(RecordedRule):
    """Indices (n, …), weight (rows, d): each sample's gradients added up by index."""
