"""What a recording knows: parameters, the states of tensors, and uses of parameters.

A use is one call of an operator in which a parameter interacts with samples. Its tap brings the
output gradient in backward. Everything above this package reads or makes these objects.
"""

from .batches import COMPUTED
from .contents import Values, memory_of
from .context import ANCHOR, Ahead, Context, Options
from .marks import (
    EXCLUDED,
    SAMPLES,
    SELECTED,
    Derived,
    Mark,
    gained_history,
    innermost,
    same,
    transformed,
    unseen,
    version,
    versions,
)
from .module_tree import ByModel, Modules, modules_of
from .parameters import Parameters, Params, choose
from .positions import Positions
from .results import Known
from .signature import Kind, Template, taken_apart, tapped
from .tap import Gradient, Tap, hook
from .tensor_states import TensorStates
from .use import Firing, Lookup, Operand, Use, View

__all__ = [
    "ANCHOR",
    "COMPUTED",
    "EXCLUDED",
    "SAMPLES",
    "SELECTED",
    "Ahead",
    "ByModel",
    "Context",
    "Derived",
    "Firing",
    "Gradient",
    "Kind",
    "Known",
    "Lookup",
    "Mark",
    "Modules",
    "Operand",
    "Options",
    "Parameters",
    "Params",
    "Positions",
    "Tap",
    "Template",
    "TensorStates",
    "Use",
    "Values",
    "View",
    "choose",
    "gained_history",
    "hook",
    "innermost",
    "memory_of",
    "modules_of",
    "same",
    "taken_apart",
    "tapped",
    "transformed",
    "unseen",
    "version",
    "versions",
]
