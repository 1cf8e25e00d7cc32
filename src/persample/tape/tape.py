"""The tape: all uses of all parameters in one pass, and every query."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..backward.consumers.lean import Lean
from ..distributed import Reduction
from ..errors import UsageError
from ..forms import Form
from ..forms.sums import NoiseScale
from ..guards.native_gradients import forget_untrained
from ..inputs.user_marks import mark
from ..recording.recorder import Recording
from ..uses import Params
from ..validation import (
    expect_coefficients,
    expect_direction,
    expect_projection,
    number,
    shown,
    unfit,
)
from . import products
from .answers import LeanAnswers, ParameterForms
from .clipping import Rule, clipped_sum, flat, nonfinite
from .explain import Explanation, explain
from .out_buffers import expect_buffers
from .positions import contributions
from .question import Grads, Question

Answer = TypeVar("Answer")


class Tape:
    """What :func:`persample.record` yields. Query it after :meth:`backward`.

    Every query takes ``params=``: a name, names, or a predicate on names.
    """

    def __init__(self, recording: Recording) -> None:
        context, collector = recording.context, recording.collector
        self._recording: Recording | None = recording
        self._context, self._passes = context, recording.passes
        self._forms: ParameterForms | None = None
        self._question: Question
        if isinstance(collector.consumer, Lean):
            lean = collector.consumer
            self._question = LeanAnswers(context, lean, recording.passes, recording.guards)
        else:
            self._question = self._forms = ParameterForms(context, collector, recording.guards)
        self._collector = collector
        self._warned = False
        weakref.finalize(self, _release, weakref.ref(recording))

    def __reduce__(self) -> Any:
        raise UsageError(
            "a tape can be neither copied nor pickled",
            why="it refers to the model and to the graph of one pass",
            fix="copy or store its answers",
        )

    def __repr__(self) -> str:
        context, state = self._context, "closed"
        if self._recording is not None:
            count = context.backward.count
            state = f"{count} backward passes" if count != 1 else "1 backward pass"
        if context.backward.trouble is not None:
            state += ", refused"
        uses = "lean" if self._forms is None else f"{len(self._forms.contributions)} uses kept"
        parameters = len(context.parameters.asked)
        return f"<persample.Tape: n = {context.n}, {parameters} parameters, {uses}, {state}>"

    @property
    def n(self) -> int:
        """How many samples were seen."""
        return self._open().n

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the recorded parameters, in the order of ``named_parameters()``."""
        return tuple(self._open().selected)

    def _open(self) -> Question:
        """The recording, if it was not closed."""
        if self._recording is None:
            raise UsageError("the tape is closed", fix="ask before tape.close()")
        return self._question

    def _answering(self) -> AbstractContextManager[Question]:
        return self._open().answering()

    def _ask(self, answer: Callable[[Question, list[str]], Answer], params: Params) -> Answer:
        with self._answering() as question:
            return answer(question, question.names(params))

    # ------------------------------------------------------------------ recording

    def mark(self, tensor: Tensor, *, dim: int = 0, ids: Tensor | None = None) -> Tensor:
        """Say where the samples are in a tensor that the model does not receive as input.

        Args:
            tensor: Data, before it is used with parameters.
            dim: The axis of the samples.
            ids: The sample of each index of that axis, if they are not in order; -1 for none.

        Returns:
            The tensor.
        """
        self._open()
        mark(self._context, tensor, dim=dim, ids=ids)
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
            MixedSamplesError: Samples interact before the loss, or nothing proves that they do not.
            MissedUseError: A parameter was used where the recorder could not see it.
        """
        self._open()
        self._passes.run(losses, scale=scale, retain_graph=retain_graph)

    def explain(self) -> Explanation:
        """Every use, what is slow and why, parameters without gradient, ambiguous sizes."""
        self._open()
        assert self._recording is not None
        return explain(self._recording, self._forms)

    def close(self) -> None:
        """Release everything the tape holds. Queries raise afterwards."""
        if self._recording is not None:
            self._recording.release()
        self._recording = None

    # ------------------------------------------------------------------ gradients

    def grads(self, *, params: Params = None, out: Grads | None = None) -> Grads:
        """Every sample's own gradient: ``{name: (n, *shape)}``.

        Row i of each tensor is the gradient of sample i's loss (of the sum of its losses, if it has
        several). Rows are new, contiguous tensors of the parameter's dtype and device; a parameter
        without influence has zeros.

        ``out`` takes the dictionary of an earlier step and writes into its tensors instead. An
        embedding's buffer is then cleared only where the earlier step wrote, unless it was written
        to since. Writes by NumPy, ``.data`` or DLPack are noticed if they cover the buffer; if they
        change only a few elements, call ``zero_()`` first.

        >>> import torch, persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model) as tape:
        ...     tape.backward(model(torch.randn(4, 3)).square().sum(1))
        >>> {name: tuple(g.shape) for name, g in tape.grads().items()}
        {'weight': (4, 2, 3), 'bias': (4, 2)}
        """
        with self._answering() as question:
            names, selected = question.names(params), question.selected
            asked, found = {name: selected[name] for name in names}, Grads()
            buffers = {} if out is None else expect_buffers(out, asked, self.n)

            def visit(name: str, form: Form | None) -> None:
                found[name] = _write_rows(form, self.n, asked[name], buffers.get(name))

            ahead = question.found_grads(names)
            if ahead is None:
                question.each(names, visit)
            for name, rows in (ahead or {}).items():
                buffer, own = buffers.get(name), rows.to(asked[name].dtype)
                found[name] = own if buffer is None else buffer.copy_(own)
            for name in names:
                if name not in found:
                    visit(name, None)
            if out is not None:
                question.ready()  # a buffer may have been something that rows come from
            return {name: found[name] for name in names}

    def norms(self, *, params: Params = None) -> Tensor:
        """‖gᵢ‖ over all parameters: (n,). Never materialised.

        If products of positions cancel so far that digits would be lost, norms are computed again
        from rows. Clipping uses certified bounds instead.
        """
        return self._ask(lambda question, names: question.sq_norms([names])[0].sqrt(), params)

    def parameter_norms(self, *, params: Params = None) -> Grads:
        """‖gᵢ‖ of each parameter: ``{name: (n,)}``."""
        return self._ask(Question.parameter_norms, params)

    def weighted_sum(self, c: Tensor, *, params: Params = None) -> Grads:
        """Σᵢ cᵢ gᵢ for any coefficients c (n,): ``{name: shape}``."""
        with self._answering() as question:
            names = question.names(params)
            expect_coefficients(c, self.n)
            return question.weighted_sum(names, c.detach().to(question.device), last=True)

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
        ``.item()`` before the loss  :class:`persample.ExtractedNumberWarning` with the line
        ===========================  =====================================================
        """
        return self._clipped_sum(max_norm, rule, params)

    def _clipped_sum(
        self, max_norm: float, rule: Rule, params: Params, reduction: Reduction | None = None
    ) -> Grads:
        with self._answering() as question:
            bound = number(max_norm, "max_norm")
            if not 0 <= bound < float("inf"):
                raise UsageError(
                    f"max_norm must be finite and not negative, got {max_norm!r}",
                    fix="clipped_sum(1.0) lets no sample contribute more than norm 1",
                )
            names, warn = question.names(params), not self._warned
            found, left_out = clipped_sum(
                question, bound, rule, names, warn=warn, reduction=reduction
            )
            self._warned = self._warned or left_out
            return found

    def nonfinite(self, *, params: Params = None) -> Tensor:
        """Samples whose gradient holds NaN or inf, or overflows when squared: indices.

        They are those that contribute nothing to :meth:`clipped_sum`.
        """
        return self._ask(nonfinite, params)

    # ------------------------------------------------------------------ inner products

    def gram(self, *, params: Params = None) -> Tensor:
        """⟨gᵢ, gⱼ⟩ for every pair of samples: (n, n)."""
        return self._ask(products.gram, params)

    def cosine(self, *, params: Params = None) -> Tensor:
        """⟨gᵢ, gⱼ⟩ / ‖gᵢ‖‖gⱼ‖: (n, n); zero where a gradient is zero."""
        found = self.gram(params=params)
        with self._answering():
            return products.cosine(found)

    def cross(self, other: Tape, *, params: Params = None) -> Tensor:
        """⟨gᵢ, hⱼ⟩ between this tape's samples and another's: (n, m).

        Over the parameters that both tapes recorded. One of the two may be lean.
        """
        with self._answering() as question:
            if not isinstance(other, Tape):
                raise UsageError(
                    f"cross takes another tape, got {shown(other)}",
                    fix="dots(direction) takes a dictionary of tensors",
                )
            return products.cross(question, other._open(), question.names(params))

    def dots(self, direction: Mapping[str, Tensor], *, params: Params = None) -> Tensor:
        """⟨gᵢ, V⟩ for a direction ``{name: shape}``: (n,).

        For m directions at once, ``{name: (m, *shape)}``: (n, m). With ``params=`` the direction
        may also hold other names.

        >>> import torch, persample
        >>> model = torch.nn.Linear(3, 2)
        >>> with persample.record(model) as tape:
        ...     tape.backward(model(torch.randn(4, 3)).square().sum(1))
        >>> along = {name: torch.randn(5, *g.shape[1:]) for name, g in tape.grads().items()}
        >>> tape.dots(along).shape
        torch.Size([4, 5])
        """
        with self._answering() as question:
            names, chosen = question.names(params), params is not None
            expect_direction(direction, names, question.selected, chosen=chosen, several=True)
            return products.dots(question, direction, names)

    def project(
        self,
        dim: int,
        *,
        seed: int,
        params: Params = None,
        scale: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Random projections that keep inner products on average: (n, dim).

        The map depends on seed, parameter name, shape and dim alone, so projections of different
        batches, runs and devices can be compared. E⟨P gᵢ, P gⱼ⟩ = ⟨gᵢ, gⱼ⟩.

        ``scale``: a real tensor for each parameter, ``{name: shape}``, that its gradients are
        multiplied by first (the second moments of Adam, a diagonal Fisher matrix).
        """
        with self._answering() as question:
            wanted, names = expect_projection(dim, seed), question.names(params)
            if scale is not None:
                expect_direction(scale, names, question.selected, chosen=params is not None)
            return products.project(question, wanted, names, scale)

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
        with self._answering() as question:
            names = question.names(params)
            if direction is not None:
                chosen = params is not None
                expect_direction(direction, names, question.selected, chosen=chosen)
            question.forms(())  # refuses what is not kept, or no longer true
            forms, collector = self._forms, self._collector
            if forms is None or forms.looped:
                raise UsageError(
                    "this tape was computed one loss at a time, so no positions are known",
                    fix="use a model that persample can prove",
                )
            kept = forms.contributions
            return contributions(self._context, collector, kept, names, direction, self.n)

    # ------------------------------------------------------------------ moments

    def second_moment(self, *, params: Params = None) -> Grads:
        """meanᵢ gᵢ², element by element: ``{name: shape}``."""
        return self._ask(products.second_moment, params)

    def variance(self, *, params: Params = None) -> Grads:
        """The unbiased variance over samples, element by element: ``{name: shape}``."""
        return self._ask(products.variance, params)

    def noise_scale(self, *, params: Params = None) -> NoiseScale:
        """The simple gradient noise scale tr Σ / |G|², with its parts.

        With m = meanᵢ‖gᵢ‖² and N = ‖meanᵢ gᵢ‖²: tr Σ = n(m − N)/(n − 1), |G|² = N − tr Σ / n.
        """
        return self._ask(products.noise_scale, params)

    # ------------------------------------------------------------------ optimizers

    def set_grad(self, grads: Mapping[str, Tensor], *, accumulate: bool = False) -> None:
        """Make ``{name: gradient}`` the parameters' ``.grad`` (or add to it).

        The tensors are taken over, not copied, as in ``parameter.grad = tensor``: what changes
        ``.grad`` in place later changes them. Adding writes to neither.

        If the model is distributed (DDP, ``fully_shard``), every process must call it, and what is
        written is the sum over processes, not their mean.
        """
        with torch._C.DisableTorchFunction(), torch.no_grad():
            selected = self._open().selected
            self._expect_to_add(accumulate)
            problem, processes = unfit(grads, selected), self._context.processes
            if processes is not None:
                targets = processes.reduce(grads, selected, accumulate=accumulate, problem=problem)
            elif problem is not None:
                raise problem
            else:
                targets = [(selected[name], value) for name, value in grads.items()]
            _write_grads(targets, accumulate=accumulate)

    def set_clipped_grad(
        self,
        max_norm: float,
        *,
        rule: Rule = flat,
        params: Params = None,
        accumulate: bool = False,
    ) -> None:
        """``set_grad(clipped_sum(max_norm))``, sums on their way while the next are computed.

        The numbers are those of the two calls. Only where the model is spread over processes does
        it make a difference: every process must call it, and a failure in one raises in all.
        """
        processes = self._context.processes
        if processes is None:
            self.set_grad(
                self.clipped_sum(max_norm, rule=rule, params=params), accumulate=accumulate
            )
            return
        question = self._open()
        self._expect_to_add(accumulate)
        names, key = question.names(params), ("clipped", accumulate)
        reduction = processes.reduction(names, question.selected, key=key)
        try:
            self._clipped_sum(max_norm, rule, params, reduction)
        except Exception as problem:
            reduction.fail(problem)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            _write_grads(reduction.finish(), accumulate=accumulate)

    def _expect_to_add(self, accumulate: bool) -> None:
        """Refuse to add a bounded sum to an ordinary gradient."""
        if accumulate and self._context.options.grad:
            raise UsageError(
                "set_grad(..., accumulate=True) on a recording with grad=True",
                why="the ordinary gradient is in .grad already: a clipped sum added to it has "
                "no bound",
                fix="set_grad(...) without accumulate replaces it; or record without grad=True",
            )


def _release(owner: weakref.ref[Recording]) -> None:
    """A tape is gone: so are the tensors that were followed for it."""
    recording = owner()
    if recording is not None:
        recording.release()


def _write_grads(targets: Iterable[tuple[Tensor, Tensor]], *, accumulate: bool) -> None:
    """Make sums the parameters' ``.grad``, or add to it."""
    targets = list(targets)
    forget_untrained(parameter for parameter, _ in targets)
    for parameter, value in targets:
        new = value.detach().to(parameter.dtype)
        if accumulate and parameter.grad is not None:
            new = parameter.grad + new
        parameter.grad = new


def _write_rows(form: Form | None, n: int, parameter: Tensor, buffer: Tensor | None) -> Tensor:
    """A parameter's rows, in the buffer if there is one; zeros without a form."""
    if buffer is not None:
        return buffer.zero_() if form is None else form.write(buffer)
    if form is not None:
        return form.fresh().to(parameter.dtype)
    return torch.zeros(n, *parameter.shape, dtype=parameter.dtype, device=parameter.device)
