"""The tape: all uses of all parameters in one pass, and every question."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import queries
from .clipping import Grouped, Rule, coefficients, flat
from .errors import NonFiniteWarning, UsageError
from .explain import Explanation, explain
from .forms import Form
from .ledger import Ledger
from .parameters import Params, choose
from .queries import NoiseScale
from .use import Use

if TYPE_CHECKING:
    from .recorder import Recorder

Grads = dict[str, Tensor]


class Tape:
    """What :func:`persample.record` yields. Ask it after :meth:`backward`.

    Every question takes ``params=``: a name, names, or a predicate on names.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder: Recorder | None = recorder
        self._ledger = Ledger(recorder)
        self._warned = False

    # ------------------------------------------------------------------ recording

    @property
    def n(self) -> int:
        """How many samples were seen."""
        n = self._open().n
        if n is None:
            raise UsageError(
                "no samples were seen",
                why="the model was not called inside the block",
                fix="call the model on its inputs inside the block, or tape.mark(x)",
            )
        return n

    @property
    def names(self) -> tuple[str, ...]:
        """The recorded parameters, in the order of ``named_parameters()``."""
        return tuple(self._open().parameters.selected)

    def mark(self, tensor: Tensor, *, dim: int = 0, ids: Tensor | None = None) -> Tensor:
        """Say where the samples are in a tensor that the model does not receive as input.

        ``dim`` is the axis of the samples; ``ids`` gives each index on it a sample instead (-1 for
        none). Returns the tensor.
        """
        self._open().inputs.mark(tensor, dim=dim, ids=ids)
        return tensor

    def backward(
        self, losses: Tensor, *, scale: float | Tensor | None = None, retain_graph: bool = False
    ) -> None:
        """Back-propagate ``losses.sum()``; afterwards the tape knows every sample's gradient.

        ``losses`` must hold the samples on axis 0, proven by the recording, or be a scalar that is
        a proven sum (or mean) over samples. ``scale`` multiplies the losses for the backward pass
        (loss scaling) and is divided out again.
        """
        self._open().backward(losses, scale=scale, retain_graph=retain_graph)

    def receive(
        self, use: Use, saved: tuple[Tensor, ...], grads: tuple[Tensor | None, ...]
    ) -> None:
        """A tap fired (internal)."""
        self._ledger.receive(use, saved, grads)

    def retains(self) -> bool:
        """Whether the graph may be back-propagated again (internal)."""
        return self._ledger.retain or not self._ledger.receiving

    def explain(self) -> Explanation:
        """Every use, what is slow and why, parameters without gradient, ambiguous sizes."""
        return explain(self._open(), self._ledger)

    def close(self) -> None:
        """Release everything the tape holds. Questions raise afterwards."""
        if self._recorder is not None:
            self._recorder.release()
        self._recorder = None
        self._ledger.clear()

    # ------------------------------------------------------------------ gradients

    def grads(self, *, params: Params = None, out: Grads | None = None) -> Grads:
        """Every sample's own gradient: ``{name: (n, *shape)}``.

        Row i of each tensor belongs to sample i: the gradient of its loss (the sum of its losses,
        if it has several). Rows are fresh, contiguous tensors of the
        parameter's dtype and device; a parameter that had no influence has zeros. ``out`` takes
        the dictionary of an earlier step and writes into its tensors instead.

        >>> import torch, persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model) as tape:
        ...     tape.backward(model(torch.randn(4, 3)).square().sum(1))
        >>> {name: tuple(g.shape) for name, g in tape.grads().items()}
        {'weight': (4, 2, 3), 'bias': (4, 2)}
        """
        with torch._C.DisableTorchFunction():
            forms = self._forms(params)
            found = {}
            for name in choose(params, self.names):
                parameter = self._open().parameters.selected[name]
                shape = (self.n, *parameter.shape)
                buffer = None if out is None else _buffer(out, name, shape, parameter)
                found[name] = _written(forms.get(name), shape, parameter, buffer)
            return found

    def norms(self, *, params: Params = None) -> Tensor:
        """‖gᵢ‖ over all parameters: (n,). Never materialised."""
        with torch._C.DisableTorchFunction():
            return self._sq_norms(params).sqrt_()

    def parameter_norms(self, *, params: Params = None) -> Grads:
        """‖gᵢ‖ of each parameter: ``{name: (n,)}``."""
        with torch._C.DisableTorchFunction():
            names = choose(params, self.names)
            found = self._ledger.sq_norms(names)
            return {
                name: found[name].sqrt() if name in found else self._zeros(name, ())
                for name in names
            }

    def weighted_sum(self, c: Tensor, *, params: Params = None) -> Grads:
        """Σᵢ cᵢ gᵢ for any coefficients c (n,): ``{name: shape}``."""
        with torch._C.DisableTorchFunction():
            return self._summed(choose(params, self.names), self._coefficients(c))

    def clipped_sum(self, max_norm: float, *, rule: Rule = flat, params: Params = None) -> Grads:
        """Σᵢ cᵢ gᵢ with ‖cᵢ gᵢ‖ ≤ max_norm for every sample: DP-SGD's gradient, one backward.

        ``rule``: :func:`persample.flat` (default), :func:`persample.automatic`,
        :func:`persample.per_layer`, :func:`persample.per_group`, or any function of the norms (n,)
        that returns coefficients.

        Guarantees
            * No sample contributes more than ``max_norm``, in exact arithmetic, whatever it
              contains and whatever the rule returns: coefficients are limited by a certified upper
              bound of the norm, not by its floating-point value.
            * A sample's coefficient depends on that sample only.
            * Sums are accumulated and returned in float32 at least.

        ===========================  =====================================================
        edge case                    result
        ===========================  =====================================================
        a sample's gradient is zero  contributes zero; nothing is divided by zero
        NaN, inf, overflow           contributes zero, ``tape.nonfinite()`` names it, one
                                     :class:`persample.NonFiniteWarning`
        positions that cancel        the norm is recomputed in double precision
        empty batch                  zeros
        max_norm = 0                 zeros
        negative or NaN max_norm     UsageError
        mean or summed loss          UsageError: its rows are not gradients of losses
        coupled normaliser           MixedSamplesError with the line that divides
        ===========================  =====================================================
        """
        with torch._C.DisableTorchFunction():
            if not 0 <= float(max_norm) < float("inf"):
                raise UsageError(f"max_norm must be finite and not negative, got {max_norm!r}")
            self._ledger.expect_losses("clipped_sum")
            names = choose(params, self.names)
            groups = rule.split(names) if isinstance(rule, Grouped) else [tuple(names)]
            within = rule.within if isinstance(rule, Grouped) else rule
            bounds = self._ledger.sq_norms(names, bounds=True)
            bad = ~torch.isfinite(queries.added(bounds, self.n, self._device()))
            self._warn(bad)
            found: Grads = {}
            for group in groups:
                mine = {name: bounds[name] for name in group if name in bounds}
                sizes = queries.added(mine, self.n, self._device()).sqrt_()
                c = coefficients(within, sizes, float(max_norm) / len(groups) ** 0.5)
                found.update(self._summed(group, c.masked_fill(bad, 0), bad=bad, wide=True))
            return {name: found[name] for name in names}

    def nonfinite(self, *, params: Params = None) -> Tensor:
        """Samples whose gradient holds NaN or inf, or overflows when squared: indices."""
        with torch._C.DisableTorchFunction():
            return (~torch.isfinite(self._sq_norms(params))).nonzero().flatten()

    def set_grad(self, grads: Mapping[str, Tensor], *, accumulate: bool = False) -> None:
        """Write ``{name: gradient}`` to the parameters' ``.grad`` (or add to it)."""
        with torch._C.DisableTorchFunction(), torch.no_grad():
            selected = self._open().parameters.selected
            for name, value in grads.items():
                if name not in selected:
                    raise UsageError(f"no recorded parameter is called {name!r}")
                if value.shape != selected[name].shape:
                    raise UsageError(
                        f"{name}: a gradient of shape {tuple(value.shape)} for a parameter of "
                        f"shape {tuple(selected[name].shape)}",
                        fix="set_grad takes sums over samples, not per-sample gradients",
                    )
            for name, value in grads.items():
                parameter = selected[name]
                new = value.to(parameter.dtype)
                if accumulate and parameter.grad is not None:
                    parameter.grad += new
                else:
                    parameter.grad = new.clone() if new is value else new

    # ------------------------------------------------------------------ inner products

    def gram(self, *, params: Params = None) -> Tensor:
        """⟨gᵢ, gⱼ⟩ for every pair of samples: (n, n)."""
        with torch._C.DisableTorchFunction():
            forms = self._forms(params)
            return queries.gram(forms, forms, self.n, self.n)

    def cosine(self, *, params: Params = None) -> Tensor:
        """⟨gᵢ, gⱼ⟩ / ‖gᵢ‖‖gⱼ‖: (n, n); zero where a gradient is zero."""
        products = self.gram(params=params)
        with torch._C.DisableTorchFunction():
            sizes = products.diagonal().clamp(min=0).sqrt()
            scale = torch.where(sizes > 0, 1 / sizes, torch.zeros_like(sizes))
            return products * scale.unsqueeze(0) * scale.unsqueeze(1)

    def cross(self, other: Tape, *, params: Params = None) -> Tensor:
        """⟨gᵢ, hⱼ⟩ between this tape's samples and another's: (n, m)."""
        with torch._C.DisableTorchFunction():
            if not isinstance(other, Tape):
                raise UsageError(f"cross takes another tape, got {type(other).__name__}")
            names = choose(params, self.names)
            mine, theirs = self._open().parameters, other._open().parameters
            for name in names:
                if name not in theirs.selected or (
                    theirs.selected[name].shape != mine.selected[name].shape
                ):
                    raise UsageError(
                        f"the other tape does not record a parameter {name!r} of the same shape",
                        why="the tapes are of different models",
                        fix="record both on the same model, or select params= that both have",
                    )
            forms, others = self._forms(names), other._forms(names)
            both = {name: f for name, f in forms.items() if name in others}
            return queries.gram(both, others, self.n, other.n)

    def dots(self, direction: Mapping[str, Tensor], *, params: Params = None) -> Tensor:
        """⟨gᵢ, V⟩ for a direction ``{name: shape}``: (n,)."""
        with torch._C.DisableTorchFunction():
            names = choose(params, self.names)
            selected = self._open().parameters.selected
            if set(direction) != set(names):
                odd = sorted(set(direction) ^ set(names))
                raise UsageError(
                    f"the direction must have the recorded parameters' names: {odd[:4]}",
                    fix="leave none out and add none; select with params=",
                )
            for name in names:
                if direction[name].shape != selected[name].shape:
                    raise UsageError(
                        f"{name}: direction {tuple(direction[name].shape)}, parameter "
                        f"{tuple(selected[name].shape)}"
                    )
            return queries.dots(self._forms(params), direction, self.n)

    def project(self, dim: int, *, seed: int, params: Params = None) -> Tensor:
        """Random projections that keep inner products on average: (n, dim).

        The map depends on seed, parameter name, shape and dim alone, so projections of different
        batches, runs and devices can be compared. E⟨P gᵢ, P gⱼ⟩ = ⟨gᵢ, gⱼ⟩.
        """
        with torch._C.DisableTorchFunction():
            if not isinstance(dim, int) or dim < 1:
                raise UsageError(f"dim must be a positive integer, got {dim!r}")
            return queries.project(self._forms(params), dim, int(seed), self.n)

    # ------------------------------------------------------------------ moments

    def second_moment(self, *, params: Params = None) -> Grads:
        """meanᵢ gᵢ², element by element: ``{name: shape}``."""
        with torch._C.DisableTorchFunction():
            forms = self._forms(params)
            return {
                name: forms[name].sum_of_squares() / max(self.n, 1)
                if name in forms
                else self._zeros(name, None)
                for name in choose(params, self.names)
            }

    def variance(self, *, params: Params = None) -> Grads:
        """The unbiased variance over samples, element by element: ``{name: shape}``."""
        if self.n < 2:
            raise UsageError("a variance needs at least two samples")
        second = self.second_moment(params=params)
        with torch._C.DisableTorchFunction():
            ones = torch.ones(self.n, dtype=torch.float64, device=self._device())
            mean = self._summed(choose(params, self.names), ones / self.n, wide=True)
            return {
                name: (value - mean[name].abs().square()).clamp_(min=0) * (self.n / (self.n - 1))
                for name, value in second.items()
            }

    def noise_scale(self, *, params: Params = None) -> NoiseScale:
        """The simple gradient noise scale tr Σ / |G|², with its parts."""
        with torch._C.DisableTorchFunction():
            self._ledger.expect_losses("noise_scale")
            sq = self._sq_norms(params)
            ones = torch.ones(self.n, dtype=torch.float64, device=sq.device)
            mean = self._summed(choose(params, self.names), ones / max(self.n, 1), wide=True)
            size = sum(float(g.abs().double().square().sum()) for g in mean.values())
            return queries.noise_scale(sq, size, self.n)

    # ------------------------------------------------------------------ inside

    def _open(self) -> Recorder:
        if self._recorder is None:
            raise UsageError("the tape is closed", fix="ask before tape.close()")
        return self._recorder

    def _device(self) -> torch.device:
        return next(iter(self._open().parameters.selected.values())).device

    def _forms(self, params: Params) -> dict[str, Form]:
        self._open()
        return self._ledger.forms(choose(params, self.names))

    def _zeros(self, name: str, shape: tuple[int, ...] | None) -> Tensor:
        parameter = self._open().parameters.selected[name]
        return parameter.new_zeros(
            parameter.shape if shape is None else (self.n, *shape), requires_grad=False
        )

    def _coefficients(self, c: Tensor) -> Tensor:
        if not isinstance(c, Tensor) or c.shape != (self.n,):
            got = tuple(c.shape) if isinstance(c, Tensor) else type(c).__name__
            raise UsageError(f"coefficients must be a tensor of shape ({self.n},), got {got}")
        if not bool(torch.isfinite(c).all()):
            raise UsageError("coefficients must be finite")
        return c.detach().to(self._device())

    def _sq_norms(self, params: Params) -> Tensor:
        parts = self._ledger.sq_norms(choose(params, self.names))
        return queries.added(parts, self.n, self._device())

    def _summed(
        self,
        names: Sequence[str],
        c: Tensor,
        *,
        bad: Tensor | None = None,
        wide: bool = False,
    ) -> Grads:
        """Σ cᵢ gᵢ; ``bad`` samples are taken out before any batched kernel: 0 · NaN is NaN."""
        recorder = self._open()
        certain = bad is not None
        if bad is not None and not bool(bad.any()):
            bad = None
        if self._ledger.lean is not None:
            self._ledger.ready()
            sums = recorder.weighted_backward(c, bad)
        else:
            forms = self._ledger.forms(names)
            if bad is not None:
                forms = {name: form.without(bad) for name, form in forms.items()}
            sums = {
                name: form.certain_sum(c) if certain else form.weighted_sum(c)
                for name, form in forms.items()
            }
        found = {}
        for name in names:
            parameter = recorder.parameters.selected[name]
            dtype = parameter.dtype
            if wide:
                dtype = torch.promote_types(dtype, torch.float32)
            if name in sums:
                found[name] = sums[name].to(dtype)
            else:
                found[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        return found

    def _warn(self, bad: Tensor) -> None:
        if not self._warned and bool(bad.any()):
            self._warned = True
            which = bad.nonzero().flatten().tolist()
            warnings.warn(
                f"samples {which[:8]} have non-finite gradients and contribute zero",
                NonFiniteWarning,
                stacklevel=3,
            )


def _buffer(out: Grads, name: str, shape: tuple[int, ...], parameter: Tensor) -> Tensor:
    buffer = out.get(name)
    if buffer is None or buffer.shape != shape or buffer.dtype != parameter.dtype:
        raise UsageError(
            f"out[{name!r}] must be a tensor of shape {shape} and dtype {parameter.dtype}",
            fix="pass the dictionary of an earlier tape.grads() with the same n",
        )
    return buffer


def _written(
    form: Form | None, shape: tuple[int, ...], parameter: Tensor, buffer: Tensor | None
) -> Tensor:
    if form is None:
        if buffer is not None:
            return buffer.zero_()
        return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    if buffer is not None:
        return form.write(buffer)
    rows = form.dense().to(parameter.dtype).contiguous()
    return rows.clone() if form.owns(rows) else rows
