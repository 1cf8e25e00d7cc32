"""Fingerprints of what the model receives of each sample: equal ones have equal inputs.

Nearly equal gradients do not make duplicates: easy samples of one class have them, too. A
fingerprint is two sums Σ wₖ·vₖ modulo 2⁶⁴ over a sample's bytes, taken as 32-bit words v with
fixed random odd weights w; two different inputs share both about once in 2⁶⁴ pairs. It is computed
where the data are. Where it is not certain which part of the inputs is a sample's own, there is
none: what cannot be compared is not called equal.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..inputs.batch_samples import holds_graphs
from ..inputs.containers import attributes, entries
from ..inputs.input_trees import argument_names

BLOCK = 1 << 16  # words whose weights are drawn together
AT_ONCE = 1 << 20  # words that are multiplied together
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
MASK = "attention_mask"

Named = list[tuple[str, Any]]


class Watcher:
    """Keeps what each call of the model receives, until it is known how many samples there are."""

    def __init__(self) -> None:
        self._calls: list[Named] = []
        self._versions: list[int] = []

    def watch(self, model: nn.Module) -> RemovableHandle:
        """Look at every call of the whole model."""
        return model.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        names = argument_names(module)
        named = [(names[k] if k < len(names) else str(k), value) for k, value in enumerate(args)]
        found: Named = []
        for name, value in [*named, *kwargs.items()]:
            _collect(name, value, found)
        self._calls.append(found)
        self._versions += _versions(found)

    def fingerprints(self, n: int, dim: int = 0, *, ids: Any = None) -> Tensor | None:
        """(n, 2) of all calls together; None if the inputs cannot be told apart by sample.

        The samples' ids, by name or as the tensor itself, are no part of their inputs.
        """
        now = [version for call in self._calls for version in _versions(call)]
        if not self._calls or now != self._versions:  # written to by the model
            return None
        total = torch.zeros(n, 2, dtype=torch.int64)
        for k, call in enumerate(self._calls):
            found = fingerprints(call, n, dim, ids=ids)
            if found is None:
                return None
            total += found.cpu() * (2 * k + 1)
        return total


def fingerprints(inputs: Named, n: int, dim: int = 0, *, ids: Any = None) -> Tensor | None:
    """(n, 2) of the named inputs of one call; None if some may hold samples in an unknown way."""
    inputs = [(name, v) for name, v in inputs if v is not ids and not _called(name, ids)]
    tensors = [(name, v) for name, v in inputs if isinstance(v, Tensor)]
    own = [(name, v) for name, v in tensors if v.dim() > dim and v.shape[dim] == n]
    shared = [(name, v) for name, v in tensors if not (v.dim() > dim and v.shape[dim] == n)]
    rest = [(name, v) for name, v in inputs if not isinstance(v, (Tensor, *PLAIN))]
    if not _per_sample(rest, n) or not (own or rest):
        return None
    known = {1, *(size for _, v in own for size in v.shape[dim + 1 :])}
    if any(v.layout is not torch.strided for _, v in tensors):
        return None
    if any(size not in known for _, v in shared for size in v.shape):
        return None  # packed tokens, edges of graphs: whose, is not known
    mask = next((v for name, v in own if name.endswith(MASK) and v.dim() == 2), None)
    device = own[0][1].device if own else torch.device("cpu")
    total = torch.zeros(n, 2, dtype=torch.int64, device=device)
    for name, v in own:
        total += _rows(name, v.detach().movedim(dim, 0), None if dim else mask).to(device)
    for name, v in shared:
        total += _rows(name, v.detach().reshape(1, -1), None).to(device)
    for name, parts in rest:
        items = parts.to_data_list() if holds_graphs(parts) else parts
        total += torch.stack([_item(name, item, ids) for item in items]).to(device)
    return total


def _called(path: str, name: Any) -> bool:
    return isinstance(name, str) and path.rpartition(".")[2] == name


def _collect(path: str, value: Any, found: Named, *, objects: bool = True) -> None:
    """Everything in nested inputs that is no container; texts and graphs stay together."""
    texts = isinstance(value, (list, tuple)) and any(isinstance(v, str) for v in value)
    parts: Iterable[tuple[Any, Any]] | None = None
    if not (texts or holds_graphs(value) or isinstance(value, (Tensor, *PLAIN))):
        parts = entries(value)
        if parts is None and objects:
            inside = attributes(value, callables=True)
            parts, objects = None if inside is None else inside.items(), False
    if parts is None:
        found.append((path, value))
        return
    for key, part in parts:
        _collect(f"{path}.{key}", part, found, objects=objects)


def _versions(found: Named) -> list[int]:
    tensors = [v for _, v in found if isinstance(v, Tensor)]
    return [0 if v.is_inference() else v._version for v in tensors]


def _per_sample(rest: Named, n: int) -> bool:
    """Whether all that is no tensor is a list of n texts, or a batch of n graphs."""
    return all(_count(value) == n for _, value in rest)


def _count(value: Any) -> int | None:
    if holds_graphs(value):
        return int(value.num_graphs)
    if isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value):
        return len(value)
    return None


def _item(name: str, item: Any, ids: Any) -> Tensor:
    """(2,) of one text or one graph."""
    if isinstance(item, str):
        return _seed(name, item)
    total = torch.zeros(2, dtype=torch.int64)
    for store in item.stores:
        for key, value in store.items():
            if _called(str(key), ids):
                continue
            if isinstance(value, Tensor):
                total += _rows(f"{name}.{key}", value.detach().reshape(1, -1), None)[0].cpu()
                total += _seed(key, tuple(value.shape))
            else:
                total += _seed(key, value)
    return total


def _rows(name: str, rows: Tensor, mask: Tensor | None) -> Tensor:
    """(n, 2) of a tensor (n, ...); where a mask tells padding, of the rest of each row."""
    n = rows.shape[0]
    shape: tuple[Any, ...] = tuple(rows.shape[1:])
    extra = torch.zeros(n, 1, dtype=torch.int64, device=rows.device)
    if mask is not None and rows.shape[:2] == mask.shape:
        real = mask.to(rows.device).ne(0)
        order = real.long().argsort(dim=1, descending=True, stable=True)
        tail = (1,) * (rows.dim() - 2)
        rows = rows.masked_fill(~real.view(*real.shape, *tail), 0)
        rows = rows.gather(1, order.view(*order.shape, *tail).expand_as(rows))
        shape, extra = ("masked", *shape[1:]), real.long().sum(1, keepdim=True)
    seed = _seed(name, (str(rows.dtype), shape)).to(rows.device)
    return _sums(rows.reshape(n, -1)) + seed * (2 * extra + 1)


def _sums(rows: Tensor) -> Tensor:
    """Σ wₖ·vₖ over the words of rows (n, k), for two sets of weights."""
    n = rows.shape[0]
    total = torch.zeros(n, 2, dtype=torch.int64, device=rows.device)
    if not rows.numel():
        return total
    rows = torch.view_as_real(rows.resolve_conj()).flatten(1) if rows.is_complex() else rows
    raw = rows.contiguous().view(torch.uint8)
    if raw.shape[1] % 4:
        raw = nn.functional.pad(raw, (0, -raw.shape[1] % 4))
    words = raw.contiguous().view(torch.int32)
    step = max(1, min(BLOCK, AT_ONCE // n))
    for block in range(0, words.shape[1], BLOCK):
        weights = _weights(block // BLOCK).to(rows.device)
        for first in range(block, min(block + BLOCK, words.shape[1]), step):
            part = words[:, first : min(first + step, block + BLOCK)].long()
            some = weights[:, first - block : first - block + part.shape[1]]
            total += torch.stack([(part * w).sum(1) for w in some], 1)
    return total


@functools.lru_cache(maxsize=64)
def _weights(block: int) -> Tensor:
    generator = torch.Generator().manual_seed(block)
    low, high = -(1 << 63), (1 << 63) - 1
    drawn = torch.randint(low, high, (2, BLOCK), generator=generator, device="cpu")
    return drawn | 1


def _seed(name: str, what: Any) -> Tensor:
    """Two odd numbers that stand for a name and a value."""
    digest = hashlib.blake2b(f"{name}\0{what!r}".encode(errors="surrogatepass"), digest_size=16)
    raw = digest.digest()
    pair = [int.from_bytes(raw[k : k + 8], "little", signed=True) for k in (0, 8)]
    return torch.tensor(pair, dtype=torch.int64, device="cpu") | 1


def same(contents: Tensor) -> list[list[int]]:
    """Groups of two or more samples with equal fingerprints."""
    _, inverse, counts = contents.unique(dim=0, return_inverse=True, return_counts=True)
    order = inverse.argsort(stable=True)
    found = [part.tolist() for part in order.split(counts.tolist()) if len(part) > 1]
    return sorted(found)
