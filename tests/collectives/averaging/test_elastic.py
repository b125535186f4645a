"""Elastic: EASGD and EAMSGD by hand, elastic symmetry, and the range in which it is stable."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml import optim
from mpiml.collectives import Bucket
from mpiml.collectives.averaging import (
    Elastic,
    elastic_difference,
    elastic_exchange,
    elastic_limit,
)
from mpiml.errors import UsageError
from tests.collectives.averaging.crowd import all_grads, flat, rough, run, weights
from tests.collectives.everywhere import everywhere, modes
from tests.collectives.together import outcomes, together

SIZES = pytest.mark.parametrize("size", [1, 2, 3])
DTYPES = pytest.mark.parametrize("dtype", ["f4", "f8"])


def see(model):
    """Parameters, center and the point that the center draws, in one."""
    return np.concatenate([flat(t) for t in (model.params, model.center, model.positions)])


def thirds(seen):
    n = seen.shape[-1] // 3
    return seen[..., :n], seen[..., n : 2 * n], seen[..., 2 * n :]


# -- updates ---------------------------------------------------------------------------------------


@SIZES
@DTYPES
@pytest.mark.parametrize("every", [1, 3])
def test_easgd_by_hand(size, dtype, every):
    make = lambda p, t: Elastic(p, optim.SGD(0.1), alpha=0.2, every=every, comm=t)  # noqa: E731
    params, centers, positions = thirds(run(size, make, 8, dtype, see))
    x = np.tile(flat(weights(0, dtype)).astype("f8"), (size, 1))
    center = x[0].copy()
    for step in range(8):
        g = all_grads(size, step + 1, dtype)
        pull = 0.2 * (x - center) if step % every == 0 else np.zeros_like(x)
        x = x - 0.1 * g - pull
        center = center + pull.sum(axis=0)
        np.testing.assert_allclose(params[step], x, **rough(dtype))
        np.testing.assert_allclose(centers[step], np.tile(center, (size, 1)), **rough(dtype))
        assert positions[step].tobytes() == params[step].tobytes()
        assert all(c.tobytes() == centers[step][0].tobytes() for c in centers[step])


@SIZES
@DTYPES
@pytest.mark.parametrize("every", [1, 3])
def test_eamsgd_is_the_published_recursion(size, dtype, every):
    """v = delta v - lr g(x + delta v); x += v: the member holds x + delta v, the force is x's."""
    lr, delta, alpha = 0.1, 0.8, 0.15
    target = np.linspace(-1, 1, 20)  # the gradient depends on where it is taken

    def body(team):
        optimizer = optim.Momentum(lr, delta, nesterov=True)
        params = np.zeros(20, dtype)
        model = Elastic(params, optimizer, alpha=alpha, every=every, comm=team)
        seen = []
        for _ in range(9):
            model.step((model.params - target * (1 + team.index)).astype(dtype))
            seen.append(np.concatenate([model.params, model.center, model.positions]))
        return seen

    params, centers, positions = thirds(np.stack(together(size, body), axis=1))
    x, v = np.zeros((size, 20)), np.zeros((size, 20))
    center = np.zeros(20)
    targets = np.stack([target * (1 + i) for i in range(size)])
    for step in range(9):
        pull = alpha * (x - center) if step % every == 0 else np.zeros_like(x)
        v = delta * v - lr * (x + delta * v - targets)
        x = x + v - pull
        center = center + pull.sum(axis=0)
        np.testing.assert_allclose(positions[step], x, **rough(dtype))
        np.testing.assert_allclose(params[step], x + delta * v, **rough(dtype))
        np.testing.assert_allclose(centers[step], np.tile(center, (size, 1)), **rough(dtype))


def test_where_it_looks_ahead_from_when_the_rate_changes():
    def body(team):
        optimizer = optim.Momentum(lambda done: 0.1 / (1 + done), 0.9, nesterov=True)
        model = Elastic(np.zeros(4), optimizer, every=9, comm=team)
        for step in range(1, 5):
            before, grad = model.params.copy(), np.arange(4.0) + step
            model.step(grad)
            np.testing.assert_allclose(model.positions, before - 0.1 / step * grad, rtol=1e-12)

    together(1, body)


@modes
def test_everywhere(mode):
    def body(comm):
        bucket = Bucket(comm, like=np.zeros(6))
        index, size = bucket.index, bucket.size
        model = Elastic(bucket, optim.SGD(0.5), rho=0.2, every=2)
        x, center = np.zeros(size), 0.0
        for step in range(5):
            model.step(np.full(6, float(index)))
            pull = 0.1 * (x - center) * (step % 2 == 0)
            x, center = x - 0.5 * np.arange(size) - pull, center + pull.sum()
            np.testing.assert_allclose(bucket.tree, x[index], atol=1e-12)
            np.testing.assert_allclose(model.center, center, atol=1e-12)

    everywhere(mode, body)


@pytest.mark.parametrize("rule", ["sgd", "nesterov"])
def test_elastic_symmetry(rule):
    """An exchange changes members and center by amounts whose sum is zero."""

    def body(team):
        made = {"sgd": optim.SGD(0.1), "nesterov": optim.Momentum(0.1, 0.5, nesterov=True)}
        model = Elastic(weights(0), made[rule], alpha=0.3, every=4, comm=team)
        seen = []
        for step in range(1, 11):
            model.step(weights([3, team.index, step]))
            before = see(model)
            model.meet()
            seen.append((before, see(model)))
        return seen

    for row in zip(*together(3, body), strict=True):
        before, after = (np.stack([one[i] for one in row]) for i in (0, 1))
        (p0, c0, x0), (p1, c1, x1) = thirds(before), thirds(after)
        assert np.abs(x1 - x0).max() > 1e-3
        for was, now in ((x0, x1), (p0, p1)):
            np.testing.assert_allclose((now - was).sum(axis=0) + (c1 - c0)[0], 0, atol=1e-12)
        np.testing.assert_allclose(x1 - x0, -0.3 * (x0 - c0), atol=1e-12)


def test_an_exchange_by_itself_starts_the_count_again():
    def body(team):
        model = Elastic(np.zeros(2), optim.SGD(0.1), every=3, comm=team)
        done = []
        for step in range(8):
            if step == 5:
                model.meet()
                model.meet()  # nothing
            before = model.statistics()["reductions"]
            model.step(np.ones(2))
            done.append(model.statistics()["reductions"] - before)
        return done, model.statistics()

    for done, statistics in together(2, body):
        assert done == [1, 0, 0, 1, 0, 0, 0, 0]
        assert (statistics["reductions"], statistics["bytes_saved"]) == (3, 5 * 16)


def test_the_force_follows_the_learning_rate():
    def body(team):
        optimizer = optim.SGD(lambda done: 0.4 / (1 + done))
        model = Elastic(np.zeros(1), optimizer, rho=0.5, comm=team)
        forces = []
        for _ in range(3):
            forces.append(model.alpha)
            model.step(np.ones(1))
        return forces, Elastic(np.zeros(1), optim.SGD(0.1), comm=team).alpha

    for forces, published in together(2, body):
        assert forces == pytest.approx([0.2, 0.1, 0.2 / 3])
        assert published == pytest.approx(0.45)


@pytest.mark.parametrize(
    "optimizer", [optim.SGD(0.2), optim.Momentum(0.1, 0.6, nesterov=True), optim.Adam(0.05)]
)
def test_it_converges_on_a_quadratic(optimizer):
    def body(team):
        # Adam's direction is not linear: members with other targets balance elsewhere
        target = np.arange(4.0) + (1 if optimizer.name == "Adam" else team.index)
        model = Elastic(np.zeros(4), optimizer, every=4, comm=team)
        for _ in range(600):
            model.step(model.params - target)
        return model.center

    for found in together(3, body):
        np.testing.assert_allclose(found, np.arange(4.0) + 1, atol=1e-4)


# -- the range -------------------------------------------------------------------------------------


def radius(eta, alpha, members, momentum, nesterov, every=1):
    """The largest eigenvalue of what `every` steps do to a quadratic of curvature 1."""
    force = np.array([-eta, momentum - (eta * momentum if nesterov else 0), 0])
    local = np.stack([np.array([1, 0, 0]) + force, force, np.array([0, 0, 1])])  # x, v, center
    beta = members * alpha
    exchange = local + np.array([[-alpha, 0, alpha], [0, 0, 0], [beta, 0, -beta]])
    whole = np.linalg.matrix_power(local, every - 1) @ exchange
    apart = np.linalg.matrix_power(local[:2, :2], every - 1) @ exchange[:2, :2]
    found = [np.abs(np.linalg.eigvals(whole)).max()]
    if members > 1:  # members against each other, around the center
        found.append(np.abs(np.linalg.eigvals(apart)).max())
    return max(found)


@given(
    part=st.floats(0.001, 0.999),
    less=st.floats(0.001, 1),
    members=st.integers(1, 16),
    momentum=st.one_of(st.just(0.0), st.floats(0, 0.95)),
    nesterov=st.booleans(),
    every=st.integers(1, 8),
)
@settings(max_examples=200, deadline=None)
def test_the_limit_is_where_it_becomes_unstable(part, less, members, momentum, nesterov, every):
    most = (2 + 2 * momentum) / (1 + 2 * momentum) if nesterov else 2 + 2 * momentum
    eta = part * most
    limit = elastic_limit(eta, members, momentum, nesterov=nesterov)
    every = 1 if momentum else every
    assert radius(less * eta, 0.999 * limit, members, momentum, nesterov, every) <= 1 + 1e-9
    if limit < 0.999 / members:  # else it is the center's, which is not about stability
        assert radius(eta, 1.001 * limit + 1e-6, members, momentum, nesterov) > 1


@given(eta=st.floats(0, 2))
def test_one_at_a_time_it_is_the_published_range(eta):
    assert elastic_limit(eta) == pytest.approx((4 - 2 * eta) / (4 - eta))


def test_the_model_swings_where_it_is_refused():
    """What would be refused does diverge, and what is allowed does not."""

    def ends(alpha, curvature):
        def body(team):
            model = Elastic(
                np.ones(1), optim.SGD(1.7), alpha=alpha, curvature=curvature, comm=team
            )
            for _ in range(400):
                model.step(model.params - 0.0)
            return abs(model.params[0])

        return max(together(2, body))

    limit = elastic_limit(1.7, 2)
    assert limit < 0.5
    assert ends(0.99 * limit, 1.0) < 1
    assert ends(1.05 * limit, 1e-3) > 1e3  # a curvature that is not true


@pytest.mark.parametrize(
    ("arguments", "lr", "text"),
    [
        ({"alpha": 0.51}, 0.1, "at most 1 / members, 0.5, got 0.51: 2 members .* beta = 1.02"),
        ({"rho": 6.0}, 0.1, "at most 1 / members, 0.5, got 0.6"),
        ({"alpha": 0.3}, 1.7, "at most 0.2308 for 2 members, lr=1.7 .* got 0.3: .* ever wider"),
        (
            {"alpha": 0.1},
            2.1,
            r"^Elastic: optimizer: .* 0\.\.2 .* got 2.1: .* farther than the one before",
        ),
        ({"alpha": 0.1, "rho": 1.0}, 0.1, "expected alpha or rho"),
        ({"alpha": 0}, 0.1, "alpha: expected a number > 0, got 0"),
        ({"alpha": "much"}, 0.1, "alpha: expected a number > 0, got 'much'"),
        ({"rho": -1.0}, 0.1, "rho: expected a number > 0"),
        ({"curvature": 0.0}, 0.1, "curvature: expected a number > 0"),
        ({"every": 0}, 0.1, "every: expected a whole number >= 1, got 0"),
    ],
)
def test_what_is_out_of_range_is_refused_with_the_reason(arguments, lr, text):
    for error in outcomes(
        2, lambda team: Elastic(np.zeros(3), optim.SGD(lr), comm=team, **arguments)
    ):
        assert isinstance(error, UsageError)
        assert re.search(text, str(error)), error


def test_less_curvature_allows_more():
    def body(team):
        Elastic(np.zeros(3), optim.SGD(3.0), alpha=0.4, curvature=0.1, comm=team)
        Elastic(np.zeros(3), optim.Adam(3.0), alpha=0.4, comm=team)  # no range is known

    together(2, body)


def test_a_rate_that_leaves_the_range_is_refused_in_its_step():
    def body(team):
        model = Elastic(np.zeros(3), optim.SGD(lambda done: 1.0 + done), alpha=0.2, comm=team)
        model.step(np.ones(3))
        before = model.params.copy()
        with pytest.raises(UsageError, match=r"got 0.2: .* ever wider"):
            model.step(np.ones(3))
        assert model.params.tobytes() == before.tobytes()
        assert model.steps == 1

    together(2, body)


def test_members_that_draw_differently_are_an_error_on_all():
    def body(team):
        Elastic(np.zeros(3), optim.SGD(0.1), alpha=0.1 * (1 + team.index), comm=team)

    for error in outcomes(2, body):
        assert "expected the same" in str(error)
        assert "alpha=0.2" in str(error)


# -- the asynchronous pair -------------------------------------------------------------------------


@DTYPES
def test_the_asynchronous_pair(dtype):
    x, center = weights(1, dtype), weights(2, dtype)
    kept = flat(x).tobytes(), flat(center).tobytes()
    moved = elastic_difference(x, center, 0.25)
    np.testing.assert_allclose(flat(moved), 0.25 * (flat(x) - flat(center)), **rough(dtype))
    ours, theirs = elastic_exchange(x, center, 0.25)
    assert flat(ours).tobytes() == (flat(x) - flat(moved)).tobytes()
    assert flat(theirs).tobytes() == (flat(center) + flat(moved)).tobytes()
    assert (flat(x).tobytes(), flat(center).tobytes()) == kept
    for tree in (moved, ours, theirs):  # an array without axes is one still
        assert all(type(a) is np.ndarray and a.dtype == dtype for a in tree[1].values())


@given(alpha=st.floats(0, 1), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_what_one_loses_the_other_wins(alpha, seed):
    x, center = weights(seed), weights(seed + 1)
    ours, theirs = elastic_exchange(x, center, alpha)
    np.testing.assert_allclose(flat(ours) + flat(theirs), flat(x) + flat(center), atol=1e-12)


@pytest.mark.parametrize("function", [elastic_difference, elastic_exchange])
@pytest.mark.parametrize(
    ("x", "center", "alpha", "text"),
    [
        (np.zeros(3), np.zeros(3), 1.5, r"alpha: expected a number in \[0, 1\], got 1.5"),
        (np.zeros(3), np.zeros(4), 0.5, r"x float64\(3,\) and center float64\(4,\)"),
        (np.zeros(3), np.zeros(3, "f4"), 0.5, "of one shape and dtype"),
        (np.zeros(3, "i4"), np.zeros(3, "i4"), 0.5, "floating-point"),
        ([np.zeros(3)], (np.zeros(3),), 0.5, "a center like x"),
    ],
)
def test_pairs_that_do_not_fit(function, x, center, alpha, text):
    with pytest.raises(UsageError, match=f"^{function.__name__}: .*{text}|{text}"):
        function(x, center, alpha)


@pytest.mark.parametrize(
    "arguments", [(-0.1,), (2.1,), (0.5, 0), (0.5, 2, 1.0), (0.5, 2, -0.1), ("x",)]
)
def test_limits_of_nothing(arguments):
    with pytest.raises(UsageError, match="elastic_limit"):
        elastic_limit(*arguments)
