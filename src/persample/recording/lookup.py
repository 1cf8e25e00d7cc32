"""What is known of a tensor: whose samples it holds, or which parameters it is made of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..backward.loss_checks import of_constants
from ..errors import Reason, here
from ..guards.extracted_numbers import ExtractedNumbers
from ..layouts import CONSTANT, Earlier, Mixed, State
from ..uses import EXCLUDED, SELECTED, Context, Derived, gained_history, transformed
from .tensor_subclasses import behind
from .user_code.custom_functions import CustomFunctions


class Lookup:
    """Looks a tensor up, and finds out what it is if that is not known yet."""

    def __init__(
        self, context: Context, custom: CustomFunctions, numbers: ExtractedNumbers,
        modules: Sequence[nn.Module],
    ) -> None:  # fmt: skip
        self._context, self._custom, self._numbers = context, custom, numbers
        self._states, self._parameters = context.states, context.parameters
        self._modules = modules
        self.overriding: list[Tensor] = []  # what tensors' own code was given, while it runs

    def __call__(self, tensor: Tensor) -> State | Derived | None:
        """What is known of a tensor; None for a constant."""
        mark = self._states.get(tensor)
        if mark is not None:
            if not mark.history and gained_history(mark, tensor):
                self._custom.adopt(tensor, mark)
            return mark.state
        name = self._parameters.slots.get(id(tensor))
        if name is not None:  # frozen inside the block: this use is none of the parameter's
            return SELECTED if name and tensor.requires_grad else EXCLUDED
        if self._context.backward.busy:
            twin = self._twin(tensor)
            if twin is not None:
                return twin
        if self.overriding:
            known = behind(self._states, tensor, self.overriding)
            if known is not None:
                return known
        if not tensor.requires_grad:
            written = self._context.written
            return written.known(tensor) if written.written else None
        return self._unknown(tensor)

    def _twin(self, tensor: Tensor) -> State | Derived | None:
        """A recomputation's inputs, and what hooks give back to a function, may be copies."""
        if transformed(tensor):  # what comes out of the transform has no mark
            self._numbers.hide("torch.func")
        elif torch.is_grad_enabled() or self._numbers.running:
            return self._states.twin(tensor)
        return None

    def _unknown(self, tensor: Tensor) -> State | Derived | None:
        """A tensor with a gradient that no recorded operator made."""
        if tensor.is_leaf and not torch.is_grad_enabled():
            return None  # a parameter that is being initialised, perhaps: look again when used
        name = self._parameters.find(tensor)
        if name is not None:
            return SELECTED if name else EXCLUDED
        if tensor.is_leaf:
            self._context.user_code.expose(tensor)
            self._parameters.note_foreign(tensor)
            self._states.put(tensor, CONSTANT)
            return CONSTANT
        known = self._custom.unpacked(tensor)
        if known is not None:
            return known
        if self._parameters.partial and self._custom.of_excluded(tensor.grad_fn):
            self._states.put(tensor, EXCLUDED)
            return EXCLUDED
        if of_constants(self._context, tensor.grad_fn):
            self._states.put(tensor, CONSTANT)
            return CONSTANT
        state = self._unseen(tensor)
        self._states.put(tensor, state)
        return state

    def _unseen(self, tensor: Tensor) -> Mixed:
        node = tensor.grad_fn
        why = (
            f"a tensor with a gradient history ({node.name() if node else 'unknown'}) was made "
            "where the recorder could not see it"
        )
        fix = 'compute it inside the block, or record(..., unproven="loop")'
        graph = node is not None and node.name().startswith("torch::jit")
        if graph or any(isinstance(m, torch.jit.ScriptModule) for m in self._modules):
            why += f": in TorchScript (scripted or traced code){'' if graph else ', perhaps'}"
            fix = 'record what was scripted or traced, or record(..., unproven="loop")'
        kind, start = Mixed, self._context.user_code.start
        # another thread counts its own nodes
        if node is not None and not self._context.backward.busy and node._sequence_nr() < start:
            why = f"a tensor with a gradient history ({node.name()}) from before the block"
            fix = "compute it inside the block, or detach() it"
            kind = Earlier
        elif self._context.user_code.transforming:
            why += ": inside a torch.func transform (vmap, jvp, grad), perhaps"
            fix = (
                "write it without torch.func (vmap alone is followed, over parameters or samples: "
                'tape.mark(x) tells them); or record(..., unproven="loop")'
            )
        return kind(Reason("an unseen operator", why, (tuple(tensor.shape),), here(), fix))
