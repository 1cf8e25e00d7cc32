"""PyTorch's operator database as an attack: every entry, every axis, exact or refused.

Each sample input of each entry is tried in three roles. As a *data operator*: a parameter is added
to one argument whose axis a holds the samples, then the operator runs. As a *use*: one tensor
argument is the parameter, another holds the samples. *One by one*: the operator runs in a loop,
each time on one sample's part of a batch. The truth is one backward pass per loss on the native
graph, without persample.

With ``--ids`` the first two roles are tried with samples that ids tell apart (tests/irregular.py):
several rows each, in no order, as many as it happens to be, some nobody's, or single elements.

    python -m tests.operators            all entries, prints counts
    python -m tests.operators --ids      the same with ids in no order
    python -m tests.operators matmul     entries whose name contains a word
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import persample
from persample.layouts.layout import Layout, ids_of

SAMPLES_PER_ENTRY = 20
SHOWN = 5  # wrong trials of an entry that are printed; all are counted


class Mark(NamedTuple):
    """Where the samples are in a tensor: in order on one axis, or as ids say."""

    tensor: Tensor
    axis: int
    ids: Tensor | None = None

    def foreign(self, grad: Tensor, sample: int, n: int) -> Tensor:
        """A gradient of the tensor where it belongs to other samples."""
        if self.ids is None:
            others = torch.tensor([j for j in range(n) if j != sample], dtype=torch.long)
        else:
            others = ((self.ids >= 0) & (self.ids != sample)).nonzero().flatten()
        return grad.index_select(self.axis, others)


class Weight(nn.Module):
    """A module that owns one parameter and calls a function with it."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(value.detach().clone())


def entries() -> list[Any]:
    """Operators with autograd in float64."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        op for op in op_db if op.supports_autograd and torch.float64 in op.supported_dtypes("cpu")
    ]


def reduced(out: Any, recorder: Any, *, told: bool = False) -> Tensor | None:
    """Losses per sample from whatever an operator returned, by the recorder's own layouts."""
    flat = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
    total = None
    n = recorder.n
    for tensor in flat:
        if not tensor.requires_grad:
            continue
        state = recorder.look(tensor)
        if not isinstance(state, Layout):
            return None
        with torch._C.DisableTorchFunction():
            ids = ids_of(state, tensor.shape, n, tensor.device).expand(tensor.shape).reshape(-1)
            owned = ids >= 0
            if not told and not bool(owned.all()):
                return None
            weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64)
        value = tensor
        if value.is_complex():
            value = torch.view_as_real(value.resolve_conj()).sum(-1)
        flat_value = (value.reshape(-1) * weights.to(value.dtype)).square()
        if told:  # elements of nobody are in no loss
            flat_value, ids = flat_value[owned], ids[owned]
        part = torch.zeros(n, dtype=flat_value.dtype).index_add(0, ids, flat_value)
        total = part if total is None else total + part
    return total


def run(call: Callable[[Weight], Any], module: Weight, marks: list[Mark], n: int) -> str:
    """One trial: 'exact', 'refused' or 'wrong: …'."""
    try:
        with persample.record(module, n=n, unproven="refuse", verify=False) as tape:
            for tensor, axis, ids in marks:
                tape.mark(tensor, dim=axis, ids=ids)
            torch.manual_seed(1)
            out = call(module)
            told = any(mark.ids is not None for mark in marks)
            losses = reduced(out, tape._context, told=told)
            if losses is None:
                return "refused"
            tape.backward(losses)
        rows = tape.grads()["w"]
    except persample.PersampleError:
        return "refused"
    expected = truth(call, module, marks, n)
    if expected is None:
        return "skipped"
    # gradients that cancel (a difference of two arguments) leave rounding of their parts behind
    top = max(float(expected.abs().max()), 1e-6 * _size(losses)) if expected.numel() else 0.0
    error = float((rows - expected).abs().max()) / (top or 1.0) if expected.numel() else 0.0
    if not bool(torch.isfinite(expected).all() and torch.isfinite(rows).all()):
        return "skipped"
    return "exact" if error < 1e-9 else f"wrong: {error:.1e}"


def _size(losses: Tensor) -> float:
    return float(losses.detach().abs().max()) if losses.numel() else 0.0


def truth(call: Any, module: Weight, marks: list[Mark], n: int) -> Tensor | None:
    """Rows by one backward pass per loss, the layout taken as claimed."""
    with persample.record(module, n=n) as tape:  # only to learn the claimed layout of the result
        for tensor, axis, ids in marks:
            tape.mark(tensor, dim=axis, ids=ids)
        torch.manual_seed(1)
        out = call(module)
        recorder = tape._context
        flat = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        states = [recorder.look(t) for t in flat if t.requires_grad]
    torch.manual_seed(1)
    out = call(module)
    flat = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor) and t.requires_grad]
    if len(flat) != len(states):
        return None
    total = torch.zeros(n, dtype=torch.float64)
    for tensor, layout in zip(flat, states, strict=True):
        ids = ids_of(layout, tensor.shape, n, tensor.device).expand(tensor.shape).reshape(-1)
        weights = torch.linspace(0.5, 1.5, tensor.numel(), dtype=torch.float64)
        value = torch.view_as_real(tensor.resolve_conj()).sum(-1) if tensor.is_complex() else tensor
        flat_value = (value.reshape(-1) * weights.to(value.dtype)).square()
        owned = ids >= 0
        total = total.to(flat_value.dtype).index_add(0, ids[owned], flat_value[owned])
    return _isolated(module, marks, n, total)


def _isolated(module: Weight, marks: list[Mark], n: int, total: Tensor) -> Tensor:
    """Rows; poisoned with inf if a loss depends on another sample's data (samples mix)."""
    rows = []
    followed = [mark for mark in marks if mark.tensor.requires_grad]
    inputs = [mark.tensor for mark in followed]
    for i in range(n):
        found = torch.autograd.grad(
            total[i], [module.w, *inputs], retain_graph=True, allow_unused=True
        )
        row = torch.zeros_like(module.w) if found[0] is None else found[0].to_dense()
        for mark, g in zip(followed, found[1:], strict=True):
            if g is not None:
                foreign = mark.foreign(g, i, n)
                if bool(foreign.isfinite().logical_and(foreign.ne(0)).any()):
                    row = torch.full_like(row, 1e300)
        rows.append(row)
    return torch.stack(rows) if rows else module.w.new_zeros((0, *module.w.shape))


def _call(op: Any, leaves: list[Any], spec: Any) -> Any:
    args, kwargs = tree_unflatten(leaves, spec)
    return op.op(*args, **kwargs)


def float_places(leaves: list[Any]) -> list[int]:
    """Which arguments may hold samples, or be a parameter."""
    return [
        k
        for k, v in enumerate(leaves)
        if isinstance(v, Tensor) and v.is_floating_point() and v.layout is torch.strided
    ]


def trials(op: Any, sample: Any) -> Iterator[tuple[str, Callable[[], str]]]:
    """Every role of every tensor argument and axis."""
    leaves, spec = tree_flatten(((sample.input, *sample.args), sample.kwargs))
    tensors = float_places(leaves)
    base = [v.detach().clone() if isinstance(v, Tensor) else v for v in leaves]
    for k in tensors:
        x = base[k]
        for axis in range(x.dim()):
            n = x.shape[axis]
            if n < 2 or n > 20:
                continue
            yield (
                f"data {k} axis {axis}",
                lambda k=k, axis=axis, n=n: _data(op, sample, base, spec, k, axis, n),
            )
            for j in tensors:
                if j != k:
                    yield (
                        f"use param {j} data {k} axis {axis}",
                        lambda j=j, k=k, axis=axis, n=n: _use(
                            op, sample, base, spec, j, k, axis, n
                        ),
                    )
        if x.numel():
            yield f"one by one {k}", lambda k=k: _one_by_one(op, base, spec, k)
    for axis in range(-1, -4, -1):
        group = [k for k in tensors if base[k].dim() >= -axis and base[k].shape[axis] > 1]
        if (
            len(group) > 1
            and len({base[k].shape[axis] for k in group}) == 1
            and base[group[0]].shape[axis] <= 12
        ):
            yield (
                f"data {group} axis {axis}",
                lambda g=group, a=axis: _several(op, sample, base, spec, g, a),
            )


def _fresh(base: list[Any]) -> list[Any]:
    return [v.clone() if isinstance(v, Tensor) else v for v in base]


def _data(op: Any, sample: Any, base: Any, spec: Any, k: int, axis: int, n: int) -> str:
    values = _fresh(base)
    x = values[k].requires_grad_()
    shape = list(x.shape)
    shape[axis] = 1
    module = Weight(torch.zeros(shape, dtype=torch.float64))

    def call(m: Weight) -> Any:
        leaves = [v.detach().clone() if isinstance(v, Tensor) and v is not x else v for v in values]
        leaves[k] = x + m.w
        return _call(op, leaves, spec)

    return run(call, module, [Mark(x, axis)], n)


def _several(op: Any, sample: Any, base: Any, spec: Any, group: list[int], axis: int) -> str:
    values = _fresh(base)
    xs = [values[k].requires_grad_() for k in group]
    n = xs[0].shape[axis]
    module = Weight(torch.zeros((), dtype=torch.float64))

    def call(m: Weight) -> Any:
        leaves = list(values)
        for k, x in zip(group, xs, strict=True):
            leaves[k] = x + m.w
        return _call(op, leaves, spec)

    return run(call, module, [Mark(x, x.dim() + axis) for x in xs], n)


def _one_by_one(op: Any, base: Any, spec: Any, k: int) -> str:
    x = torch.stack([base[k], 1.01 * base[k]])
    module = Weight(torch.ones((), dtype=torch.float64))

    def losses() -> Tensor | None:
        found = []
        for i in range(2):
            leaves = _fresh(base)
            leaves[k] = x[i] * module.w
            torch.manual_seed(1)
            args, kwargs = tree_unflatten(leaves, spec)
            outs = [t for t in tree_flatten(op.op(*args, **kwargs))[0] if isinstance(t, Tensor)]
            parts = [_number(t) for t in outs if t.requires_grad]
            if not parts:
                return None
            found.append(torch.stack(parts).sum())
        return torch.stack(found)

    plain = losses()
    if plain is None or not plain.is_floating_point():
        return "skipped"
    expected = torch.stack(
        [torch.autograd.grad(loss, module.w, retain_graph=True)[0] for loss in plain]
    )
    try:
        with persample.record(module, n=2, unproven="refuse", verify=False) as tape:
            tape.mark(x)
            found = losses()
            assert found is not None
            tape.backward(found)
        rows = tape.grads()["w"]
    except persample.PersampleError:
        return "refused"
    if not bool(torch.isfinite(expected).all() and torch.isfinite(rows).all()):
        return "skipped"
    error = float((rows - expected).abs().max()) / max(float(expected.abs().max()), 1e-12)
    return "exact" if error < 1e-9 else f"wrong: {error:.1e}"


def _number(tensor: Tensor) -> Tensor:
    """A sum in which no two elements count alike."""
    value = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.to_dense()
    weights = torch.linspace(0.5, 1.5, max(value.numel(), 1), dtype=torch.float64)
    return (value.reshape(-1) * weights[: value.numel()].to(value.dtype)).sum()


def _use(op: Any, sample: Any, base: Any, spec: Any, j: int, k: int, axis: int, n: int) -> str:
    values = _fresh(base)
    x = values[k].requires_grad_()
    module = Weight(values[j])

    def call(m: Weight) -> Any:
        leaves = list(values)
        leaves[j] = m.w
        return _call(op, leaves, spec)

    return run(call, module, [Mark(x, axis)], n)


Roles = Callable[[Any, Any], Iterator[tuple[str, Callable[[], str]]]]


def attack(op: Any, roles: Roles = trials) -> Counter[str]:
    """Verdicts over the entry's sample inputs."""
    verdicts: Counter[str] = Counter()
    torch.manual_seed(0)
    samples = []
    try:
        for k, sample in enumerate(op.sample_inputs("cpu", torch.float64)):
            if k >= SAMPLES_PER_ENTRY:
                break
            samples.append(sample)
    except Exception:
        return verdicts
    for sample in samples:
        for name, trial in roles(op, sample):
            try:
                torch.manual_seed(1)
                verdict = trial()
            except RuntimeError as error:
                verdict = "not differentiable" if "not differentiable" in str(error) else "error"
            except Exception as error:
                verdict = f"error {type(error).__name__}"
                if "-v" in sys.argv:
                    print("   ", op.name, name, type(error).__name__, str(error)[:150])
            if verdict.startswith("wrong") and verdicts["wrong"] < SHOWN:
                print(
                    f"    WRONG {op.name} {op.variant_test_name} {name}: {verdict} {sample}"[:300]
                )
            verdicts[verdict.split(":")[0].split(" ")[0]] += 1
    return verdicts


def irregular_roles() -> Roles:
    """The roles of ``--ids``."""
    from .irregular import trials as irregular  # that module is made of this one

    return irregular


def main() -> None:
    """Print the verdict of every entry and the totals."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    words = [w for w in sys.argv[1:] if not w.startswith("-")]
    totals: Counter[str] = Counter()
    trials_total: Counter[str] = Counter()
    refused = []
    roles = irregular_roles() if "--ids" in sys.argv else trials
    for op in entries():
        name = f"{op.name}.{op.variant_test_name}".rstrip(".")
        if words and not any(w in name for w in words):
            continue
        verdicts = attack(op, roles)
        trials_total.update(verdicts)
        kind = (
            "wrong"
            if verdicts["wrong"]
            else "exact"
            if verdicts["exact"]
            else "error"
            if verdicts["error"]
            else "refused"
            if verdicts["refused"]
            else "no trial"
        )
        totals[kind] += 1
        if kind not in ("exact", "no trial") or words:
            refused.append(f"{name}: {kind} {dict(verdicts)}")
    print("\n".join(refused))
    print("entries", dict(totals))
    print("trials", dict(trials_total))


if __name__ == "__main__":
    main()
