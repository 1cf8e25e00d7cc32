"""The model's parameters as slots: who is recorded, under which name, and where it is now."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..errors import UsageError
from ..validation import shown
from .module_tree import Modules, modules_of, trainable_of

Params = str | Iterable[str] | Callable[[str], bool] | None


def choose(params: Params, names: Iterable[str]) -> list[str]:
    """The names that a ``params=`` argument selects, in the given order."""
    known = list(names)
    if params is None:
        return known
    examples = f"names come from model.named_parameters(): {', '.join(known[:4])} …"
    fits = isinstance(params, Iterable) or callable(params)
    if not fits or isinstance(params, (nn.Module, Tensor)):
        raise UsageError(
            f"params= takes a name, names, or a predicate on names, got {shown(params)}",
            fix=examples,
        )
    if callable(params):
        found = [name for name in known if params(name)]
    else:
        wanted = [params] if isinstance(params, str) else list(params)
        for name in wanted:
            if not isinstance(name, str) or name not in known:
                raise UsageError(
                    f"no recorded parameter is called {shown(name)}",
                    why="it does not exist, is frozen, is an alias of a tied one, or was not "
                    "selected",
                    fix=f"{examples}; params=lambda name: ... selects several",
                )
        found = [name for name in known if name in wanted]
    if known and not found:
        raise UsageError("params= selects no parameter", fix=examples)
    return found


def _expect_a_tensor(name: str, parameter: Tensor) -> None:
    """Refuse a parameter that only wraps another tensor: what is used is not in the slot."""
    if is_lazy(parameter):
        return
    try:
        if isinstance(parameter.detach(), Tensor):
            return
    except TypeError:
        pass  # its class does not let torch functions work on it
    raise UsageError(
        f"the parameter {name!r} is a {type(parameter).__name__}, not a tensor of its own",
        why="torch functions do not take it: it wraps a tensor that is no parameter of the model",
        fix="let a module hold the tensor itself as nn.Parameter, or leave this one out: "
        "requires_grad_(False)",
    )


class Parameters:
    """Found by identity; looked up again by slot when a tensor is unknown.

    ``functional_call`` and FSDP2 put other tensors into the modules' slots while the model runs.
    ``slots`` are the names of trainable tensors found in slots, by their ids, empty for those that
    are not recorded; ``tensors`` are these tensors.
    """

    def __init__(
        self, model: nn.Module, params: Params, modules: Modules, *, all_grads: bool = False
    ) -> None:
        self.model = model
        trainable = trainable_of(model, modules)
        chosen = trainable.keys() if params is None else set(choose(params, trainable))
        # ordinary gradients are wanted of all of them, questions are asked of the chosen ones
        self._asked = frozenset(chosen) if all_grads and params is not None else None
        if all_grads:
            chosen, params = trainable.keys(), None
        if not chosen:
            raise UsageError(
                "there is no trainable parameter to record",
                fix="set requires_grad on the parameters you want gradients of",
            )
        tensors = list(trainable.values())
        if set(map(type, tensors)) != {nn.Parameter}:
            for name, parameter in trainable.items():
                if type(parameter) is not nn.Parameter:
                    _expect_a_tensor(name, parameter)
        self.partial = len(chosen) < len(trainable)
        self.selected, names = dict(trainable), list(trainable)
        if self.partial:
            self.selected = {n: p for n, p in trainable.items() if n in chosen}
            names = [n if n in chosen else "" for n in trainable]
        self.slots = dict(zip(map(id, tensors), names, strict=True))
        self.tensors = dict(zip(self.slots, tensors, strict=True))
        self._wanted = params is None or (params if callable(params) else False)
        self._foreign: list[weakref.ref[Tensor]] = []  # leaves that were no parameters when used
        self._new: list[str] = []  # parameters that came, or were unfrozen, after the beginning
        self.homes: list[Tensor] = []  # where gradients of sharded parameters end up
        self.exchanged = False  # whether another tensor was found in a slot
        self._standing: dict[str, int] = {}

    @property
    def asked(self) -> Mapping[str, Tensor]:
        """The parameters that questions are about."""
        if self._asked is None:
            return self.selected
        return {name: p for name, p in self.selected.items() if name in self._asked}

    def find(self, tensor: Tensor) -> str | None:
        """The name of the slot that holds a tensor, as in ``slots``; None if none does."""
        found = self.slots.get(id(tensor))
        return self._search(tensor) if found is None else found

    def _search(self, tensor: Tensor) -> str | None:
        found = modules_of(self.model)
        for prefix, module in zip(found.prefixes, found.modules, strict=True):
            for key, value in module._parameters.items():
                if value is tensor:
                    name, where = prefix + key, id(tensor)
                    recorded = name in self.selected
                    self.slots[where], self.tensors[where] = name if recorded else "", tensor
                    if recorded:
                        self.selected[name] = tensor
                        self.exchanged = True
                    elif torch.is_grad_enabled():
                        self._new.append(name)
                    return self.slots[where]
        return None

    def note_foreign(self, leaf: Tensor) -> None:
        """A leaf was used that is no parameter: it may become one."""
        self._foreign.append(weakref.ref(leaf))

    def expect_no_new(self) -> None:
        """Refuse parameters that take part and were not there, or frozen, when the block began."""
        new = list(self._new)
        if self._foreign:
            here = {id(p): name for name, p in self.model.named_parameters()}
            leaves = [leaf for leaf in (ref() for ref in self._foreign) if leaf is not None]
            new += [here[id(leaf)] for leaf in leaves if id(leaf) in here]
        wanted = self._wanted
        found = [name for name in new if (wanted(name) if callable(wanted) else wanted)]
        if found:
            raise UsageError(
                f"the parameter {found[0]!r} was added or unfrozen inside the block",
                why="which parameters are recorded is read when the block begins",
                fix="change the model before persample.record(model), or leave it out with params=",
            )

    def stand(self, tensor: Tensor | int) -> str | None:
        """A gradient arrived at this tensor of a slot: it stands for its parameter from now on.

        Returns the parameter's name if another one does: a name can only tell one's gradient.
        """
        where = tensor if isinstance(tensor, int) else id(tensor)
        name = self.slots.get(where)
        if not name:
            return None
        if self._standing.setdefault(name, where) != where:
            return name
        self.selected[name] = self.tensors[where]
        return None

    def expect_no_hooks(self) -> None:
        """Refuse hooks on recorded parameters: for most gradients they would not be called."""
        for name, parameter in self.selected.items():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                raise UsageError(
                    f"the parameter {name!r} has a gradient hook",
                    why="per-sample gradients do not pass through it",
                    fix="remove the hook and apply it to the answer",
                )

    def leaves(self) -> list[Tensor]:
        """Every leaf that an ordinary backward could write a ``.grad`` to."""
        found = self.tensors | {id(home): home for home in self.homes}
        return [tensor for tensor in found.values() if tensor.is_leaf]

    def aliases(self) -> dict[str, tuple[str, ...]]:
        """Other names of tied parameters, by the first."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return {found[0]: tuple(found[1:]) for found in names.values()}
