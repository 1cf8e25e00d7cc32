"""What a model's calls were, learned step by step: where each argument came from, what came out.

A step says of a call everything that decides how it is followed: the function, and for every
argument which earlier result, parameter, marked tensor, constant tensor or plain value it was. A
call that agrees in all of this has results with the same states. Earlier results are counted along
the steps that agreed; what else was called in between makes no difference.

Steps are a tree: where programs part (another branch, another batch size), a step has others
beside it. Nothing here holds a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import Place
from ..layouts import PLAIN, Layout, Operator
from ..uses import ByModel, Context, Derived, Kind, Known

_LIMIT = 1 << 14  # steps that are learned of one model
_BESIDE = 32  # steps that may follow one step
# stands for explicit ids, which every batch has of its own
ROWS = Layout(0, 1, torch.empty(0, dtype=torch.long, device="cpu"))


class OfParameter:
    """The parameter of a slot, as it was: trainable, and of this shape and dtype."""

    __slots__ = ("dtype", "shape", "slot")

    def __init__(self, slot: int, tensor: Tensor) -> None:
        self.slot, self.shape, self.dtype = slot, tensor.shape, tensor.dtype


class OfMark:
    """A tensor that is no result of a step, but has a mark: an input, or of parameters."""

    __slots__ = ("batches", "dtype", "grad", "shape", "state")

    def __init__(self, state: Layout | Derived, batches: int, tensor: Tensor) -> None:
        self.state, self.batches, self.grad = state, batches, tensor.requires_grad
        self.shape, self.dtype = tensor.shape, tensor.dtype


class OfRows:
    """A tensor with samples by explicit ids of this shape; each batch has its own."""

    __slots__ = ("batches", "dtype", "grad", "ids", "shape")

    def __init__(self, ids: torch.Size, batches: int, tensor: Tensor) -> None:
        self.ids, self.batches, self.grad = ids, batches, tensor.requires_grad
        self.shape, self.dtype = tensor.shape, tensor.dtype


class OfConstant:
    """A tensor of neither samples nor parameters; its values decide nothing."""

    __slots__ = ("dtype", "shape")

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype


class Plain:
    """A value that is no tensor: one number, name, dtype or nothing."""

    __slots__ = ("kind", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.kind = value, value.__class__


class Sequenced:
    """A sequence or slice of such values; ``flat`` are the classes of numbers and names alone."""

    __slots__ = ("flat", "kind", "kinds", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.kind, self.kinds = value, value.__class__, _kinds(value)
        nested = self.kind is slice or any(isinstance(kind, tuple) for kind in self.kinds[1:])
        self.flat = None if nested else list(map(type, value))

    def fits(self, value: Any) -> bool:
        """Whether another value is the same, of the same classes: 1, 1.0 and True are three."""
        if value.__class__ is not self.kind:
            return False
        if self.flat is None:
            return bool(_kinds(value) == self.kinds and value == self.value)
        return bool(value == self.value and list(map(type, value)) == self.flat)


class Origins:
    """Where values come from, sorted: ``results``, ``parameters`` and ``others``, with places."""

    __slots__ = ("count", "others", "parameters", "results")

    def __init__(self, origins: tuple[Origin, ...]) -> None:
        places = list(enumerate(origins))
        self.count, kinds = len(places), (int, OfParameter)
        self.results = tuple([(k, o) for k, o in places if isinstance(o, int)])
        self.parameters = tuple([(k, o) for k, o in places if isinstance(o, OfParameter)])
        self.others = tuple([(k, o) for k, o in places if not isinstance(o, kinds)])


class Several(Origins):
    """A list or tuple that holds tensors."""

    __slots__ = ("kind",)

    def __init__(self, kind: type, origins: tuple[Origin, ...]) -> None:
        super().__init__(origins)
        self.kind = kind


# an int counts the results of all steps before
Origin = int | OfParameter | OfMark | OfRows | OfConstant | Plain | Sequenced | Several


class UsePlan:
    """How a step runs in which parameters are used with samples.

    ``mine`` are the places of its parameters, their names, and whether they are derived from
    others. ``leaves`` are its plain values.
    ``additive``: no derivative reads its values.
    """

    __slots__ = (
        "additive",
        "batches",
        "kind",
        "leaves",
        "mine",
        "operator",
        "place",
        "wanted",
    )

    def __init__(
        self, operator: Operator, kind: Kind, mine: list[tuple[int, str | None, bool]],
        leaves: list[Any], place: Place | None, batches: int, *, additive: bool,
        wanted: bool,
    ) -> None:  # fmt: skip
        self.operator, self.kind, self.leaves, self.place = operator, kind, leaves, place
        self.mine, self.batches, self.additive, self.wanted = mine, batches, additive, wanted


class Step(Origins):
    """One call, and the steps that may follow it.

    ``names`` are those of its keywords, whose values come last. ``known`` is of its only result, or
    of several. Its results may share memory with the value at ``source``, if that is not negative.
    ``watched`` are the places of constants that a guard is told of. ``derived``: it takes
    parameters alone; ``careful``: where it runs has to be looked at. ``mode`` counts 1 if gradients
    are wanted, and 2 if its name is that of the Python function that calls it. ``rows``: the shapes
    of its results' explicit ids, which are those of what it takes.
    """

    __slots__ = (
        "careful", "derived", "following", "func", "known", "mode", "names", "only", "rows",
        "source", "use", "watched",
    )  # fmt: skip

    def __init__(
        self, func: Any, origins: tuple[Origin, ...] = (), names: tuple[str, ...] = (),
        known: tuple[Known, ...] | Known = (), source: int = -1, use: UsePlan | None = None,
        *, mode: int = 1, watched: bool = False, derived: bool = False,
        rows: Sequence[torch.Size] = (),
    ) -> None:  # fmt: skip
        super().__init__(origins)
        self.mode, self.rows = mode, tuple(rows)
        self.derived, self.careful = derived, derived or use is not None
        self.func, self.names, self.known, self.source, self.use = func, names, known, source, use
        constants = [k for k, origin in self.others if isinstance(origin, OfConstant)]
        self.watched = tuple(constants) if watched else ()
        # the result that it takes, where it takes nothing else
        alone = self.count == len(self.results) == 1 and not names and use is None
        self.only = self.results[0][1] if alone else -1
        self.following: list[Step] = []


def plain(value: Any) -> Plain | Sequenced | None:
    """A value that can be compared: numbers, names, dtypes, and sequences and slices of them."""
    if value.__class__ in PLAIN:
        return Plain(value)
    items: Any = None
    if value.__class__ in (list, tuple, torch.Size):
        items = value
    elif value.__class__ is slice:
        items = (value.start, value.stop, value.step)
    if items is None or any(plain(item) is None for item in items):
        return None
    return Sequenced(value)


def _kinds(value: Any) -> Any:
    if value.__class__ in (tuple, list, torch.Size):
        return (value.__class__, *[_kinds(item) for item in value])
    if value.__class__ is slice:
        return (slice, _kinds(value.start), _kinds(value.stop), _kinds(value.step))
    return value.__class__


class Program:
    """The steps of one model, by what its recordings have in common from the beginning."""

    def __init__(self) -> None:
        self._roots: dict[Any, Step] = {}
        self._count = 0

    def root(self, signature: Any) -> Step:
        """Where the steps of recordings with this signature begin."""
        found = self._roots.get(signature)
        if found is None:
            found = self._roots[signature] = Step(None)
        return found

    def add(self, after: Step, step: Step) -> None:
        """A step was learned; where too many are known, all are forgotten."""
        self._count += 1
        if self._count > _LIMIT:
            self._roots.clear()
            self._count = 0
        if len(after.following) >= _BESIDE:
            after.following.clear()
        after.following.insert(0, step)


_PROGRAMS = ByModel[Program]()


def program_of(model: nn.Module) -> Program:
    """What was learned of a model; forgotten with it."""
    found = _PROGRAMS.get(model)
    if found is None:
        found = Program()
        _PROGRAMS.put(model, found)
    return found


class Cursor:
    """Where a recording is in the program of its model."""

    __slots__ = ("_context", "_places", "_program", "at", "parameters", "passing")

    def __init__(self, context: Context) -> None:
        self._context = context
        self.parameters = list(context.parameters.tensors.values())
        self._places: dict[int, int] = {}
        self.passing = False  # the call agreed with a step, but not its circumstances
        self.at: Step | None = None  # the last step that a call agreed with, or that was learned
        spread = context.processes
        sharded = spread is not None and spread.sharded
        self._program = None
        if not context.options.native and not sharded:
            self._program = program_of(context.parameters.model)

    def begin(self) -> Step | None:
        """A program begins where it is known how many samples there are."""
        context = self._context
        if self._program is None or context.n is None:
            return None
        names = tuple(context.parameters.slots.values())
        options = context.options
        self.at = self._program.root((context.n, options.lean, tuple(options.rules), names))
        return self.at

    def place(self, tensor: Tensor) -> int | None:
        """Which of the parameters a tensor is."""
        if not self._places:
            self._places = {id(parameter): k for k, parameter in enumerate(self.parameters)}
        return self._places.get(id(tensor))

    def add(self, after: Step, step: Step) -> None:
        """A step was learned."""
        assert self._program is not None
        self._program.add(after, step)
        self.at = step

    def clear(self) -> None:
        """Forget every tensor; nothing is followed from now on."""
        self.parameters.clear()
        self._places.clear()
        self.at = self._program = None


def flat(args: Sequence[Any], kwargs: dict[str, Any] | None) -> Sequence[Any]:
    """A call's values, those of keywords last."""
    return (*args, *kwargs.values()) if kwargs else args
