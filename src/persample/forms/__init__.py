"""Forms: representations of n gradients that know their algebra."""

from .convolution import Geometry
from .cost import (
    BUDGET,
    JOINED,
    LEAN,
    LIMIT,
    LITTLE,
    SHARE,
    WALK,
    Plan,
    scratch,
    spans,
    within,
)
from .dense import Dense
from .fast.elementwise import Scaled, scale_form
from .fast.picked_rows import Picked
from .fast.single_samples import SingleSamples
from .fast.stacked import Joined, Layer, Stacked, join_layers, name_joined
from .fast.written_rows import pull_back_together
from .form import Form, inner, lift, lower, real, wide
from .gradients import Gradients, add_norms, bound_norms, certain_sums, norms_of, settled
from .mapped import Part
from .merging import total
from .outer import Outer
from .patches import Patches
from .position_shares import Pixels, shares
from .pullback import Joint, Pullback, Replay, walk_rows
from .rounding import Norms
from .sketch import Sketch, kept_sketch
from .table_rows import Rows
from .total import Pieces, Total

__all__ = [
    "BUDGET",
    "JOINED",
    "LEAN",
    "LIMIT",
    "LITTLE",
    "SHARE",
    "WALK",
    "Apart",
    "Dense",
    "Form",
    "Geometry",
    "Gradients",
    "Joined",
    "Joint",
    "Layer",
    "Norms",
    "Outer",
    "Part",
    "Patches",
    "Picked",
    "Pieces",
    "Pixels",
    "Plan",
    "Pullback",
    "Replay",
    "Rows",
    "Scaled",
    "SingleSamples",
    "Sketch",
    "Stacked",
    "Together",
    "Total",
    "add_norms",
    "bound_norms",
    "certain_sums",
    "inner",
    "join_layers",
    "kept_sketch",
    "lift",
    "lower",
    "name_joined",
    "norms_of",
    "pull_back_together",
    "real",
    "scale_form",
    "scratch",
    "settled",
    "shares",
    "spans",
    "total",
    "walk_rows",
    "wide",
    "within",
]
Apart, Together = SingleSamples, Stacked  # former names
