"""What the packages share while one model is recorded. It holds, and decides nothing.

The tape owns the context. Whatever hangs on autograd's graph refers to it weakly, so that no graph
keeps gradients alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..distributed import Processes
from ..layouts.layout import State
from .batches import Batches
from .caller_memory import CallerMemory
from .options import Options
from .parameters import Parameters
from .pass_state import PassState
from .tensor_states import Derived, TensorStates
from .use import Receiver
from .user_code import UserCode
from .written_constants import WrittenConstants

Look = Callable[[Tensor], State | Derived | None]

with torch.inference_mode(False):
    ANCHOR = torch.zeros((), device="cpu", requires_grad=True)  # gives our nodes a reason to exist


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
        self.caller.clear()
        self.user_code.clear()
