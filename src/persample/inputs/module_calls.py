"""Hears the outermost call of any module of a model, and what it returns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn


class Listener(Protocol):
    """Told of calls; torch functions are not watched meanwhile."""

    def take(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The outermost module was called."""

    def turn(self, states: Any) -> None:
        """A recurrent layer was called with these initial states."""

    def give(self, out: Any) -> None:
        """The outermost module returned."""


class Gate:
    """A hook that does not travel: copies and pickles of a model get one that does nothing."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        """Forward to the recorder, if it is ours."""
        if self._function is not None:
            self._function(*args)

    def __deepcopy__(self, memo: Any) -> Gate:
        return Gate()

    def __reduce__(self) -> Any:
        return (Gate, ())


class ModuleCalls:
    """Hooks on all modules; while one of them runs, those inside it run as fast as ever."""

    def __init__(self, listener: Listener, *, any_thread: bool) -> None:
        self._listener, self._any_thread = listener, any_thread
        self._gate = Gate()
        self._kwargs: list[dict[int, bool]] = []  # which pre-hooks take keyword arguments
        self._hooks: list[Any] = []  # pre-hooks of all modules that are hooked
        self._recurrent: list[Any] = []  # those that stay while a module runs
        self._inside: nn.Module | None = None  # the outermost that runs
        self._only_recurrent = False
        self._thread = 0  # the recording's: calls in others are not seen

    def install(self, modules: Iterable[nn.Module], *, only_recurrent: bool) -> None:
        """Hook them (undone when the block ends, and while a module runs)."""
        self._thread, self._gate = threading.get_ident(), Gate(self._before)
        self._only_recurrent = only_recurrent
        hooked, recurrent = list(modules), list[nn.Module]()
        kinds = set(map(type, hooked))  # few: asking each module takes longer
        if any(issubclass(kind, torch.jit.ScriptModule) for kind in kinds):
            hooked = [m for m in hooked if not isinstance(m, torch.jit.ScriptModule)]
        if any(issubclass(kind, nn.RNNBase) for kind in kinds):
            recurrent = [m for m in hooked if isinstance(m, nn.RNNBase)]
        hooked = recurrent if only_recurrent else hooked
        self._kwargs = [module._forward_pre_hooks_with_kwargs for module in hooked]
        self._hooks = [module._forward_pre_hooks for module in hooked]
        self._recurrent = [module._forward_pre_hooks for module in recurrent]
        key = id(self)
        for kwargs in self._kwargs:
            kwargs[key] = True
        self._hook(self._hooks)

    def remove(self) -> None:
        """Take all hooks away."""
        self._unhook()
        for kwargs in self._kwargs:
            kwargs.pop(id(self), None)
        self._gate = Gate()
        self._leave()

    def _hook(self, places: list[Any]) -> None:
        """A pre-hook with keyword arguments before all others, cheaper than torch registers it."""
        gate, key = self._gate, id(self)
        for hooks in places:
            hooks[key] = gate
            if len(hooks) > 1:
                hooks.move_to_end(key, last=False)

    def _unhook(self) -> None:
        key = id(self)
        for hooks in self._hooks:
            hooks.pop(key, None)

    def _enter(self, module: nn.Module) -> None:
        """Listen to its end, also where it fails, cheaper than torch registers it."""
        module._forward_hooks[id(self)] = self._after
        module._forward_hooks_always_called[id(self)] = True
        self._inside = module

    def _leave(self) -> None:
        if self._inside is not None:
            self._inside._forward_hooks.pop(id(self), None)
            self._inside._forward_hooks_always_called.pop(id(self), None)
            self._inside = None

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread and not self._any_thread:
            return
        if self._inside is None and not self._only_recurrent:
            self._enter(module)
            self._unhook()
            self._hook(self._recurrent)
            with torch._C.DisableTorchFunction():
                self._listener.take(module, args, kwargs)
        if isinstance(module, nn.RNNBase):
            self._listener.turn(args[1] if len(args) > 1 else kwargs.get("hx"))

    def _after(self, module: nn.Module, args: Any, out: Any) -> None:
        if self._inside is not None:
            self._leave()
            self._hook(self._hooks)
            with torch._C.DisableTorchFunction():
                self._listener.give(out)
