"""How layouts move through torch's operators: one table, one rule per family.

A rule looks at the arguments, not only at the name: which axes are reduced, normalised, padded or
contracted. Whatever is not in the table, or fails its rule, gives a tensor whose samples are mixed.
"""

from .call import PLAIN, Call, collect
from .explicit_rows import (
    Moves,
    Rows,
    common_rows,
    explicit_rows,
    shapes_of_ids,
    viewed,
)
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
from .families.contraction import einsum_terms, product_equation, spell_terms
from .families.pointwise import POINTWISE
from .layout import (
    CONSTANT,
    PURE,
    Additive,
    Constant,
    Earlier,
    Layout,
    Mixed,
    State,
    closed,
    explicit,
    ids_of,
    remap,
)
from .operator_facts import ADDITIVE, COUNTS, CUSTOM, LATE, PRODUCTS
from .operators import COND, NEEDS_GRAD, SET_DATA, Operator, find
from .propagation import propagate
from .reshaping import place_in_groups, squeeze_colours
from .structural_zeros import ZEROS, separate_by_zeros
from .unowned_rows import assign_owners, in_order
from .views import (
    Place,
    colours_of,
    contiguous_strides,
    overlaps,
    painted_through,
    place_of,
    reach,
    shown_by,
    whole_of,
)

__all__ = [
    "ADDITIVE",
    "COND",
    "CONSTANT",
    "COUNTS",
    "CUSTOM",
    "LATE",
    "NEEDS_GRAD",
    "PLAIN",
    "POINTWISE",
    "PRODUCTS",
    "PURE",
    "SET_DATA",
    "ZEROS",
    "Additive",
    "Call",
    "Constant",
    "Earlier",
    "Layout",
    "Mixed",
    "Moves",
    "Operator",
    "Place",
    "Rows",
    "State",
    "assign_owners",
    "closed",
    "collect",
    "colours_of",
    "common_rows",
    "contiguous_strides",
    "einsum_terms",
    "explicit",
    "explicit_rows",
    "find",
    "ids_of",
    "in_order",
    "overlaps",
    "painted_through",
    "place_in_groups",
    "place_of",
    "product_equation",
    "propagate",
    "reach",
    "remap",
    "separate_by_zeros",
    "shapes_of_ids",
    "shown_by",
    "spell_terms",
    "squeeze_colours",
    "viewed",
    "whole_of",
]
