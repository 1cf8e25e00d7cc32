"""How layouts move through torch's operators: one table, one rule per family.

A rule looks at the arguments, not only at the name: which axes are reduced, normalised, padded or
contracted. Whatever is not in the table, or fails its rule, gives a tensor whose samples are mixed.
"""

from .call import Call, collect
from .families import (  # noqa: F401  (importing a family fills the table)
    contraction,
    indexing,
    joining,
    linear_algebra,
    losses,
    neural,
    pointwise,
    reduction,
    shape,
    writing,
)
from .families.pointwise import POINTWISE
from .operators import COND, NEEDS_GRAD, SET_DATA, Operator, find
from .propagation import propagate
from .reshaping import squeeze_colours
from .structural_zeros import ZEROS, separate_by_zeros

__all__ = [
    "COND",
    "NEEDS_GRAD",
    "POINTWISE",
    "SET_DATA",
    "ZEROS",
    "Call",
    "Operator",
    "collect",
    "find",
    "propagate",
    "separate_by_zeros",
    "squeeze_colours",
]
