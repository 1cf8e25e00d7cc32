"""What the attacks share: a module around a function, tables, and the judgement of one case."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import persample
from persample.testing import LossFn, oracle, relative_error

EXACT, REFUSED, EITHER = "exact", "refused", "either"
N = 4  # samples; also features, time steps, channels and heads: sizes must not tell axes apart
TOLERANCE = 1e-9
# releases before it hide torch.autograd.backward from modes, and do not differentiate aminmax
RECENT = torch.__version__ >= (2, 13)
USERS = torch.tensor([2, 0, 2, 0])  # whose each row is, one user without rows
Rows = dict[str, Tensor]


class Case(NamedTuple):
    """A model, a batch and its losses; what persample may answer."""

    name: str
    model: nn.Module
    batch: Any
    loss_fn: LossFn
    expectation: str


class Script(NamedTuple):
    """A way to use the interface: ``run`` returns the rows found and the rows expected."""

    name: str
    run: Callable[[], tuple[Rows, Rows]]
    expectation: str


class Verdict(NamedTuple):
    """``outcome`` is exact, refused, wrong, crash or invalid; ``detail`` is one line."""

    outcome: str
    detail: str

    def fits(self, expectation: str) -> bool:
        """Whether the contract is kept."""
        allowed = (EXACT, REFUSED) if expectation == EITHER else (expectation,)
        return self.outcome in allowed


class Net(nn.Module):
    """Parameters, buffers and modules by keyword, and a function of (module, inputs)."""

    def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            plain = isinstance(part, Tensor) and not isinstance(part, nn.Buffer | nn.Parameter)
            setattr(self, name, nn.Parameter(part) if plain else part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def rand(*shape: int, seed: int = 0) -> Tensor:
    """Numbers that are the same in every run."""
    generator = torch.Generator().manual_seed(seed + 1000 * len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def ints(*shape: int, high: int = N, seed: int = 0) -> Tensor:
    """Integers below ``high``."""
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def seeded(module: nn.Module, seed: int = 0) -> nn.Module:
    """The module in float64, with values that are the same in every run."""
    module = module.double()
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            parameter.copy_(0.6 * rand(*parameter.shape, seed=seed + 17 * k + 5))
    return module


def lin(a: int = N, b: int = N, *, seed: int = 0) -> nn.Module:
    """A linear layer."""
    return seeded(nn.Linear(a, b), seed)


def spread(out: Tensor) -> Tensor:
    """One loss per index of axis 0, different in every entry of a sample's output."""
    if out.dim() < 2:
        return out
    flat = out.flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=torch.float64)
    return ((0.3 * flat.square() + flat) * weights).sum(1)


def row_losses(model: nn.Module, batch: Any) -> Tensor:
    """The default loss: ``spread`` of the model's output."""
    return spread(model(**batch) if isinstance(batch, dict) else model(*batch))


def case(name: str, expectation: str, body: Callable[..., Any], *batch: Any, **parts: Any) -> Case:
    """A case of a function; the default batch is one (n, n) tensor, the default part a Linear."""
    parts = parts or {"l": lin()}
    return Case(name, Net(body, **parts), batch or (rand(N, N),), row_losses, expectation)


def seeded_losses(model: nn.Module, batch: Any) -> Tensor:
    """The default loss after setting the seed."""
    torch.manual_seed(3)
    return row_losses(model, batch)


def script(thing: Any) -> Any:
    """Compiled by TorchScript, without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(thing)


def unseen(function: Callable[[], Any]) -> Any:
    """The result of a function that no torch function mode sees."""
    with torch._C.DisableTorchFunction():
        return function()


def elsewhere(function: Callable[[], Tensor]) -> Tensor:
    """The result of a function run by another thread."""
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


Table = dict[str, tuple[str, Callable[..., Any]]]


def on_hidden(prefix: str, table: Table, *shape: int) -> Iterator[Case]:
    """Functions of one hidden tensor, itself the output of a linear layer."""
    for name, (expectation, function) in table.items():
        body = lambda m, x, function=function: function(m.l(x))
        yield case(f"{prefix}: {name}", expectation, body, rand(*(shape or (N, N))), l=lin())


def on_pair(prefix: str, table: Table, *shape: int) -> Iterator[Case]:
    """Functions of two hidden tensors of the same samples, one from each of two layers."""
    for name, (expectation, function) in table.items():
        body = lambda m, x, function=function: function(m.l(x), m.k(x))
        parts = {"l": lin(), "k": lin(seed=3)}
        yield case(f"{prefix}: {name}", expectation, body, rand(*(shape or (N, N))), **parts)


def on_module(prefix: str, table: Table, *batch: Any, **parts: Any) -> Iterator[Case]:
    """Functions of a module with these parts and a batch."""
    for name, (expectation, function) in table.items():
        yield case(f"{prefix}: {name}", expectation, function, *batch, **copy.deepcopy(parts))


def trainable(model: nn.Module) -> Rows:
    """The parameters that persample answers for."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def floating(leaf: Any) -> bool:
    """Whether a leaf of a batch can carry a gradient."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def dense(leaf: Tensor) -> Tensor:
    """The gradient of a leaf, zero where none arrived."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.to_dense().clone()


def jacobian_rows(
    model: nn.Module, loss_fn: LossFn, batch: Any, *, probe_inputs: bool = True
) -> tuple[Tensor, Rows, Tensor]:
    """Losses, the native gradient of every loss, and which samples each loss depends on."""
    leaves, spec = tree_flatten(batch)
    n = next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
    probes = [leaf.detach().clone() for leaf in leaves if floating(leaf)]
    for probe in probes:
        probe.requires_grad_(probe_inputs)
    fresh = iter(probes)
    batch = tree_unflatten([next(fresh) if floating(leaf) else leaf for leaf in leaves], spec)
    losses = loss_fn(model, batch)
    named = trainable(model)
    probes = [probe for probe in probes if probe.dim() and probe.shape[0] == n]
    rows: dict[str, list[Tensor]] = {name: [] for name in named}
    depends = torch.zeros(losses.shape[0], n, dtype=torch.bool)
    for i, loss in enumerate(losses.unbind(0)):
        for leaf in (*named.values(), *probes):
            leaf.grad = None
        loss.sum().backward(retain_graph=True)
        for name, parameter in named.items():
            rows[name].append(dense(parameter))
        for probe in probes:
            depends[i] |= dense(probe).reshape(n, -1).abs().sum(1) > 0
    stacked = {
        k: torch.stack(r) if r else named[k].new_zeros(0, *named[k].shape) for k, r in rows.items()
    }
    return losses.detach(), stacked, depends


def truths(item: Case) -> tuple[Tensor, dict[str, Rows], bool]:
    """The losses, every answer that would be right, and whether a loss depends on two samples.

    "native": row i is the gradient of losses[i]. "alone": sample i was run alone. "owner": row i
    sums the gradients of the losses that depend on sample i (losses in another order).
    """
    try:
        losses, native, depends = jacobian_rows(copied(item.model), item.loss_fn, item.batch)
    except RuntimeError:  # an operator that refuses a gradient of an input
        losses, native, depends = jacobian_rows(
            copied(item.model), item.loss_fn, item.batch, probe_inputs=False
        )
    mixing = bool((depends.sum(1) > 1).any())
    answers = {"native": native}
    if not mixing and depends.any():
        owner = depends.to(torch.float64)
        answers["owner"] = {
            k: torch.einsum("li,l...->i...", owner.to(g.dtype), g) for k, g in native.items()
        }
    try:
        answers["alone"] = oracle(copied(item.model), item.loss_fn, item.batch)
    except Exception:  # a model that needs the whole batch
        pass
    return losses, answers, mixing


def by_user(item: Case) -> tuple[Tensor, dict[str, Rows], bool]:
    """The same where rows belong to users: right answers, and whether a loss depends on two.

    A user's losses are added and back-propagated at once: what a backward does need not be linear.
    """
    losses, _, depends = jacobian_rows(copied(item.model), item.loss_fn, item.batch)
    if losses.shape != (N,) or "by frequency" in item.name:  # counted within one sample
        raise ValueError("no native answer")
    touched = torch.stack([depends[:, user == USERS].any(1) for user in range(3)])
    mine = torch.stack([user == USERS for user in range(3)])
    answers: dict[str, Rows] = {}
    for name, chosen in (("native", mine), ("owner", touched)):
        rows: dict[str, list[Tensor]] = {k: [] for k in trainable(item.model)}
        for user in range(3):
            model = copied(item.model)
            for parameter in trainable(model).values():
                parameter.grad = None
            if chosen[user].any():
                item.loss_fn(model, item.batch)[chosen[user]].sum().backward()
            for k, parameter in trainable(model).items():
                rows[k].append(dense(parameter))
        answers[name] = {k: torch.stack(r) for k, r in rows.items()}
    return losses, answers, bool((touched.sum(0) > 1).any())


def copied(model: nn.Module) -> nn.Module:
    """A fresh model where it can be copied (the parameters of a copied script are no leaves)."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return model
    try:
        return copy.deepcopy(model)
    except Exception:
        return model


def refusal(error: persample.PersampleError) -> str:
    """What and why in one line."""
    return f"{error.what} | {error.why}"


def judge(item: Case, **options: Any) -> Verdict:
    """Record one case and compare."""
    users = options.get("sample_ids") is not None
    try:
        losses, answers, mixing = by_user(item) if users else truths(item)
    except Exception as error:
        return Verdict("invalid", f"{type(error).__name__}: {error}")
    model = copied(item.model)
    try:
        with persample.record(model, **options) as tape:
            found_losses = item.loss_fn(model, item.batch)
            tape.backward(found_losses)
        found = tape.grads()
    except persample.PersampleError as error:
        return Verdict("refused", refusal(error))
    except Exception as error:
        return Verdict("crash", f"{type(error).__name__}: {error}".splitlines()[0])
    if not torch.allclose(found_losses.detach(), losses, atol=1e-12, equal_nan=True):
        return Verdict("wrong", "the recording changed the losses")
    if users and mixing:
        return Verdict("wrong", "a loss depends on several users")
    return compare(found, answers, mixing)


def compare(found: Rows, answers: dict[str, Rows], mixing: bool) -> Verdict:
    """Exact if some right answer was found."""
    errors = {k: relative_error(found, rows) for k, rows in answers.items()}
    right = [k for k, error in errors.items() if error <= TOLERANCE]
    note = " (a loss depends on several samples)" if mixing else ""
    if right:
        return Verdict("exact", "equals " + ", ".join(right) + note)
    return Verdict("wrong", ", ".join(f"{k} off by {e:.1e}" for k, e in errors.items()) + note)


def judge_script(item: Script) -> Verdict:
    """Run a script and compare."""
    try:
        found, expected = item.run()
    except persample.PersampleError as error:
        return Verdict("refused", refusal(error))
    except Exception as error:
        if "modified by an inplace operation" in str(error):
            return Verdict("refused", "by autograd itself, with or without persample")
        return Verdict("crash", f"{type(error).__name__}: {error}".splitlines()[0])
    return compare(found, {"expected": expected}, False)
