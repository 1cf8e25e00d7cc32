"""Which inputs of the model hold samples: read off at the outermost module call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import UsageError
from ..layouts import CONSTANT, Constant, Layout, closed, explicit, ids_of
from ..uses import COMPUTED, Context, Mark, Positions, transformed
from .batch_size import Guess
from .input_trees import (
    argument_names,
    in_nested_lists,
    lists_alike,
    nested_lists,
    one_each,
    open_object,
    packed_ids,
    tensor_of,
    tensors_of,
    walk,
)
from .module_calls import ModuleCalls
from .shared_arguments import shared


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    """An input tensor and how it was read."""

    path: str
    shape: tuple[int, ...]
    samples: bool
    declared: bool


class Inputs:
    """Marks the tensors among the arguments of the outermost call of any module of the model."""

    def __init__(
        self,
        context: Context,
        *,
        constants: Sequence[str | int | Tensor],
        sample_ids: Tensor | None,
    ) -> None:
        self._context, self.dim, self.sample_ids = context, context.options.dim, sample_ids
        self.names = {c for c in constants if isinstance(c, (str, int))}
        self.keep_alive = [c for c in constants if isinstance(c, Tensor)]
        self.tensors = {id(c) for c in self.keep_alive}
        self.seen: list[Seen] = []
        self.guess = Guess(self.dim)
        self._guessed: dict[int, Tensor] = {}
        self._begun = False
        self.call_count = 0  # how often the model was called
        self._calls: ModuleCalls | None = None  # while the block is open

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Take the arguments of the only call to come: no module has to announce it."""
        self._begun = True
        if len(args) != 1 or kwargs or not self._take_only(args[0]):
            self.take(module, args, kwargs)

    def _take_only(self, value: Any) -> bool:
        """The same for the usual call: its only argument is a tensor of the samples."""
        context, dim = self._context, self.dim
        if value.__class__ is not Tensor or value.layout is not torch.strided or value.is_nested:
            return False
        if self.names or value.dim() <= dim or value.shape[dim] != context.n or transformed(value):
            return False
        if not isinstance(context.look(value) or CONSTANT, Constant):
            return False
        context.caller.add(value)
        context.user_code.expose(value)
        context.states.put(value, closed(dim))
        context.states.table[id(value)].batches = context.batches.enter(())
        self._guessed[id(value)] = value
        return True

    def install(self, modules: Iterable[nn.Module]) -> None:
        """Hear calls of any of them."""
        self._calls = ModuleCalls(self, any_thread=self._context.options.loop)
        self._calls.install(modules, only_recurrent=self._begun)

    def remove(self) -> None:
        """Hear no more calls."""
        if self._calls is not None:
            self._calls.remove()
        self._calls = None
        self._guessed.clear()

    def turn(self, states: Any) -> None:
        """Initial states are (layers, samples, features), also where layers and samples agree."""
        marks = self._context.states
        for _, state in walk("hx", states):
            if id(state) in self._guessed and state.dim() == 3 and state.shape[1] == marks.n:
                marks.put(state, closed(1))

    def give(self, out: Any) -> None:
        """Results also belong to the caller, who may go on to compute in their memory."""
        for _, value in walk("", out if out.__class__ is Tensor else open_object(out)):
            tensor = tensor_of(value)
            if not transformed(tensor):
                self._context.caller.add(tensor, received=False)

    def take(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Mark the tensors among the arguments that hold samples."""
        if self._context.processes is not None:
            self._context.processes.notice()
        if self._context.backward.busy:
            return  # called again by checkpointing: what samples have is known, the rest is shared
        self.call_count += 1
        named: list[tuple[str, Any]] = []
        names = argument_names(module)
        for k, value in enumerate(args):
            name = names[k] if k < len(names) else str(k)
            if k in self.names:
                self._see_constant(name, value)
            else:
                named.append((name, value))
        found = tensors_of([*named, *kwargs.items()])
        if any(isinstance(v, Tensor) and transformed(v) for _, v in found):
            return  # inside a torch.func transform, where nothing is followed
        self._declare_shared(module, found)
        fresh, others = self._sorted(found)
        undeclared = [(path, value) for path, value in fresh if not self._is_declared(path, value)]
        least = 1 if self._context.n == 1 else 2  # a list of one is the only sample
        lists = lists_alike(undeclared, least) if len(undeclared) >= least else []
        nested = nested_lists(undeclared) if len(undeclared) > 1 else []
        values = [value for _, value in undeclared]
        self.guess.expect_same(values, self._context.n)
        if self._context.n is None:
            self._context.n = self.guess.infer(values, lists, nested)
        each: dict[int, Tensor] = {}
        if self.sample_ids is None and (lists or nested):
            held = any(isinstance(self._state(value), Layout) for _, value in found)
            each = one_each(lists, values, self._context.n, self.dim, batched=held)
            each |= in_nested_lists(nested, self._context.n)
        self.guess.lengths.update(len(tensors) for tensors in lists)
        if fresh and torch.is_grad_enabled():
            self.guess.note_call(module)
        count = len(self.seen)
        for path, value in fresh:
            tensor = tensor_of(value)
            self._context.caller.add(tensor)
            self._context.user_code.expose(tensor)
            if id(tensor) in each:
                self._context.states.put(tensor, explicit(each[id(tensor)], self._context.n or 0))
                self.seen.append(Seen(path, tuple(tensor.shape), samples=True, declared=False))
            else:
                self._mark(path, value)
        self._context.caller.expect_not_refilled([tensor_of(value) for value in others])
        if not self._begun:  # else no other call will come
            self._context.caller.enter([tensor_of(value) for _, value in fresh])
        self._enter_batch([value for _, value in fresh], others)
        self._note_other_size(undeclared, self.seen[count:])

    def _enter_batch(self, fresh: Sequence[Any], others: Sequence[Any]) -> None:
        """Which batch a call's samples are of: its fresh ones, and those that were seen before."""
        entered, known = self._samples(fresh), self._samples(others)
        if not entered:
            return
        batches = self._context.batches.enter([mark.batches for mark in known])
        for mark in entered:
            mark.batches = batches
        for mark in known:  # a mask that several batches share is of none of them
            if not mark.batches & (COMPUTED | batches):
                mark.batches = 0

    def _samples(self, values: Sequence[Any]) -> list[Mark]:
        tensors = [tensor_of(v) for v in values]
        marks = [self._context.states.table.get(id(tensor)) for tensor in tensors]
        return [mark for mark in marks if mark is not None and isinstance(mark.state, Layout)]

    def _note_other_size(self, undeclared: Sequence[tuple[str, Any]], seen: Sequence[Seen]) -> None:
        """A call none of whose inputs has n rows may be of another batch, of another size."""
        if undeclared and seen and not any(one.samples for one in seen):
            sizes = [one.shape[self.dim] for one in seen if len(one.shape) > self.dim]
            self._context.batches.sizes += sizes[:1]

    def _see_constant(self, name: str, value: Any) -> None:
        """An argument that is constant by its position."""
        for path, tensor in walk(name, open_object(value)):
            shape = tensor_of(tensor).shape
            self.seen.append(Seen(path, tuple(shape), samples=False, declared=True))

    def _sorted(self, found: list[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], list[Any]]:
        """Tensors that are not known to hold samples yet, and the others."""
        fresh: list[tuple[str, Any]] = []
        others: list[Any] = []
        for path, value in found:
            state = self._state(value)
            if state is None or isinstance(state, Constant):
                fresh.append((path, value))
            else:
                others.append(value)
        return fresh, others

    def _declare_shared(self, module: nn.Module, found: list[tuple[str, Any]]) -> None:
        """Masks, and positions beside samples that were seen before, hold none."""
        known = self._context.positions if any(seen.samples for seen in self.seen) else Positions()
        for path, value in found:
            if shared(module, path, value, known):
                self.keep_alive.append(value)
                self.tensors.add(id(value))

    def _state(self, value: Any) -> Any:
        return self._context.look(tensor_of(value))

    def _is_declared(self, path: str, value: Any) -> bool:
        if not self.names and not self.tensors:
            return False
        parts = path.split(".")
        return (
            id(value) in self.tensors
            or path in self.names
            or parts[0] in self.names
            or (parts[-1] in self.names)
        )

    def expect_samples(self) -> None:
        """Say which inputs were looked at, if none of them was read as samples."""
        if not self.seen or any(seen.samples for seen in self.seen):
            return
        n = self._context.n
        what = f"an axis {self.dim}" if n is None else f"{n} indices on axis {self.dim}"
        why = f"none has {what}"
        if all(seen.declared for seen in self.seen):
            why = "constants= names all of them"
        shapes = ", ".join(f"{seen.path} {seen.shape}" for seen in self.seen[:4])
        raise UsageError(
            "no input of the model was recognised as holding samples",
            why=f"{why}: {shapes}",
            fix="record(..., n=..., dim=...), or tape.mark(x, dim=..., ids=...) for the tensor "
            "that holds them",
        )

    def _mark(self, path: str, value: Any) -> None:
        n, marks = self._context.n, self._context.states
        declared = self._is_declared(path, value)
        if isinstance(value, PackedSequence):
            if not declared and n == int(value.batch_sizes[0]):
                marks.put(
                    value.data,
                    explicit(packed_ids(value).view(-1, *[1] * (value.data.dim() - 1)), n),
                )
            return
        rows = n if self.sample_ids is None else self.sample_ids.numel()
        samples = not declared and value.dim() > self.dim and value.shape[self.dim] == rows
        if samples and n is not None:
            if self.sample_ids is not None:
                self._mark_rows(path, value, n)
            else:
                layout = closed(self.dim)
                if value.layout is not torch.strided:  # needs a look wherever it goes
                    layout = Layout(self.dim, 1, ids_of(layout, value.shape, n, value.device))
                marks.put(value, layout)
                self._guessed[id(value)] = value
        self.seen.append(Seen(path, tuple(value.shape), samples, declared))

    def _mark_rows(self, path: str, value: Tensor, n: int) -> None:
        assert self.sample_ids is not None
        ids = self.sample_ids.to(value.device, torch.long).flatten()
        if not value.is_floating_point() and value.dim() == 1 and torch.equal(value.long(), ids):
            self.guess.id_input = path
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < n):
            raise UsageError(
                f"sample_ids must lie between 0 and n - 1 = {n - 1}, got {int(ids.min())} to "
                f"{int(ids.max())}",
                fix="number the samples from 0, and give their number as n=",
            )
        if not self._context.patterns:
            self._context.patterns.append(ids)
        view = [1] * value.dim()
        view[self.dim] = -1
        self._context.states.put(value, explicit(ids.view(view), n))
