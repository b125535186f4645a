"""LocalSGD and PostLocalSGD: each update by hand; with H = 1 the bits of synchronous SGD."""

import numpy as np
import pytest

from mpiml import optim
from mpiml.collectives import Bucket, allreduce
from mpiml.collectives.averaging import LocalSGD, PostLocalSGD
from mpiml.errors import UsageError
from tests.collectives.averaging.crowd import all_grads, flat, grads, rough, run, weights
from tests.collectives.everywhere import everywhere, modes
from tests.collectives.together import outcomes, together

SIZES = pytest.mark.parametrize("size", [1, 2, 3])
DTYPES = pytest.mark.parametrize("dtype", ["f4", "f8"])
RULES = {
    "sgd": lambda: optim.SGD(lambda done: 0.1 / (1 + done), weight_decay=0.01),
    "momentum": lambda: optim.Momentum(0.1, 0.9),
    "nesterov": lambda: optim.Momentum(0.1, 0.9, nesterov=True),
    "adam": lambda: optim.Adam(0.1),
}


@SIZES
@DTYPES
@pytest.mark.parametrize("every", [2, 3])
def test_means_of_parameters_by_hand(size, dtype, every):
    seen = run(size, lambda p, t: LocalSGD(p, optim.SGD(0.1), every=every, comm=t), 7, dtype)
    x = np.tile(flat(weights(0, dtype)), (size, 1))
    for step in range(1, 8):
        x = x - 0.1 * all_grads(size, step, dtype)
        if step % every == 0:
            x = np.tile(x.mean(axis=0), (size, 1))
        np.testing.assert_allclose(seen[step - 1], x, **rough(dtype))
        if step % every == 0:  # to the last bit
            assert all(one.tobytes() == seen[step - 1][0].tobytes() for one in seen[step - 1])


@SIZES
def test_momentum_stays_with_the_member(size):
    make = lambda p, t: LocalSGD(p, optim.Momentum(0.1, 0.5), every=2, comm=t)  # noqa: E731
    seen = run(size, make, 5)
    x = np.tile(flat(weights(0)), (size, 1))
    m = np.zeros_like(x)
    for step in range(1, 6):
        m = 0.5 * m + all_grads(size, step)
        x = x - 0.1 * m
        if step % 2 == 0:
            x = np.tile(x.mean(axis=0), (size, 1))
        np.testing.assert_allclose(seen[step - 1], x, **rough("f8"))


def synchronous(team, optimizer, steps, dtype):
    """Synchronous SGD, as one writes it: parameters after each step."""
    params = weights(0, dtype)
    leaves = [params[0], params[1]["b"], params[1]["s"]]
    states = [optimizer.init(leaf) for leaf in leaves]
    for step in range(1, steps + 1):
        mean = allreduce(grads(team.index, step, dtype), "mean", team)
        parts = zip(leaves, [mean[0], mean[1]["b"], mean[1]["s"]], states, strict=True)
        for leaf, grad, state in parts:
            optimizer.apply(leaf, grad, state, step)
        yield flat(params)


@SIZES
@DTYPES
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("way", ["tree", "bucket", "post"])
def test_with_one_step_the_bits_of_synchronous_sgd(size, dtype, rule, way):
    def body(team):
        params = weights(team.index, dtype)
        if way == "post":
            model = PostLocalSGD(params, RULES[rule](), every=5, until=6, comm=team)
        else:
            model = LocalSGD(params, RULES[rule](), every=1, comm=team)
        bucket = Bucket(team, like=params)
        for step, expected in enumerate(synchronous(team, RULES[rule](), 6, dtype), 1):
            mine = grads(team.index, step, dtype)
            kept = flat(mine).tobytes()
            bucket.tree[0][...] = mine[0]
            bucket.tree[1]["b"][...], bucket.tree[1]["s"][...] = mine[1]["b"], mine[1]["s"]
            model.step(bucket if way == "bucket" else mine)
            assert flat(model.params).tobytes() == expected.tobytes()
            assert flat(mine).tobytes() == kept
        model.meet()  # there is nothing to do
        assert flat(model.params).tobytes() == expected.tobytes()
        assert model.statistics()["reductions"] == 6

    together(size, body)


@modes
def test_one_step_and_several_everywhere(mode):
    def body(comm):
        local, params, expected = np.zeros(6), np.ones(6, "f4"), np.ones(6, "f4")
        one = LocalSGD(params, optim.SGD(0.1), every=1, comm=comm)
        bucket = Bucket(comm, like=np.zeros(6))
        two = LocalSGD(bucket, optim.SGD(0.1), every=2)
        index, size = bucket.index, bucket.size
        for step in range(1, 5):
            grad = np.random.default_rng([index, step]).normal(size=6).astype("f4")
            one.step(grad)
            optim.SGD(0.1).apply(expected, allreduce(grad, "mean", comm), (), step)
            assert params.tobytes() == expected.tobytes()
            two.step(np.full(6, float(index)))
            local -= 0.1 * index
            if step % 2 == 0:
                local[:] = -0.1 * step * (size - 1) / 2
            np.testing.assert_allclose(bucket.tree, local, atol=1e-12)

    everywhere(mode, body)


@pytest.mark.parametrize("until", [4, lambda done: done >= 4])
def test_post_local_goes_over_once(until):
    def body(team):
        model = PostLocalSGD(weights(0), optim.SGD(0.1), every=3, until=until, comm=team)
        together_, apart = [], []
        for step in range(1, 11):
            model.step(grads(team.index, step))
            (together_ if model.synchronous else apart).append(step)
        return together_, apart, flat(model.params), model.statistics()

    found = together(2, body)
    assert found[0][:2] == ([1, 2, 3, 4], [5, 6, 7, 8, 9, 10])
    assert found[0][2].tobytes() == found[1][2].tobytes()
    expected = flat(weights(0)) - 0.1 * sum(all_grads(2, i).mean(axis=0) for i in range(1, 11))
    np.testing.assert_allclose(found[0][2], expected, rtol=1e-12)
    assert (found[0][3]["reductions"], found[0][3]["reductions_saved"]) == (6, 4)


def test_a_predicate_is_not_asked_again():
    answers = iter([False, True])

    def body(team):
        model = PostLocalSGD(
            np.zeros(3), optim.SGD(1.0), every=9, until=lambda done: next(answers), comm=team
        )
        for _ in range(5):
            model.step(np.ones(3))
        assert not model.synchronous
        other = PostLocalSGD(np.zeros(3), optim.SGD(1.0), every=9, until=9, comm=team)
        other.load_state_dict(model.state_dict())
        assert not other.synchronous

    together(1, body)


def test_a_predicate_that_differs_is_an_error_on_all():
    def body(team):
        until = (lambda done: done >= 2) if team.index else (lambda done: done >= 5)
        model = PostLocalSGD(np.zeros(3), optim.SGD(1.0), every=2, until=until, comm=team)
        for _ in range(9):
            model.step(np.ones(3))

    for error in outcomes(2, body):
        assert isinstance(error, UsageError)
        assert "PostLocalSGD: gradients" in str(error)
        assert "PostLocalSGD.step" in str(error)


def test_a_predicate_that_raises_is_an_error_on_all():
    def until(done):
        raise KeyError("plateau")

    def body(team):
        own = until if team.index else (lambda done: False)
        model = PostLocalSGD(np.zeros(3), optim.SGD(1.0), every=2, until=own, comm=team)
        model.step(np.ones(3))

    first, second = outcomes(2, body)
    assert isinstance(first, UsageError)
    assert "plateau" in str(first)
    assert isinstance(second, KeyError)


@pytest.mark.parametrize("until", [-1, 1.5, None, True])
def test_until_is_a_number_or_a_function(until):
    def body(team):
        PostLocalSGD(np.zeros(3), optim.SGD(1.0), every=2, until=until, comm=team)

    for error in outcomes(2, body):
        assert "PostLocalSGD: until: expected a whole number >= 0" in str(error)


def test_it_converges_on_a_quadratic():
    def body(team):
        target = np.arange(4.0) + team.index
        model = LocalSGD(np.zeros(4), optim.SGD(0.2), every=4, comm=team)
        for _ in range(100):
            model.step(model.params - target)
        return model.params

    for found in together(3, body):
        np.testing.assert_allclose(found, np.arange(4.0) + 1, rtol=1e-8)
