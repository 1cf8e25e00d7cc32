"""Private training: a plan of public constants, a training that keeps to it, and proofs.

>>> import torch
>>> from persample import private
>>> model, data = torch.nn.Linear(3, 1), torch.randn(20, 3)
>>> plan = private.plan(noise_multiplier=1.0, delta=1e-3, size=20, batch_size=5, steps=3)
>>> training = private.Training(
...     model,
...     torch.optim.SGD(model.parameters(), lr=0.1),
...     data,
...     plan,
...     loss_fn=lambda model, x: model(x).square().sum(1),
... )
>>> [step for step in training]
[1, 2, 3]
"""

from .audit import Audit, audit
from .plan import Plan, plan
from .replay import replay
from .training import Training

__all__ = ["Audit", "Plan", "Training", "audit", "plan", "replay"]
