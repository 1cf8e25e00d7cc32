"""Forms: representations of n gradients that know their algebra."""

from .apart import Apart
from .cost import BUDGET, JOINED, LEAN, WALK, Plan, scratch, spans, within
from .dense import Dense
from .form import Form, inner, lift, real, wide
from .geometry import Geometry
from .guard import Unsure, doubts, guarded, restored
from .joint import Joint
from .keeping import kept_rows
from .merging import total
from .outer import Outer
from .part import Part
from .patches import Patches
from .picked import Picked
from .pieces import Pieces
from .pixels import Pixels
from .pullback import Pullback
from .pulled import pulled
from .replay import Replay
from .rows import Rows
from .scaled import Scaled, scaled
from .shares import shares
from .sharing import sharing
from .sketch import Sketch, kept_sketch
from .together import Together, together
from .total import Total

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
    "Together",
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
