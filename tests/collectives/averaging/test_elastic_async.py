"""AsyncElastic: algorithms 1 and 2 of EASGD by hand, elastic symmetry in a race, its checkpoints."""

import re

import numpy as np
import pytest

from mpiml import optim
from mpiml.collectives import Bucket, allreduce
from mpiml.collectives.averaging import AsyncElastic, elastic_limit
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives.averaging.crowd import flat, grads, rough, weights
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.together import outcomes, together

DTYPES = pytest.mark.parametrize("dtype", ["f4", "f8"])
RULES = {"sgd": optim.SGD(0.1), "nesterov": optim.Momentum(0.1, 0.8, nesterov=True)}
rules = pytest.mark.parametrize("rule", list(RULES))


def in_turn(model, index, size, step):
    """Let the members do one step each, one after the other; return the center after each."""
    seen = []
    for turn in range(size):
        if turn == index:
            step()
        seen.append(model.finish())
    return seen


# -- updates ---------------------------------------------------------------------------------------


@places
@DTYPES
@pytest.mark.parametrize("every", [1, 3])
def test_easgd_by_hand(place, dtype, every, monkeypatch):
    """Algorithm 1, one member after the other: each meets what the one before it has left."""

    def body(comm):
        optimizer = optim.SGD(0.1)
        with AsyncElastic(weights(0, dtype), optimizer, every=every, comm=comm) as model:
            index, size = model._team.index, model.members
            alpha = 0.9 / size
            x = np.tile(flat(weights(0, dtype)).astype("f8"), (size, 1))
            center = x[0].copy()
            for step in range(5):
                seen = in_turn(
                    model, index, size, lambda s=step: model.step(grads(index, s, dtype))
                )
                for turn in range(size):
                    pull = alpha * (x[turn] - center) if step % every == 0 else 0.0
                    center = center + pull
                    x[turn] -= pull + 0.1 * flat(grads(turn, step, dtype))
                    np.testing.assert_allclose(flat(seen[turn]), center, **rough(dtype))
                np.testing.assert_allclose(flat(model.params), x[index], **rough(dtype))
                assert flat(model.positions).tobytes() == flat(model.params).tobytes()
            done = 5 if every == 1 else 2
            assert model.statistics()["exchanges"] == done
            if model._model.home:  # elsewhere `finish` is a read too
                assert model.statistics()["staleness"] == {
                    "samples": done,
                    "mean": 0,
                    "largest": 0,
                }
        assert flat(model.center).tobytes() == flat(seen[-1]).tobytes()  # after its end too

    played(place, body, monkeypatch)


@places
@pytest.mark.parametrize("every", [1, 2])
def test_eamsgd_is_the_published_recursion(place, every, monkeypatch):
    """v = delta v - lr g(x + delta v); x += v: the member holds x + delta v, the force is x's."""
    lr, delta, alpha = 0.1, 0.8, 0.15
    target = np.linspace(-1, 1, 20)  # the gradient depends on where it is taken

    def body(comm):
        optimizer = optim.Momentum(lr, delta, nesterov=True)
        with AsyncElastic(
            np.zeros(20), optimizer, alpha=alpha, every=every, comm=comm
        ) as model:
            index, size = model._team.index, model.members
            x, v, center = np.zeros((size, 20)), np.zeros((size, 20)), np.zeros(20)
            for step in range(5):
                seen = in_turn(
                    model, index, size,
                    lambda: model.step(model.params - target * (1 + index)),
                )  # fmt: skip
                for i in range(size):
                    pull = alpha * (x[i] - center) if step % every == 0 else 0.0
                    v[i] = delta * v[i] - lr * (x[i] + delta * v[i] - target * (1 + i))
                    x[i] += v[i] - pull
                    center = center + pull
                    np.testing.assert_allclose(seen[i], center, **rough("f8"))
                np.testing.assert_allclose(model.positions, x[index], **rough("f8"))
                np.testing.assert_allclose(
                    model.params, x[index] + delta * v[index], **rough("f8")
                )

    played(place, body, monkeypatch)


@places
@rules
def test_a_race_loses_nothing(place, rule, monkeypatch):
    """Without gradients the sum of all members and the center stays what it was."""

    def body(comm):
        bucket = Bucket(comm, like=np.zeros(300))
        made = RULES[rule]
        with AsyncElastic(bucket, made, every=1) as model:
            index, size = model._team.index, model.members
            bucket.tree[:] = np.random.default_rng(index).normal(size=300)
            start = model.finish()
            before = allreduce(model.positions, "sum", comm) + start
            for _ in range(40):
                model.step(np.zeros(300))
            center = model.finish()
            after = allreduce(model.positions, "sum", comm) + center
            np.testing.assert_allclose(after, before, rtol=0, atol=1e-12)
            assert np.abs(center - start).max() > 0.1  # and it did something
            assert model.statistics()["exchanges"] == 40
            assert model._model.version == 1 + 40 * size

    played(place, body, monkeypatch)


@rules
def test_elastic_symmetry_of_one_exchange(rule):
    def body(team):
        with AsyncElastic(weights(0), RULES[rule], alpha=0.3, every=4, comm=team) as model:
            for step in range(1, 8):
                model.step(weights([3, step]))
            x, held, center = map(flat, (model.positions, model.params, model.center))
            model.meet()
            moved = flat(model.positions) - x
            assert np.abs(moved).max() > 1e-3
            np.testing.assert_allclose(moved, -0.3 * (x - center), atol=1e-12)
            np.testing.assert_allclose(flat(model.params) - held, moved, atol=1e-12)
            np.testing.assert_allclose(flat(model.center) - center, -moved, atol=1e-12)

    together(1, body)


def test_a_member_reads_the_center_of_before_its_own_part():
    """Both read at the same moment: each takes the force of the center that it saw."""

    def body(team):
        with AsyncElastic(np.zeros(3), optim.SGD(0.1), alpha=0.25, comm=team) as model:
            model.params[:] = 1.0 + team.index
            exchange, read = model._exchange, []

            def held(plan):
                model._model.add = lambda tree: read.append(tree[0].copy())
                pulls = exchange(plan)
                del model._model.add
                model.finish()  # both have read, none has added
                model._model.add([pulls[0]])
                return pulls

            model._exchange = held
            model.step(np.zeros(3))
            np.testing.assert_allclose(read[0], 0.25 * (1 + team.index))
            np.testing.assert_allclose(model.params, 0.75 * (1 + team.index))
            np.testing.assert_allclose(model.finish(), 0.25 * 3)
            return model.statistics()["staleness"]

    for staleness in together(2, body):
        assert staleness["samples"] == 1
        assert staleness["largest"] <= 1


@places
def test_members_need_not_make_the_same_steps(place, monkeypatch):
    def body(comm):
        with AsyncElastic(np.zeros(4), optim.SGD(0.2), every=2, comm=comm) as model:
            for _ in range(3 * model._team.index):  # member 0 makes none
                model.step(model.params - 1.0)
            steps = model.statistics()["steps"]
            assert steps == model.steps == 3 * model._team.index
            assert model.statistics()["exchanges"] == -(-steps // 2)
            model.meet()  # with nobody
            model.meet()  # nothing
            assert model.statistics()["exchanges"] == -(-steps // 2) + 1
            center = model.finish()
            assert (center > 0).all() == (model.members > 1)

    played(place, body, monkeypatch)


@places
@rules
def test_it_converges_on_a_quadratic(place, rule, monkeypatch):
    """All draw to one center, whose best is the mean of theirs."""

    def body(comm):
        with AsyncElastic(np.zeros(4), RULES[rule], every=4, comm=comm) as model:
            target = np.arange(4.0) + 1
            for _ in range(600):
                model.step(model.params - target)
            allreduce(np.zeros(1), comm=comm)  # one that began late may draw the others back
            for _ in range(200):
                model.step(model.params - target)
            np.testing.assert_allclose(model.finish(), target, atol=1e-4)

    played(place, body, monkeypatch)


def test_members_with_targets_of_their_own_balance_at_the_mean():
    """In turn, where no schedule favours one: over a round the center is the mean, exactly."""

    def body(team):
        with AsyncElastic(np.zeros(2), optim.SGD(0.2), every=1, comm=team) as model:
            target = np.array([1.0, -2.0]) * (1 + team.index)
            for _ in range(200):
                seen = in_turn(
                    model, team.index, team.size, lambda: model.step(model.params - target)
                )
            return np.mean(seen, axis=0)

    for found in together(3, body):
        np.testing.assert_allclose(found, [2.0, -4.0], rtol=1e-9)


# -- the range -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "lr", "text"),
    [
        (
            {"alpha": 0.51},
            0.1,
            "AsyncElastic: alpha: expected at most 1 / members, 0.5, got 0.51",
        ),
        ({"alpha": 0.3}, 1.7, "at most 0.2308 for 2 members, lr=1.7 .* got 0.3: .* ever wider"),
        ({"alpha": 0.1}, 2.1, r"in 0\.\.2 .* got 2.1: .* farther than the one before"),
        ({"alpha": 0.1, "rho": 1.0}, 0.1, "AsyncElastic: expected alpha or rho"),
        ({"rho": -1.0}, 0.1, "rho: expected a number > 0"),
        ({"every": 0}, 0.1, "every: expected a whole number >= 1, got 0"),
    ],
)
def test_what_is_out_of_range_is_refused_with_the_reason(arguments, lr, text):
    for error in outcomes(
        2, lambda team: AsyncElastic(np.zeros(3), optim.SGD(lr), comm=team, **arguments)
    ):
        assert isinstance(error, UsageError)
        assert re.search(text, str(error)), error


def test_the_range_is_that_of_all_members_at_once():
    def body(team):
        limit = elastic_limit(1.7, 2)
        AsyncElastic(np.zeros(2), optim.SGD(1.7), alpha=limit, comm=team).close()

    together(2, body)


def test_a_rate_that_leaves_the_range_is_refused_in_its_step():
    def body(team):
        rate = optim.SGD(lambda done: 1.0 + done)
        with AsyncElastic(np.zeros(3), rate, alpha=0.2, comm=team) as model:
            model.step(np.ones(3))
            kept = model.params.tobytes(), model.finish().tobytes()
            with pytest.raises(UsageError, match=r"got 0.2: .* ever wider"):
                model.step(np.ones(3))
            assert (model.params.tobytes(), model.finish().tobytes()) == kept
            assert model.steps == 1

    together(2, body)


def test_one_members_error_leaves_the_others_alone():
    def body(team):
        with AsyncElastic(np.zeros(3), optim.SGD(0.1), comm=team) as model:
            if team.index == 0:
                model.step(np.zeros(3))
            else:
                with pytest.raises(UsageError, match=r"AsyncElastic\.step: grads"):
                    model.step(np.zeros(4))
            model.finish()
            return model.steps

    assert together(2, body) == [1, 0]


def test_members_that_draw_differently_are_an_error_on_all():
    def body(team):
        AsyncElastic(np.zeros(3), optim.SGD(0.1), alpha=0.1 * (1 + team.index), comm=team)

    for error in outcomes(2, body):
        assert "expected the same" in str(error)
        assert "alpha=0.2" in str(error)


# -- checkpoints and the end -----------------------------------------------------------------------


@places
@rules
def test_a_checkpoint_goes_on_where_it_was(place, rule, monkeypatch):
    def body(comm):
        def rest(model, index, size, first):
            for step in range(first, 6):
                seen = in_turn(model, index, size, lambda s=step: model.step(grads(index, s)))
            return seen[-1]

        with AsyncElastic(weights(0), RULES[rule], every=2, comm=comm) as model:
            index, size = model._team.index, model.members
            for step in range(3):
                in_turn(model, index, size, lambda s=step: model.step(grads(index, s)))
            state = model.state_dict()
            center, x = rest(model, index, size, 3), flat(model.params)
        with AsyncElastic(weights(9), RULES[rule], every=2, comm=comm) as other:
            other.step(grads(0, 0))  # is forgotten
            other.load_state_dict(state)
            assert other.steps == 3
            found = rest(other, index, size, 3)
            np.testing.assert_allclose(flat(other.params), x, atol=1e-12)
            np.testing.assert_allclose(flat(found), flat(center), atol=1e-12)

    played(place, body, monkeypatch)


def test_members_load_states_of_different_steps_and_the_center_of_member_0():
    def body(team):
        with AsyncElastic(np.zeros(2), optim.SGD(0.1), alpha=0.1, comm=team) as model:
            for _ in range(team.index + 1):
                model.step(np.ones(2))
            model.finish()
            state = model.state_dict()
            state["arrays"]["center"][:] = 5.0 + team.index
            model.load_state_dict(state)
            assert model.steps == team.index + 1
            assert model.finish().tolist() == [5.0, 5.0]
            state["rule"] = "Elastic"
            with pytest.raises(UsageError, match="rule"):
                model.load_state_dict(state)
            assert model.finish().tolist() == [5.0, 5.0]

    together(2, body)


def test_a_checkpoint_has_the_center_as_it_is_now():
    def body(team):
        with AsyncElastic(np.zeros(2), optim.SGD(0.1), alpha=0.1, comm=team) as model:
            seen = []
            for _ in range(3):
                model.step(np.ones(2))
                seen.append(model.state_dict()["arrays"]["center"].tolist())
                assert seen[-1] == model.center.tolist()
            assert len({tuple(center) for center in seen}) == 3

    together(1, body)


def test_what_is_closed_says_so():
    def body(team):
        model = AsyncElastic(np.ones(2), optim.SGD(0.1), comm=team)
        model.close()
        model.close()
        assert model.center.tolist() == [1.0, 1.0]
        assert model.params.tolist() == [1.0, 1.0]
        calls = [lambda: model.step(np.ones(2)), model.meet, model.finish, model.state_dict]
        for call in calls:
            with pytest.raises(ServiceGoneError, match=r"AsyncElastic.*: it is closed"):
                call()
        assert model.statistics()["steps"] == 0

    together(2, body)


def test_an_error_within_ends_it_without_the_others():
    def body(team):
        with AsyncElastic(np.ones(2), optim.SGD(0.1), comm=team) as model:
            model.finish()
            if team.index:
                raise KeyError("of the user")
            model.step(np.ones(2))
            raise KeyError("too")

    assert all(isinstance(error, KeyError) for error in outcomes(2, body))
