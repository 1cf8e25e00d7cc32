"""The number of samples, if the caller does not give it: from the inputs, checked by losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..errors import UsageError, describe, here
from .input_trees import differ_in_rows


class Guess:
    """The number of samples as the first call's inputs have it, and what casts doubt on it."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.made = False
        self._quiet = False  # made from a call without gradients
        self.lengths: set[int] = set()  # of lists whose tensors may be one sample each
        self.id_input = ""  # an input of sample ids that was read as samples
        self._other: int | None = None  # the first size that is not one, beside one
        self._nested = 0  # tensors in the lists of a list, if each list was taken as a sample
        self._second: set[int] = set()  # sizes of the next axis, if the first has one index
        self._calls: dict[int, int] = {}  # how often a module was given samples

    def infer(
        self,
        values: Sequence[Any],
        lists: Sequence[list[Tensor]] = (),
        nested: Sequence[list[list[Tensor]]] = (),
    ) -> int | None:
        """The size of the samples' axis of the first input, or the length of the first list.

        A list counts if its tensors have different numbers of rows alike: one sample each; or if it
        holds lists of different lengths: one sample each. One row
        may be a batch of one, or something that all samples share: then most inputs decide, and the
        losses must agree.
        """
        self.made = True
        for tensors in lists:
            if tensors[0] is values[0] and self.dim == 0 and differ_in_rows(tensors):
                return len(tensors)
        for groups in nested:
            if groups[0][0] is values[0] and len({len(group) for group in groups}) > 1:
                self._nested = sum(len(group) for group in groups)
                return len(groups)
        sizes = []
        for value in values:
            if isinstance(value, PackedSequence):
                return int(value.batch_sizes[0]) if value.batch_sizes.numel() else 0
            if value.dim() > self.dim:
                sizes.append(value.shape[self.dim])
        others = [s for s in sizes if s != 1]
        if not others or sizes[0] != 1:
            n = sizes[0] if sizes else None
        else:
            self._other = others[0]
            n = others[0] if 2 * len(others) > len(sizes) else 1
        if n == 1 and self.dim == 0:
            numbers = [
                v for v in values if v.is_floating_point() and not v.is_nested and v.dim() > 1
            ]
            self._second = {value.shape[1] for value in numbers}
        return n

    def expect_same(self, values: Sequence[Any], n: int | None) -> None:
        """A number read off a call without gradients must be that of the call that has them."""
        if not torch.is_grad_enabled():
            self._quiet = self._quiet or n is None
            return
        quiet, self._quiet = self._quiet, False
        tensors = [v for v in values if isinstance(v, Tensor) and v.dim() > self.dim]
        sizes = [tensor.shape[self.dim] for tensor in tensors]
        if quiet and n is not None and self.made and sizes and n not in sizes:
            raise _unclear(
                (n, sizes[0]),
                f"a call without gradients was given {n}, and the first with gradients {sizes[0]}",
                f"record(..., n={sizes[0]}), or make the other call before the block",
            )

    def note_call(self, module: nn.Module) -> None:
        """A module was given samples."""
        if self.made:
            self._calls[id(module)] = self._calls.get(id(module), 0) + 1

    def advice(self, losses: Tensor, n: int | None) -> str:
        """What may have been misread, where samples interact."""
        count = losses.shape[0] if losses.dim() == 1 else 0
        if self.id_input:
            return (
                f"if {self.id_input!r} only says which sample each row belongs to, name it in "
                f"record(..., constants=({self.id_input!r},))"
            )
        if self.made and count != n and count in self.lengths:
            return f"if every tensor of a list is a sample: record(..., n={count})"
        if self.made and n is not None and count > n:
            advised = f'record(..., n={count}, unproven="loop")'
            return f"if each of the {count} losses is of a sample: {advised}"
        return ""

    def expect_agreement(self, losses: Tensor, n: int | None) -> None:
        """Where the inputs leave a doubt about n, the losses must decide."""
        if not self.made or not n:
            return
        count = losses.shape[0] if losses.dim() else 0
        if self._nested and count != n:
            raise _unclear(
                (n, self._nested),
                f"an input is a list of {n} lists that hold {self._nested} tensors, and losses of "
                f"shape {tuple(losses.shape)} do not decide",
                f"record(..., n={n}) if each list is a sample, record(..., n={self._nested}) if "
                "each tensor is",
            )
        calls = max(self._calls.values(), default=0)
        if calls > 1 and count > n and calls * n % count == 0:
            raise _unclear(
                (n, count),
                f"the model was called {calls} times with inputs of {n}, and there are {count} "
                "losses",
                f"record(..., n={count}) and tape.mark(batch) before pieces of it are taken, or "
                f"record(..., n={n}) if every call was given the same samples",
            )
        if n == 1 and count > 1 and count in self._second:
            raise _unclear(
                (1, count),
                f"an input has one index on axis 0 and {count} on axis 1, and there are {count} "
                "losses",
                "record(..., dim=1) if axis 1 holds the samples, record(..., n=1) if all are "
                "losses of one sample",
            )
        if self._other is not None and count != n:
            raise _unclear(
                (1, self._other),
                f"the first input has one index on axis {self.dim}, another input has "
                f"{self._other}, and losses of shape {tuple(losses.shape)} do not decide",
                "record(..., n=...), or constants=... with the names of inputs that all samples "
                "share",
            )


def _unclear(sizes: tuple[int, int], why: str, fix: str) -> UsageError:
    what = "the number of samples is not clear: {} or {}".format(*sizes)
    return UsageError(what, where=describe(here()), why=why, fix=fix)
