"""Loss functions: per element they keep colours, reduced they are sums over samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..call import Call, Result, carry
from ..layout import Additive, Layout
from ..operators import rule


def _by_row(
    call: Call, operands: Sequence[tuple[Tensor, set[int]]], shape: Sequence[int], position: int
) -> Result:
    """A loss for each element of ``shape``, then reduced unless the argument at a position is 0."""
    reduced = call.arg(position, "reduction") not in (0, "none")
    # a stand-in with the shape that the result would have
    out = (
        call.first.new_empty(()).expand(shape) if reduced and call.first.dim() == 0 else call.first
    )
    layout = carry(call, operands, out)
    if layout is None or not reduced:
        return layout
    if not layout.axes and layout.ids is not None:  # all of it is one sample's
        return Layout(0, 1, layout.ids.reshape(()))
    return Additive()


_POINTWISE = {
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2,
    "kl_div": 2, "binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4,
    "margin_ranking_loss": 4, "hinge_embedding_loss": 3, "poisson_nll_loss": 5,
}  # fmt: skip


@rule(" ".join(_POINTWISE))
def pointwise_loss(call: Call) -> Result:
    """Element by element, then reduced."""
    tensors = call.tensors()
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return _by_row(call, [(t, set()) for t in tensors], shape, _POINTWISE[call.name])


@rule("cross_entropy_loss nll_loss_nd nll_loss nll_loss2d")
def cross_entropy(call: Call) -> Result:
    """The class axis is 1 (0 for a single row); targets have the other axes."""
    x, target = call.arg(0, "input", "self"), call.arg(1, "target")
    axis = 0 if x.dim() == 1 else 1
    core = {axis} if target.dim() == x.dim() and target.is_floating_point() else set()
    shape = [s for d, s in enumerate(x.shape) if d != axis]
    return _by_row(call, [(x, {axis}), (target, core)], shape, 3)


@rule("multi_margin_loss multilabel_margin_loss")
def margin(call: Call) -> Result:
    """Rows of scores with one target each, or with rows of targets."""
    x, target, several = call.arg(0, "input"), call.arg(1, "target"), "label" in call.name
    core = {x.dim() - 1}
    operands = [(x, core), (target, core if several else set())]
    return _by_row(call, operands, x.shape[:-1], 2 if several else 5)


@rule("cosine_embedding_loss triplet_margin_loss")
def row_loss(call: Call) -> Result:
    """Along the last axis of rows."""
    tensors, cosine = call.tensors(), call.name == "cosine_embedding_loss"
    rows = tensors[:2] if cosine else tensors[:3]
    pairs = [(t, {t.dim() - 1}) for t in rows] + [(t, set()) for t in tensors[len(rows) :]]
    return _by_row(call, pairs, rows[0].shape[:-1], 4 if cosine else 7)


@rule("ctc_loss")
def ctc(call: Call) -> Result:
    """Scores are (time, batch, classes); targets are rows."""
    scores, targets = call.arg(0, "log_probs"), call.arg(1, "targets")
    lengths = [call.arg(2, "input_lengths"), call.arg(3, "target_lengths")]
    pairs = [(scores, {0, -1}), (targets, {-1})]
    pairs += [(t, set()) for t in lengths if isinstance(t, Tensor)]
    return _by_row(call, pairs, scores.shape[1:2], 5)
