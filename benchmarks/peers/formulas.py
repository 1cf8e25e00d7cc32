"""Formulas of each layer, from its input and output gradient: squared norms and weighted sums.

No bound on rounding, no case but those of the benchmark's models.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sum = Callable[[Tensor], Tensor]
Answer = tuple[Tensor, dict[str, Sum]]  # squared norms, and the weighted sum of each parameter
Formula = Callable[[nn.Module, Tensor, Tensor], Answer]
aten = torch.ops.aten


def squares(rows: Tensor) -> Tensor:
    """‖·‖² of every row."""
    flat = rows.flatten(1)
    return torch.bmm(flat.unsqueeze(1), flat.unsqueeze(2)).flatten()


def of_rows(**rows: Tensor) -> Answer:
    """From materialised rows."""
    found = torch.stack([squares(r) for r in rows.values()]).sum(0)
    return found, {k: lambda c, r=r: (c @ r.flatten(1)).view(r.shape[1:]) for k, r in rows.items()}


def joined(*answers: Answer) -> Answer:
    """Several parameters of one layer."""
    sums = {name: each for _, some in answers for name, each in some.items()}
    return torch.stack([sq for sq, _ in answers]).sum(0), sums


def turned(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as (in, out), like GPT-2's."""
    return not isinstance(module, nn.Linear)


def product(module: nn.Module, a: Tensor, g: Tensor) -> dict[str, Sum]:
    """Σ cᵢ gᵢ of a linear layer's weight, by one product."""

    def weighted(c: Tensor) -> Tensor:
        left, right = (a, g) if turned(module) else (g, a)
        smaller, other = (left, right) if left.shape[-1] <= right.shape[-1] else (right, left)
        scaled = (smaller * c.view(-1, *[1] * (a.dim() - 1))).flatten(0, -2)
        rest = other.flatten(0, -2)
        return scaled.t() @ rest if smaller is left else rest.t() @ scaled

    return {"weight": weighted}


def bias(module: nn.Module, g: Tensor) -> list[Answer]:
    """The bias of a linear layer or a convolution."""
    if module.bias is None:
        return []
    channels = 1 if isinstance(module, nn.Conv2d) else g.dim() - 1
    axes = [k for k in range(1, g.dim()) if k != channels]
    return [of_rows(bias=g.sum(axes) if axes else g)]


def flat_linear(module: nn.Module, a: Tensor, g: Tensor) -> Answer:
    """One position for each sample: ‖a‖² ‖g‖²."""
    return joined((squares(a) * squares(g), product(module, a, g)), *bias(module, g))


def gram_linear(module: nn.Module, a: Tensor, g: Tensor) -> Answer:
    """Several positions: Σ (A Aᵀ) ∘ (G Gᵀ)."""
    found = torch.bmm(a, a.mT).mul_(torch.bmm(g, g.mT)).sum((1, 2))
    return joined((found, product(module, a, g)), *bias(module, g))


def rows_linear(module: nn.Module, a: Tensor, g: Tensor) -> Answer:
    """Several positions: Gᵀ A written out."""
    rows = torch.bmm(a.mT, g) if turned(module) else torch.bmm(g.mT, a)
    return joined(of_rows(weight=rows), *bias(module, g))


def passing_linear(module: nn.Module, a: Tensor, g: Tensor) -> Answer:
    """Gᵀ A written out for the norms alone."""
    found = squares(torch.bmm(g.mT, a))
    return joined((found, product(module, a, g)), *bias(module, g))


def folded_convolution(module: Any, a: Tensor, g: Tensor) -> Answer:
    """One convolution's weight gradient with a group for each sample."""
    n, (o, i, *kernel) = len(a), module.weight.shape
    weight = module.weight.detach().expand(n, o, i, *kernel).reshape(n * o, i, *kernel)
    _, rows, _ = aten.convolution_backward(
        g.reshape(1, -1, *g.shape[2:]), a.reshape(1, -1, *a.shape[2:]), weight, None,
        module.stride, module.padding, module.dilation, False, [0, 0], n, [False, True, False],
    )  # fmt: skip
    return joined(of_rows(weight=rows.view(n, o, i, *kernel)), *bias(module, g))


def patches(module: Any, a: Tensor) -> Tensor:
    """(n, inputs · taps, positions)."""
    return F.unfold(a, module.kernel_size, module.dilation, module.padding, module.stride)


def unfolded_convolution(module: Any, a: Tensor, g: Tensor) -> Answer:
    """Patches times output gradients."""
    rows = torch.bmm(g.flatten(2), patches(module, a).mT).view(-1, *module.weight.shape)
    return joined(of_rows(weight=rows), *bias(module, g))


def summed(module: Any, a: Tensor, g: Tensor) -> Sum:
    """A convolution's own weight gradient, of scaled output gradients."""

    def weighted(c: Tensor) -> Tensor:
        return aten.convolution_backward(
            g * c[:, None, None, None], a, module.weight, None, module.stride, module.padding,
            module.dilation, False, [0, 0], 1, [False, True, False],
        )[1]  # fmt: skip

    return weighted


def gram_convolution(module: Any, a: Tensor, g: Tensor) -> Answer:
    """Products of positions."""
    p, q = patches(module, a), g.flatten(2)
    found = torch.bmm(p.mT, p).mul_(torch.bmm(q.mT, q)).sum((1, 2))
    return joined((found, {"weight": summed(module, a, g)}), *bias(module, g))


def passing_convolution(module: Any, a: Tensor, g: Tensor) -> Answer:
    """One sample's weight gradient at a time, for the norms alone."""
    one = [summed(module, x, d)(x.new_ones(1)) for x, d in zip(a.split(1), g.split(1), strict=True)]
    found = torch.stack([row.square().sum() for row in one])
    return joined((found, {"weight": summed(module, a, g)}), *bias(module, g))


def layer_norm(module: Any, a: Tensor, g: Tensor) -> Answer:
    """Scale and shift of a layer norm."""
    normal = aten.native_layer_norm(a, module.normalized_shape, None, None, module.eps)[0]
    return of_rows(weight=normal.mul_(g).sum(1), bias=g.sum(1))


def group_norm(module: Any, a: Tensor, g: Tensor) -> Answer:
    """Scale and shift of a group norm."""
    groups = a.reshape(len(a), module.num_groups, -1)
    var, mean = torch.var_mean(groups, 2, correction=0)
    sums = g.flatten(2).sum(2)
    inner = (a * g).flatten(2).sum(2).view(len(a), module.num_groups, -1)
    shift = mean[:, :, None] * sums.view_as(inner)
    weight = (inner - shift) * (var + module.eps).rsqrt()[:, :, None]
    return of_rows(weight=weight.flatten(1), bias=sums)


def embedding(module: Any, a: Tensor, g: Tensor) -> Answer:
    """Rows of a table, added up where a sample looks one up several times."""
    v, d = module.weight.shape
    keys = (a + torch.arange(len(a), device=a.device)[:, None] * v).flatten()
    unique, places = torch.unique(keys, return_inverse=True)
    rows = g.new_zeros(len(unique), d).index_add_(0, places, g.reshape(-1, d))
    found = g.new_zeros(len(a)).index_add_(0, unique // v, rows.square().sum(1))

    def weighted(c: Tensor) -> Tensor:
        return aten.embedding_dense_backward(g * c[:, None, None], a, v, -1, False)

    return found, {"weight": weighted}


FORMULAS: list[tuple[str, Sequence[Formula]]] = [
    ("Conv2d", (folded_convolution, unfolded_convolution, gram_convolution, passing_convolution)),
    ("LayerNorm", (layer_norm,)),
    ("GroupNorm", (group_norm,)),
    ("Embedding", (embedding,)),
]


def formulas(module: nn.Module, g: Tensor) -> Sequence[Formula]:
    """What a layer may be answered by."""
    for name, some in FORMULAS:
        if type(module).__name__ == name:
            return some
    return (gram_linear, rows_linear, passing_linear) if g.dim() == 3 else (flat_linear,)
