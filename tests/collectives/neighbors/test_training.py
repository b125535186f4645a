"""D-PSGD, push-sum and SGP: each update by hand, and what they keep."""

import numpy as np
import pytest

from mpiml import optim, topology
from mpiml.collectives import Bucket
from mpiml.collectives.members import team_of
from mpiml.collectives.neighbors import DPSGD, SGP, PushSum
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives.averaging.crowd import all_grads, flat, grads, rough, run, weights
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.together import outcomes, together

SIZES = pytest.mark.parametrize("size", [1, 2, 3, 4])
DTYPES = pytest.mark.parametrize("dtype", ["f4", "f8"])
LR = 0.1


def directed(n):
    """A ring with chords from even members: strongly connected, not balanced."""
    edges = [(i, (i + 1) % n) for i in range(n)] + [(i, (i + 2) % n) for i in range(0, n, 2)]
    return topology.push_sum(n, edges)


# -- D-PSGD ------------------------------------------------------------------------------------


@SIZES
@DTYPES
@pytest.mark.parametrize("order", ["awc", "atc"])
@pytest.mark.parametrize("graph", ["ring", "one_peer_exponential"])
def test_dpsgd_by_hand(size, dtype, order, graph):
    made = getattr(topology, graph)(size)
    seen = run(size, lambda p, t: DPSGD(p, optim.SGD(LR), made, order, t), 6, dtype)
    x = np.tile(flat(weights(0, dtype)).astype("f8"), (size, 1))
    for step in range(6):
        w = topology.as_schedule(made)[step].matrix()
        g = all_grads(size, step + 1, dtype)
        x = w @ x - LR * g if order == "awc" else w @ (x - LR * g)
        np.testing.assert_allclose(seen[step], x, **rough(dtype))


@SIZES
def test_dpsgd_with_momentum_by_hand(size):
    w = topology.ring(size).matrix()
    make = lambda p, t: DPSGD(p, optim.Momentum(LR, 0.9), topology.ring(size), comm=t)  # noqa: E731
    seen = run(size, make, 5)
    x = np.tile(flat(weights(0)), (size, 1))
    v = np.zeros_like(x)
    for step in range(5):
        v = 0.9 * v + all_grads(size, step + 1)
        x = w @ x - LR * v
        np.testing.assert_allclose(seen[step], x, rtol=1e-12, atol=1e-13)


@SIZES
def test_dpsgd_on_the_complete_graph_is_synchronous_sgd(size):
    graph = topology.complete(size)
    combined = run(size, lambda p, t: DPSGD(p, optim.SGD(LR), graph, "atc", t), 5)
    adapted = run(size, lambda p, t: DPSGD(p, optim.SGD(LR), graph, "awc", t), 5)
    x = flat(weights(0))
    for step in range(5):
        x = x - LR * all_grads(size, step + 1).mean(axis=0)
        np.testing.assert_allclose(combined[step], np.tile(x, (size, 1)), rtol=1e-12)
        np.testing.assert_allclose(adapted[step].mean(axis=0), x, rtol=1e-12)


@places
def test_dpsgd_everywhere(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        n, i = team.size, team.index
        graph = topology.ring(n)
        with Bucket(comm, like={"w": np.zeros(4)}) as bucket:
            bucket["w"][:] = i + 1.0  # that of member 0 is given to all
            model = DPSGD(bucket, optim.SGD(0.5), graph)
            x = np.ones(n)
            for step in range(4):
                model.step({"w": np.full(4, float(i + step))})
                x = graph.matrix() @ x - 0.5 * (np.arange(n) + step)
                np.testing.assert_allclose(bucket["w"], x[i], rtol=1e-12, atol=1e-12)
            model.meet()
            np.testing.assert_allclose(bucket["w"], x.mean(), rtol=1e-12)
            degree = len(graph.sends(i))
            assert model.statistics() == {
                "members": n, "steps": 4, "rounds": 4, "bytes": 4 * 32 * degree, "reductions": 1,
            }  # fmt: skip

    played(place, body, monkeypatch)


def test_a_checkpoint_goes_on_with_the_same_bits():
    def body(team):
        for make in (
            lambda p: DPSGD(
                p, optim.Momentum(LR, 0.9), topology.one_peer_exponential(3), comm=team
            ),
            lambda p: SGP(p, optim.Adam(LR), directed(3), comm=team),
        ):
            model = make(weights(team.index))
            for step in range(1, 4):
                model.step(grads(team.index, step))
            kept = model.state_dict()
            other = make(weights(9))
            other.load_state_dict(kept)
            for step in range(4, 7):
                model.step(grads(team.index, step))
                other.step(grads(team.index, step))
                assert flat(model.params).tobytes() == flat(other.params).tobytes()

    together(3, body)


def test_gradients_that_do_not_fit_are_an_error_on_neighbours_too():
    def body(team):
        model = DPSGD(np.zeros(3), optim.SGD(LR), topology.complete(3), comm=team)
        with pytest.raises(UsageError) as error:
            model.step(np.zeros(4 if team.index == 1 else 3))
        model.step(np.zeros(3))
        assert model.steps == 1
        return str(error.value)

    errors = together(3, body)
    assert "DPSGD.step: grads: expected a floating-point array of shape (3,)" in errors[1]
    assert "member 1 could not take part in DPSGD.step" in errors[0]
    assert "got numpy float64(4,)" in errors[2]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda t: DPSGD(np.zeros(2), optim.SGD(1), directed(3), comm=t), "doubly stochastic"),
        (lambda t: SGP(np.zeros(2), optim.SGD(1), _row_only(), t), "SGP: expected column-st"),
        (lambda t: SGP(np.zeros(2), optim.SGD(1), _parts(), t), "expected all members to be conn"),
        (lambda t: PushSum(np.zeros(2), _row_only(), t), "column-stochastic"),
        (lambda t: PushSum(np.zeros(2, int), topology.ring(3), t), "got int64"),
        (lambda t: DPSGD(np.zeros(2), optim.SGD(1), topology.ring(4), comm=t), "one of 3 members"),
        (lambda t: DPSGD(np.zeros(2), optim.SGD(1), "ring", comm=t), "DPSGD: topology: schedule: exp"),
        (
            lambda t: DPSGD(np.zeros(2), optim.SGD(1), topology.ring(3), "cta", t),
            "order: expected 'awc' or 'atc', got 'cta'",
        ),
        (lambda t: DPSGD(np.zeros(2, "f2"), optim.SGD(1), topology.ring(3), comm=t), "float32"),
        (
            lambda t: DPSGD(
                np.zeros(2), optim.SGD(1),
                topology.ring(3) if t.index else topology.complete(3), comm=t,
            ),
            "ring(3)",
        ),
    ],
)  # fmt: skip
def test_what_is_refused_on_all(make, said):
    for error in outcomes(3, make):
        assert isinstance(error, UsageError)
        assert said in str(error)


def _row_only():
    return topology.from_matrix([[0.5, 0.5, 0], [0, 0.5, 0.5], [0.25, 0.5, 0.25]])


def _parts():
    """Two that hear of each other, and one alone."""
    return topology.from_matrix(
        [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], allow_disconnected=True
    )


def test_after_close():
    def body(team):
        model = DPSGD(np.zeros(2), optim.SGD(1), topology.ring(1), comm=team)
        model.close()
        with pytest.raises(ServiceGoneError, match=r"DPSGD.step: it is closed"):
            model.step(np.zeros(2))

    together(1, body)


# -- push-sum ----------------------------------------------------------------------------------


@places
def test_push_sum_is_exact_on_a_directed_graph(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        n, i = team.size, team.index
        graph = directed(n)
        w = graph.matrix()
        x, omega = np.arange(3.0 * n).reshape(n, 3) ** 2, np.ones(n)
        mean = x.mean(axis=0)
        model = PushSum({"a": x[i, :2], "b": x[i, 2:].astype("c16")}, graph, comm)
        for _ in range(5):
            model.step()
            x, omega = w @ x, w @ omega
            assert model.weight == pytest.approx(omega[i], rel=1e-14)
            np.testing.assert_allclose(model.biased["a"], x[i, :2], rtol=1e-13)
            np.testing.assert_allclose(model.value["a"], x[i, :2] / omega[i], rtol=1e-13)
        for _ in range(120):
            model.step()
        np.testing.assert_allclose(model.value["a"], mean[:2], rtol=1e-12)
        np.testing.assert_allclose(model.value["b"], mean[2:], rtol=1e-12)

    played(place, body, monkeypatch)


def test_push_sum_keeps_the_sums_of_dyadic_numbers_exactly():
    """Weights of 1/2: nothing is rounded, so what all have together stays to the last bit."""
    graph = topology.push_sum(3, [(0, 1), (1, 2), (2, 0)])

    def body(team):
        model = PushSum(np.array([float(7**team.index)]), graph, team)
        seen = []
        for _ in range(20):
            model.step()
            seen.append([model.biased[0], model.weight])
        return seen

    total = np.sum(together(3, body), axis=0)
    assert (total == [57.0, 3.0]).all()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_peer_push_sum_is_exact_after_log2_steps(size):
    def body(team):
        model = PushSum(np.arange(3.0) * team.index, topology.one_peer_exponential(size), team)
        for _ in range(size.bit_length() - 1):
            model.step()
        assert model.weight == 1
        np.testing.assert_array_equal(model.value, np.arange(3.0) * (size - 1) / 2)

    together(size, body)


@SIZES
@DTYPES
def test_sgp_is_algorithm_1(size, dtype):
    graph = directed(size)
    w = graph.matrix()
    see = lambda m: np.append(flat(m.params), m.weight)  # noqa: E731
    seen = run(size, lambda p, t: SGP(p, optim.SGD(LR), graph, t), 6, dtype, see)
    x = np.tile(flat(weights(0, dtype)).astype("f8"), (size, 1))
    omega = np.ones(size)
    for step in range(6):
        x = w @ (x - LR * all_grads(size, step + 1, dtype))
        omega = w @ omega
        np.testing.assert_allclose(seen[step][:, :-1], x / omega[:, None], **rough(dtype))
        np.testing.assert_allclose(seen[step][:, -1], omega, rtol=1e-13)


@places
def test_sgp_finds_the_minimum_of_the_sum_and_meets(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        n, i = team.size, team.index
        model = SGP(
            np.full(2, 5.0 + i),
            optim.SGD(lambda done: 0.2 / (1 + done / 20)),
            directed(n),
            comm,
        )
        for _ in range(150):
            model.step(model.params - np.array([1.0, -1.0]) * i)
        model.meet()
        assert model.weight == pytest.approx(1, rel=1e-12)
        mean = (n - 1) / 2
        np.testing.assert_allclose(model.params, [mean, -mean], atol=0.15)
        return model.params.copy()

    played(place, body, monkeypatch)
