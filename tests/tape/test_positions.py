"""Positions: shares of norms and dots, against parameters copied once per position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import persample
from persample.testing import take

from ..models import Fn, par
from .test_queries import close


class Copies:
    """Every leaf module runs once per position with a copy of its parameters of that position.

    The gradients of the copies are gᵢₜ by definition, found by autograd alone.
    """

    def __init__(self, model: nn.Module, count: int, axis: Callable[[str], int]) -> None:
        self.count = count
        self.values: dict[str, Tensor] = {}
        self.names = {id(p): name for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            self.values[name] = p.detach().expand(count, *p.shape).clone().requires_grad_()
        self.undo = []
        for path, module in model.named_modules():
            if not list(module.children()) and list(module.parameters()):
                plain = module.forward
                self.undo.append((module, plain))
                module.forward = self._split(module, plain, axis(path))

    def _split(self, module: nn.Module, plain: Any, axis: int) -> Any:
        own = {key: self.names[id(p)] for key, p in module.named_parameters()}

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            module.forward = plain
            try:
                outs = []
                for t in range(self.count):
                    copies = {key: self.values[name][t] for key, name in own.items()}
                    out = functional_call(module, copies, args, kwargs, tie_weights=False)
                    outs.append(out.select(axis, t))
                return torch.stack(outs, axis if axis >= 0 else outs[0].dim() + 1 + axis)
            finally:
                module.forward = again

        again = forward
        return forward

    def restore(self) -> None:
        for module, _ in self.undo:
            del module.forward


def truth(
    model: nn.Module, loss: Any, batch: Any, n: int, count: int, axis: Any = lambda path: -2
) -> dict[str, Tensor]:
    """gᵢₜ: ``{name: (n, T, *shape)}``."""
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in model.named_parameters()}
    for i in range(n):
        copies = Copies(model, count, axis)
        try:
            value = loss(model, take(batch, torch.tensor([i]), n)).sum()
        finally:
            copies.restore()
        found = torch.autograd.grad(value, list(copies.values.values()), allow_unused=True)
        for (name, copy), g in zip(copies.values.items(), found, strict=True):
            rows[name].append(torch.zeros_like(copy) if g is None else g)
    return {name: torch.stack(r) for name, r in rows.items()}


def check(
    model: nn.Module, loss: Any, batch: Any, n: int, count: int, *,
    axis: Any = lambda path: -2, params: Any = None,
) -> persample.Tape:  # fmt: skip
    model = model.double()
    fine = truth(model, loss, batch, n, count, axis)
    with persample.record(model, positions=True) as tape:
        tape.backward(loss(model, batch))
    keep = [name for name in tape.names if params is None or params(name)]
    whole = {name: fine[name].sum(1, keepdim=True) for name in keep}
    expected = sum((fine[k] * whole[k]).flatten(2).sum(2) for k in keep)
    found = tape.positions(params=params)
    close(found, expected)
    close(found.sum(1), tape.norms(params=params).square())
    torch.manual_seed(1)
    direction = {name: torch.randn_like(fine[name][0, 0]) for name in keep}
    expected = sum((fine[k] * direction[k]).flatten(2).sum(2) for k in keep)
    found = tape.positions(direction, params=params)
    close(found, expected)
    close(found.sum(1), tape.dots(direction, params=params))
    noise = 1e-26 * float(sum(whole[k].square().sum() for k in keep))  # of gradients that are zero
    for name in keep:  # each alone: no error hides behind a larger one
        mine = (fine[name] * whole[name]).flatten(2).sum(2)
        limit = max(1e-9 * float(mine.abs().max()), noise)
        assert float((tape.positions(params=name) - mine).abs().max()) <= limit
    return tape


class Block(nn.Module):
    def __init__(self, d: int, heads: int, norm: Any) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.after = norm(d), norm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d, bias=False)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = self.qkv(self.before(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    def __init__(self, tied: bool, norm: Any = nn.LayerNorm, d: int = 8, v: int = 11) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(v, d), nn.Embedding(9, d)
        self.blocks = nn.Sequential(Block(d, 2, norm), Block(d, 2, norm))
        self.norm, self.head = norm(d), nn.Linear(d, v, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def next_token(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    (ids,) = batch
    out = model(ids)
    logits = out if isinstance(out, Tensor) else out.logits
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return losses.sum(1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("t", [3, 6])
def test_language_model(tied: bool, norm: Any, t: int) -> None:
    torch.manual_seed(0)
    check(GPT(tied, norm), next_token, (torch.randint(11, (3, t)),), 3, t)


def _hugging(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "vocab_size": 13, "max_position_embeddings": 12}
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=13, n_positions=12,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if name == "bert":
        config = transformers.BertConfig(**small, **heads, is_decoder=True)
        return transformers.BertLMHeadModel(config).eval()
    made = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    }
    config, model = (getattr(transformers, part) for part in made[name])
    more = {"num_key_value_heads": 1, "tie_word_embeddings": name == "qwen3"}
    return model(config(**small, **heads, **more, **({"head_dim": 8} if name == "qwen3" else {})))


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "bert"])
def test_hugging_face(name: str) -> None:
    torch.manual_seed(0)
    ids = torch.randint(13, (3, 5))
    model = _hugging(name)

    def axis(path: str) -> int:
        return 1 if path.endswith(("q_norm", "k_norm")) else -2

    tape = check(model, next_token, (ids,), 3, 5, axis=axis)
    assert all(u.rule != "generic" for u in tape.explain().uses)


OPERATORS: dict[str, tuple[nn.Module, tuple[Any, ...], int, int]] = {
    "linear": (nn.Linear(4, 3), (torch.randn(3, 5, 4),), 5, -2),
    "as many positions as samples": (nn.Linear(4, 3), (torch.randn(3, 3, 4),), 3, -2),
    "one position": (nn.Linear(4, 3), (torch.randn(3, 1, 4),), 1, -2),
    "wide layer, few positions": (nn.Linear(40, 30), (torch.randn(3, 2, 40),), 2, -2),
    "frequencies": (
        nn.Embedding(4, 3, scale_grad_by_freq=True), (torch.randint(4, (3, 6)),), 6, -2),
    "padding": (nn.Embedding(4, 3, padding_idx=1), (torch.randint(4, (3, 6)),), 6, -2),
    "conv1d": (nn.Conv1d(3, 4, 3, padding=1, groups=1), (torch.randn(3, 3, 5),), 5, 2),
    "conv1d groups": (nn.Conv1d(4, 4, 3, stride=2, groups=2), (torch.randn(3, 4, 7),), 3, 2),
    "batch norm": (nn.BatchNorm1d(3).eval(), (torch.randn(3, 3, 5),), 5, 2),
    "group norm": (nn.GroupNorm(1, 4), (torch.randn(3, 4, 5),), 5, 2),
    "instance norm": (nn.InstanceNorm1d(4, affine=True), (torch.randn(3, 4, 5),), 5, 2),
    "prelu": (nn.PReLU(4), (torch.randn(3, 4, 5),), 5, 2),
    "transposed conv1d": (nn.ConvTranspose1d(3, 4, 3), (torch.randn(3, 3, 5),), 7, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    torch.manual_seed(0)
    module, batch, count, axis = OPERATORS[name]
    batch = tuple(b.double() if b.is_floating_point() else b for b in batch)

    sizes = [count if d == axis % 3 else 1 for d in range(3)]
    weights = torch.linspace(1, 2, count, dtype=torch.float64).view(sizes)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(*batch).sin() * weights).flatten(1).square().sum(1)

    check(module, loss, batch, 3, count, axis=lambda path: axis)


def sequence(model: nn.Module, batch: Any) -> Tensor:
    out = model(*batch)
    out = out[0] if isinstance(out, tuple) else out
    return (out * torch.linspace(1, 2, out.shape[1]).view(1, -1, 1)).square().sum((1, 2))


def _flat(s: Fn, x: Tensor) -> Tensor:
    return F.linear(x.reshape(-1, 4), s.w, s.b).view(3, 5, 4)


def _flat_time_first(s: Fn, x: Tensor) -> Tensor:
    return (x.transpose(0, 1).reshape(-1, 4) @ s.w).view(5, 3, 4).transpose(0, 1)


def _in_place(s: Fn, x: Tensor) -> Tensor:
    h = F.linear(x, s.w)
    h += s.b
    return h


FUNCTIONS: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "flattened": (_flat, {"w": (4, 4), "b": (4,)}),
    "time first": (
        lambda s, x: (x.transpose(0, 1) @ s.w).transpose(0, 1), {"w": (4, 4)}),
    "time first, flattened": (_flat_time_first, {"w": (4, 4)}),
    "features first": (lambda s, x: (s.w @ x.mT).mT, {"w": (4, 4)}),
    "heads": (lambda s, x: torch.einsum("bti,hio->bhto", x, s.w).sum(1), {"w": (2, 4, 4)}),
    "scale": (lambda s, x: x * s.w, {"w": (4,)}),
    "scale of all": (lambda s, x: x * s.w, {"w": (1, 1)}),
    "one value per position": (lambda s, x: x / s.w, {"w": (5, 1)}),
    "slice of positions": (lambda s, x: x * s.w[:, :5], {"w": (1, 7, 4)}),
    "looked up by constants": (
        lambda s, x: x - F.embedding(torch.zeros(3, 5, dtype=torch.long), s.w), {"w": (2, 4)}),
    "low rank": (lambda s, x: F.linear(x, s.a @ s.b), {"a": (4, 2), "b": (2, 4)}),
    "fused": (
        lambda s, x: sum(F.linear(x, w) * k for k, w in enumerate(s.w.chunk(3))), {"w": (12, 4)}),
    "weight and its transpose": (
        lambda s, x: F.linear(x, s.w) + F.linear(x.sin(), s.w.t()), {"w": (4, 4)}),
    "in place": (_in_place, {"w": (4, 4), "b": (4,)}),
    "bilinear": (lambda s, x: F.bilinear(x, x, s.w), {"w": (4, 4, 4)}),
    "class token": (
        lambda s, x: torch.cat([s.c.expand(3, -1, -1), x[:, 1:]], 1) * s.g,
        {"c": (1, 1, 4), "g": (4,)}),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    """Against the output gradient masked to one position at a time."""
    torch.manual_seed(0)
    function, shapes = FUNCTIONS[name]
    model = Fn(function, **{key: par(*shape) for key, shape in shapes.items()}).double()
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    with persample.record(model, positions=True) as tape:
        tape.backward(sequence(model, (x,)))
    direction = {k: torch.randn_like(p) for k, p in model.named_parameters()}
    flat = torch.cat([d.flatten() for d in direction.values()])
    shares, dots = [], []
    out = model(x)
    weights = torch.linspace(1, 2, 5, dtype=torch.float64).view(1, -1, 1)
    (seed,) = torch.autograd.grad((out * weights).square().sum(), out, retain_graph=True)
    for i in range(3):
        pieces = []
        for t in range(5):
            mask = torch.zeros_like(seed)
            mask[i, t] = seed[i, t]
            found = torch.autograd.grad(out, list(model.parameters()), mask, retain_graph=True)
            pieces.append(torch.cat([g.flatten() for g in found]))
        rows = torch.stack(pieces)
        shares.append(rows @ rows.sum(0))
        dots.append(rows @ flat)
    close(tape.positions(), torch.stack(shares))
    close(tape.positions(direction), torch.stack(dots))
    close(tape.positions().sum(1), tape.norms().square())


def test_recurrent_layer() -> None:
    torch.manual_seed(0)
    rnn, x = nn.RNN(4, 3, batch_first=True).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    with persample.record(rnn, positions=True) as tape:
        tape.backward(sequence(rnn, (x,)))
    shares = []
    for i in range(3):
        copies = {k: p.detach().expand(5, *p.shape).clone().requires_grad_()
                  for k, p in rnn.named_parameters()}  # fmt: skip
        into, back, b, c = copies.values()
        h, outs = torch.zeros(3, dtype=torch.float64), []
        for t in range(5):
            h = (into[t] @ x[i, t] + b[t] + back[t] @ h + c[t]).tanh()
            outs.append(h)
        value = sequence(lambda y: y, (torch.stack(outs).unsqueeze(0),)).sum()
        found = torch.autograd.grad(value, list(copies.values()))
        rows = torch.cat([g.flatten(1) for g in found], 1)
        shares.append(rows @ rows.sum(0))
    close(tape.positions(), torch.stack(shares))


def test_pixels() -> None:
    torch.manual_seed(0)
    net, x = nn.Conv2d(3, 8, 3, stride=2, padding=1).double(), torch.randn(3, 3, 6, 5).double()
    with persample.record(net, positions=True) as tape:
        tape.backward(net(x).square().sum((1, 2, 3)))
    assert tape.positions().shape == (3, 9)
    shares = []
    for i in range(3):
        out = net(x[i : i + 1])
        rows = []
        for row, column in ((r, c) for r in range(3) for c in range(3)):
            mask = torch.zeros_like(out)
            mask[..., row, column] = 2 * out.detach()[..., row, column]
            found = torch.autograd.grad(out, list(net.parameters()), mask, retain_graph=True)
            rows.append(torch.cat([g.flatten() for g in found]))
        shares.append(torch.stack(rows) @ torch.stack(rows).sum(0))
    close(tape.positions(), torch.stack(shares))
    fine = persample.forms.Pixels(tape._forms.contributions[0].form)
    ones = torch.ones(9, dtype=torch.float64)
    part = fine.narrowed(9, 18)
    close(part.weighted_sum(ones), tape.grads()["weight"][1])
    close(part.dense().sum(0), tape.grads()["weight"][1])
    close(fine.narrowed(4, 11).dense(), fine.dense()[4:11])


def test_sums_and_several_backwards_add() -> None:
    """Cross terms between uses of one parameter, and between backward passes."""
    torch.manual_seed(0)
    net, x = GPT(True).double(), torch.randint(11, (3, 4))
    with persample.record(net, positions=True) as tape:
        tape.backward(next_token(net, (x,)))
        tape.backward(next_token(net, (x.flip(1),)))
    close(tape.positions().sum(1), tape.norms().square())
    with persample.record(net, positions=True) as once:
        once.backward(next_token(net, (x,)))
    with persample.record(net, positions=True) as again:
        again.backward(next_token(net, (x.flip(1),)))
    direction = {name: g[0] for name, g in tape.grads().items()}
    both = once.positions(direction) + again.positions(direction)
    close(tape.positions(direction), both)
    assert float((tape.positions() - once.positions() - again.positions()).abs().max()) > 1e-3


def _pooled(s: Fn, x: Tensor) -> Tensor:
    return s.head(s.body(x).tanh()[:, 0])


def test_refused_by_name() -> None:
    net = Fn(_pooled, body=nn.Linear(4, 4), head=nn.Linear(4, 2))
    x = torch.randn(3, 4, 4)
    with persample.record(net) as tape:
        tape.backward(net(x).square().sum(1))
    with pytest.raises(persample.UsageError, match=r"record\(model, positions=True\)"):
        tape.positions()
    with persample.record(net, positions=True) as tape:
        tape.backward(net(x).square().sum(1))
    with pytest.raises(persample.UsageError, match=r"'head.weight' has no positions") as caught:
        tape.positions()
    assert "params=" in str(caught.value)
    found = tape.positions(params=lambda name: name.startswith("body"))
    torch.testing.assert_close(
        found.sum(1), tape.norms(params=["body.weight", "body.bias"]).square()
    )
    assert found.shape == (3, 4)
    assert bool((found[:, 1:] == 0).all())  # only token 0 is read
    with pytest.raises(persample.UsageError, match="names"):
        tape.positions({"body.weight": torch.zeros(4, 4)})
    with pytest.raises(persample.UsageError, match="lean"):
        persample.record(net, lean=True, positions=True)


def test_other_lengths_are_refused() -> None:
    net = Fn(lambda s, x: s.b(s.a(x)[:, ::2]), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    with persample.record(net, positions=True) as tape:
        tape.backward(net(torch.randn(3, 6, 4)).square().sum((1, 2)))
    with pytest.raises(persample.UsageError, match=r"3 of 'b.weight'.*6 of 'a.weight'"):
        tape.positions()


def test_two_axes_of_one_length_are_refused() -> None:
    net = nn.LayerNorm(4)
    with persample.record(net, positions=True) as tape:
        tape.backward(net(torch.randn(3, 5, 5, 4)).square().sum((1, 2, 3)))
    with pytest.raises(persample.UsageError, match="two axes of 5"):
        tape.positions()


def test_rows_routed_by_data_are_refused() -> None:
    net = Fn(
        lambda s, x: torch.zeros_like(x).index_add(
            0, torch.tensor([0, 2, 1, 0]), F.linear(x[torch.tensor([0, 2, 1, 0])], s.w)
        ),
        w=par(4, 4),
    )
    with persample.record(net, positions=True) as tape:
        tape.backward(net(torch.randn(3, 4, 4)).square().sum((1, 2)))
    with pytest.raises(persample.UsageError, match="where the data say"):
        tape.positions()


def test_overwritten_data_are_noticed() -> None:
    net, x = nn.LayerNorm(4), torch.randn(3, 5, 4)
    with persample.record(net, positions=True) as tape:
        h = net(x * 2)
        tape.backward(h.square().sum((1, 2)))
    with torch.no_grad():
        net.weight.mul_(2)
    with pytest.raises(persample.PersampleError, match="modified"):
        tape.positions()


def test_empty_batch_and_one_sample() -> None:
    net = GPT(True).double()
    with persample.record(net, positions=True) as tape:
        tape.backward(next_token(net, (torch.randint(11, (1, 5)),)))
    assert tape.positions().shape == (1, 5)
    close(tape.positions().sum(1), tape.norms().square())
    conv, x = nn.Conv2d(3, 4, 3).double(), torch.randn(1, 3, 6, 5, dtype=torch.float64)
    with persample.record(conv, positions=True) as tape:
        tape.backward(conv(x).square().sum((1, 2, 3)))
    assert tape.positions().shape == (1, 12)
    close(tape.positions().sum(1), tape.norms().square())
    layer = nn.Linear(4, 3)
    with persample.record(layer, positions=True) as tape:
        tape.backward(layer(torch.randn(0, 5, 4)).square().sum((1, 2)))
    assert tape.positions().shape[0] == 0


def test_layers_without_features() -> None:
    net = Fn(lambda m, x: F.linear(x[..., :0], m.empty, m.shift) * x, empty=par(4, 0), shift=par(4))
    x = torch.randn(3, 5, 4)
    with persample.record(net, positions=True) as tape:
        tape.backward(net(x).square().sum((1, 2)))
    torch.testing.assert_close(tape.positions().sum(1), tape.norms().square())


def test_unproven_tapes_have_no_positions() -> None:
    net = nn.Linear(4, 3)
    with persample.record(net, positions=True, unproven="loop") as tape:
        out = net(torch.randn(3, 5, 4))
        tape.backward((out - out.mean(0)).square().sum((1, 2)))
    with pytest.raises(persample.UsageError, match="one loss at a time"):
        tape.positions()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, ids = GPT(True).to(dtype), torch.randint(11, (3, 6))
    with persample.record(net, positions=True) as tape:
        tape.backward(next_token(net, (ids,)))
    found = tape.positions()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.sum(1), tape.norms().square(), rtol=1e-4, atol=1e-4)
