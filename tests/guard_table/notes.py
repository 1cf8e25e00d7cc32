"""What happened in one program, and instruments that write it down.

The functions that check are wrapped in the process that counts; the source knows nothing of it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import persample
from persample.errors import PersampleError
from persample.guards import guards
from persample.guards.extracted_numbers import Received
from persample.guards.guards import Guards
from persample.uses import contents
from persample.uses.tensor_states import TensorStates

SOURCE = Path(persample.__file__).parent
WRITTEN = "a gradient was written to past torch"
Check = tuple[Any, str, Callable[..., bool]]  # owner, function, and when a call of it counts


@dataclass
class Notes:
    """Who looked, what was found, and the errors that were built, each with functions of ours."""

    looked: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)
    built: list[tuple[PersampleError, tuple[str, ...]]] = field(default_factory=list)

    def raised(self) -> tuple[PersampleError, tuple[str, ...]] | None:
        """The last error that was raised."""
        return next((pair for pair in self.built[::-1] if pair[0].__traceback__), None)


_NOTES = [Notes()]  # the last one is of the program that runs


@contextlib.contextmanager
def noting() -> Iterator[Notes]:
    """The notes of one program."""
    _NOTES.append(Notes())
    try:
        yield _NOTES[-1]
    finally:
        _NOTES.pop()


def contents_of(kind: str) -> str:
    """The name of the guard of contents of one kind."""
    return f"the contents of {kind} changed, unseen by version counters"


class Watched(contents.Values):
    """Knows which of its tensors changed, and whose they are."""

    whose: dict[int, str] = {}
    blind = ""  # to tensors of this kind

    def __init__(self, tensors: Any) -> None:
        seen = [(t, self.whose.get(id(t), "constants")) for t in tensors]
        seen = [(t, kind) for t, kind in seen if kind != self.blind]
        super().__init__([t for t, _ in seen])
        self.parts = [(kind, contents.Values([t])) for t, kind in seen]

    def changed(self) -> bool:
        for kind, part in self.parts:
            _NOTES[-1].looked.add(contents_of(kind))
            if part.changed():
                _NOTES[-1].found.add(contents_of(kind))
        return super().changed()


def _frames() -> tuple[str, ...]:
    """The innermost functions of ours, as file:function."""
    found: list[str] = []
    frame: Any = sys._getframe(2)
    while frame is not None and len(found) < 5:
        path = Path(frame.f_code.co_filename)
        if SOURCE in path.parents and path.name != "errors.py":
            found.append(f"{path.relative_to(SOURCE)}:{frame.f_code.co_qualname}")
        frame = frame.f_back
    return tuple(found)


def _counted(guard: str, original: Any, when: Callable[..., bool]) -> Any:
    def look(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            _NOTES[-1].looked.add(guard)
        return original(*args, **kwargs)

    return look


@contextlib.contextmanager
def instruments(checks: dict[str, tuple[Check, ...]]) -> Iterator[None]:
    """Every check of a guard notes that it looked, every error where it was built."""
    build, written, remember = PersampleError.__init__, Received.written, Guards.remember

    def noted(self: PersampleError, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        _NOTES[-1].built.append((self, _frames()))

    def lent(self: Received, marks: TensorStates) -> bool:
        found = written(self, marks)
        if found:
            _NOTES[-1].found.add(WRITTEN)
        return found

    def remembering(self: Guards, kept: Any, *, again: bool) -> None:
        context = self._context
        Watched.whose = {id(t): "what the caller passed in" for t in context.caller.alive()}
        Watched.whose |= dict.fromkeys(context.parameters.slots, "parameters")
        remember(self, kept, again=again)

    with contextlib.ExitStack() as stack:
        for owner, name, instead in (
            (PersampleError, "__init__", noted),
            (Received, "written", lent),
            (Guards, "remember", remembering),
            (guards, "Values", Watched),
        ):
            stack.enter_context(mock.patch.object(owner, name, instead))
        for guard, each in checks.items():
            for owner, name, when in each:
                wrapped = _counted(guard, getattr(owner, name), when)
                stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield
