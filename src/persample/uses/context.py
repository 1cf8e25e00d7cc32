"""What the packages share while one model is recorded: what the caller asked for, what is known.

The context holds, and decides nothing. The tape owns it. Whatever hangs on autograd's graph refers
to it weakly, so that no graph keeps gradients alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..distributed import Processes
from ..layouts import State
from .batches import Batches
from .contents import CallerMemory
from .marks import Derived
from .parameters import Parameters
from .pass_state import PassState, UserCode
from .positions import Positions
from .tensor_states import TensorStates
from .use import Receiver
from .written_constants import WrittenConstants

Look = Callable[[Tensor], State | Derived | None]

with torch.inference_mode(False):
    ANCHOR = torch.zeros((), device="cpu", requires_grad=True)  # gives our nodes a reason to exist


@dataclass(frozen=True, slots=True)
class Ahead:
    """Questions that a lean recording answers during its first backward pass, besides the norms.

    What is not named here costs a backward pass of its own when asked; the answers are the same.

    >>> import torch, persample
    >>> model = torch.nn.Linear(3, 2)
    >>> with persample.record(model, lean=persample.Ahead(projection=(16, 0))) as tape:
    ...     tape.backward(model(torch.randn(4, 3)).square().sum(1))
    >>> tape.project(16, seed=0).shape
    torch.Size([4, 16])

    Attributes:
        direction: For :meth:`Tape.dots`.
        projection: (dim, seed) for :meth:`Tape.project`.
        moments: For :meth:`Tape.second_moment` and :meth:`Tape.variance`.
        grads: For :meth:`Tape.grads`, which hands the rows out without keeping them.
        again: False promises that no further pass follows: the graph is freed while the first one
            passes, as any backward does.
    """

    direction: Mapping[str, Tensor] | None = None
    projection: tuple[int, int] | None = None
    moments: bool = False
    grads: bool = False
    again: bool = True


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one recording.

    ``rows``: bytes of rows that may be kept between norms and a sum; None is a share of the tape's.
    ``rules`` are the user's own, by operator name. ``native``: parameters stay in the graph, which
    ``verify`` and ``loop`` need. ``special``: uses do not run the usual way.
    """

    dim: int
    verify: bool
    loop: bool
    ahead: Ahead | None
    positions: bool
    budget: int
    rows: int | None
    rules: Mapping[str, Callable[..., Any]]
    same_samples: bool
    grad: bool
    native: bool = field(init=False)
    lean: bool = field(init=False)
    special: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "native", self.verify or self.loop)
        object.__setattr__(self, "lean", self.ahead is not None)
        object.__setattr__(self, "special", self.native or bool(self.rules))


class Context:
    """Options, parameters, states of tensors, and the state of the backward pass.

    ``receiver``, ``look`` (what is known of a tensor; None for a constant) and ``mode`` (sees every
    torch call) are given by the packages that make them.
    """

    receiver: Receiver
    look: Look
    mode: TorchFunctionMode

    def __init__(
        self, options: Options, parameters: Parameters, processes: Processes | None, n: int | None
    ) -> None:
        self.options, self.parameters, self.processes = options, parameters, processes
        self.states = TensorStates()
        self.states.n = n
        self.batches = Batches(same=options.same_samples)
        self.written = WrittenConstants(self.states, parameters)
        self.patterns: list[Tensor] = []  # the sample of every row, as the user said it
        self.positions = Positions()
        self.caller = CallerMemory(lean=options.lean)
        self.user_code = UserCode()
        self.backward = PassState()
        self.expects = options.lean or processes is not None  # uses are announced in forward
        self.closed = False  # no query will follow
        self.ref = weakref.ref(self)

    @property
    def n(self) -> int | None:
        """The number of samples, once it is known."""
        return self.states.n

    @n.setter
    def n(self, value: int | None) -> None:
        self.states.n = value

    def is_selected(self, tensor: Tensor) -> bool:
        """Whether a tensor is, or is derived from, a recorded parameter."""
        state = self.look(tensor)
        return isinstance(state, Derived) and state.selected

    def release(self) -> None:
        """Forget every tensor."""
        self.closed = True
        for name in ("look", "mode", "receiver"):  # they hold the context
            self.__dict__.pop(name, None)
        self.states.clear()
        self.written.clear()
        self.positions.clear()
        self.caller.clear()
        self.user_code.clear()
