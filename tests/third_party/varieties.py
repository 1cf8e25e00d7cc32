"""Models of many fields: algebras, complex numbers, flows, wavelets, tables, graphs of causes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.models import Fn

from .subject import N, Subject, Table, squares

TABLE = Table("varieties")
crf = TABLE.package("TorchCRF")
clifford = TABLE.package("cliffordlayers")
complexes = TABLE.package("complextorch")
causes = TABLE.package("dagma")
deformable = TABLE.package("deformable-attention")
wavelets = TABLE.package("ptwt")
ensembles = TABLE.package("tabm")
machines = TABLE.package("torchfm")
flows = TABLE.package("torchflows")
monotonic = TABLE.package("UMNN")
FIELDS = (4, 5, 6)


@crf("tags of sentences with lengths")
def tags() -> Subject:
    from TorchCRF import CRF

    def f(s: Any, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return -s.crf(s.l(x), labels, mask)[:, None]

    mask = torch.arange(6) < torch.tensor([6, 2, 4, 5])[:, None]
    batch = torch.randn(N, 6, 5), torch.randint(0, 4, (N, 6)), mask
    return Subject(Fn(f, l=nn.Linear(5, 4), crf=CRF(4)), squares, batch)


@clifford("linear", [1, 1, 1])
@clifford("linear, negative signature", [-1, -1])
def multivectors(signature: list[int]) -> Subject:
    from cliffordlayers.nn.modules.cliffordlinear import CliffordLinear

    model = nn.Sequential(
        CliffordLinear(signature, 3, 4), nn.Tanh(), CliffordLinear(signature, 4, 2)
    )
    return Subject(model, squares, torch.randn(N, 3, 2 ** len(signature)))


@clifford("rotational convolutions with group norm")
def rotations() -> Subject:
    from cliffordlayers.nn.modules.cliffordconv import CliffordConv2d
    from cliffordlayers.nn.modules.groupnorm import CliffordGroupNorm2d

    signature = [-1, -1]
    model = nn.Sequential(
        CliffordConv2d(signature, 3, 4, 3, padding=1, rotation=True),
        CliffordGroupNorm2d(signature, 2, 4),
    )
    return Subject(model, squares, torch.randn(N, 3, 6, 6, 4))


def pairs(*shape: int) -> Tensor:
    return torch.complex(torch.randn(N, *shape), torch.randn(N, *shape))


@complexes("convolutions, group norm, pooling by size")
def complex_convolutions() -> Subject:
    import complextorch.nn as layers

    model = nn.Sequential(
        layers.Conv2d(2, 4, 3, padding=1), layers.GroupNorm(2, 4), layers.CVCardiod(),
        layers.MagMaxPool2d(2), layers.Conv2d(4, 2, 3, padding=1),
    )  # fmt: skip
    return Subject(model, squares, pairs(2, 6, 6))


@complexes("S4D", "s4d")
@complexes("DSS", "dss")
def complex_states(variant: str) -> Subject:
    from complextorch.nn.modules.ssm import S4DBlock

    return Subject(S4DBlock(4, 6, variant=variant), squares, pairs(6, 4))


@complexes("unitary recurrence")
def unitary() -> Subject:
    from complextorch.nn.modules.unitary_rnn import UnitaryRNN

    return Subject(UnitaryRNN(5, 4, num_layers=2, batch_first=True), squares, pairs(6, 5))


@causes("structural equations", [5, 4, 1])
@causes("structural equations, deeper", [5, 4, 5, 1])
def equations(sizes: list[int]) -> Subject:
    from dagma.nonlinear import DagmaMLP

    model = DagmaMLP(sizes, dtype=torch.get_default_dtype())
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return Subject(model, squares, torch.randn(N, 5))


@deformable("1d", "DeformableAttention1D", (16,))
@deformable("2d", "DeformableAttention", (8, 8))
def moved(name: str, shape: tuple[int, ...]) -> Subject:
    import deformable_attention

    layer = getattr(deformable_attention, name)(
        dim=8, dim_head=4, heads=2, downsample_factor=2, offset_kernel_size=4
    )
    return Subject(layer, squares, torch.randn(N, 8, *shape))


@wavelets("a sparse matrix of wavelets")
def matrix() -> Subject:
    import ptwt

    def f(s: Any, x: Tensor) -> Tensor:
        return torch.cat(ptwt.MatrixWavedec("haar", level=2)(s.l(x)), -1)

    return Subject(Fn(f, l=nn.Linear(16, 16)), squares, torch.randn(N, 16))


@wavelets("there and back")
def there_and_back() -> Subject:
    import ptwt

    def f(s: Any, x: Tensor) -> Tensor:
        first, *others = ptwt.wavedec(s.a(x), "db2", level=2, mode="zero")
        return ptwt.waverec([s.b(first), *others], "db2")

    model = Fn(f, a=nn.Linear(16, 16), b=nn.Linear(6, 6))
    return Subject(model, squares, torch.randn(N, 16))


@ensembles("TabM", "tabm")
@ensembles("TabM mini", "tabm-mini")
@ensembles("TabM packed", "tabm-packed")
def tabular(kind: str) -> Subject:
    from tabm import TabM

    model = TabM.make(
        n_num_features=4, cat_cardinalities=[3, 3], d_out=2, k=5, arch_type=kind, n_blocks=2,
        d_block=8, dropout=0.0,
    )  # fmt: skip
    return Subject(model, squares, (torch.randn(N, 4), torch.randint(0, 3, (N, 2))))


@machines("field aware", "ffm.FieldAwareFactorizationMachineModel", 4)
@machines("extreme", "xdfm.ExtremeDeepFactorizationMachineModel", 4, (8,), 0.0, (6, 6))
@machines("outer products", "pnn.ProductNeuralNetworkModel", 4, (8,), 0.0, "outer")
@machines("logarithms", "afn.AdaptiveFactorizationNetwork", 4, 6, (8,), (0.0, 0.0))
def factorization(name: str, *arguments: Any) -> Subject:
    import importlib

    import numpy

    module, _, kind = name.partition(".")
    make = getattr(importlib.import_module(f"torchfm.model.{module}"), kind)
    batch = torch.stack([torch.randint(0, size, (N,)) for size in FIELDS], 1)
    model = make(numpy.array(FIELDS), *arguments)
    return Subject(model, lambda m, x: (m(x) - 0.3).square(), batch)


@flows("RealNVP", "RealNVP")
@flows("MAF", "MAF")
@flows("couplings by splines", "CouplingRQNSF")
def density(name: str) -> Subject:
    from torchflows.bijections.finite.autoregressive import architectures
    from torchflows.flows import Flow

    model = Flow(getattr(architectures, name)((4,)))
    with torch.no_grad():  # its first batch sets scales
        model.log_prob(torch.randn(20, 4))
    return Subject(
        model, lambda m, x: -m.log_prob(x), torch.randn(N, 4),
        prepare=lambda tape, x: tape.mark(x),
    )  # fmt: skip


@monotonic("monotonic network")
def rising() -> Subject:
    from UMNN import MonotonicNN

    batch = torch.randn(N, 1), torch.randn(N, 3)
    return Subject(MonotonicNN(4, [8, 8], nb_steps=8), squares, batch)


@monotonic("flow", "CC")
@monotonic("flow, in parallel", "CCParallel")
def integrals(solver: str) -> Subject:
    from UMNN import UMNNMAFFlow

    model = UMNNMAFFlow(1, 3, [8], [8], 4, nb_steps=6, solver=solver)
    return Subject(model, lambda m, x: -m.compute_ll(x)[0].view(len(x)), torch.randn(N, 3))
