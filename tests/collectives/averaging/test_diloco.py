"""DiLoCo: inner AdamW and outer Nesterov, each update by hand."""

import numpy as np
import pytest

from mpiml import optim
from mpiml.collectives import Bucket
from mpiml.collectives.averaging import DiLoCo
from mpiml.errors import UsageError
from tests.collectives.averaging.crowd import all_grads, flat, grads, rough, run, weights
from tests.collectives.everywhere import everywhere, modes
from tests.collectives.together import outcomes, together

LR, B1, B2, EPS, DECAY = 0.05, 0.9, 0.99, 1e-8, 0.1


def inner():
    return optim.AdamW(LR, (B1, B2), eps=EPS, weight_decay=DECAY)


def by_hand(size, steps, every, dtype):
    """Parameters after each step, all written out in float64. (steps, members, n)."""
    x = np.tile(flat(weights(0, dtype)).astype("f8"), (size, 1))
    m, v = np.zeros_like(x), np.zeros_like(x)
    old, buffer = x[0].copy(), np.zeros_like(x[0])
    seen = []
    for step in range(1, steps + 1):
        g = all_grads(size, step, dtype).astype("f8")
        m = B1 * m + (1 - B1) * g
        v = B2 * v + (1 - B2) * g**2
        x = x - LR * DECAY * x
        x = x - LR * (m / (1 - B1**step)) / (np.sqrt(v / (1 - B2**step)) + EPS)
        if step % every == 0:
            delta = old - x.mean(axis=0)
            buffer = 0.9 * buffer + delta
            old = old - 0.7 * (delta + 0.9 * buffer)
            x = np.tile(old, (size, 1))
        seen.append(x)
    return np.stack(seen)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("every", [1, 3])
def test_updates_by_hand(size, dtype, every):
    seen = run(size, lambda p, t: DiLoCo(p, inner(), every=every, comm=t), 8, dtype)
    np.testing.assert_allclose(seen, by_hand(size, 8, every, dtype), **rough(dtype))
    assert all(one.tobytes() == seen[5][0].tobytes() for one in seen[5])


def test_what_it_counts():
    def body(team):
        model = DiLoCo(weights(0, "f4"), inner(), every=5, comm=team)
        for step in range(1, 13):
            model.step(grads(team.index, step, "f4"))
        before = model.statistics()
        outer = flat(model.outer_params)
        assert flat(model.params).tobytes() != outer.tobytes()
        model.meet()  # the round under way
        model.meet()  # nothing: an outer step of no gradient would move by its momentum
        assert flat(model.params).tobytes() == flat(model.outer_params).tobytes()
        assert flat(model.params).tobytes() != outer.tobytes()
        return before, model.statistics(), model.rounds

    size = 4 * (15 + 4 + 1)
    for before, after, rounds in together(2, body):
        assert before == {
            "members": 2, "steps": 12, "reductions": 2, "bytes": 2 * size,
            "reductions_saved": 10, "bytes_saved": 10 * size, "rounds": 2,
        }  # fmt: skip
        assert (after["reductions"], after["reductions_saved"], rounds) == (3, 9, 3)


def test_five_hundred_steps_are_a_round_unless_said():
    def body(team):
        model = DiLoCo(np.zeros(2), inner(), comm=team)
        assert model.every == 500
        assert repr(model.outer) == repr(optim.Momentum(0.7, 0.9, nesterov=True))

    together(1, body)


def test_plain_outer_descent_is_the_mean_of_parameters():
    make = lambda p, t: DiLoCo(p, optim.SGD(0.1), optim.SGD(1.0), every=2, comm=t)  # noqa: E731
    seen = run(3, make, 4)
    expected = flat(weights(0)) - 0.1 * sum(all_grads(3, i).mean(axis=0) for i in (1, 2, 3, 4))
    np.testing.assert_allclose(seen[3][1], expected, rtol=1e-12)


def test_outer_rates_go_by_rounds():
    make = lambda p, t: DiLoCo(  # noqa: E731
        p, optim.SGD(0.1), optim.SGD(lambda done: 1.0 / (1 + done)), every=2, comm=t
    )
    seen = run(2, make, 4)
    gradient = [all_grads(2, i).mean(axis=0) for i in (1, 2, 3, 4)]
    x = flat(weights(0)) - 0.1 * (gradient[0] + gradient[1])
    x = x - 0.5 * 0.1 * (gradient[2] + gradient[3])
    np.testing.assert_allclose(seen[3][0], x, rtol=1e-12)


@modes
def test_everywhere(mode):
    def body(comm):
        bucket = Bucket(comm, like=np.zeros(6))
        model = DiLoCo(bucket, optim.SGD(0.5), every=2)
        mean = (bucket.size - 1) / 2
        model.step(np.full(6, float(bucket.index)))
        np.testing.assert_allclose(bucket.tree, -0.5 * bucket.index)
        model.step(np.full(6, float(bucket.index)))
        np.testing.assert_allclose(bucket.tree, -0.7 * 1.9 * mean, atol=1e-12)

    everywhere(mode, body)


def test_it_converges_on_a_quadratic():
    def body(team):
        target = np.arange(4.0) + team.index
        model = DiLoCo(np.zeros(4), optim.SGD(0.02), every=10, comm=team)
        for _ in range(3000):
            model.step(model.params - target)
        return model.outer_params

    for found in together(3, body):
        np.testing.assert_allclose(found, np.arange(4.0) + 1, rtol=1e-6)


def test_outer_steps_that_differ_are_an_error_on_all():
    def body(team):
        model = DiLoCo(np.zeros(3), inner(), every=2, comm=team)
        model.step(np.ones(3))
        model.outer.lr = (0.7, 0.8)[team.index]
        model.step(np.ones(3))

    for error in outcomes(2, body):
        assert isinstance(error, UsageError)
        assert "round 1 after 2 steps, Momentum(lr=0.7," in str(error)
        assert "Momentum(lr=0.8," in str(error)


@pytest.mark.parametrize("outer", ["sgd", optim.Momentum])
def test_outer_is_an_optimizer(outer):
    for error in outcomes(2, lambda team: DiLoCo(np.zeros(3), inner(), outer, comm=team)):
        assert "DiLoCo: outer: optimizer: expected an optimizer of mpiml.optim" in str(error)
