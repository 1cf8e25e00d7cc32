"""Questions about the spread of gradients over samples."""

from __future__ import annotations

import torch
from torch import Tensor

from .asked import Asked, Grads
from .errors import UsageError
from .forms import Form, real
from .parameters import Params, choose
from .queries import NoiseScale, noise_scale


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
            selected = self._open().parameters.selected
            return {
                name: squares[name] / max(self.n, 1)
                if name in squares
                else torch.zeros_like(selected[name], dtype=real(selected[name].dtype))
                for name in names
            }

    def _mean(self, params: Params) -> Grads:
        names, n = choose(params, self.names), max(self.n, 1)
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
        if self.n < 2:
            raise UsageError("a variance needs at least two samples")
        second = self.second_moment(params=params)
        with self._asking():
            mean = self._mean(params)
            return {
                name: (value - mean[name].abs().square()).clamp_(min=0) * (self.n / (self.n - 1))
                for name, value in second.items()
            }

    def noise_scale(self, *, params: Params = None) -> NoiseScale:
        """The simple gradient noise scale tr Σ / |G|², with its parts."""
        with self._asking():
            self._ledger.expect_losses("noise_scale")
            sq: Tensor = self._sq_norms(params)
            mean = self._mean(params)
            size = sum(float(g.abs().double().square().sum()) for g in mean.values())
            return noise_scale(sq, size, self.n)
