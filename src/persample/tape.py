"""The tape: all uses of all parameters in one pass, and every question."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from . import queries
from .asked import Grads
from .buffers import expect_buffers
from .clipping import Grouped, Rule, coefficients, flat
from .errors import NonFiniteWarning, UsageError
from .explain import Explanation, explain
from .forms import Form, real
from .moments import Moments
from .parameters import Params, choose
from .products import Products
from .requests import expect_coefficients, number, unfit


class Tape(Products, Moments):
    """What :func:`persample.record` yields. Ask it after :meth:`backward`.

    Every question takes ``params=``: a name, names, or a predicate on names.
    """

    # ------------------------------------------------------------------ recording

    def mark(self, tensor: Tensor, *, dim: int = 0, ids: Tensor | None = None) -> Tensor:
        """Say where the samples are in a tensor that the model does not receive as input.

        Args:
            tensor: Data, before parameters meet it.
            dim: The axis of the samples.
            ids: A sample for each index of that axis, where they are not in order; -1 for none.

        Returns:
            The tensor.
        """
        self._open().inputs.mark(tensor, dim=dim, ids=ids)
        return tensor

    def backward(
        self, losses: Tensor, *, scale: float | Tensor | None = None, retain_graph: bool = False
    ) -> None:
        """Back-propagate ``losses.sum()``; afterwards the tape knows every sample's gradient.

        Args:
            losses: One loss per sample on axis 0, or a scalar that is a sum or mean over samples.
                The recording must prove which; a scalar cannot be clipped.
            scale: A factor for the backward pass (loss scaling), divided out again.
            retain_graph: Keep the graph for another backward pass.

        Raises:
            MixedSamplesError: Samples meet before the loss, or nothing proves that they do not.
            MissedUseError: A parameter was used where the recorder could not see it.
        """
        self._open().propagate_back(losses, scale=scale, retain_graph=retain_graph)

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
        the dictionary of an earlier step and writes into its tensors instead; an embedding's buffer
        is then cleared only where the earlier step wrote, unless it was written to since. What
        NumPy, ``.data`` or DLPack write is found where it is all over the buffer; if they write new
        values to a few of its elements, call ``zero_()`` before.

        >>> import torch, persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model) as tape:
        ...     tape.backward(model(torch.randn(4, 3)).square().sum(1))
        >>> {name: tuple(g.shape) for name, g in tape.grads().items()}
        {'weight': (4, 2, 3), 'bias': (4, 2)}
        """
        with self._asking():
            names, selected = choose(params, self.names), self._open().parameters.selected
            buffers: dict[str, Tensor | None] = dict.fromkeys(names)
            if out is not None:
                buffers |= expect_buffers(out, {k: selected[k] for k in names}, self.n)
            found: Grads = {}

            def visit(name: str, form: Form | None) -> None:
                shape = (self.n, *selected[name].shape)
                found[name] = _written(form, shape, selected[name], buffers[name])

            lean = self._ledger.lean
            if lean is not None and lean.ahead.grads and lean.given.isdisjoint(names):
                self._ledger.ready()
                for name, rows in lean.handed(names):
                    buffer, own = buffers[name], rows.to(selected[name].dtype)
                    found[name] = own if buffer is None else buffer.copy_(own)
            else:
                self._each(names, visit)
            for name in names:
                if name not in found:
                    visit(name, None)
            if out is not None:
                self._ledger.ready()  # a buffer may have been something that rows come from
            return {name: found[name] for name in names}

    def norms(self, *, params: Params = None) -> Tensor:
        """‖gᵢ‖ over all parameters: (n,). Never materialised.

        Where products of positions cancel so far that digits would be lost, they are taken again
        from rows. Clipping does not rely on them: it uses certified bounds.
        """
        with self._asking():
            return self._sq_norms(params).sqrt_()

    def parameter_norms(self, *, params: Params = None) -> Grads:
        """‖gᵢ‖ of each parameter: ``{name: (n,)}``."""
        with self._asking():
            names = choose(params, self.names)
            found = self._ledger.sq_norms(names, apart=True)
            return {
                name: found[name].sqrt() if name in found else self._zero_norms(name)
                for name in names
            }

    def weighted_sum(self, c: Tensor, *, params: Params = None) -> Grads:
        """Σᵢ cᵢ gᵢ for any coefficients c (n,): ``{name: shape}``."""
        with self._asking():
            names = choose(params, self.names)
            return self._summed(names, dict.fromkeys(names, self._coefficients(c)), last=True)

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
        with self._asking():
            bound = number(max_norm, "max_norm")
            if not 0 <= bound < float("inf"):
                raise UsageError(
                    f"max_norm must be finite and not negative, got {max_norm!r}",
                    fix="clipped_sum(1.0) lets no sample contribute more than length 1",
                )
            self._ledger.expect_losses("clipped_sum")
            names = choose(params, self.names)
            groups = rule.split(names) if isinstance(rule, Grouped) else [tuple(names)]
            within = rule.within if isinstance(rule, Grouped) else rule
            with self._ledger.settled(names, apart=len(groups) > 1) as forms:
                bounds = self._ledger.sq_bounds(names, forms)
                whole = self._certain(bounds, names)
                bad = self._nonfinite(whole)
                c: dict[str, Tensor] = {}
                for group in groups:
                    sizes = whole
                    if len(groups) > 1:
                        mine = {name: bounds[name] for name in group if name in bounds}
                        sizes = self._certain(mine, group)
                    share = coefficients(within, sizes.sqrt(), bound / len(groups) ** 0.5)
                    share = share if bad is None else share.masked_fill(bad, 0)
                    c.update(dict.fromkeys(group, share))
                return self._summed(
                    names, c, bad=bad, settled=forms, certain=True, wide=True, last=True
                )

    def nonfinite(self, *, params: Params = None) -> Tensor:
        """Samples whose gradient holds NaN or inf, or overflows when squared: indices.

        They are those that contribute nothing to :meth:`clipped_sum`.
        """
        with self._asking():
            self._ledger.ready()
            names = choose(params, self.names)
            with self._ledger.settled(names, apart=False) as forms:
                whole = self._certain(self._ledger.sq_bounds(names, forms), names)
            return (~torch.isfinite(whole)).nonzero().flatten()

    def set_grad(self, grads: Mapping[str, Tensor], *, accumulate: bool = False) -> None:
        """Make ``{name: gradient}`` the parameters' ``.grad`` (or add to it).

        The tensors are taken over, not copied, as in ``parameter.grad = tensor``: what changes
        ``.grad`` in place later changes them. Adding writes to neither.

        Where the model is spread over processes (DDP, ``fully_shard``), every process must call it,
        and what is written is the sum over processes, not their mean.
        """
        with torch._C.DisableTorchFunction(), torch.no_grad():
            recorder = self._open()
            selected = recorder.parameters.selected
            problem = unfit(grads, selected)
            if recorder.spread is not None:
                targets = recorder.spread.reduced(
                    grads, selected, accumulate=accumulate, problem=problem
                )
            elif problem is not None:
                raise problem
            else:
                targets = [(selected[name], value) for name, value in grads.items()]
            for parameter, value in targets:
                new = value.detach().to(parameter.dtype)
                if accumulate and parameter.grad is not None:
                    new = parameter.grad + new
                parameter.grad = new

    # ------------------------------------------------------------------ inside

    def _zero_norms(self, name: str) -> Tensor:
        parameter = self._open().parameters.selected[name]
        return torch.zeros(self.n, dtype=real(parameter.dtype), device=parameter.device)

    def _coefficients(self, c: Tensor) -> Tensor:
        expect_coefficients(c, self.n)
        return c.detach().to(self._device())

    def _certain(self, bounds: Grads, names: Iterable[str]) -> Tensor:
        """Bounds of ‖gᵢ‖² over some parameters."""
        selected = self._open().parameters.selected
        elements = sum(selected[name].numel() for name in names)
        return queries.certain(bounds, elements, self.n, self._device())

    def _nonfinite(self, sq_norms: Tensor) -> Tensor | None:
        """Which samples are not finite, told once; None if all are."""
        finite = torch.isfinite(sq_norms)
        if bool(finite.all()):
            return None
        bad = ~finite
        if not self._warned:
            self._warned = True
            which = bad.nonzero().flatten().tolist()
            warnings.warn(
                f"samples {which[:8]} have non-finite gradients and contribute zero",
                NonFiniteWarning,
                stacklevel=3,
            )
        return bad


def _written(
    form: Form | None, shape: tuple[int, ...], parameter: Tensor, buffer: Tensor | None
) -> Tensor:
    if form is None:
        if buffer is not None:
            return buffer.zero_()
        return torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)
    if buffer is not None:
        return form.write(buffer)
    return form.fresh().to(parameter.dtype)
