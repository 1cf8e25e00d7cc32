"""Custom autograd.Functions that take parameters beside data.

Their backward adds up the parameter's gradient over samples. Run again for every sample, with the
gradients of the other samples' results set to zero, it gives that sample's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from ...autograd_graph import expect_unconverted, nodes_of
from ...errors import LOOP, MixedSamplesError, Place, describe
from ...forms import Dense, Form, Pullback, wide
from ...layouts import CUSTOM, Layout, State, ids_of
from ...rules import Forms
from ...run_state import RandomState, tolerance
from ...uses import Context, Firing, Kind, Operand, Template, Use, tapped, version


class OfParameters:
    """One node of such a function.

    ``edges`` leads from edges of the graph to arguments: of parameters, or of what was computed
    from parameters alone.
    """

    def __init__(self, context: Context, node: Any, place: Place | None) -> None:
        self._context, self._node = context, node
        self._rows: dict[int, Tensor] = {}
        self._shapes: dict[int, torch.Size] = {}
        self.stretched: dict[int, torch.Size] = {}  # what is returned, where autograd sums it
        # edges, and the arguments that need gradients, come in the same order
        needed = [j for j, needs in enumerate(node.needs_input_grad) if needs]
        edges = [k for k, (into, _) in enumerate(node.next_functions) if into is not None]
        if len(edges) != len(needed):  # a view made without gradients has no edge
            edges, needed = [], []
        self.edges: dict[int, int] = {}
        self.parameters: set[int] = set()
        self._operands: list[tuple[int, str, Tensor, GradientEdge | None]] = []
        for k, j in zip(edges, needed, strict=True):
            into, number = node.next_functions[k]
            parameters = self._leaves(into)
            if parameters:
                self.edges[k] = j
                self.parameters.update(id(p) for _, p in parameters)
                self._shapes[j] = torch.Size(into._input_metadata[number].shape)
                edge = None if hasattr(into, "variable") else GradientEdge(into, number)
                if edge is not None:
                    context.user_code.derived.append(into)
                self._operands += [(j, name, p, edge) for name, p in parameters if name]
        operands = [
            Operand(j, p.detach(), name, version(p), id(p)) for j, name, p, _ in self._operands
        ]
        kind = Kind(CUSTOM, Template(None, 0, ()), [o.position for o in operands], [], [])
        self.use = Use(context.ref, kind, node.apply, [], operands, place, 0)
        self.use.rule = self._rule
        if operands:
            context.receiver.expect(self.use)

    def _leaves(self, node: Any) -> list[tuple[str, Tensor]]:
        """Names and parameters in which a graph ends; none where samples or user code may be in it.

        Samples and parameters meet in nodes of ours, or in those of other custom functions.
        """
        nodes = nodes_of(node)
        hooked = self._context.user_code.by_hand
        if any(isinstance(at, BackwardCFunction) or at in hooked for at in nodes):
            return []
        slots = self._context.parameters.slots
        leaves = [at.variable for at in nodes if hasattr(at, "variable")]
        names = [slots.get(id(leaf)) for leaf in leaves]
        found = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if name is not None]
        return found if len(found) == len(leaves) else []

    def fire(self, grads: Sequence[Tensor | None], states: dict[int, State]) -> str:
        """Take every sample's gradient before the node runs; why not, if it cannot be done."""
        found = []
        for k, grad in enumerate(grads):
            state = states.get(k)
            if grad is not None:
                if not isinstance(state, Layout):
                    return "the samples of one of its results are not known"
                found.append((k, state, None, grad))
        self.use.tapped = tapped(found)
        if self._context.n and found:
            own = tuple(grad for grad in grads if grad is not None)
            self._context.receiver.receive(self.use, (), own)
        return ""

    def _rule(self, use: Use, firing: Firing, n: int) -> Forms:
        """One run of the function's own backward for each sample."""
        colours = [
            (k, g.to(dtype), ids_of(layout, g.shape, n, g.device))
            for k, g, layout, dtype in zip(
                use.tapped.results, firing.grads, use.out_layouts, use.tapped.dtypes, strict=True
            )
            if g is not None
        ]
        own: list[Tensor | None] = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
            for meta in self._node._input_metadata
        ]
        device = colours[0][1].device
        now, rows = RandomState(device), dict[int, Tensor]()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for i in range(n):
                for k, g, ids in colours:
                    own[k] = torch.where(ids == i, g, 0)
                now.restore()  # its own run draws the same numbers
                self._write(rows, self._apply(own), i, n)
            if not _finite(rows.values()):
                self._expect_finite_at_zero(own)
        self._rows = rows
        return [_rows_of(rows.get(j), edge, p) for j, _, p, edge in self._operands]

    def _expect_finite_at_zero(self, grads: list[Tensor | None]) -> None:
        """Refuse where one sample that is not finite makes all others so: 0 · NaN is NaN."""
        found = self._apply([None if g is None else torch.zeros_like(g) for g in grads])
        if not _finite([found[j] for j in self.edges.values() if found[j] is not None]):
            raise MixedSamplesError(
                f"the backward of {self._node.name()} gives no finite gradient of a parameter",
                where=describe(self.use.place),
                why="a sample that is not finite is multiplied by zero in the runs for all others",
                fix="leave such samples out before the model, or compute with torch's operators",
            )

    def _write(self, rows: dict[int, Tensor], found: tuple[Any, ...], i: int, n: int) -> None:
        """A copy of one sample's gradients: a function may return the same memory every time."""
        for j in self.edges.values():
            row = found[j]
            if row is not None:
                if row.shape != self._shapes[j]:
                    self.stretched[j] = row.shape
                    row = row.to_dense().sum_to_size(self._shapes[j])
                if j not in rows:
                    rows[j] = torch.zeros((n, *row.shape), dtype=row.dtype, device=row.device)
                rows[j][i] = row.to_dense()

    def adds_up(self, k: int, grad: Tensor, factor: float) -> bool:
        """Whether the samples' gradients add up to what the function's own run returned.

        They do not where it keeps a state between runs, or adds something in every run.
        """
        rows = self._rows.pop(self.edges[k], None)
        if rows is None:
            return not bool(grad.any())
        dtype = wide(rows.dtype)
        total, found = rows.sum(0, dtype=dtype), grad.to_dense().to(dtype) * factor
        size = rows.shape[0] ** 0.5 * torch.linalg.vector_norm(rows, float("inf")) + found.abs()
        limit = size * tolerance(grad.dtype)
        return not bool(((total - found).abs() > limit).any())

    def _apply(self, grads: list[Tensor | None]) -> tuple[Any, ...]:
        try:
            found = self._node.apply(*grads)
        except Exception as error:
            raise MixedSamplesError(
                f"the backward of {self._node.name()} could not be run for one sample alone",
                where=describe(self.use.place),
                why=f"{type(error).__name__}: {error}",
                fix=LOOP,
            ) from error
        return found if isinstance(found, tuple) else (found,)


def _finite(tensors: Iterable[Tensor]) -> bool:
    return all(bool(tensor.to_dense().isfinite().all()) for tensor in tensors)


def _rows_of(rows: Tensor | None, edge: GradientEdge | None, parameter: Tensor) -> Form | None:
    """Rows of an argument as rows of a parameter behind it."""
    if rows is None:
        return None
    form = Dense(rows)
    if edge is None:
        return form
    expect_unconverted(edge.node)
    # at once: the node's own run goes on through this graph, and frees it
    return Dense(Pullback(form, edge, parameter, rows.dtype).wide_dense())
