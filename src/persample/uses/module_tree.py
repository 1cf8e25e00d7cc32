"""The modules of a model and its trainable parameters, by name, as fast as can be.

A model is walked once. Later walks only compare: a tree whose modules have the same children and
parameters under the same names is the same tree.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

Modules = list[tuple[str, nn.Module]]


class Branch(NamedTuple):
    """One module of a tree, and what it had: names and ids of children and parameters.

    ``names`` are the full names of its parameters, empty for those that have one already.
    """

    module: weakref.ref[nn.Module]
    prefix: str
    children: tuple[list[str], list[int]]
    parameters: tuple[list[str], list[int]]
    names: list[str]


# by identity: modules may be equal
_TREES: MutableMapping[nn.Module, list[Branch]] = WeakIdKeyDictionary()


def modules_of(model: nn.Module) -> Modules:
    """``named_modules()`` with a dot after every name."""
    tree = _known(model)
    if tree is not None:
        return tree
    found = _walk(model)
    kinds = {type(module) for _, module in found}
    if all(kind.named_modules is nn.Module.named_modules for kind in kinds):
        _TREES[model] = _branches(found)
        return found
    _TREES.pop(model, None)
    return [(f"{name}." if name else "", module) for name, module in model.named_modules()]


def trainable_of(model: nn.Module, modules: Modules) -> dict[str, Tensor]:
    """Those of ``named_parameters()`` that require gradients."""
    if type(model).named_parameters is not nn.Module.named_parameters:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: dict[str, Tensor] = {}
    for branch, (_, module) in zip(_TREES.get(model) or _branches(modules), modules, strict=True):
        if branch.names:
            for name, parameter in zip(branch.names, module._parameters.values(), strict=True):
                if name and parameter is not None and parameter.requires_grad:
                    found[name] = parameter
    return found


def _known(model: nn.Module) -> Modules | None:
    """The modules of a model that is as it was."""
    found: Modules = []
    for ref, prefix, children, parameters, _ in _TREES.get(model, ()):
        module = ref()
        if module is None or _listed(module._modules) != children:
            return None
        if _listed(module._parameters) != parameters:
            return None
        found.append((prefix, module))
    return found or None


def _listed(held: Mapping[str, object]) -> tuple[list[str], list[int]]:
    return [*held.keys()], [*map(id, held.values())]


def _walk(model: nn.Module) -> Modules:
    """In one pass through the tree; a module has its first name."""
    found: Modules = []
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append((prefix, module))
            children = [(f"{prefix}{n}.", m) for n, m in module._modules.items() if m is not None]
            waiting += reversed(children)
    return found


def _branches(modules: Modules) -> list[Branch]:
    found: list[Branch] = []
    seen: set[int] = {id(None)}
    for prefix, module in modules:
        children, parameters = _listed(module._modules), _listed(module._parameters)
        names = []
        for name, key in zip(*parameters, strict=True):
            names.append("" if key in seen else prefix + name)
            seen.add(key)
        found.append(Branch(weakref.ref(module), prefix, children, parameters, names))
    return found
