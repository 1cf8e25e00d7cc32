"""Every number of an inspection as a plain tensor, and the tables made from them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..validation import whole
from ..verification import Verification
from . import health
from .collect import Collected
from .compare import Snapshot
from .cost import Cost
from .likeness import TOLERANCE, Group, Likeness
from .planted import Planted, count_planted
from .scores import STRONG, Suspicion, suspicion
from .show import Shown
from .table import Table


class Findings:
    """What an inspection found.

    Tensors, one row per sample in the order of the data: ``losses``, ``norms``, ``labels`` and
    ``predictions`` (or None), ``parameter_norms`` (N, parameters), ``projections`` (N, width),
    ``finite``, and from them ``suspicion.score``. ``ids[i]`` is the i-th sample's own id.
    """

    def __init__(self, collected: Collected) -> None:
        self._collected = collected
        self.count, self.batches = collected.count, collected.batches
        self.interrupted = collected.interrupted
        self.model_name, self.names = collected.model_name, collected.names
        losses, norms = collected.rows(collected.losses), collected.rows(collected.norms)
        sizes, rows = collected.parameter_norms, collected.projections
        assert losses is not None
        assert norms is not None
        self.losses, self.norms = losses, norms
        self.parameter_norms = sizes.tensor()[: self.count]
        self.projections = rows.tensor()[: self.count]
        self.labels = collected.rows(collected.labels)
        self.predictions = collected.rows(collected.predictions)
        self.finite = torch.isfinite(norms) & torch.isfinite(losses)
        self.planted: Planted | None = None

    # ------------------------------------------------------------------ facts

    @property
    def ids(self) -> Sequence[int | str]:
        """The samples' ids."""
        return self._collected.ids  # type: ignore[return-value]

    @property
    def ids_given(self) -> bool:
        """Whether ids are the user's; else they are positions."""
        return self._collected.ids.given

    @property
    def in_order(self) -> bool:
        """Whether positions are those of the data; else they are of this pass alone."""
        return self._collected.ids.order.of_data

    @property
    def verification(self) -> Verification | None:
        """The self-check and isolation probe on the first samples; None if it was not run."""
        return self._collected.verification

    @property
    def cost(self) -> Cost:
        """Seconds, and the ratio to a plain step."""
        return self._collected.cost

    @property
    def collected(self) -> Collected:
        """Everything that was kept."""
        return self._collected

    @functools.cached_property
    def suspicion(self) -> Suspicion:
        """Scores, their parts and the nearest gradients of every sample."""
        return suspicion(self.projections, self.norms, self.labels, self.finite)

    @functools.cached_property
    def likeness(self) -> Likeness:
        """Which samples have identical inputs, and which nearly equal gradients."""
        contents = self._collected.rows(self._collected.contents)
        return Likeness(contents, self.labels, self.projections, self.norms, self.finite)

    @functools.cached_property
    def clip_curve(self) -> health.ClipCurve:
        """Fraction clipped and bias against the threshold. Computed from data: not private."""
        return health.clip_curve(self.projections, self.norms, self.finite)

    @functools.cached_property
    def noise(self) -> health.Noise | None:
        """The gradient noise scale; None with fewer than two batches of two samples."""
        return health.noise(self._collected.noise_parts.tensor())

    @functools.cached_property
    def parameters(self) -> list[health.Parameter]:
        """The distribution of per-sample norms in every parameter."""
        made = self._collected
        return health.parameters(made.names, made.shapes, self.parameter_norms, self.finite)

    @functools.cached_property
    def without_gradient(self) -> list[str]:
        """Parameters whose gradient is zero for every sample."""
        columns = self.parameter_norms.unbind(1)
        return [
            name for name, c in zip(self.names, columns, strict=True) if not bool(c.ne(0).any())
        ]

    @property
    def nonfinite(self) -> Tensor:
        """Indices of samples whose loss or gradient is not finite."""
        return (~self.finite).nonzero().flatten()

    @property
    def strong(self) -> int:
        """How many samples score above 0.7."""
        return int((self.suspicion.score > STRONG).sum())

    def share(self, part: float = 0.01) -> float:
        """The share of Σ‖gᵢ‖ that the largest ``part`` of the samples holds."""
        sizes = self.norms[self.finite].double()
        k = max(1, round(part * sizes.numel()))
        total = float(sizes.sum())
        return float(sizes.topk(min(k, sizes.numel())).values.sum()) / total if total else 0.0

    def mark_planted(self, ids: Iterable[int | str]) -> Planted:
        """Name samples whose labels you changed on purpose, and count how many were found.

        The summary and the page then begin with this count, and the page marks the samples.
        """
        score = torch.where(self.finite, self.suspicion.score, torch.full((), -1.0))
        own = [self.ids[i] for i in range(self.count)]
        self.planted = count_planted(own, ids, score, self.losses)
        return self.planted

    def shown(self, index: int) -> Shown:
        """The small copy of a sample."""
        return self._collected.gallery[index]

    def class_name(self, label: int | None) -> str:
        """A label's name."""
        return "" if label is None else self._collected.gallery.show.class_name(label)

    # ------------------------------------------------------------------ tables

    def table(self) -> Table:
        """All samples: id, label, prediction, loss, norm, suspect score and its parts."""
        return self.rows(torch.arange(self.count))

    def named(self) -> Table:
        """All samples, with the names of their classes if :class:`Show` has them."""
        table = self.table()
        if self._collected.gallery.show.classes is None:
            return table
        columns: dict[str, Any] = {}
        for name, values in table.columns.items():
            columns[name] = values
            if name in ("label", "prediction", "vote"):
                columns[f"{name} name"] = [self.class_name(int(v)) for v in values]
        return Table(columns)

    def outliers(self, k: int = 20) -> Table:
        """The k samples with the largest gradients, largest first."""
        sizes = torch.where(self.finite, self.norms, torch.full_like(self.norms, -1))
        k = min(whole(k, "k", least=0), int(self.finite.sum()))
        return self.rows(sizes.topk(k).indices)

    def suspects(self, k: int = 20) -> Table:
        """The k samples whose gradients contradict their neighbours most, worst first."""
        score = torch.where(self.finite, self.suspicion.score, torch.full((), -1.0))
        k = min(whole(k, "k", least=0), int(self.finite.sum()))
        return self.rows(score.topk(k).indices)

    def duplicates(self, *, tolerance: float = TOLERANCE) -> list[Group]:
        """Groups of samples with identical inputs, then others whose gradients nearly agree.

        Only the former are duplicates: what the model received of them is the same, byte by byte
        (padding that an attention mask tells is left out). The latter differ in their inputs but
        have gradients that are the same up to ``tolerance`` of their norm, as easy samples of one
        class often do; ``identical`` is None for them where inputs could not be compared.
        """
        made = self.likeness
        alike = made.alike if tolerance == TOLERANCE else made.close(tolerance)
        told = False if made.compared else None
        return [
            *(Group(tuple(self.ids[i] for i in group), True) for group in made.identical),
            *(Group(tuple(self.ids[i] for i in group), told) for group in alike),
        ]

    def worth_a_look(self, k: int = 24) -> set[int]:
        """Positions of the samples that a page shows in full."""
        tables = (self.suspects(k), self.outliers(k))
        return {i for table in tables for i in torch.as_tensor(table["position"]).tolist()}

    def rows(self, indices: Tensor) -> Table:
        """A table of some samples."""
        columns: dict[str, Any] = {
            "id": [self.ids[i] for i in indices.tolist()],
            "position": indices,
        }
        for name, values in (("label", self.labels), ("prediction", self.predictions)):
            if values is not None:
                columns[name] = values[indices]
        columns |= {"loss": self.losses[indices], "norm": self.norms[indices]}
        columns |= {"suspicion": self.suspicion.score[indices]}
        columns |= {"agreement": self.suspicion.agreement[indices]}
        if self.suspicion.vote is not None:
            columns["vote"] = self.suspicion.vote[indices]
        if self.suspicion.class_agreement is not None:
            columns["class agreement"] = self.suspicion.class_agreement[indices]
        return Table(columns)

    # ------------------------------------------------------------------ elsewhere

    def snapshot(self) -> Snapshot:
        """What a later inspection is compared with."""
        return Snapshot(
            ids=[self.ids[i] for i in range(self.count)],
            ids_given=self.ids_given,
            in_order=self.in_order,
            losses=self.losses.double(),
            norms=self.norms.double(),
            suspicion=self.suspicion.score.double(),
            labels=self.labels,
            predictions=self.predictions,
            parameters={p.name: float(p.quantiles[3]) for p in self.parameters},
            noise=None if self.noise is None else self.noise.value,
            model=self.model_name,
        )
