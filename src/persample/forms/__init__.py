"""Forms: representations of n gradients that know their algebra."""

from .cost import BUDGET, JOINED, LEAN, LIMIT, WALK, Plan, scratch, spans, within
from .dense import Dense
from .fast.common_pullback import pull_back_together
from .fast.disjoint_parts import Pieces
from .fast.elementwise import Scaled, scale_form
from .fast.picked_rows import Picked
from .fast.single_samples import SingleSamples
from .fast.stacked import Stacked, name_joined
from .form import Form, inner, lift, real, wide
from .geometry import Geometry
from .gradients import Gradients, certain_sums
from .merging import total
from .norms import add_norms, bound_norms, norms_of, settled
from .outer import Outer
from .patches import Patches
from .pixels import Pixels
from .position_shares import shares
from .pullback import Pullback
from .replay import Replay
from .rounding import Norms
from .sketch import Sketch, kept_sketch
from .strided_part import Part
from .table_rows import Rows
from .total import Total
from .user_maps import Joint
from .walk import walk_rows

__all__ = [
    "BUDGET",
    "JOINED",
    "LEAN",
    "LIMIT",
    "WALK",
    "Apart",
    "Dense",
    "Form",
    "Geometry",
    "Gradients",
    "Joint",
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
    "kept_sketch",
    "lift",
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
