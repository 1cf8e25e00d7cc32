"""The modules of a model and its trainable parameters, by name, as fast as can be.

A model is walked once. Later walks only compare: a tree whose modules have the same children and
parameters under the same names is the same tree.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

Contents = tuple[list[int], list[str], list[int]]  # how many of each module; their names and ids
Known = TypeVar("Known")


class ByModel(Generic[Known]):
    """What is known of modules, by identity (modules may be equal); forgotten with them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[nn.Module], Known]] = {}

    def get(self, module: nn.Module) -> Known | None:
        """What is known of a module."""
        found = self._known.get(id(module))
        return None if found is None or found[0]() is not module else found[1]

    def put(self, module: nn.Module, value: Known) -> None:
        """Remember it for as long as the module lives."""
        key, known = id(module), self._known
        self._known[key] = weakref.ref(module, lambda _: known.pop(key, None)), value

    def __len__(self) -> int:
        """How many modules something is known of."""
        return len(self._known)

    def forget(self, module: nn.Module) -> None:
        """Nothing is known of it any more."""
        self._known.pop(id(module), None)


class Modules(NamedTuple):
    """The modules of a model, each under its first name with a dot behind it, and parameters.

    ``names`` are the full names of all ``parameters``, empty for those that have one already and
    for places without one.
    """

    prefixes: list[str]
    modules: list[nn.Module]
    names: list[str]
    parameters: list[nn.Parameter | None]


class Tree(NamedTuple):
    """What the modules of a model held."""

    modules: list[weakref.ref[nn.Module]]
    prefixes: list[str]
    children: Contents
    parameters: Contents
    names: list[str]


_TREES = ByModel[Tree]()


def modules_of(model: nn.Module) -> Modules:
    """Those of ``named_modules()``, and what they hold."""
    tree = _TREES.get(model)
    known = None if tree is None else _unchanged(tree)
    if known is not None:
        return known
    found = _walk(model)
    kinds = {type(module) for module in found.values()}
    usual = all(kind.named_modules is nn.Module.named_modules for kind in kinds)
    if usual and not any(issubclass(kind, torch.jit.ScriptModule) for kind in kinds):
        modules = _listed(found)
        _TREES.put(model, _tree(modules))
        return modules
    _TREES.forget(model)  # scripted modules hold no dict to compare
    if not usual:
        found = {f"{name}." if name else "": module for name, module in model.named_modules()}
    return _listed(found)


def trainable_of(model: nn.Module, modules: Modules) -> dict[str, Tensor]:
    """Those of ``named_parameters()`` that require gradients."""
    if type(model).named_parameters is not nn.Module.named_parameters:
        return {name: p for name, p in model.named_parameters() if p.requires_grad}
    pairs = zip(modules.names, modules.parameters, strict=True)
    return {name: p for name, p in pairs if name and p is not None and p.requires_grad}


def _unchanged(tree: Tree) -> Modules | None:
    """The modules of a model that is as it was."""
    modules = [module for ref in tree.modules if (module := ref()) is not None]
    if len(modules) < len(tree.modules):
        return None
    if _contents([module._modules for module in modules])[0] != tree.children:
        return None
    contents, parameters = _contents([module._parameters for module in modules])
    if contents != tree.parameters:
        return None
    return Modules(tree.prefixes, modules, tree.names, parameters)


def _contents(held: Sequence[Any]) -> tuple[Contents, list[Any]]:
    full = [each for each in held if each]
    values = [*chain.from_iterable(map(dict.values, full))]
    return ([*map(len, held)], [*chain.from_iterable(full)], [*map(id, values)]), values


def _walk(model: nn.Module) -> dict[str, nn.Module]:
    """In one pass through the tree; a module has its first name."""
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()
    waiting = [("", model)]
    while waiting:
        prefix, module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found[prefix] = module
            children = [(f"{prefix}{n}.", m) for n, m in module._modules.items() if m is not None]
            waiting += reversed(children)
    return found


def _tree(found: Modules) -> Tree:
    children, _ = _contents([module._modules for module in found.modules])
    parameters, _ = _contents([module._parameters for module in found.modules])
    modules = [weakref.ref(module) for module in found.modules]
    return Tree(modules, found.prefixes, children, parameters, found.names)


def _listed(found: dict[str, nn.Module]) -> Modules:
    seen: set[int] = {id(None)}
    names: list[str] = []
    parameters: list[nn.Parameter | None] = []
    for prefix, module in found.items():
        for name, parameter in module._parameters.items():
            names.append("" if id(parameter) in seen else prefix + name)
            parameters.append(parameter)
            seen.add(id(parameter))
    return Modules([*found], [*found.values()], names, parameters)
