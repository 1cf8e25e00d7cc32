"""What persample raises, and how a message is built: what, where, why, fix."""

from __future__ import annotations

import linecache
import os
import sys
import warnings
from dataclasses import dataclass
from types import CodeType

import torch

LOOP = 'record(..., unproven="loop") computes the gradient of each loss by its own backward pass'
_HIDDEN = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, __file__)
)


class PersampleError(RuntimeError):
    """Base of every error; ``what``, ``where``, ``why`` and ``fix`` are attributes."""

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        parts = [what]
        for label, text in (("where", where), ("why", why), ("fix", fix)):
            if text:
                parts.append(f"  {label}: {text}")
        super().__init__("\n".join(parts))


class MixedSamplesError(PersampleError):
    """Samples interact, or nothing proves that they do not."""


class MissedUseError(PersampleError):
    """A parameter was used where the recorder could not see it."""


class StaleError(PersampleError):
    """Something the answer depends on changed since it was recorded."""


class UsageError(PersampleError):
    """The interface was called in a way that has no meaning."""


class VerificationError(PersampleError):
    """The self-check found a number that does not agree with autograd."""


class StorageError(PersampleError):
    """A file could not be written; nothing half-written is left."""


class UnheardWarning(UserWarning):
    """A backward pass reached a recorded model unannounced: its parameters got no gradients."""


def unheard() -> None:
    """Warn of it: an optimizer would step without a word."""
    warn_caller(
        "a backward pass that persample did not start reached a recorded model: its parameters "
        "received no gradients; call tape.backward(losses), and tape.set_grad(...)",
        UnheardWarning,
    )


class NonFiniteWarning(UserWarning):
    """Some samples have gradients that are not finite; clipped sums leave them out."""


class ExtractedNumberWarning(UserWarning):
    """A number of several samples was taken out of torch before the losses: may be in them."""


Place = tuple[CodeType, int]  # and the offset of an instruction: its line is looked up if need be
_FILES: dict[str, bool] = {}  # whether a file is torch's or ours


def here(depth: int = 1) -> Place | None:
    """The innermost frame of the caller's own code (not torch, not persample).

    At least ``depth`` frames are known to be ours.
    """
    frame, known = sys._getframe(depth), _FILES
    while frame is not None:
        code = frame.f_code
        hidden = known.get(code.co_filename)
        if hidden is None:
            name = code.co_filename
            hidden = known[name] = name.startswith(_HIDDEN) or name.startswith("<")
        if not hidden:
            return code, frame.f_lasti
        frame = frame.f_back  # type: ignore[assignment]
    return None


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn of the innermost line of the caller's own code."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def from_torch() -> bool:
    """Whether the innermost frame outside this package is torch's own code."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HIDDEN[1]):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_code.co_filename.startswith(_HIDDEN[0])


def from_us() -> bool:
    """Whether code of this package made the call that a recorder's mode is handling."""
    frame = sys._getframe(1)
    while frame.f_code.co_name != "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    caller = frame.f_back
    return caller is not None and caller.f_code.co_filename.startswith(_HIDDEN[1])


def called_by(code: CodeType) -> bool:
    """Whether this function of torch called us, with no code of the caller's own in between."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HIDDEN):
        if frame.f_code is code:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def describe(place: Place | None) -> str:
    """``model.py:12 in forward: y = x.mean(0)``."""
    if place is None:
        return ""
    code, offset = place
    line = next((n for a, b, n in code.co_lines() if a <= offset < b and n), code.co_firstlineno)
    text = linecache.getline(code.co_filename, line).strip()
    text = text if len(text) <= 120 else f"{text[:119]}…"
    name = os.path.join(*code.co_filename.split(os.sep)[-2:])
    return f"{name}:{line} in {code.co_name}" + (f": {text}" if text else "")


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a tensor has no proven place for its samples; becomes an error only if it matters.

    ``real``: real values met, not integers or truth values alone.
    """

    operator: str
    why: str
    shapes: tuple[tuple[int, ...], ...] = ()
    place: Place | None = None
    fix: str = ""
    real: bool = False

    def where(self) -> str:
        """Operator, shapes and the caller's line."""
        text = self.operator
        if self.shapes:
            text += " on " + ", ".join(str(s) for s in self.shapes)
        line = describe(self.place)
        return f"{text}, {line}" if line else text

    def error(self, what: str, *, fix: str = LOOP) -> MixedSamplesError:
        """The error for a caller who needs separate samples; ``fix`` if none is known here."""
        return MixedSamplesError(what, where=self.where(), why=self.why, fix=self.fix or fix)


class Mixing(Exception):
    """Raised inside a layout rule: this call mixes samples, or nothing proves that it does not."""

    def __init__(self, why: str, fix: str = "") -> None:
        self.why, self.fix = why, fix
        super().__init__(why)
