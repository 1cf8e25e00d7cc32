"""A linear map of another form: from a derived tensor back to a parameter it was computed from."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .form import Form, lift, wide
from .mapped import Mapped
from .masked import Masked
from .walk import Found, ends, walk, walk_rows


class Pullback(Mapped):
    """gᵢ = Jᵀ hᵢ, where h is a form of the derived tensor and J its derivative by the parameter.

    The derived tensor's own graph, recorded by autograd, does the work.
    """

    __slots__ = ("derived", "edge", "parameter", "target")

    def __init__(
        self, form: Form, edge: Any, parameter: Tensor, derived: torch.dtype,
        target: tuple[Any, torch.Size] | None = None,
    ) -> None:  # fmt: skip
        """``target``: an edge of the graph, and a shape, where to stop on the way."""
        end, shape = (parameter, parameter.shape) if target is None else target
        super().__init__(form, shape, parameter.dtype, parameter.device)
        self.edge, self.parameter, self.derived, self.target = edge, parameter, derived, end

    def of(self, form: Form) -> Pullback:
        """The same derivative for another form."""
        return Pullback(form, self.edge, self.parameter, self.derived, (self.target, self.shape))

    def map(self) -> Hashable:
        """Where the derived tensor comes from."""
        return Pullback, id(self.edge.node), self.edge.output_nr, self.form.shape, self.derived

    def without(self, bad: Tensor) -> Pullback:
        """Zero gradients for some samples."""
        return self.of(Masked(self.form, bad))

    def row_bytes(self) -> int:
        """A row of the derived tensor and one of the parameter."""
        return super().row_bytes() + self.form.row_bytes()

    def _grad(self, seed: Tensor, walk: Callable[..., Found]) -> Tensor | None:
        up = lift([seed], self.derived)
        seed = (seed if up is None else seed * up).to(self.derived)
        found = walk([self.edge], [self.target], [seed])[0]
        return found if up is None or found is None else found.to(wide(found.dtype)) / up

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """All rows in one batched backward pass where torch can, else row by row."""
        rows = self.form.dense(first, last)
        found = self._grad(rows, walk_rows) if rows.shape[0] else None
        if found is None:
            return torch.zeros((rows.shape[0], *self.shape), dtype=self.dtype, device=self.device)
        return found

    def dot(self, direction: Tensor) -> Tensor:
        """⟨Jᵀ hᵢ, V⟩ = ⟨hᵢ, J V⟩: one product with the derivative for all samples."""
        if self.dtype.is_complex or self.derived.is_complex:
            return super().dot(direction)
        moved = self._push(direction)
        return super().dot(direction) if moved is None else self.form.dot(moved)

    def _push(self, direction: Tensor) -> Tensor | None:
        """J V as the derivative of s ↦ ⟨Jᵀ s, V⟩; None where backward cannot be differentiated.

        A backward that detaches its work would lose a part without a word, so the product is
        compared with ⟨Jᵀ s, V⟩ at a random s.
        """
        generator = torch.Generator().manual_seed(0)
        at = torch.randn(self.form.shape, generator=generator, dtype=torch.float64)
        seed = at.to(self.device, self.derived).requires_grad_()
        direction = direction.to(self.dtype)
        try:
            with torch.enable_grad():
                wanted = ends([self.edge.node], [self.target])
                back = torch.autograd.grad(
                    self.edge, wanted, seed, create_graph=True, allow_unused=True
                )[0]
                if back is None:
                    return torch.zeros_like(seed).detach()
                back = back.to_dense()
                moved: Tensor = torch.autograd.grad(back, [seed], direction)[0]
        except RuntimeError:
            return None
        expected = (back.detach().double() * direction.double()).sum()
        size = back.detach().double().norm() * direction.double().norm()
        error = ((moved.double() * seed.detach().double()).sum() - expected).abs()
        if not bool(error <= 64 * torch.finfo(self.derived).eps * size):
            return None
        return moved

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """Linear: one backward pass of the form's own sum; norms come from the rows."""
        if certain:
            return super().weighted_sum(c)
        found = self._grad(self.form.weighted_sum(c), walk)
        if found is None:
            return torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        return found.to(wide(self.dtype))
