"""opake: clipping as a transformation of a function, over ``torch.func``."""

from __future__ import annotations

import torch
from torch import Tensor

from ..models.case import Case
from .answers import Grads, trained
from .peer import Steps, peer


@peer("opake")
def opake(case: Case, bound: float) -> Steps:
    """``clipped_grad`` of one sample's loss, the whole batch at once."""
    from opake.dpsgd.clipping import clipped_grad

    net, xs, ys, loss = case
    parameters = {name: p.detach() for name, p in trained(case).items()}

    def one(values: Grads, x: Tensor, y: Tensor) -> Tensor:
        out = torch.func.functional_call(net, values, (x[None],))
        return loss(out, y[None])[0]

    gradient, state = clipped_grad(one, clipping_norm=bound, batch_argnums=(1, 2))

    def clipped() -> Grads:
        found: Grads = gradient(parameters, xs, ys, state=state)[0].pytree
        return found

    return {"clipped sum": clipped}
