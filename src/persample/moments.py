"""Questions about the spread of gradients over samples."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .asked import Asked, Grads
from .errors import UsageError
from .forms import Form, real
from .parameters import Params, choose
from .queries import NoiseScale, spread


class Moments(Asked):
    """Every question takes ``params=``: a name, names, or a predicate on names."""

    def second_moment(self, *, params: Params = None) -> Grads:
        """meanᵢ gᵢ², element by element: ``{name: shape}``."""
        with self._asking():
            names = choose(params, self.names)
            squares: Grads = {}
            lean = self._ledger.lean
            if lean is not None and lean.ahead.moments:
                self._ledger.ready()
                squares = lean.squares
            else:

                def visit(name: str, form: Form) -> None:
                    squares[name] = form.sum_of_squares()

                self._each(names, visit)
            return {
                name: squares[name] / max(self.n, 1) if name in squares else self._zeros(name)
                for name in names
            }

    def _mean(self, names: Sequence[str]) -> Grads:
        n = max(self.n, 1)
        lean = self._ledger.lean
        if lean is not None and lean.ahead.moments:
            selected = self._open().parameters.selected
            return {
                name: lean.sums[name] / n
                if name in lean.sums
                else torch.zeros_like(selected[name], requires_grad=False)
                for name in names
            }
        ones = torch.ones(self.n, dtype=torch.float64, device=self._device())
        return self._summed(names, dict.fromkeys(names, ones / n), wide=True)

    def variance(self, *, params: Params = None) -> Grads:
        """The unbiased variance over samples, element by element: ``{name: shape}``."""
        with self._asking():
            return self._variances(choose(params, self.names))

    def _variances(self, names: Sequence[str]) -> Grads:
        if self.n < 2:
            raise UsageError("a variance needs at least two samples", fix="record a larger batch")
        found: Grads = {}
        lean = self._ledger.lean
        if lean is not None and lean.ahead.moments:
            self._ledger.ready()
            found = {name: value.clone() for name, value in lean.variances.items()}
        else:

            def visit(name: str, form: Form) -> None:
                found[name] = spread(form.moments(), self.n).to(real(form.dtype))

            self._each(names, visit)
        return {name: found[name] if name in found else self._zeros(name) for name in names}

    def noise_scale(self, *, params: Params = None) -> NoiseScale:
        """The simple gradient noise scale tr Σ / |G|², with its parts.

        With m = meanᵢ‖gᵢ‖² and N = ‖meanᵢ gᵢ‖²: tr Σ = n(m − N)/(n − 1), |G|² = N − tr Σ / n.
        """
        with self._asking():
            self._ledger.expect_losses("noise_scale")
            names, n = choose(params, self.names), self.n
            if n < 2:
                raise UsageError(
                    "the noise scale needs at least two samples", fix="record a larger batch"
                )
            mean_square = float(self._sq_norms(names).double().mean())
            means = self._mean(names).values()
            square_mean = sum(float(g.abs().double().square().sum()) for g in means)
            trace = n * (mean_square - square_mean) / (n - 1)
            if trace < 1e-3 * mean_square:  # almost all cancels between the two
                trace = sum(
                    float(v.sum(dtype=torch.float64)) for v in self._variances(names).values()
                )
            gradient = square_mean - trace / n
            return NoiseScale(trace / gradient if gradient else float("inf"), trace, gradient, n)

    def _zeros(self, name: str) -> Tensor:
        parameter = self._open().parameters.selected[name]
        return torch.zeros_like(parameter, dtype=real(parameter.dtype), requires_grad=False)
