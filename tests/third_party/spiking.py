"""Spiking networks and networks that keep their state between calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .subject import N, Subject, Table, squares

TABLE = Table("spiking and stateful")
snntorch = TABLE.package("snntorch")
norse = TABLE.package("norse")
jelly = TABLE.package("spikingjelly")
ncps = TABLE.package("ncps")

TIME = 5


class Unrolled(nn.Module):
    """A layer, spiking neurons and a read-out, over some steps of time."""

    def __init__(self, neuron: nn.Module, *, init: bool = False, plain: bool = False) -> None:
        super().__init__()
        self.into, self.neuron, self.out = nn.Linear(6, 8), neuron, nn.Linear(8, 3)
        self.init, self.plain = init, plain

    def forward(self, x: Tensor) -> Tensor:
        state: Any = () if self.init or self.plain else self.neuron.reset_mem()
        state = state if isinstance(state, tuple) else (state,)
        found = []
        for k in range(TIME):
            spikes = self.neuron(self.into(x[:, k]), *state)
            if not self.init and not self.plain:
                spikes, *rest = spikes
                state = tuple(rest)
            found.append(self.out(spikes))
        return torch.stack(found, 1)


def sequence(model: nn.Module, *, first: bool = False) -> Subject:
    """A sequence of inputs for each sample."""
    return Subject(model, squares, 2 * torch.randn(N, TIME, 6))


@snntorch("Leaky", "Leaky", beta=0.9, learn_beta=True, learn_threshold=True)
@snntorch("Lapicque", "Lapicque", beta=0.9)
@snntorch("Synaptic", "Synaptic", alpha=0.9, beta=0.8, learn_alpha=True)
@snntorch("Alpha", "Alpha", alpha=0.9, beta=0.8)
@snntorch("RLeaky", "RLeaky", beta=0.9, linear_features=8)
@snntorch("RSynaptic", "RSynaptic", alpha=0.9, beta=0.8, linear_features=8)
def leaky(name: str, **arguments: Any) -> Subject:
    import snntorch

    if name.startswith("R"):
        neuron = getattr(snntorch, name)(init_hidden=True, **arguments)
        return sequence(Reset(neuron))
    return sequence(Unrolled(getattr(snntorch, name)(**arguments)))


class Reset(Unrolled):
    """Neurons that keep their state themselves and are reset before every sequence."""

    def __init__(self, neuron: nn.Module, *, reset: str = "reset_mem") -> None:
        super().__init__(neuron, init=True)
        self.reset = reset

    def forward(self, x: Tensor) -> Tensor:
        getattr(self.neuron, self.reset)()
        return super().forward(x)


@snntorch("Leaky, state kept and reset", "reset_mem")
@snntorch("Leaky, state kept and detached", "detach_hidden")
def hidden(reset: str) -> Subject:
    import snntorch

    return sequence(Reset(snntorch.Leaky(beta=0.9, init_hidden=True), reset=reset))


@snntorch("SLSTM")
def slstm() -> Subject:
    import snntorch

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.out = snntorch.SLSTM(6, 8), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            syn, mem = self.cell.reset_mem()
            found = []
            for k in range(TIME):
                spikes, syn, mem = self.cell(x[:, k], syn, mem)
                found.append(self.out(spikes))
            return torch.stack(found, 1)

    return sequence(Net())


class Norse(nn.Module):
    """A cell of norse over time."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.into, self.cell, self.out = nn.Linear(6, 8), cell, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, found = None, []
        for k in range(TIME):
            spikes, state = self.cell(self.into(x[:, k]), state)
            found.append(self.out(spikes))
        return torch.stack(found, 1)


@norse("LIFCell", "LIFCell")
@norse("LIFRecurrentCell", "LIFRecurrentCell", 8, 8)
@norse("LICell", "LICell")
@norse("LSNNCell", "LSNNCell")
@norse("LSNNRecurrentCell", "LSNNRecurrentCell", 8, 8)
@norse("LIFAdExCell", "LIFAdExCell")
@norse("LIFBoxCell", "LIFBoxCell")
@norse("IAFCell", "IAFCell")
@norse("IzhikevichCell", "IzhikevichCell", None)
def cell(name: str, *sizes: Any) -> Subject:
    from norse import torch as norse_torch

    kind = getattr(norse_torch, name)
    if name == "IzhikevichCell":
        return sequence(Norse(kind(norse_torch.tonic_spiking)))
    return sequence(Norse(kind(*sizes)))


class Jelly(nn.Module):
    """Neurons of spikingjelly, reset before every batch, or detached only."""

    def __init__(self, neuron: nn.Module, *, reset: bool = True) -> None:
        super().__init__()
        self.into, self.neuron, self.out = nn.Linear(6, 8), neuron, nn.Linear(8, 3)
        self.reset = reset

    def forward(self, x: Tensor) -> Tensor:
        from spikingjelly.activation_based import functional

        if self.reset:
            functional.reset_net(self)
        else:
            functional.detach_net(self)
        return torch.stack([self.out(self.neuron(self.into(x[:, k]))) for k in range(TIME)], 1)


@jelly("IFNode", "IFNode")
@jelly("LIFNode", "LIFNode")
@jelly("ParametricLIFNode", "ParametricLIFNode")
@jelly("QIFNode", "QIFNode")
@jelly("EIFNode", "EIFNode")
@jelly("KLIFNode", "KLIFNode")
@jelly("LIFNode, state detached", "LIFNode", False)
@jelly("IFNode, state detached", "IFNode", False)
def node(name: str, reset: bool = True) -> Subject:
    from spikingjelly.activation_based import neuron

    return sequence(Jelly(getattr(neuron, name)(), reset=reset))


@jelly("PLIF with multi-step layers")
def multistep() -> Subject:
    from spikingjelly.activation_based import functional, layer, neuron

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(
                layer.Conv2d(2, 4, 3, padding=1), neuron.ParametricLIFNode(), layer.MaxPool2d(2),
                layer.Flatten(), layer.Linear(16, 3), neuron.LIFNode(),
            )  # fmt: skip
            functional.set_step_mode(self.net, "m")

        def forward(self, x: Tensor) -> Tensor:
            functional.reset_net(self.net)
            return self.net(x.unsqueeze(0).repeat(TIME, 1, 1, 1, 1)).mean(0)

    return Subject(Net(), squares, torch.randn(N, 2, 4, 4))


@ncps("LTC", "LTC")
@ncps("CfC", "CfC")
@ncps("CfC, no gate", "CfC", {"mode": "no_gate"})
@ncps("LTC with a wiring", "LTC", None)
def liquid(name: str, more: dict[str, Any] | None = {}) -> Subject:  # noqa: B006
    from ncps import torch as liquid_torch
    from ncps import wirings

    units = wirings.AutoNCP(10, 3) if more is None else 8
    return sequence(getattr(liquid_torch, name)(6, units, **(more or {})))
