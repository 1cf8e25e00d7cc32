"""Users: coins over users, the sum over a user's samples, then clipped; never cut apart."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import persample
from persample import private
from persample.private.contribution import clip
from persample.private.users import Samples, Users, numbered
from persample.testing import oracle

from .programs import SIZE, data, finish, losses, net, planned, seeded, training

NAN = float("nan")
OWNERS = torch.tensor([k * k % 13 for k in range(SIZE)])  # 7 users of different sizes, out of 13
SECRET = bytes(range(32))


def users_plan(**changes: Any) -> private.Plan:
    return planned(**{"unit": "user", "size": 13, "batch_size": 6} | changes)


def user_training(**options: Any) -> private.Training:
    known: dict[str, Any] = {"plan": users_plan(), "users": OWNERS, "micro_batch": 12}
    return training(**known | options)


def expected_sum(made: private.Training, batch: Any, step: int) -> dict[str, Tensor]:
    """Σ over users of clip(Σ over their samples), one sample at a time, in float64."""
    twin = net(torch.float64)
    twin.load_state_dict({k: v.double() for k, v in made.model.state_dict().items()})
    rows = oracle(twin, losses, (batch[0].double(), batch[1]))
    total = {name: torch.zeros_like(g[0]) for name, g in rows.items()}
    for user in made.sampler.drawn(step).tolist():
        mine = (user == OWNERS).nonzero().flatten()
        grads = {name: g[mine].sum(0) for name, g in rows.items()}
        for name, value in clip(grads, made.plan.max_norm, made.plan.clipping).items():
            total[name] += value
    return total


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("micro_batch", [9, 12, 64])
@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
def test_sums_are_those_of_one_user_at_a_time(micro_batch: int, clipping: str, pad: bool) -> None:
    made = user_training(micro_batch=micro_batch, plan=users_plan(clipping=clipping), pad=pad)
    found: list[dict[str, Tensor]] = []
    made.observer.summed = lambda step, sums: found.append(  # type: ignore[method-assign]
        {name: value.clone() for name, value in sums.items()}
    )
    for parts in made.batches():
        expected = expected_sum(made, data(), parts.step)
        for batch in parts:
            with made.record() as tape:
                tape.backward(losses(made.model, batch))
        made.step()
        for name, value in expected.items():
            torch.testing.assert_close(found[-1][name].double(), value, atol=1e-5, rtol=1e-5)


def test_micro_batches_end_between_users() -> None:
    made = user_training()
    seen = []
    for step in range(20):
        parts = made.units.parts(step, made.sampler.drawn(step))
        users = [user for part in parts for user in part.units.tolist()]
        assert len(set(users)) == len(users)
        for part in parts:
            assert len(part.rows) <= 12
            assert part.ids is not None
            assert torch.equal(OWNERS[part.rows], part.units[part.ids])
            for user in part.units.tolist():
                assert int((user == OWNERS).sum()) == int((OWNERS[part.rows] == user).sum())
        seen.append(len(parts))
    assert max(seen) > 1


def test_coins_are_over_users() -> None:
    drawn = torch.cat([user_training().sampler.drawn(step) for step in range(50)])
    assert int(drawn.max()) == 12
    made = user_training()
    rate = sum(len(made.sampler.drawn(k)) for k in range(500)) / 500
    assert abs(rate - 6) < 5 * math.sqrt(13 * 6 / 13 * 7 / 13 / 500)


def test_a_user_with_a_sample_that_is_not_finite_contributes_nothing() -> None:
    x, y = data()
    user = int(OWNERS[3])
    x[3] = NAN
    plan = users_plan(sample_rate=1.0, batch_size=None, divisor=6.0)
    bad, good = (user_training(given=given, plan=plan) for given in ((x, y), data()))
    sums: list[dict[str, Tensor]] = []
    for made in (bad, good):
        made.observer.summed = lambda step, found: sums.append(  # type: ignore[method-assign]
            {name: value.clone() for name, value in found.items()}
        )
        for _ in made:
            break
    mine = (user == OWNERS).nonzero().flatten()
    model = net()
    with persample.record(model, n=1, sample_ids=torch.zeros(len(mine)).long()) as tape:
        tape.backward(losses(model, tuple(t[mine] for t in data())))
    alone = tape.clipped_sum(1.0)
    for name, value in sums[0].items():
        torch.testing.assert_close(value, sums[1][name] - alone[name], atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("per_user", [1, 3])
def test_a_cap_per_user_is_a_uniform_draw_of_their_own(per_user: int) -> None:
    def units(owners: Tensor) -> Users:
        return Users(
            owners, count=len(owners), size=4, micro_batch=16, per_user=per_user, secret=SECRET
        )

    owners = torch.arange(40) % 4
    made, counts = units(owners), torch.zeros(40)
    other = units(torch.where(owners == 2, 3, owners))  # user 2 is gone; user 3 has more
    for step in range(2000):
        rows = made.rows(step, 1)
        assert len(rows) == per_user
        assert bool((owners[rows] == 1).all())
        assert torch.equal(rows, other.rows(step, 1))  # nobody else's samples matter
        counts[rows] += 1
    mine = counts[owners == 1]
    share = 2000 * per_user / 10
    assert float(((mine - share) ** 2 / share).sum()) < 9 + 5 * math.sqrt(18)


def test_a_cap_per_user_trains() -> None:
    made = user_training(per_user=2, micro_batch=4)
    finish(made)
    with pytest.raises(persample.UsageError):
        user_training(micro_batch=4)


LABELS = {
    "indices": [0, 0, 2, 1],
    "tensor": torch.tensor([0, 0, 2, 1]),
    "text": ["ann", "ann", "zoe", "bob"],
    "large numbers": [100, 100, 900, 500],
    "tuples": [(1, "a"), (1, "a"), (2, "b"), (1, "b")],
}


@pytest.mark.parametrize("name", LABELS)
def test_labels(name: str) -> None:
    found, size = numbered(LABELS[name], 4, None)
    assert found.tolist() == [0, 0, 2, 1]
    assert size == 3


def test_an_index_of_a_user_does_not_depend_on_who_else_has_samples() -> None:
    found, size = numbered([5, 5, 9], 3, 13)
    assert (found.tolist(), size) == ([5, 5, 9], 13)


def test_users_without_samples_draw_nothing() -> None:
    made = Users([5, 5, 9], count=3, size=13, micro_batch=4, per_user=None, secret=SECRET)
    assert made.parts(0, torch.tensor([0, 1, 2])) == []
    (part,) = made.parts(0, torch.tensor([0, 5, 9]))
    assert part.units.tolist() == [5, 9]
    assert part.rows.tolist() == [0, 1, 2]


def test_samples_are_cut_by_number() -> None:
    parts = Samples(20, 4).parts(0, torch.arange(9))
    assert [len(p.rows) for p in parts] == [4, 4, 1]
    assert [p.number for p in parts] == [0, 1, 2]
    assert Samples(20, 4).parts(0, torch.arange(0)) == []


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("remove", [0, 1, 9])
def test_replay_of_a_user(remove: int, pad: bool) -> None:
    def make(given: Any) -> private.Training:
        return user_training(given=given, model=net(dropout=0.3), pad=pad)

    report = private.replay(make, data(), remove=remove)
    assert report.ok, str(report)
    assert max(c.contribution for c in report.compared) == pytest.approx(1.0, abs=1e-5)


def test_users_resume() -> None:
    expected, first = finish(user_training(per_user=3)), user_training(per_user=3)
    for step in first:
        if step == 3:
            break
    second = user_training(per_user=3, sample_generator=seeded(9))
    second.load_state_dict(first.state_dict())
    assert all(map(torch.equal, finish(second), expected))
