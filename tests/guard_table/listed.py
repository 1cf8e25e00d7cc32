"""Every guard: where it looks, which refusals are its own, and how to switch it off alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

from persample.backward import collector, contribution, loss_checks, passes, user_backward
from persample.backward.one_by_one import OneByOne
from persample.errors import PersampleError
from persample.guards import constants, guards
from persample.guards.determinism import PassComparison
from persample.guards.extracted_numbers import ExtractedNumbers, Received
from persample.guards.guards import Guards
from persample.guards.native_gradients import Escapes
from persample.layouts.layout import CONSTANT
from persample.recording import dispatch, lookup
from persample.recording.broadcast_parameters import Repeats
from persample.recording.user_code import backward_code, custom_parameters
from persample.uses.batches import Batches
from persample.uses.parameters import Parameters
from persample.uses.tensor_states import TensorStates

from .notes import WRITTEN, Check, Notes, Watched, contents_of

Patch = tuple[Any, str, Any]  # owner, attribute, what stands there while the guard is off


@dataclass(frozen=True)
class Guard:
    """One guard.

    ``checks``: functions that look. ``sites``: functions that build its error, as file:function.
    ``off``: what to put in whose place to switch it off; nothing where that cannot be done.
    """

    name: str
    file: str
    checks: tuple[Check, ...]
    sites: tuple[str, ...]
    off: tuple[Patch, ...] = ()
    tells: Callable[[PersampleError, Notes], bool] = lambda error, notes: True

    def refused(self, error: PersampleError, frames: tuple[str, ...], notes: Notes) -> bool:
        """Whether the error is this guard's."""
        return any(site in frames for site in self.sites) and self.tells(error, notes)


def always(*args: Any, **kwargs: Any) -> bool:
    return True


def nothing(*args: Any, **kwargs: Any) -> None:
    return None


def no(*args: Any, **kwargs: Any) -> bool:
    return False


def changing(owner: Any, name: str, change: Callable[[Any], Any]) -> Patch:
    """A function whose result is changed."""
    original = getattr(owner, name)
    return owner, name, lambda *args, **kwargs: change(original(*args, **kwargs))


def contents(kind: str) -> Guard:
    name = contents_of(kind)
    return Guard(
        name,
        "guards/constants.py",
        (),
        ("guards/guards.py:Guards.expect_values",),
        ((guards, "Values", type("Blind", (Watched,), {"blind": kind})),),
        lambda error, notes: name in notes.found,
    )


def extracted(error: PersampleError, notes: Notes) -> bool:
    return error.why.startswith("numbers were taken out")


def past_torch(error: PersampleError, notes: Notes) -> bool:
    return WRITTEN in notes.found and not extracted(error, notes)


def plain(error: PersampleError, notes: Notes) -> bool:
    return not extracted(error, notes) and WRITTEN not in notes.found


def unseen(error: PersampleError, notes: Notes) -> bool:
    return "made where the recorder could not see it" in error.why


def unfollowed(error: PersampleError, notes: Notes) -> bool:
    return error.where.startswith("an unseen operator") and not unseen(error, notes)


REPORT = "recording/user_code/backward_code.py:report"
PROOF = (
    "backward/loss_checks.py:prove",
    "backward/loss_checks.py:expect_losses",
    "backward/collector.py:Collector.receive",
)

GUARDS = (
    # ------------------------------------------------------------------ guards/
    Guard(
        "a parameter was written to after it was recorded (version counter)",
        "guards/guards.py",
        ((guards, "_expect_unchanged", always),),
        ("guards/guards.py:_expect_unchanged",),
        ((guards, "_expect_unchanged", nothing),),
    ),
    Guard(
        "recorded data were overwritten (version counter)",
        "guards/guards.py",
        ((contribution.Contribution, "overwritten", always),),
        ("guards/messages.py:kept_data_overwritten",),
        ((contribution.Contribution, "overwritten", no),),
    ),
    contents("parameters"),
    contents("what the caller passed in"),
    contents("constants"),
    Guard(
        "a later pass of a lean recording differs from the first",
        "guards/determinism.py",
        ((PassComparison, "finish", lambda own, **_: own.guarded and own._first is not None),),
        ("guards/determinism.py:PassComparison.finish",),
        ((PassComparison, "finish", nothing),),
    ),
    Guard(
        "user code between a weight and its parameter does something else the second time",
        "guards/determinism.py",
        ((Guards, "expect_deterministic", always),),
        ("guards/determinism.py:expect_deterministic",),
        ((Guards, "expect_deterministic", nothing),),
    ),
    Guard(
        "a mask or matrix whose zeros separate samples was written to",
        "guards/constants.py",
        ((constants.Zeros, "changed", lambda own: bool(own)),),
        ("guards/messages.py:zeros_overwritten",),
        ((constants.Zeros, "changed", no),),
    ),
    Guard(
        "a gradient is not finite where zeros separate samples",
        "guards/constants.py",
        ((constants.Zeros, "changed", lambda own: bool(own)),),
        ("guards/messages.py:not_finite_at_zeros",),
        ((guards, "not_finite_at_zeros", nothing), (constants, "not_finite_at_zeros", nothing)),
    ),
    Guard(
        "saved tensors did not come back",
        "guards/guards.py",
        ((Guards, "fired", lambda own, use, *_: use.fingerprint is not None),),
        ("guards/messages.py:saved_data_changed",),
        ((guards, "saved_data_changed", nothing),),
    ),
    Guard(
        "a tensor derived from parameters came out differently when it was computed again",
        "guards/guards.py",
        ((Guards, "made_again", always),),
        ("guards/messages.py:remade",),
        ((guards, "remade", nothing),),
    ),
    Guard(
        "numbers were taken out of tensors in backward",
        "guards/extracted_numbers.py",
        ((ExtractedNumbers, "note", always), (ExtractedNumbers, "hide", always)),
        (REPORT,),
        ((ExtractedNumbers, "hide", nothing),),
        extracted,
    ),
    Guard(
        "a gradient was written to past torch (NumPy, `.data`) by a hook or a custom function",
        "guards/extracted_numbers.py",
        ((Received, "written", lambda own, _: bool(own.handed_out or own._copies)),),
        (REPORT,),
        ((Received, "written", no),),
        past_torch,
    ),
    Guard(
        "an ordinary gradient reached a parameter",
        "guards/native_gradients.py",
        ((Escapes, "restore", always),),
        ("guards/native_gradients.py:_missed_use",),
        (changing(Escapes, "restore", nothing),),
    ),
    # ------------------------------------------------------------------ elsewhere
    Guard(
        "a gradient reached rows that belong to no sample",
        "backward/collector.py",
        ((collector, "reached", lambda rows, _: rows is not None),),
        ("guards/messages.py:gradient_of_unowned_rows",),
        ((collector.Collector, "_reaches_nobody", no),),
    ),
    Guard(
        "two tensors were used as one parameter",
        "backward/collector.py",
        ((Parameters, "stand", always),),
        ("guards/messages.py:slot_exchanged",),
        (changing(Parameters, "stand", nothing),),
    ),
    Guard(
        "a hook on an expanded tensor sees sums over samples",
        "backward/contribution.py",
        (),
        ("guards/messages.py:hook_on_expanded",),
    ),
    Guard(
        "a parameter has a gradient hook",
        "uses/parameters.py",
        ((Parameters, "expect_no_hooks", always),),
        ("uses/parameters.py:Parameters.expect_no_hooks",),
        ((Parameters, "expect_no_hooks", nothing),),
    ),
    Guard(
        "a parameter was added or unfrozen inside the block",
        "uses/parameters.py",
        ((Parameters, "expect_no_new", always),),
        ("uses/parameters.py:Parameters.expect_no_new",),
        ((Parameters, "expect_no_new", nothing),),
    ),
    Guard(
        "a parameter was converted to another dtype",
        "autograd_graph.py",
        tuple(
            (module, "expect_unconverted", always)
            for module in (passes, contribution, custom_parameters)
        ),
        ("autograd_graph.py:expect_unconverted",),
        tuple(
            (module, "expect_unconverted", nothing)
            for module in (passes, contribution, custom_parameters)
        ),
    ),
    Guard(
        "a second batch in one recording",
        "uses/batches.py",
        ((Batches, "expect_joined", lambda own, *, first, **_: not first),),
        ("uses/batches.py:Batches.expect_joined", "uses/batches.py:Batches.expect_one_size"),
        ((Batches, "expect_joined", nothing), (Batches, "expect_one_size", nothing)),
    ),
    Guard(
        "a hook was registered after a lean pass",
        "backward/passes.py",
        ((passes.Passes, "_expect_root", always),),
        ("backward/passes.py:Passes._expect_root",),
        ((TensorStates, "hooks", lambda own: {}),),
        lambda error, notes: error.what.startswith("a hook"),
    ),
    Guard(
        "a hook on learned rows that were used already",
        "recording/broadcast_parameters.py",
        ((Repeats, "exposed", always),),
        ("recording/broadcast_parameters.py:Repeats.exposed",),
        ((Repeats, "exposed", nothing),),
    ),
    Guard(
        "a lean recording met a use that forward did not announce",
        "backward/consumers/lean.py",
        (),
        ("backward/consumers/lean.py:Lean._take",),
    ),
    Guard(
        "a hook or a custom function does not keep samples apart",
        "recording/user_code/",
        (
            (backward_code.FollowedHook, "_check", always),
            (backward_code.FollowedBackward, "_after", always),
        ),
        (REPORT,),
        ((backward_code, "report", nothing),),
        plain,
    ),
    Guard(
        "a custom function returned a tensor with a history of its own",
        "backward/loss_checks.py",
        ((passes, "expect_followed", always),),
        ("backward/loss_checks.py:expect_followed",),
        ((passes, "expect_followed", nothing),),
    ),
    Guard(
        "a backward pass that persample did not start",
        "backward/collector.py",
        ((collector.Collector, "_stray", always),),
        ("backward/collector.py:Collector._stray",),
        ((collector.Collector, "_stray", nothing),),
    ),
    Guard(
        "reentrant checkpointing where it cannot be followed",
        "backward/",
        ((user_backward, "_expect_apart", always),),
        ("backward/user_backward.py:_expect_apart", "backward/user_backward.py:expect_reached",
         "backward/loss_checks.py:expect_possible"),
        (
            (user_backward, "_expect_apart", nothing),
            (dispatch, "expect_reached", nothing),
            (passes, "expect_possible", nothing),
        ),
        lambda error, notes: "reentrant" in error.what,
    ),
    Guard(
        "a tensor with a gradient history that was not recorded",
        "recording/lookup.py",
        ((lookup.Lookup, "_unseen", always),),
        PROOF,
        ((lookup, "Mixed", lambda reason: CONSTANT),),
        unseen,
    ),
    Guard(
        "a tensor with samples was written to where the recorder could not see it",
        "uses/tensor_states.py",
        ((TensorStates, "get", always),),
        PROOF,
        (),
        unfollowed,
    ),
    Guard(
        "clipping losses that are scaled by a number of the whole batch",
        "tape/question.py",
        ((loss_checks, "expect_losses", always),),
        ("tape/question.py:Question.expect_losses",),
        (changing(loss_checks, "expect_losses", lambda found: (found[0], None)),),
        lambda error, notes: "whole batch" in error.what,
    ),
    Guard(
        "a later pass that the program may not want to be added to those before",
        "backward/several_passes.py",
        ((
            passes, "expect_to_be_added",
            lambda context, call_count, *, plain: context.backward.count > 0,
        ),),
        (
            "backward/several_passes.py:expect_to_be_added",
            "backward/several_passes.py:_expect_kept",
        ),
        ((passes, "expect_to_be_added", nothing),),
    ),
    Guard(
        "the tape disagrees with autograd (`verify`, `loop`)",
        "backward/one_by_one.py",
        ((OneByOne, "disagreement", lambda own, losses, reference: reference is not None),),
        ("backward/one_by_one.py:OneByOne.disagreement",),
        ((OneByOne, "disagreement", nothing),),
    ),
    Guard(
        "the proof: samples interact, or nothing shows that they do not",
        "layouts/, backward/loss_checks.py",
        ((loss_checks, "expect_losses", always),),
        PROOF,
    ),
)  # fmt: skip
OTHER = "arguments, and everything else"


def guard_of(notes: Notes) -> str:
    """The guard whose error was raised."""
    raised = notes.raised()
    if raised is None:
        return OTHER
    error, frames = raised
    return next((g.name for g in GUARDS if g.refused(error, frames, notes)), OTHER)


@contextlib.contextmanager
def switched_off(name: str) -> Iterator[None]:
    """One guard is off, all others are on."""
    guard = next(g for g in GUARDS if g.name == name)
    with contextlib.ExitStack() as stack:
        for owner, attribute, instead in guard.off:
            stack.enter_context(mock.patch.object(owner, attribute, instead))
        yield
