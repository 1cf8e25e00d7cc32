"""dattri-llm: factors of linear layers, by hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..models.case import Case
from .peer import Steps, clear, peer, twin


@peer("dattri-llm")
def dattri(case: Case, bound: float) -> Steps:
    """Norms and inner products of captured factors, every layer by the cheaper way of its own."""
    from dattri_llm import REGISTER_ALL, HookManager, HookManagerConfig
    from dattri_llm.gradient.ops import grad_norm_sq

    copied = twin(case[0])
    _, x, y, loss = case
    manager = HookManager(copied.net, config=HookManagerConfig(linear_io=REGISTER_ALL))

    def captured() -> Any:
        with manager.collect():
            loss(copied.net(x), y).sum().backward()
            clear(copied.net)
            found = manager.get_gradient()
        covered = {name.split("#")[0] for name in found.layer_names}
        missing = [
            name
            for name, module in copied.net.named_modules()
            if name not in covered
            and any(p.requires_grad for p in module.parameters(recurse=False))
        ]
        if missing:
            raise RuntimeError(f"captured nothing of {', '.join(missing[:3])}")
        return found

    def norms() -> Tensor:
        found = captured()
        each = [grad_norm_sq(found.data[k], found.layer_types[k]) for k in found.data]
        return torch.stack(each).sum(0).sqrt()

    def gram() -> Tensor:
        found = captured()
        total: Tensor = found.similarity(found, reduce="all")
        return total

    return {"norms": norms, "gram": gram}
