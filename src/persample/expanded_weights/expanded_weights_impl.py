"""The tensor that stands in for a parameter, and the tables of functions that know it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import UsageError, describe, here
from ..layouts import find

# looked up like the size or the dtype by the recorder, but here they would change the original, or
# leave a tensor that is no expanded weight
_NO_LOOK = frozenset(
    (
        Tensor.requires_grad_,
        Tensor.retain_grad,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.__deepcopy__,
        Tensor.__reduce_ex__,
    )
)
Registered = TypeVar("Registered", bound=type)

HANDLED_FUNCTIONS: dict[Any, Any] = {}
# recurrent functions, on sequences of one length and on packed ones; recurrent_functions fills it
expanded_weights_rnn_decomps: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}


class ExpandedWeight(Tensor):
    """A parameter whose gradient is wanted for every sample.

    Handed to a function of the table it gives an ordinary result; the backward pass then leaves
    ``orig_weight.grad_sample``, (batch_size, *shape).

    >>> import torch
    >>> weight = torch.randn(2, 3, requires_grad=True)
    >>> out = torch.nn.functional.linear(torch.ones(4, 3), ExpandedWeight(weight, 4, "sum"))
    >>> out.sum().backward()
    >>> weight.grad_sample.shape
    torch.Size([4, 2, 3])
    """

    handled_functions: ClassVar[dict[Any, Any]] = HANDLED_FUNCTIONS

    orig_weight: Tensor
    batch_size: int
    loss_reduction: str
    batch_first: bool
    allow_smaller_batches: bool

    @staticmethod
    def __new__(
        cls: type[ExpandedWeight], orig_weight: Tensor, batch_size: int, loss_reduction: str
    ) -> ExpandedWeight:
        """Check the weight; a view of its memory stands in for it."""
        if not isinstance(orig_weight, Tensor):
            raise UsageError(
                f"Can only make Expanded Weights of Tensors, got {type(orig_weight).__name__}",
                where=describe(here()),
                fix="pass the parameter itself",
            )
        if not orig_weight.requires_grad:
            raise UsageError(
                "Can only build ExpandedWeights objects of tensors that require_grad",
                where=describe(here()),
                why=f"this tensor of shape {tuple(orig_weight.shape)} is frozen (Expanded Weights "
                "are for gradients)",
                fix="pass a frozen tensor to the function as it is",
            )
        return Tensor._make_subclass(cls, orig_weight.detach(), True)

    def __init__(self, orig_weight: Tensor, batch_size: int, loss_reduction: str) -> None:
        self.orig_weight = orig_weight
        self.batch_size = batch_size
        self.loss_reduction = loss_reduction
        self.batch_first = True
        self.allow_smaller_batches = False

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Sequence[Any],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Functions of the table are applied; size or dtype are the original's."""
        kwargs = kwargs or {}
        rule = cls.handled_functions.get(func)
        if rule is not None:
            return rule.apply(tuple(kwargs), func, *args, *kwargs.values())
        if func in expanded_weights_rnn_decomps:
            padded, packed = expanded_weights_rnn_decomps[func]
            return (packed if _is_packed(args) else padded)(*args, **kwargs)
        if func is torch._cudnn_rnn_flatten_weight:
            return None  # a layout for kernels that are not used
        operator = find(func)
        if operator.ignore and func not in _NO_LOOK and func.__name__ != "__set__":
            args, kwargs = tree_map_only(ExpandedWeight, lambda e: e.orig_weight, (args, kwargs))
            return func(*args, **kwargs)
        raise UsageError(
            f"Expanded Weights encountered but cannot handle function {operator.name}",
            where=describe(here()),
            why="nothing says where the samples are in its arguments",
            fix="call_for_per_sample_grads(module), or persample.record, follow every operator; "
            "implements_per_sample_grads registers a rule of your own",
        )

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """The original's."""
        return self.orig_weight.shape

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The original's."""
        return self.orig_weight.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The original's."""
        return self.orig_weight.device

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """The original's."""
        return self.orig_weight.is_cuda

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The original's."""
        return self.orig_weight.data

    def data_ptr(self) -> int:
        """The original's."""
        return self.orig_weight.data_ptr()

    def get_device(self) -> int:
        """The original's."""
        return self.orig_weight.get_device()

    def set_batch_first(self, is_batch_first: bool = True) -> None:
        """Say whether samples are on axis 0 (else 1) of the data that this weight is used with."""
        self.batch_first = is_batch_first

    def set_allow_smaller_batches(self, is_allow_smaller_batches: bool) -> None:
        """Say whether data may hold the first samples only; the others get zeros."""
        self.allow_smaller_batches = is_allow_smaller_batches

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return (
            f"ExpandedWeight({self.orig_weight!r}, batch_size={self.batch_size}, "
            f"loss_reduction={self.loss_reduction!r})"
        )


def implements_per_sample_grads(torch_function: Any) -> Callable[[Registered], Registered]:
    """Register an ``autograd.Function`` for a function of torch; a second one replaces the first.

    It is called as ``Rule.apply(kwarg_names, torch_function, *args, *kwarg_values)``.
    """

    def register(rule: Registered) -> Registered:
        HANDLED_FUNCTIONS[torch_function] = rule
        return rule

    return register


@contextlib.contextmanager
def batch_second(args: Any, kwargs: Any) -> Iterator[None]:
    """Samples are on axis 1 of what the expanded weights among these arguments are applied to.

    >>> import torch
    >>> weight = ExpandedWeight(torch.randn(2, 3, requires_grad=True), 4, "sum")
    >>> with batch_second((weight,), {}):
    ...     out = torch.nn.functional.linear(torch.randn(7, 4, 3), weight)
    """
    with _changed((args, kwargs), "batch_first", False):
        yield


@contextlib.contextmanager
def allow_smaller_batches(args: Any, kwargs: Any) -> Iterator[None]:
    """Data may hold the first samples only: later time steps of a packed sequence."""
    with _changed((args, kwargs), "allow_smaller_batches", True):
        yield


@contextlib.contextmanager
def setup_rnn(use_input_variant: bool, args: Any, kwargs: Any) -> Iterator[None]:
    """For a time loop of one's own: over (time, batch, …), or over the steps of packed data."""
    enter = batch_second if use_input_variant else allow_smaller_batches
    with enter(args, kwargs):
        yield


@contextlib.contextmanager
def _changed(arguments: Any, name: str, value: bool) -> Iterator[None]:
    """Set an attribute of every expanded weight; afterwards they have what they had before."""
    weights = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, ExpandedWeight)]
    before = [getattr(weight, name) for weight in weights]
    for weight in weights:
        setattr(weight, name, value)
    try:
        yield
    finally:
        for weight, known in reversed(list(zip(weights, before, strict=True))):
            setattr(weight, name, known)


def _is_packed(args: Sequence[Any]) -> bool:
    """Of (input, hx, weights, …) and (data, batch_sizes, hx, weights, …), whether the latter."""
    return len(args) > 2 and isinstance(args[1], Tensor) and not args[1].is_floating_point()
