"""Gradients that backward passes compute when they are asked for.

From a derived tensor back to a parameter (Pullback), through code of the user's own (Joint), or
through an operator without a rule (Replay).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..autograd_graph import nodes_of
from .dense import Dense
from .form import Form, lift, lower, wide
from .mapped import Composite, Mapped, Masked

Found = list[Tensor | None]


def ends(nodes: Sequence[Any], wanted: Sequence[Any]) -> list[Any]:
    """What to ask a graph for, where parameters or edges of it are wanted.

    A parameter that was frozen since is found where the graph ends.
    """
    frozen = {id(w) for w in wanted if isinstance(w, Tensor) and not w.requires_grad}
    if not frozen:
        return list(wanted)
    last = {
        id(at.variable): GradientEdge(at, 0)
        for node in nodes
        for at in nodes_of(node)
        if hasattr(at, "variable") and id(at.variable) in frozen
    }
    # torch asks for something that requires a gradient, also where no path leads to it
    nowhere = torch.zeros((), requires_grad=True)
    return [last.get(id(w), nowhere) if id(w) in frozen else w for w in wanted]


def walk(
    edges: Sequence[Any],
    parameters: Sequence[Any],
    seeds: Sequence[Tensor],
    *,
    batched: bool = False,
) -> Found:
    """Each parameter's gradient of all edges together; None where no path leads to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.autograd.grad(
            edges, ends([edge.node for edge in edges], parameters), seeds,
            retain_graph=True, allow_unused=True, is_grads_batched=batched,
        )  # fmt: skip
    return [None if grad is None else grad.to_dense() for grad in found]


def walk_rows(edges: Sequence[Any], parameters: Sequence[Tensor], seeds: Sequence[Tensor]) -> Found:
    """The same for rows of seeds: in one batched walk where torch can, else row by row.

    The walk may write to what it is given: a custom function's backward does.
    """
    try:
        return walk(edges, parameters, [seed.clone() for seed in seeds], batched=True)
    except RuntimeError:
        count = seeds[0].shape[0]
        each = [walk(edges, parameters, [s[i].clone() for s in seeds]) for i in range(count)]
    return [
        None if rows[0] is None else torch.stack([row for row in rows if row is not None])
        for rows in zip(*each, strict=True)
    ]


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

    def _grad(self, seed: Tensor, walk: Callable[..., Found]) -> Tensor:
        """Jᵀ of one seed, or of rows of them; zeros where no path leads to the parameter."""
        count, up = seed.shape[: seed.dim() - len(self.form.shape)], lift([seed], self.derived)
        seed = (seed if up is None else seed * up).to(self.derived)
        found = walk([self.edge], [self.target], [seed])[0] if count.numel() else None
        if found is None:
            return torch.zeros((*count, *self.shape), dtype=self.dtype, device=self.device)
        return lower(found, up)

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """All rows in one batched backward pass where torch can, else row by row."""
        return self._grad(self.form.dense(first, last), walk_rows)

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
        return moved if bool(error <= 64 * torch.finfo(self.derived).eps * size) else None

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """Linear: one backward pass of the form's own sum; norms come from the rows."""
        if certain:
            return super().weighted_sum(c)
        return self._grad(self.form.weighted_sum(c), walk).to(wide(self.dtype))


class Joint(Composite):
    """gᵢ = P(h¹ᵢ, h²ᵢ, …): one form for every use of what was computed from the parameter."""

    __slots__ = ("edges", "parameter")

    def __init__(self, forms: Sequence[Form], edges: Sequence[Any], parameter: Tensor) -> None:
        super().__init__(forms, forms[0].n, parameter.shape, parameter.dtype, parameter.device)
        self.edges, self.parameter = list(edges), parameter

    def work(self) -> int:
        """That of rows of the parameter."""
        return self.n * self.size

    def row_bytes(self) -> int:
        """A row of every use and one of the parameter."""
        return super().row_bytes() + sum(form.row_bytes() for form in self.forms)

    def narrowed(self, first: int, last: int) -> Joint:
        """Some samples of all uses."""
        return Joint([f.narrowed(first, last) for f in self.forms], self.edges, self.parameter)

    def without(self, bad: Tensor) -> Form:
        """Zeros in the rows: nothing says that zeros stay zeros."""
        return Masked(self, bad)

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """All rows in one batched backward pass where torch can, else row by row."""
        seeds = [form.dense(first, last) for form in self.forms]
        count = seeds[0].shape[0]
        found = walk_rows(self.edges, [self.parameter], seeds)[0] if count else None
        if found is None:
            return torch.zeros((count, *self.shape), dtype=self.dtype, device=self.device)
        return found


def join_uses(forms: Sequence[Joint]) -> Joint:
    """The uses of all of them, in one."""
    return Joint(
        [f for form in forms for f in form.forms],
        [e for form in forms for e in form.edges],
        forms[0].parameter,
    )


class Replay(Form):
    """Rows come from ``rows(first, last)``, weighted sums from ``sums(c)``: one backward pass."""

    __slots__ = ("_held", "_rows", "_sums")

    def __init__(
        self,
        rows: Callable[[int, int], Tensor],
        sums: Callable[[Tensor], Tensor],
        n: int,
        value: Tensor,
        held: list[Tensor],
    ) -> None:
        super().__init__(n, value.shape, value.dtype, value.device)
        self._rows, self._sums, self._held = rows, sums, held

    def tensors(self) -> list[Tensor]:
        """Saved arguments and output gradients."""
        return self._held

    def dense(self, first: int = 0, last: int | None = None) -> Tensor:
        """Masked backward passes."""
        last = self.n if last is None else last
        if last <= first:
            return torch.zeros((0, *self.shape), dtype=self.dtype, device=self.device)
        return self._rows(first, last)

    def narrowed(self, first: int, last: int) -> Dense:
        """Written out."""
        return Dense(self.dense(first, last))

    def without(self, bad: Tensor) -> Form:
        """Zeros in the rows: a backward pass would carry what is not finite to others."""
        return Masked(self, bad)

    def weighted_sum(self, c: Tensor, *, certain: bool = False) -> Tensor:
        """One backward pass with scaled output gradients, which rounds otherwise than rows."""
        if certain:
            return super().weighted_sum(c)
        if self.n == 0:
            return torch.zeros(self.shape, dtype=wide(self.dtype), device=self.device)
        return self._sums(c).to(wide(self.dtype))
