"""Drop-in for the expanded weights of ``torch.nn.utils``: change the import, keep the program.

>>> import torch
>>> from persample.expanded_weights import call_for_per_sample_grads
>>> model = torch.nn.Linear(3, 1)
>>> call_for_per_sample_grads(model)(torch.ones(2, 3)).sum().backward()
>>> model.weight.grad_sample.shape
torch.Size([2, 1, 3])

Reading order: ``entry.py`` → ``detached.py`` → ``stretch.py`` → ``weight.py`` → ``functions.py``.
"""

from . import functions  # noqa: F401  (fills the table of functions)
from .contract import (
    forward_helper,
    is_batch_first,
    maybe_scale_by_batch_size,
    set_grad_sample_if_exists,
    standard_kwargs,
    sum_over_all_but_batch_and_last_n,
    unpack_expanded_weight_or_tensor,
)
from .entry import call_for_per_sample_grads
from .weight import ExpandedWeight, implements_per_sample_grads

__all__ = [
    "ExpandedWeight",
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
