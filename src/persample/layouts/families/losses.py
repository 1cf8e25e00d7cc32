"""Loss functions: per element they keep colours, reduced they are sums over samples."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import Mixing, Reason
from ..call import Call, Result, carry, elementwise
from ..layout import Additive, Layout
from ..operators import rule

_NONE, _MEAN, _SUM = 0, 1, 2


def _reduction(call: Call, position: int) -> int:
    value = call.arg(position, "reduction", default=_MEAN)
    if isinstance(value, str):
        return {"none": _NONE, "mean": _MEAN, "sum": _SUM}.get(value, _MEAN)
    return int(value)


def _unreduced(call: Call, shape: tuple[int, ...]) -> Tensor:
    """A stand-in with the shape the unreduced result would have."""
    some = call.out if isinstance(call.out, Tensor) else call.out[0]
    return some.new_empty(()).expand(shape) if some.dim() == 0 else some


def _finish(layout: Layout | None, reduction: int, coupled: Reason | None = None) -> Result:
    if layout is None or reduction == _NONE:
        return layout
    if not layout.axes and layout.ids is not None:  # all of it is one sample's
        return Layout(0, 1, layout.ids.reshape(()), coupled)
    return Additive(coupled)


_POINTWISE = {
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2,
    "kl_div": 2, "binary_cross_entropy": 3, "binary_cross_entropy_with_logits": 4,
    "margin_ranking_loss": 4, "hinge_embedding_loss": 3, "poisson_nll_loss": 5,
}  # fmt: skip


@rule(" ".join(_POINTWISE))
def pointwise_loss(call: Call) -> Result:
    """Element by element, then reduced."""
    reduction = _reduction(call, _POINTWISE[call.name])
    if reduction == _NONE:
        return elementwise(call)
    shape = torch.broadcast_shapes(*(t.shape for t in call.tensors()))
    inner = Call(
        call.name,
        call.func,
        call.args,
        call.kwargs,
        _unreduced(call, tuple(shape)),
        call.layouts,
        call.n,
    )
    return _finish(elementwise(inner), reduction)


@rule("cross_entropy_loss nll_loss_nd nll_loss nll_loss2d")
def cross_entropy(call: Call) -> Result:
    """The class axis is 1 (0 for a single row); targets have the other axes."""
    x, target = call.arg(0, "input", "self"), call.arg(1, "target")
    axis = 0 if x.dim() == 1 else 1
    reduction = _reduction(call, 3)
    shape = tuple(s for d, s in enumerate(x.shape) if d != axis)
    out = call.out if reduction == _NONE else _unreduced(call, shape)
    core = {axis} if target.dim() == x.dim() and target.is_floating_point() else ()
    layout = carry(call, [(x, {axis}), (target, core)], out)
    return _finish(layout, reduction)


@rule("multi_margin_loss")
def multi_margin(call: Call) -> Result:
    """Rows of scores with one target each."""
    x, target = call.arg(0, "input"), call.arg(1, "target")
    reduction = _reduction(call, 5)
    core = {x.dim() - 1}
    out = call.out if reduction == _NONE else _unreduced(call, tuple(x.shape[:-1]))
    return _finish(carry(call, [(x, core), (target, ())], out), reduction)


@rule("multilabel_margin_loss")
def multilabel_margin(call: Call) -> Result:
    """Rows of scores with rows of targets."""
    x, target = call.arg(0, "input"), call.arg(1, "target")
    reduction = _reduction(call, 2)
    core = {x.dim() - 1}
    out = call.out if reduction == _NONE else _unreduced(call, tuple(x.shape[:-1]))
    return _finish(carry(call, [(x, core), (target, core)], out), reduction)


@rule("cosine_embedding_loss triplet_margin_loss")
def row_loss(call: Call) -> Result:
    """Along the last axis of rows."""
    tensors = call.tensors()
    cosine = call.name == "cosine_embedding_loss"
    reduction = _reduction(call, 4 if cosine else 7)
    rows = tensors[:2] if cosine else tensors[:3]
    if any(t.dim() != rows[0].dim() for t in rows):
        raise Mixing(f"{call.name} on tensors of different rank")
    pairs = [(t, {t.dim() - 1}) for t in rows] + [(t, set()) for t in tensors[len(rows) :]]
    out = call.out if reduction == _NONE else _unreduced(call, tuple(rows[0].shape[:-1]))
    return _finish(carry(call, pairs, out), reduction)


@rule("ctc_loss")
def ctc(call: Call) -> Result:
    """Scores are (time, batch, classes); targets are rows."""
    scores, targets = call.arg(0, "log_probs"), call.arg(1, "targets")
    lengths = [call.arg(2, "input_lengths"), call.arg(3, "target_lengths")]
    reduction = _reduction(call, 5)
    if scores.dim() != 3:
        raise Mixing("ctc_loss of an unbatched input")
    pairs = [(scores, {0, 2})]
    if targets.dim() == 2:
        pairs.append((targets, {1}))
    elif call.layout(targets) is not None:
        raise Mixing("ctc_loss with concatenated targets", "pass targets as a padded 2-D tensor")
    pairs += [(t, set()) for t in lengths if isinstance(t, Tensor)]
    out = call.out if reduction == _NONE else _unreduced(call, (scores.shape[1],))
    return _finish(carry(call, pairs, out), reduction)
