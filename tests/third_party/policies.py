"""Bayesian layers, policies of agents, survival."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .subject import N, Subject, Table, squares

TABLE = Table("bayesian, policies, survival")
blitz = TABLE.package("blitz-bayesian-pytorch", "blitz")
bnn = TABLE.package("torchbnn")
bayes = TABLE.package("bayesian-torch")
policies = TABLE.package("stable-baselines3")
tianshou = TABLE.package("tianshou")
torchrl = TABLE.package("torchrl")
survival = TABLE.package("pycox")
tuples = TABLE.package("torchtuples")


def rows(model: nn.Module, width: int = 4) -> Subject:
    return Subject(model, squares, torch.randn(N, width))


@blitz("BayesianLinear")
def bayesian_linear() -> Subject:
    from blitz.modules import BayesianLinear

    return rows(nn.Sequential(BayesianLinear(4, 8), nn.ReLU(), BayesianLinear(8, 2)))


@blitz("BayesianLSTM")
def bayesian_lstm() -> Subject:
    from blitz.modules import BayesianLSTM

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.out = BayesianLSTM(4, 6), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.rnn(x)[0][:, -1])

    return Subject(Net(), squares, torch.randn(N, 5, 4))


@bnn("BayesLinear and BayesConv2d")
def bayes_layers() -> Subject:
    import torchbnn

    model = nn.Sequential(
        torchbnn.BayesConv2d(0, 0.1, in_channels=2, out_channels=4, kernel_size=3),
        nn.ReLU(), nn.Flatten(),
        torchbnn.BayesLinear(prior_mu=0, prior_sigma=0.1, in_features=16, out_features=3),
    )  # fmt: skip
    return Subject(model, squares, torch.randn(N, 2, 4, 4))


@bayes("LinearReparameterization", "LinearReparameterization")
@bayes("LinearFlipout", "LinearFlipout")
def variational(name: str) -> Subject:
    from bayesian_torch import layers

    kind = getattr(layers, name)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = kind(4, 8), kind(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.relu(self.a(x)[0]))[0]

    return rows(Net())


@policies("actor and critic, evaluate_actions", "ActorCriticPolicy", True)
@policies("actor and critic, continuous", "ActorCriticPolicy", False)
def actor_critic(name: str, discrete: bool) -> Subject:
    import gymnasium
    import numpy as np
    from stable_baselines3.common import policies as sb

    seen = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    acts = (
        gymnasium.spaces.Discrete(3) if discrete else gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    )
    model = getattr(sb, name)(seen, acts, lambda _: 1e-3, net_arch=[8])

    def loss(model: nn.Module, batch: Any) -> Tensor:
        values, log_prob, entropy = model.evaluate_actions(*batch)
        return values.flatten().square() - log_prob - 0.01 * entropy

    action = torch.randint(0, 3, (N,)) if discrete else torch.randn(N, 2)
    return Subject(model, loss, (torch.randn(N, 4), action))


@policies("Q network")
def q_network() -> Subject:
    import gymnasium
    import numpy as np
    from stable_baselines3.dqn.policies import DQNPolicy

    seen = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    model = DQNPolicy(seen, gymnasium.spaces.Discrete(3), lambda _: 1e-3, net_arch=[8]).q_net
    return rows(model)


@policies("SAC actor and critics")
def sac() -> Subject:
    import gymnasium
    import numpy as np
    from stable_baselines3.sac.policies import SACPolicy

    seen = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    acts = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    policy = SACPolicy(seen, acts, lambda _: 1e-3, net_arch=[8])

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        action, log_prob = model.actor.action_log_prob(x)
        values = torch.cat(model.critic(x, action), 1)
        return 0.2 * log_prob - values.min(1).values

    return Subject(policy, loss, torch.randn(N, 4))


@tianshou("Net with a duelling head")
def duelling() -> Subject:
    from tianshou.utils.net.common import Net

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            heads = {"hidden_sizes": [8]}, {"hidden_sizes": [8]}
            self.net = Net(state_shape=(4,), action_shape=3, hidden_sizes=[8], dueling_param=heads)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)[0]

    return rows(Policy())


@torchrl("MLP", "MLP")
@torchrl("ConvNet", "ConvNet")
@torchrl("NoisyLinear", "NoisyLinear")
def reinforcement(name: str) -> Subject:
    from torchrl import modules

    if name == "ConvNet":
        model = modules.ConvNet(in_features=2, num_cells=[4, 4], kernel_sizes=3)
        return Subject(model, squares, torch.randn(N, 2, 8, 8))
    made = {
        "MLP": lambda: modules.MLP(4, 2, num_cells=[8, 8]),
        "NoisyLinear": lambda: modules.NoisyLinear(4, 3),
    }[name]()  # fmt: skip
    return rows(made)


@tuples("MLPVanilla")
def vanilla() -> Subject:
    import torchtuples

    return rows(torchtuples.practical.MLPVanilla(4, [8, 8], 2, batch_norm=True, dropout=0.1))


@survival("CoxTime network", "MLPVanillaCoxTime")
def cox_time(name: str) -> Subject:
    from pycox.models import cox_time as models

    model = getattr(models, name)(4, [8], batch_norm=False, dropout=0.0)
    return Subject(model, squares, (torch.randn(N, 4), torch.rand(N, 1)))


@survival("Cox partial likelihood, over the batch")
def cox() -> Subject:
    from pycox.models.loss import cox_ph_loss

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, time, event = batch
        whole = cox_ph_loss(model(x), time, event)
        return whole.expand(len(x)) + 0 * model(x).flatten()

    batch = torch.randn(N, 4), torch.rand(N), torch.ones(N)
    return Subject(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), loss, batch)
