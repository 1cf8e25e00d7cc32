"""The native graph: the last resort (one backward pass per loss) and the exact self-check."""

from __future__ import annotations

import torch
from torch import Tensor

from ..autograd_graph import nodes_of, own_functions
from ..errors import UsageError, VerificationError
from ..forms.pullback import ends
from ..guards.determinism import not_deterministic
from ..layouts import Layout, ids_of
from ..modes import entered, watching
from ..run_state import largest, noise, tolerance
from ..uses import Context
from ..validation import counted
from .collector import Collector
from .consumers.consumer import Kept, Looped
from .kept_forms import KeptForms
from .loss_checks import rows_of_a_sample

_grad = entered(torch.autograd.grad)


class OneByOne:
    """Runs autograd with the parameters attached."""

    def __init__(self, context: Context, collector: Collector) -> None:
        self._context, self._collector = context, collector
        self._forms = KeptForms(collector)

    def run(self, losses: Tensor, *, retain_graph: bool) -> dict[str, Tensor]:
        """The gradient of each loss by its own backward pass through the whole graph.

        Returns their sums, for parameters that some loss depends on.
        """
        self._expect_vector(losses)
        before = self._followed_before()
        rows, reached = self._rows(losses, retain_graph=retain_graph)
        with torch._C.DisableTorchFunction():
            summed = {k: before[k] + new if k in before else new for k, new in rows.items()}
            sums = {name: rows[name].sum(0) for name in reached}
        self._collector.hand_to(Looped(summed))
        return sums

    def _expect_vector(self, losses: Tensor) -> None:
        """Refuse what is not one loss for each sample."""
        context = self._context
        if losses.dim() != 1:
            raise UsageError(
                f"one loss per sample is needed, got shape {tuple(losses.shape)}",
                fix="pass a vector of losses",
            )
        if context.n is None:
            context.n = losses.shape[0]
        if losses.shape[0] != context.n:
            raise UsageError(
                f"{counted(losses.shape[0], 'loss', 'losses')} for {counted(context.n, 'sample')}",
                why=f"the model's inputs have {counted(context.n, 'row')}",
                fix=rows_of_a_sample(losses, context.n) or "record(..., n=...), one loss for each",
            )

    def _followed_before(self) -> dict[str, Tensor]:
        """Rows of earlier backward passes, looped or followed."""
        consumer = self._collector.consumer
        if isinstance(consumer, Looped):
            return dict(consumer.rows)
        if not (isinstance(consumer, Kept) and consumer.contributions):
            return {}
        selected = self._context.parameters.selected
        with torch._C.DisableTorchFunction(), torch.no_grad():
            return {name: form.fresh() for name, form in self._forms.get(selected).items()}

    def _gradient(self, losses: Tensor, seed: Tensor, *, retain: bool) -> list[Tensor | None]:
        """Autograd's gradient by every recorded parameter.

        A function that back-propagates in its own backward (reversible layers do) writes to
        ``.grad``; that counts, and ``.grad`` is put back.
        """
        context = self._context
        wanted = list(context.parameters.selected.values())
        asked = ends([] if losses.grad_fn is None else [losses.grad_fn], wanted)
        before = [p.grad for p in wanted]
        for p in wanted:
            p.grad = None
        try:
            with (
                context.backward.silence(),
                watching(context.mode),
                torch.autograd.set_multithreading_enabled(False),
            ):
                found = list(_grad(losses, asked, seed, retain_graph=retain, allow_unused=True))
        except TypeError as error:  # torch.cond traces its branches in backward
            raise UsageError(
                "an operator's backward cannot run while it is recorded",
                why=f"it traces code of its own: {error}",
                fix="write torch.cond as a Python condition, or leave the operator out",
            ) from error
        else:
            for k, p in enumerate(wanted):
                if p.grad is not None:
                    found[k] = p.grad if found[k] is None else found[k].to_dense() + p.grad
        finally:
            for p, g in zip(wanted, before, strict=True):
                p.grad = g
        return [None if f is None else f.to_dense().detach() for f in found]

    def _rows(
        self, losses: Tensor, *, retain_graph: bool
    ) -> tuple[dict[str, Tensor], dict[str, None]]:
        """Every loss's gradient, and the parameters that were reached.

        Rows are copied: a function may return the same memory every time. Code of the user's own
        may also keep a state between runs: then the first does not come back.
        """
        selected, count = self._context.parameters.selected, losses.shape[0]
        with torch._C.DisableTorchFunction():
            rows = {k: p.detach().new_zeros((count, *p.shape)) for k, p in selected.items()}
        reached: dict[str, None] = {}
        again = count > 0 and (self._context.user_code.exposed or own_functions())
        for i in range(count):
            last = i == count - 1 and not again
            found = self._gradient(losses, _only(losses, i), retain=retain_graph or not last)
            with torch._C.DisableTorchFunction():
                for name, g in zip(selected, found, strict=True):
                    if g is not None:
                        rows[name][i] = g
                        reached[name] = None
        if again:
            found = self._gradient(losses, _only(losses, 0), retain=retain_graph)
            with torch._C.DisableTorchFunction():
                _expect_the_same({name: r[0] for name, r in rows.items()}, found, narrowest(losses))
        return rows, reached

    # ------------------------------------------------------------------ the self-check

    def reference_of(self, losses: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """Random c and autograd's gradient of Σ cᵢ ℓᵢ, the losses of earlier passes included."""
        n, backward = self._context.n or 0, self._context.backward
        with torch._C.DisableTorchFunction():
            generator = torch.Generator().manual_seed(0)
            c = torch.rand(n, generator=generator, dtype=torch.float64, device="cpu") + 0.5
            c = c.to(losses.device)
            seed = self._weights(losses, c)
        found = self._gradient(losses, seed, retain=True)
        with torch._C.DisableTorchFunction():
            before = backward.reference or [None] * len(found)
            backward.reference = [
                a if b is None else b.clone() if a is None else a + b
                for a, b in zip(before, found, strict=True)
            ]
        return c, backward.reference

    def _weights(self, losses: Tensor, c: Tensor) -> Tensor:
        state = self._context.look(losses)
        if not isinstance(state, Layout):
            raise UsageError("verify=True needs one loss per sample", fix="tape.backward(losses)")
        ids = ids_of(state, losses.shape, self._context.n or 0, losses.device)
        weights = torch.where(ids >= 0, c[ids.clamp(min=0)], 0)  # a loss of no sample is a constant
        return weights.to(losses.dtype).expand(losses.shape)

    def disagreement(
        self, losses: Tensor, reference: tuple[Tensor, list[Tensor | None]] | None
    ) -> VerificationError | None:
        """Compare Σ cᵢ gᵢ from the tape with autograd's."""
        if reference is None:
            return None
        c, found = reference
        context, selected = self._context, self._context.parameters.selected
        expected = [None if e is None else e.to_dense() for e in found]
        narrow = narrowest(losses)
        sizes = [0.0 if e is None else largest(e) for e in expected]
        floor = noise(narrow) / tolerance(narrow) * max(sizes, default=0.0)
        worst, where = 0.0, ""
        sums = self._forms.weighted_sum(c, selected, context.options.budget)
        for (name, p), e, size in zip(selected.items(), expected, sizes, strict=True):
            mine = sums.get(name, torch.zeros_like(p, requires_grad=False))
            other = torch.zeros_like(mine) if e is None else e
            error = largest(mine - other) / (max(size, floor) or 1.0)
            if not error <= worst:
                worst, where = error, name
        if worst <= tolerance(narrow):
            return None
        why = "Σ cᵢ gᵢ for random c is not the gradient of Σ cᵢ lossᵢ"
        if context.user_code.exposed:
            why += " (nor where a hook or a custom backward is not linear, and clamps gradients)"
        return VerificationError(
            f"the tape disagrees with autograd by {worst:.1e} (relative) at {where!r}",
            why=why,
            fix='record(..., unproven="loop") is exact; please report this model',
        )


def _only(losses: Tensor, i: int) -> Tensor:
    with torch._C.DisableTorchFunction():
        return (torch.arange(losses.shape[0], device=losses.device) == i).to(losses.dtype)


def _expect_the_same(
    first: dict[str, Tensor], found: list[Tensor | None], dtype: torch.dtype
) -> None:
    for (name, row), g in zip(first.items(), found, strict=True):
        now = torch.zeros_like(row) if g is None else g
        top = torch.maximum(row.abs(), now.abs()).nan_to_num(0.0, 0.0, 0.0).sum()
        if bool(((row - now).abs() > tolerance(dtype) * top).any()):
            raise not_deterministic(name)


def narrowest(losses: Tensor) -> torch.dtype:
    """The least precise dtype of a gradient on its way back from the losses (autocast, casts)."""
    found = {losses.dtype}
    for node in [] if losses.grad_fn is None else nodes_of(losses.grad_fn):
        found.update(result.dtype for result in node._input_metadata)
    floating = [d for d in found if d.is_floating_point or d.is_complex]
    return max(floating, key=lambda d: torch.finfo(d).eps)
