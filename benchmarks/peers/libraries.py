"""Opacus and BackPACK, used as their own documentation shows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..models.case import Case
from .answers import Grads, coefficients
from .peer import Steps, Twin, clear, from_rows, peer, twin


def opacus_twin(case: Case) -> Twin:
    """The model with its recurrent layers replaced by Opacus's own."""
    from opacus.validators import ModuleValidator

    copied = twin(case[0])
    if any(isinstance(module, nn.RNNBase) for module in copied.net.modules()):
        copied.net = ModuleValidator.fix(copied.net)
        for prefix, module in copied.net.named_modules():
            for old, new in getattr(module, "old_to_new", {}).items():
                copied.names[f"{prefix}.{old}"] = f"{prefix}.{new}"
    return copied


@peer("Opacus hooks")
def hooks(case: Case, bound: float) -> Steps:
    """GradSampleModule: materialised by backward hooks."""
    from opacus.grad_sample import GradSampleModule

    copied = opacus_twin(case)
    _, x, y, loss = case
    wrapped = GradSampleModule(copied.net, batch_first=True, loss_reduction="sum", strict=False)

    def grads() -> Grads:
        wrapped.zero_grad(set_to_none=True)
        loss(wrapped(x), y).sum().backward()
        return copied.collect("grad_sample")

    return from_rows(grads, bound)


@peer("Opacus ghost")
def ghost(case: Case, bound: float) -> Steps:
    """Ghost clipping: norms in a first backward, the sum by a second one."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping

    copied = opacus_twin(case)
    _, x, y, loss = case
    wrapped: Any = GradSampleModuleFastGradientClipping(
        copied.net, batch_first=True, loss_reduction="sum", strict=False, max_grad_norm=bound,
        use_ghost_clipping=True,
    )  # fmt: skip

    def first(retain: bool) -> Tensor:
        wrapped.zero_grad(set_to_none=True)
        losses = loss(wrapped(x), y)
        losses.sum().backward(retain_graph=retain)
        return losses

    def norms() -> Tensor:
        first(False)
        found: Tensor = wrapped.get_norm_sample()
        clear(copied.net, "_norm_sample")
        return found

    def clipped() -> Grads:
        losses = first(True)
        c = wrapped.get_clipping_coef()
        wrapped.zero_grad(set_to_none=True)
        wrapped.disable_hooks()
        try:
            (c * losses).sum().backward()
        finally:
            wrapped.enable_hooks()
        found = copied.collect("grad")
        clear(copied.net, "_norm_sample")
        return found

    return {"norms": norms, "clipped sum": clipped}


@peer("BackPACK")
def backpack(case: Case, bound: float) -> Steps:
    """BatchGrad for rows; BatchL2Grad and a second backward for the rest."""
    from backpack import backpack as active
    from backpack import extend
    from backpack.extensions import BatchGrad, BatchL2Grad

    copied = twin(case[0])
    _, x, y, loss = case
    net = copied.net
    extend(net)

    def run(extension: Any, retain: bool) -> Tensor:
        losses = loss(net(x), y)
        with active(extension, retain_graph=retain):
            losses.sum().backward(retain_graph=retain)
        return losses

    def grads() -> Grads:
        run(BatchGrad(), False)
        return copied.collect("grad_batch")

    def square_root(found: dict[str, Tensor]) -> Tensor:
        trainable = sum(p.requires_grad for p in net.parameters())
        if len(found) < trainable:
            raise RuntimeError(f"norms of {len(found)} parameters out of {trainable}")
        return torch.stack(list(found.values())).sum(0).sqrt()

    def norms() -> Tensor:
        run(BatchL2Grad(), False)
        return square_root(copied.collect("batch_l2"))

    def clipped() -> Grads:
        losses = run(BatchL2Grad(), True)
        c = coefficients(square_root(copied.collect("batch_l2")), bound)
        (c * losses).sum().backward()
        return copied.collect("grad")

    return {"grads": grads, "norms": norms, "clipped sum": clipped}
