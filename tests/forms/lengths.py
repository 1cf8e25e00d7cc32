"""How long the gradients of one form are: their squared norms, and bounds of them."""

from __future__ import annotations

from torch import Tensor

from persample.forms import Form, add_norms, bound_norms, norms_of


def sq_norms(form: Form) -> Tensor:
    """Squared norms; what is in doubt is computed again."""
    return add_norms(norms_of([form]), form.n, form.device)[0]


def sq_bounds(form: Form) -> Tensor:
    """What they certainly do not exceed."""
    return bound_norms(norms_of([form]), form.n, form.device, form.size)[0]


def exact_sq_norms(form: Form, which: Tensor) -> Tensor:
    """Those of a few samples, in double precision; of kept rows as they are."""
    (norms,) = norms_of([form])[0]
    if norms.exact is None:
        return form.wide_dense()[which].double().flatten(1).square().sum(1)
    return norms.exact(which)
