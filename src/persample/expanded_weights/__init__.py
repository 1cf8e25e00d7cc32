"""Drop-in for the expanded weights of ``torch.nn.utils``: change the import, keep the program.

>>> import torch
>>> from persample.expanded_weights import call_for_per_sample_grads
>>> model = torch.nn.Linear(3, 1)
>>> call_for_per_sample_grads(model)(torch.ones(2, 3)).sum().backward()
>>> model.weight.grad_sample.shape
torch.Size([2, 1, 3])

Files have the names they have there: ``expanded_weights_impl`` (ExpandedWeight and the tables),
``expanded_weights_utils`` (what rules call), ``*_expanded_weights`` (the rules), ``conv_utils``.
Ours beside them, in the order of a call: ``entry`` → ``detached`` → ``recorded_graph`` →
``written`` for a module, ``recorded_rule`` → ``recorded_call`` → ``recorded_graph`` for a function.
"""

from . import recurrent_functions  # noqa: F401  (fills the table of recurrent functions)
from .conv_expanded_weights import ConvPerSampleGrad
from .embedding_expanded_weights import EmbeddingPerSampleGrad
from .entry import call_for_per_sample_grads
from .expanded_weights_impl import ExpandedWeight, implements_per_sample_grads
from .expanded_weights_utils import (
    forward_helper,
    is_batch_first,
    maybe_scale_by_batch_size,
    set_grad_sample_if_exists,
    standard_kwargs,
    sum_over_all_but_batch_and_last_n,
    unpack_expanded_weight_or_tensor,
)
from .group_norm_expanded_weights import GroupNormPerSampleGrad
from .instance_norm_expanded_weights import InstanceNormPerSampleGrad
from .layer_norm_expanded_weights import LayerNormPerSampleGrad
from .linear_expanded_weights import LinearPerSampleGrad
from .own import BUILT_IN

BUILT_IN.update(ExpandedWeight.handled_functions.values())

__all__ = [
    "ConvPerSampleGrad",
    "EmbeddingPerSampleGrad",
    "ExpandedWeight",
    "GroupNormPerSampleGrad",
    "InstanceNormPerSampleGrad",
    "LayerNormPerSampleGrad",
    "LinearPerSampleGrad",
    "call_for_per_sample_grads",
    "forward_helper",
    "implements_per_sample_grads",
    "is_batch_first",
    "maybe_scale_by_batch_size",
    "set_grad_sample_if_exists",
    "standard_kwargs",
    "sum_over_all_but_batch_and_last_n",
    "unpack_expanded_weight_or_tensor",
]
