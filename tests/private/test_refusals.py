"""What private training refuses, each with a way out, before anything is spent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import persample
from persample import private

from .programs import SIZE, data, finish, losses, net, planned, training


def with_layer(layer: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), layer, nn.Linear(8, 3))


def hooked(register: str) -> private.Training:
    model = net()
    getattr(model[0].weight, register)(lambda g: None)
    return training(model)


def scheduled(make: Callable[[Any], Any]) -> private.Training:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return private.Training(model, optimizer, data(), planned(), losses, scheduler=make(optimizer))


def optimized(optimizer: Any, model: nn.Module | None = None) -> private.Training:
    return private.Training(model or net(), optimizer, data(), planned(), losses)


def of_four_users(**options: Any) -> private.Training:
    plan = planned(unit="user", size=4, batch_size=2)
    return training(plan=plan, users=torch.arange(SIZE) % 4, **options)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(zip(*data(), strict=True))


class Remembering(nn.Module):
    """Keeps a mean of what it saw in a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.mean = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        out: Tensor = self.layer(x)
        return out


class Counting(nn.Module):
    """Keeps a mean of what it saw."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.body, self.kind = net(), kind
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "in place":
            self.seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        else:
            self.seen = self.seen + 1
        return self.body(x)


def mean(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch).mean()


def contrastive(model: nn.Module, batch: Any) -> Tensor:
    h = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(h @ h.t(), torch.arange(len(h)), reduction="none")


def by_count(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch) / (batch[1] > 0).sum()


def by_number(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch) / (batch[1] > 0).sum().item()


def by_branch(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch) * (2.0 if batch[0].max() > 1 else 1.0)


def by_derivative(model: nn.Module, batch: Any) -> Tensor:
    slope = torch.func.grad(lambda t: t.square().sum())(batch[0])
    return losses(model, batch) * slope.mean()


def repeated(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch).mean().expand(len(batch[0]))


def wrong_length(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch)[:-1]


def a_list(model: nn.Module, batch: Any) -> Any:
    return losses(model, batch).tolist()


TENSORS = TensorDataset(*data())
LOADERS = {
    "shuffle": lambda: DataLoader(TENSORS, 4, shuffle=True),
    "random sampler": lambda: DataLoader(TENSORS, 4, sampler=RandomSampler(TENSORS)),
    "weights": lambda: DataLoader(TENSORS, 4, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE)),
    "batches": lambda: DataLoader(
        TENSORS, batch_sampler=BatchSampler(RandomSampler(TENSORS), 4, False)
    ),
    "stream": lambda: DataLoader(Stream(), 4),
}
CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "training BatchNorm": (lambda: training(with_layer(nn.BatchNorm1d(8))), "BatchNorm1d '1'"),
    "BatchNorm without statistics": (
        lambda: training(with_layer(nn.BatchNorm1d(8, track_running_stats=False)).eval()),
        "over the batch",
    ),
    "InstanceNorm with statistics": (
        lambda: training(with_layer(nn.InstanceNorm1d(8, track_running_stats=True))),
        "running statistics",
    ),
    "a buffer that sums up data": (lambda: finish(training(Counting("in place"))), "'seen'"),
    "a buffer that is replaced": (lambda: finish(training(Counting("replaced"))), "'seen'"),
    "a gradient hook": (lambda: hooked("register_hook"), "gradient hook"),
    "an optimizer in backward": (
        lambda: hooked("register_post_accumulate_grad_hook"), "gradient hook"
    ),
    "no trainable parameter": (
        lambda: optimized(torch.optim.SGD(net().parameters(), 0.1), net().requires_grad_(False)),
        "no trainable parameter",
    ),
    "another model's optimizer": (
        lambda: optimized(torch.optim.SGD(net().parameters(), 0.1)), "not the model's"
    ),
    "an optimizer of a part": (
        lambda: (lambda m: optimized(torch.optim.SGD(m[0].parameters(), 0.1), m))(net()),
        "'3.weight'",
    ),
    "an optimizer with a closure": (
        lambda: (lambda m: optimized(torch.optim.LBFGS(m.parameters()), m))(net()), "closure"
    ),
    "an optimizer of sparse gradients": (
        lambda: (lambda m: optimized(torch.optim.SparseAdam(m.parameters()), m))(net()), "Adam"
    ),
    "a frozen parameter that keeps a mean": (
        lambda: finish(training(Remembering())), "parameter 'mean' was written to"
    ),
    "no optimizer": (lambda: optimized("sgd"), "torch.optim"),
    "a scheduler that reads a metric": (
        lambda: scheduled(lr_scheduler.ReduceLROnPlateau), "ReduceLROnPlateau reads a metric"
    ),
    "another optimizer's scheduler": (
        lambda: scheduled(
            lambda _: lr_scheduler.ConstantLR(torch.optim.SGD(net().parameters(), 0.1))
        ),
        "another optimizer",
    ),
    "no scheduler": (lambda: scheduled(lambda _: 3), "lr_scheduler"),
    "a stream": (lambda: training(given=Stream()), "Dataset"),
    "a generator": (lambda: training(given=(x for x in data()[0])), "Dataset"),
    "text": (lambda: training(given="train.csv"), "Dataset"),
    "tensors of different sizes": (lambda: training(given=(data()[0], data(7)[1])), "axis 0"),
    "a size that contradicts the data": (
        lambda: training(plan=planned(size=41)), "for 41 samples, but the data have 40"
    ),
    "a plan without a divisor": (
        lambda: training(plan=planned(size=None, batch_size=None, sample_rate=0.1)), "divisor"
    ),
    "no plan": (lambda: training(plan={"epsilon": 8}), "private.Plan"),  # type: ignore[arg-type]
    "users without a plan for them": (lambda: training(users=[0] * SIZE), "sample"),
    "a plan for users without users": (lambda: training(plan=planned(unit="user")), "users="),
    "users of the wrong length": (
        lambda: training(plan=planned(unit="user"), users=[0, 1]), "2 entries for 40 samples"
    ),
    "more users than planned": (
        lambda: training(plan=planned(unit="user", size=10), users=[f"u{k}" for k in range(SIZE)]),
        "10 users",
    ),
    "users in one text": (lambda: training(plan=planned(unit="user"), users="abc"), "one label"),
    "users of two kinds": (
        lambda: training(plan=planned(unit="user"), users=[0, "a"] * 20), "one kind"
    ),
    "a user larger than a micro-batch": (
        lambda: of_four_users(), "per_user="
    ),
    "per_user above the micro-batch": (
        lambda: of_four_users(per_user=8),
        "per_user=7",
    ),
    "a scalar loss": (lambda: finish(training(loss_fn=mean)), "one loss per sample"),
    "a mean for every sample": (lambda: finish(training(loss_fn=repeated)), ""),
    "a contrastive loss": (lambda: finish(training(loss_fn=contrastive)), "its own sample"),
    "a derivative of the whole batch": (
        lambda: finish(training(loss_fn=by_derivative)), "taken out of torch before the losses"
    ),
    "a list of tensors": (lambda: training(given=list(data())), "as a tuple, (x, y)"),
    "a number of a batch statistic": (
        lambda: finish(training(loss_fn=by_number)), "taken out of torch before the losses"
    ),
    "a branch on a batch statistic": (
        lambda: finish(training(loss_fn=by_branch)), "taken out of torch before the losses"
    ),
    "a loss over a count": (lambda: finish(training(loss_fn=by_count)), "divide"),
    "a loss too few": (lambda: finish(training(loss_fn=wrong_length)), "one loss per sample"),
    "losses in a list": (lambda: finish(training(loss_fn=a_list)), "tensor of losses"),
    "no loss_fn": (lambda: finish(training(loss_fn=None)), "needs a loss_fn"),
    "a loss_fn that is none": (lambda: training(loss_fn=3), "function"),
    "unproven": (
        lambda: training(options={"unproven": "loop"}), "loop"
    ),
    "ids in a training of users": (
        lambda: training(
            plan=planned(unit="user", size=SIZE), users=range(SIZE),
            options={"sample_ids": torch.arange(SIZE)},
        ),
        "users=",
    ),
    "arrays in a tuple": (lambda: training(given=tuple(t.numpy() for t in data())), "as_tensor"),
    "params": (lambda: training(options={"params": "0.weight"}), "freeze"),
    "no micro_batch": (lambda: training(micro_batch=0), "micro_batch"),
    "a seed for a generator": (lambda: training(noise_generator=3), "torch.Generator"),
    **{
        f"loader: {name}": (lambda make=make: training(given=make()), "pass the data set")
        for name, make in LOADERS.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused_with_a_way_out(name: str) -> None:
    run, words = CASES[name]
    with pytest.raises(persample.PersampleError) as caught:
        run()
    error = caught.value
    assert error.fix, error
    assert "unproven" not in error.fix  # it is refused, too
    assert len(str(error).splitlines()) <= 4
    assert words in str(error)


def test_a_loop_with_unproven_is_refused_in_the_block() -> None:
    made = training()
    for parts in made.batches():
        for _ in parts:
            with pytest.raises(persample.UsageError, match="loop"), made.record(unproven="loop"):
                pass
            return


def test_a_scalar_in_the_loop_is_refused() -> None:
    made = training()
    for parts in made.batches():
        for batch in parts:
            with pytest.raises(persample.UsageError) as caught, made.record() as tape:
                tape.backward(losses(made.model, batch).mean())
            assert caught.value.fix
            assert made.steps == 0
            return


def test_batch_norm_in_eval_mode_trains() -> None:
    model = with_layer(nn.BatchNorm1d(8))
    model[1].eval()
    finish(training(model))


def test_batch_norm_put_in_train_mode_later_is_found() -> None:
    model = with_layer(nn.BatchNorm1d(8)).eval()
    made = training(model)
    with pytest.raises(persample.UsageError, match="BatchNorm1d"):
        for _ in made:
            model.train()
    assert made.steps == 1


def test_spectral_norm_may_keep_its_vectors() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 3))
    finish(training(model))
    older = nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 8)), nn.Linear(8, 3))
    finish(training(older))


def test_losses_that_couple_samples_are_not_blamed_on_the_check() -> None:
    def balanced(model: nn.Module, batch: Any) -> Tensor:
        counts = torch.bincount(batch[1], minlength=3)
        return losses(model, batch) / counts[batch[1]]

    started = private.Training(
        model := net(), torch.optim.SGD(model.parameters(), 0.1), data(), planned(), balanced,
        verify=True,
    )  # fmt: skip
    with pytest.raises(persample.VerificationError) as caught:
        next(iter(started))
    assert "samples change each other's gradients" in caught.value.what
    assert "verify=False" not in str(caught.value)
