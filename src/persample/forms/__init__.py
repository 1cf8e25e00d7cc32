"""Forms: representations of n gradients that know their algebra."""

from .cost import BUDGET, JOINED, LEAN, WALK, Plan, scratch, spans, within
from .dense import Dense
from .fast.common_pullback import pulled
from .fast.disjoint_parts import Pieces
from .fast.elementwise import Scaled, scaled
from .fast.picked_rows import Picked
from .fast.product_cache import sharing
from .fast.row_cache import kept_rows
from .fast.single_samples import Apart
from .fast.stacked import Stacked, together
from .form import Form, inner, lift, real, wide
from .geometry import Geometry
from .merging import total
from .outer import Outer
from .patches import Patches
from .pixels import Pixels
from .position_shares import shares
from .pullback import Pullback
from .replay import Replay
from .rounding import Unsure, doubts, guarded, restored
from .sketch import Sketch, kept_sketch
from .strided_part import Part
from .table_rows import Rows
from .total import Total
from .user_maps import Joint

__all__ = [
    "BUDGET",
    "JOINED",
    "LEAN",
    "WALK",
    "Apart",
    "Dense",
    "Form",
    "Geometry",
    "Joint",
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
    "Sketch",
    "Stacked",
    "Total",
    "Unsure",
    "doubts",
    "guarded",
    "inner",
    "kept_rows",
    "kept_sketch",
    "lift",
    "pulled",
    "real",
    "restored",
    "scaled",
    "scratch",
    "shares",
    "sharing",
    "spans",
    "together",
    "total",
    "wide",
    "within",
]
