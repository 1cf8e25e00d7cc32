"""One call of a function with expanded weights as a small module, so that it can be recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..uses.signature import taken_apart
from .batch_checks import expect_alike
from .expanded_weights_impl import ExpandedWeight
from .recorded_graph import run
from .sample_batch import Batch


class Call(nn.Module):
    """One call of a function; its expanded weights are the parameters.

    ``forward`` takes the data that may carry gradients, the samples first.
    """

    def __init__(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.function = function
        self.leaves, self.template = taken_apart(args, kwargs)
        self.places: list[int] = []
        weights: dict[int, str] = {}
        self.weights: list[tuple[int, str]] = []
        for k, leaf in enumerate(self.leaves):
            if isinstance(leaf, ExpandedWeight):
                name = weights.setdefault(id(leaf.orig_weight), str(len(weights)))
                self._parameters[name] = leaf.orig_weight  # type: ignore[assignment]
                self.weights.append((k, name))
            elif isinstance(leaf, Tensor):
                self.places.append(k)

    def data(self) -> list[Tensor]:
        """The tensors that are not expanded."""
        return [self.leaves[k] for k in self.places]

    def forward(self, *data: Any) -> Any:
        """The function on these data and the original weights."""
        leaves = list(self.leaves)
        for k, value in zip(self.places, data, strict=True):
            leaves[k] = value.data if isinstance(value, PackedSequence) else value
        for k, name in self.weights:
            leaves[k] = self._parameters[name]
        args, kwargs = self.template.call(leaves)
        return self.function(*args, **kwargs)


def record_call(call: Call, values: Sequence[Any], first: Any, size: int, axis: int) -> Any:
    """Run the call; only its first argument holds samples."""
    weights = [v for v in values if isinstance(v, ExpandedWeight)]
    expect_alike(call.function, weights, "loss_reduction", "batch_size")
    batch = Batch(size, axis, weights[0].loss_reduction, weights[0].batch_size)
    data = (first, *call.data()[1:])
    return run(call, data, {}, batch, shared=True, constants=range(1, len(data)))
