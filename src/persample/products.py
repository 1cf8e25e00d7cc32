"""Questions about inner products: between samples, with a direction, of random projections."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .asked import Asked
from .errors import UsageError
from .forms import Form
from .parameters import Params, choose
from .positions import contributions
from .queries import Sum, added, projected
from .requests import expect_direction, expect_projection, shown


class Products(Asked):
    """Every question takes ``params=``: a name, names, or a predicate on names."""

    def gram(self, *, params: Params = None) -> Tensor:
        """⟨gᵢ, gⱼ⟩ for every pair of samples: (n, n)."""
        with self._asking():
            total = Sum(self.n, self.n, device=self._device())
            self._each(choose(params, self.names), lambda _, form: total.add(form.dots(form)))
            return total.value

    def cosine(self, *, params: Params = None) -> Tensor:
        """⟨gᵢ, gⱼ⟩ / ‖gᵢ‖‖gⱼ‖: (n, n); zero where a gradient is zero."""
        products = self.gram(params=params)
        with self._asking():
            sizes = products.diagonal().clamp(min=0).sqrt()
            scale = torch.where(sizes > 0, 1 / sizes, torch.zeros_like(sizes))
            return products * scale.unsqueeze(0) * scale.unsqueeze(1)

    def cross(self, other: Products, *, params: Params = None) -> Tensor:
        """⟨gᵢ, hⱼ⟩ between this tape's samples and another's: (n, m)."""
        with self._asking():
            if not isinstance(other, Products):
                raise UsageError(
                    f"cross takes another tape, got {shown(other)}",
                    fix="dots(direction) takes a dictionary of tensors",
                )
            names = choose(params, self.names)
            mine, theirs = self._open().parameters, other._open().parameters
            for name in names:
                if not _alike(mine.selected[name], theirs.selected.get(name)):
                    raise UsageError(
                        f"the other tape has no parameter {name!r} of this shape, dtype and device",
                        why="the tapes are of different models",
                        fix="record both on the same model, or select params= that both have",
                    )
            others = other._forms(names)
            total = Sum(self.n, other.n, device=self._device())

            def visit(name: str, form: Form) -> None:
                if name in others:
                    total.add(form.dots(others[name]))

            self._each(names, visit)
            return total.value

    def dots(self, direction: Mapping[str, Tensor], *, params: Params = None) -> Tensor:
        """⟨gᵢ, V⟩ for a direction ``{name: shape}``: (n,)."""
        with self._asking():
            names = choose(params, self.names)
            expect_direction(direction, names, self._open().parameters.selected)
            lean = self._ledger.lean
            if lean is not None and lean.knows(direction, names):
                self._ledger.ready()
                parts = {name: lean.dots[name] for name in names if name in lean.dots}
                return added(parts, self.n, self._device())
            total = Sum(self.n, device=self._device())

            def visit(name: str, form: Form) -> None:
                total.add(form.dot(direction[name].detach()))

            self._each(names, visit, linear=True)
            return total.value

    def project(self, dim: int, *, seed: int, params: Params = None) -> Tensor:
        """Random projections that keep inner products on average: (n, dim).

        The map depends on seed, parameter name, shape and dim alone, so projections of different
        batches, runs and devices can be compared. E⟨P gᵢ, P gⱼ⟩ = ⟨gᵢ, gⱼ⟩.
        """
        with self._asking():
            wanted = expect_projection(dim, seed)
            total = Sum(self.n, wanted[0], device=self._device())
            lean = self._ledger.lean
            if lean is not None and params is None and lean.ahead.projection == wanted:
                self._ledger.ready()
                for found in lean.projections:
                    total.add(found)
                return total.value

            def visit(name: str, form: Form) -> None:
                total.add(projected(name, form, *wanted))

            self._each(choose(params, self.names), visit, linear=True)
            return total.value

    def positions(
        self, direction: Mapping[str, Tensor] | None = None, *, params: Params = None
    ) -> Tensor:
        """What each position (token, pixel) contributes to ‖gᵢ‖², or to ⟨gᵢ, V⟩: (n, T).

        Row i adds up to ``norms()[i] ** 2``, or to ``dots(direction)[i]``, exactly: position t has
        ⟨gᵢₜ, gᵢ⟩, where gᵢₜ is the part of the gradient that enters parameters through results at
        position t. A position that works against the others has a negative share.

        Needs ``record(..., positions=True)``. Positions are the first axis of a use's result that
        is neither the samples' nor a feature's; what is flattened with the samples into one axis;
        all pixels of a convolution. Every parameter asked for must have been used with the same
        number of them; one without (a classifier of a pooled token) is refused by name:
        ``params=`` leaves it out.

        >>> import torch, persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model, positions=True) as tape:
        ...     tape.backward(model(torch.randn(4, 6, 3)).square().sum((1, 2)))
        >>> tape.positions().shape
        torch.Size([4, 6])
        """
        with self._asking():
            names = choose(params, self.names)
            if direction is not None:
                expect_direction(direction, names, self._open().parameters.selected)
            self._ledger.expect_forms()
            return contributions(self._ledger, names, direction, self.n)


def _alike(mine: Tensor, other: Tensor | None) -> bool:
    return other is not None and (mine.shape, mine.dtype, mine.device) == (
        other.shape,
        other.dtype,
        other.device,
    )
