"""Questions to all parameters at once: their uses are merged, asked together, and remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from .cost import spend
from .fast.common_pullback import pull_back_together
from .fast.row_cache import kept_rows
from .fast.stacked import Stacked, stack_forms
from .form import Form
from .merging import total
from .norms import add_norms, bound_norms, norms_of
from .rounding import Norms

Names = Sequence[Sequence[str]]  # groups of parameters
Uses = Mapping[str, list[Form]]


class Gradients:
    """One form for every parameter that received a gradient, made of all its uses.

    Questions bring the ``uses`` of parameters that are not ``known`` yet.
    """

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: dict[str, Form] = {}

    def forms(self, names: Iterable[str], uses: Uses) -> dict[str, Form]:
        """Those of some parameters."""
        known = self.known
        for name, found in uses.items():
            known[name] = found[0] if len(found) == 1 else total(found)
        return {name: known[name] for name in names if name in known}

    def written(self, names: Iterable[str], uses: Uses) -> dict[str, Form]:
        """The same where rows will be looked at: what is behind derived tensors is written out."""
        forms = self.forms(names, uses)
        found = pull_back_together(forms)
        self.known.update(found)
        forms |= found
        return forms

    def sq_norms(self, groups: Names, uses: Uses, n: int, device: torch.device) -> Tensor:
        """‖gᵢ‖² over groups of parameters: (groups, n)."""
        forms = self.written([name for group in groups for name in group], uses)
        forms = stack_forms(forms) if len(groups) == 1 else forms
        return add_norms(_in_groups(forms, groups), n, device)

    def weighted_sums(self, names: Iterable[str], uses: Uses, c: Tensor) -> dict[str, Tensor]:
        """Σ cᵢ gᵢ of every parameter."""
        found: dict[str, Tensor] = {}
        for name, form in stack_forms(self.forms(names, uses)).items():
            _note(found, name, form, form.weighted_sum(c))
        return found

    def bounds(
        self, groups: Names, uses: Uses, room: Callable[[int], int], *, counted: bool, n: int,
        device: torch.device, elements: int,
    ) -> tuple[dict[str, Form], Tensor]:  # fmt: skip
        """Forms for one sum, and what ‖gᵢ‖² of groups does not exceed in it: (groups, n).

        Rows are kept where that is cheaper, in the room for so many bytes; ``counted`` ones are
        part of the question's memory.
        """
        forms = self.written([name for group in groups for name in group], uses)
        rows = kept_rows(forms, room)
        forms |= rows
        if counted and rows:
            spend(sum(form.nbytes() for form in rows.values()))
        forms = stack_forms(forms) if len(groups) == 1 else forms
        return forms, bound_norms(_in_groups(forms, groups), n, device, elements)


def _in_groups(forms: Mapping[str, Form], groups: Names) -> list[list[Norms]]:
    """Norms of groups of parameters; what is joined is under the first one's name."""
    found = norms_of(forms.values())
    if len(groups) == 1:
        return [[norms for parts in found for norms in parts]]
    named = dict(zip(forms, found, strict=True))
    return [[norms for name in group for norms in named.get(name, ())] for group in groups]


def certain_sums(
    forms: Mapping[str, Form], c: Mapping[str, Tensor], bad: Tensor | None
) -> dict[str, Tensor]:
    """Σ cᵢ gᵢ of every parameter from what bounds were computed from, without ``bad`` samples.

    They are removed before any batched kernel: 0 · NaN is NaN.
    """
    found: dict[str, Tensor] = {}
    for name, form in forms.items():
        form = form if bad is None else form.without(bad)
        _note(found, name, form, form.weighted_sum(c[name], certain=True))
    return found


def _note(found: dict[str, Tensor], name: str, form: Form, value: Tensor) -> None:
    """Every parameter's own sum."""
    if isinstance(form, Stacked):
        found.update(form.split(value))
    else:
        found[name] = value
