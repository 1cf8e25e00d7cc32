"""Where users come in: ``persample.record``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from .errors import UsageError
from .forms import BUDGET, LEAN
from .layouts import find
from .recording.recorder import Recording
from .tape.tape import Tape
from .uses import Ahead, Options, Params
from .validation import expect_direction, expect_ids, expect_projection, shown, whole


def record(
    model: nn.Module,
    *,
    n: int | None = None,
    dim: int = 0,
    constants: Iterable[str | int | Tensor] = (),
    sample_ids: Tensor | None = None,
    params: Params = None,
    rules: dict[Any, Callable[..., Any]] | None = None,
    unproven: Literal["refuse", "loop"] = "refuse",
    verify: bool = False,
    lean: bool | Ahead = False,
    positions: bool = False,
    budget: int | None = None,
    same_samples: bool = False,
    grad: bool = False,
) -> Recorder:
    """Record one normal forward and backward pass of an unmodified model.

    >>> import torch, persample
    >>> model = torch.nn.Linear(3, 1)
    >>> with persample.record(model) as tape:
    ...     losses = model(torch.ones(2, 3)).square().squeeze(1)
    ...     tape.backward(losses)
    >>> tape.grads()["weight"].shape
    torch.Size([2, 1, 3])

    Graphs made inside the block give parameters no ``.grad``, not even by ``losses.backward()``:
    call :meth:`Tape.set_grad`, or pass ``grad=True``.

    Args:
        model: Any module; it is not changed. Frozen parameters are left out.
        n: The number of samples; by default, read off the first input.
        dim: The axis of the samples in the model's inputs.
        constants: Inputs that hold no samples although one has the batch size: names, positions,
            tensors.
        sample_ids: The sample of every input row, if samples have several rows; needs ``n``.
        params: The parameters to record: a name, names, or a predicate on names.
        rules: Rules of your own, ``{operator: rule}``, for this recording.
        unproven: "refuse", or "loop" to fall back to one backward pass per sample.
        verify: Check this step against autograd.
        lean: Keep nothing. Norms, and the queries that :class:`persample.Ahead` lists, are answered
            during the backward pass; every other query takes one more pass. A weighted or clipped
            sum comes last: it frees the graph, unless
            ``tape.backward(losses, retain_graph=True)`` keeps it.
        positions: Keep what :meth:`Tape.positions` needs: also inputs and output gradients of
            biases and norm layers.
        budget: Bytes of scratch memory that a query may take beyond its result. Larger work is
            cut into tiles; the smallest is one row of one parameter. By default tiles take 64 MiB
            (2 MiB if lean), and a clipped sum takes what is left up to a fifth more than a plain
            step holds.
        same_samples: You guarantee that sample i is the same in every batch of this block. Without
            it, a block holds one batch: a later backward pass from other inputs is refused.
        grad: Leave the ``.grad`` that the same program leaves without persample, so that norms can
            be watched in a training loop that is not changed.

    Returns:
        A context manager that yields the :class:`persample.Tape`.

    Raises:
        UsageError: An argument makes no sense, or the model is already being recorded.
    """
    _expect_sensible(model, n, sample_ids, unproven)
    _expect_rules(rules)
    _expect_lean(lean, positions=positions, native=verify or unproven == "loop")
    scratch, rows = _scratch(budget, lean=bool(lean))
    asked = lean if isinstance(lean, Ahead) else Ahead() if lean else None
    options = Options(
        dim=whole(
            dim, "dim", least=0, fix="axes are counted from the first: inputs differ in rank"
        ),
        verify=verify,
        loop=unproven == "loop",
        ahead=asked,
        positions=positions,
        budget=scratch,
        rows=rows,
        rules={find(f).name: rule for f, rule in (rules or {}).items()},
        same_samples=bool(same_samples),
        grad=bool(grad),
    )
    recording = Recording(
        model,
        options,
        params=params,
        n=None if n is None else whole(n, "n", least=0, fix="n=len(x), or leave it out"),
        # an input that is sample_ids itself (a graph's batch vector) holds no samples
        constants=[*_listed(constants), *([] if sample_ids is None else [sample_ids])],
        sample_ids=None if sample_ids is None else sample_ids.detach().clone(),
    )
    if asked is not None and asked.direction is not None:
        selected = recording.context.parameters.selected
        expect_direction(asked.direction, selected, selected)
    return Recorder(recording)


class Recorder:
    """A context manager around one ordinary forward (and backward) of a model."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._tape: Tape | None = Tape(recording)  # after the block its user holds it, or no one

    def __enter__(self) -> Tape:
        tape = self._tape
        if tape is None:
            raise UsageError("a recorder can be entered once", fix="call persample.record again")
        self.recording.open()
        return tape

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        self._tape = None
        self.recording.close(kind, value, trace)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Whoever forgot ``with`` looks for the tape's questions here."""
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hasattr(Tape, name):
                text += "; write: with persample.record(model) as tape:"
            raise AttributeError(text)


def _scratch(budget: int | None, *, lean: bool) -> tuple[int, int | None]:
    """Bytes for tiles, and for rows that a clipped sum keeps: None is a share of the tape's."""
    if budget is None:
        return (LEAN if lean else BUDGET), None
    given = whole(budget, "budget", least=1, fix="a number of bytes: budget=64 << 20")
    return given, given // 2


def _expect_sensible(model: object, n: object, sample_ids: object, unproven: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"record takes an nn.Module, got {type(model).__name__}",
            fix="put the function and its parameters into a module",
        )
    if unproven not in ("refuse", "loop"):
        raise UsageError(
            f"unproven must be 'refuse' or 'loop', got {unproven!r}", fix="leave it out"
        )
    if sample_ids is not None and n is None:
        raise UsageError("sample_ids needs n, the number of samples", fix="record(model, n=...)")
    if sample_ids is not None:
        expect_ids(sample_ids, "sample_ids")


def _listed(constants: Any) -> list[str | int | Tensor]:
    single = isinstance(constants, (str, int, Tensor))
    found = [constants] if single or not isinstance(constants, Iterable) else list(constants)
    for constant in found:
        if not isinstance(constant, (str, int, Tensor)) or isinstance(constant, bool):
            raise UsageError(
                f"constants are names, positions or tensors, got {shown(constant)}",
                fix='constants=("mask",)',
            )
    return found


def _expect_rules(rules: Any) -> None:
    pairs = rules.items() if isinstance(rules, Mapping) else [(rules, rules)]
    if rules is not None and not all(callable(f) and callable(rule) for f, rule in pairs):
        raise UsageError(
            f"rules are {{operator: function}}, got {shown(rules)}",
            fix="rules={torch.mul: my_rule}",
        )


def _expect_lean(lean: object, *, positions: bool, native: bool) -> None:
    if not isinstance(lean, (bool, Ahead)):
        raise UsageError(
            f"lean must be a bool or persample.Ahead(...), got {lean!r}", fix="lean=True"
        )
    if lean and native:
        raise UsageError(
            "lean=True goes with neither verify=True nor unproven='loop'",
            fix="leave one of them out: these keep the whole graph",
        )
    if lean and positions:
        raise UsageError(
            "lean=True keeps nothing, so positions cannot be asked of it",
            fix="record(model, positions=True) without lean",
        )
    if isinstance(lean, Ahead) and lean.projection is not None:
        if not isinstance(lean.projection, tuple) or len(lean.projection) != 2:
            raise UsageError(
                f"a projection is (dim, seed), got {shown(lean.projection)}",
                fix="Ahead(projection=(512, 0))",
            )
        expect_projection(*lean.projection)
