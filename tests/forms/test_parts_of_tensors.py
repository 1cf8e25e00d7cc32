"""Inner products of gradients that do not fit at once: by parts of the tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import persample

from ..models import Fn
from ..tape.test_queries import close

Build = Callable[[], tuple[nn.Module, Tensor]]

CASES: dict[str, Build] = {
    "linear": lambda: (nn.Linear(40, 30), torch.randn(5, 7, 40)),
    "one position": lambda: (nn.Linear(40, 30), torch.randn(5, 40)),
    "transposed weight": lambda: (
        Fn(lambda s, x: x @ s.w, w=nn.Parameter(torch.randn(40, 30))), torch.randn(5, 3, 40)),
    "many blocks": lambda: (
        Fn(lambda s, x: torch.einsum("nki,kio->nko", x, s.w), w=nn.Parameter(torch.randn(6, 8, 9))),
        torch.randn(5, 6, 8)),
    "written out": lambda: (nn.Linear(20, 10), torch.randn(5, 90, 20)),
    "convolution": lambda: (nn.Conv2d(6, 24, 3), torch.randn(5, 6, 7, 7)),
    "strided": lambda: (nn.Conv2d(6, 24, 3, stride=2, padding=1, dilation=2),
                        torch.randn(5, 6, 15, 15)),
    "groups": lambda: (nn.Conv2d(6, 24, 3, groups=3), torch.randn(5, 6, 7, 7)),
    "transposed convolution": lambda: (nn.ConvTranspose2d(24, 6, 3, stride=2),
                                       torch.randn(5, 24, 4, 4)),
    "volume": lambda: (nn.Conv3d(2, 12, 2), torch.randn(5, 2, 4, 4, 4)),
    "table": lambda: (nn.Embedding(50, 12), torch.randint(50, (5, 9))),
    "scale": lambda: (nn.LayerNorm([30, 40]), torch.randn(5, 30, 40)),
    "used twice": lambda: (Fn(lambda s, x: s.l(s.l(x).tanh()), l=nn.Linear(30, 30)),
                           torch.randn(5, 3, 30)),
    "complex": lambda: (nn.Linear(20, 30, dtype=torch.complex128),
                        torch.randn(5, 3, 20, dtype=torch.complex128)),
    "a number": lambda: (Fn(lambda s, x: x * s.w, w=nn.Parameter(torch.tensor(2.0))),
                         torch.randn(5, 3)),
}  # fmt: skip


def record(model: nn.Module, x: Tensor, budget: int) -> persample.Tape:
    with persample.record(model, budget=budget) as tape:
        tape.backward(model(x).abs().square().flatten(1).sum(1))
    return tape


def flat(rows: Tensor) -> Tensor:
    real = torch.view_as_real(rows) if rows.is_complex() else rows
    return real.reshape(len(rows), -1)


@pytest.mark.parametrize("budget", [1, 1 << 10, 1 << 13, 1 << 30])
@pytest.mark.parametrize("name", CASES)
def test_products_do_not_depend_on_the_budget(name: str, budget: int) -> None:
    torch.manual_seed(0)
    model, x = CASES[name]()
    if x.is_floating_point():
        model, x = model.double(), x.double()
    elif not x.is_complex():
        model = model.double()
    tape, other = record(model, x, budget), record(model, x[:3].flip(0), budget)
    rows, few = (torch.cat([flat(g) for g in each.grads().values()], 1) for each in (tape, other))
    close(tape.gram(), rows @ rows.T, 1e-12)
    close(tape.cross(other), rows @ few.T, 1e-12)


def test_a_part_is_that_of_the_rows() -> None:
    for name in (
        "linear",
        "one position",
        "many blocks",
        "convolution",
        "strided",
        "transposed convolution",
    ):
        model, x = CASES[name]()
        tape = record(model.double(), x.double(), 1 << 30)
        weight = next(iter(tape.names))
        with tape._answering() as question:
            form = question.forms([weight])[weight]
        part = form.cut(2, 5)
        assert part is not None, name
        torch.testing.assert_close(part.wide_dense(), form.wide_dense()[:, 2:5], msg=name)


class Written(TorchDispatchMode):
    """Elements that matrix products and convolutions make."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::bmm", "aten::convolution_backward"):
            made = out if isinstance(out, Tensor) else out[1]
            self.count += made.numel()
        return out


@pytest.mark.parametrize("name", ["linear", "convolution", "transposed convolution"])
def test_every_row_is_written_once(name: str) -> None:
    model, x = CASES[name]()
    if name == "linear":
        model, x = nn.Linear(60, 50), torch.randn(5, 16, 60)
    tape = record(model, x, 1 << 13)
    with Written() as seen:
        tape.gram(params=["weight"])
    assert 0 < seen.count <= 5 * dict(model.named_parameters())["weight"].numel()
