"""neighbor_allreduce: results by hand, exactness, who waits for whom, and what is said."""

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpiml
from mpiml import topology
from mpiml.collectives.members import team_of
from mpiml.collectives.neighbors import neighbor_allreduce
from mpiml.collectives.neighbors.combining import weighted_sum
from mpiml.collectives.neighbors.exchange import exchange_of
from mpiml.errors import UsageError
from tests.collectives.everywhere import everywhere
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.together import Impatient, outcomes, together

LIMIT = 20  # seconds after which something hangs


def value(member, shape=(7,), dtype="f8"):
    """Numbers of one member. Whole ones, so that sums of halves are exact."""
    rng = np.random.default_rng(member)
    x = np.asarray(rng.integers(-50, 50, shape), dtype)
    more = 1j * rng.integers(-9, 9, shape) if x.dtype.kind == "c" else 0
    return np.asarray(x + more, dtype)


def graphs(n):
    """Topologies of n members, directed and not, and schedules with a step."""
    found = [(topology.ring(n), None), (topology.complete(n), None), (topology.star(n), None)]
    found.append((topology.from_matrix(_directed(n), "directed"), None))
    one_peer = topology.one_peer_exponential(n)
    found += [(one_peer, step) for step in range(one_peer.period + 1)]
    return found + [(topology.RandomPairs(n, 3), step) for step in range(3)]


def _directed(n):
    """Row-stochastic, not column-stochastic: each hears from the one before, some from 0."""
    w = np.zeros((n, n))
    for i in range(n):
        sources = {i, (i - 1) % n} | ({0} if i % 2 else set())
        w[i, list(sources)] = 1 / len(sources)
    return w


def matrix(graph, step):
    return (graph if step is None else graph[step]).matrix()


# -- results -----------------------------------------------------------------------------------


@places
def test_rounds_are_products_with_the_matrix(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        x = np.stack([value(i) for i in range(team.size)])
        for graph, step in graphs(team.size):
            own = x[team.index].copy()
            found = neighbor_allreduce(own, graph, comm, step=step)
            x = matrix(graph, step) @ x
            np.testing.assert_allclose(found, x[team.index], rtol=1e-13, atol=1e-13)
            assert found is not own
            x = np.stack([np.round(row, 6) for row in x])

    played(place, body, monkeypatch)


@places
def test_trees_and_dtypes(place, monkeypatch):
    dtypes = ("f2", "f4", "f8", "c8", "c16")

    def body(comm):
        team = team_of(comm, "the test")
        graph = topology.ring(team.size)
        tree = {d: [value(team.index, (3, 5), d), value(team.index, (), d)] for d in dtypes}
        tree["empty"] = np.empty((0, 3))
        tree["large"] = value(team.index, (70_001,), "f4")
        before = {d: tree[d][0].copy() for d in dtypes}
        found = neighbor_allreduce(tree, graph, comm, name="tree")
        w = graph.matrix()[team.index]
        for d in dtypes:
            for shape, got in zip([(3, 5), ()], found[d], strict=True):
                by_hand = sum(w[j] * value(j, shape, d) for j in range(team.size))
                assert got.dtype == d
                assert got.shape == shape
                tolerance = {"f2": 1e-3, "f4": 1e-6, "c8": 1e-6}.get(d, 1e-13)
                np.testing.assert_allclose(got, by_hand, rtol=tolerance, atol=60 * tolerance)
            np.testing.assert_array_equal(tree[d][0], before[d])
        large = sum(w[j] * value(j, (70_001,), "f4") for j in range(team.size))
        np.testing.assert_allclose(found["large"], large, rtol=1e-5, atol=1e-4)
        assert found["empty"].shape == (0, 3)
        assert neighbor_allreduce(tree, graph, comm, out=tree) is tree
        for got, first in zip(tree["f8"], found["f8"], strict=True):
            assert np.asarray(got).tobytes() == np.asarray(first).tobytes()  # the same bits

    played(place, body, monkeypatch)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_peer_exponential_averaging_is_exact_after_log2_steps(size):
    together(size, lambda team: _exact(team, team))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("size", [2, 4])
def test_the_same_by_mpi(size):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.size < size:
        pytest.skip("too few ranks")
    comm = world.Split(0 if world.rank < size else MPI.UNDEFINED)
    if comm != MPI.COMM_NULL:
        _exact(comm, team_of(comm, "the test"))
        comm.Free()


def _exact(comm, team):
    graph = topology.one_peer_exponential(team.size)
    x = value(team.index)
    for step in range(graph.period):
        x = neighbor_allreduce(x, graph, comm, step=step)
    np.testing.assert_array_equal(x, sum(value(i) for i in range(team.size)) / team.size)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.integers(0, 200_000), st.integers(0, 5), st.sampled_from("efdFD"))
def test_sums_in_blocks(count, size, place, dtype):
    sources = [value(i, (size,), dtype) for i in range(count)]
    weights = [0.5, 0.25, 0.125, 2.0][:count]
    expected = sum((w * s.astype("c16") for w, s in zip(weights, sources, strict=True)), 0)
    out = sources[place] if place < count else np.full(size, np.nan, dtype)  # in place, perhaps
    weighted_sum(sources, weights, out)
    np.testing.assert_array_equal(out.astype("c16"), np.broadcast_to(expected, size))


def test_all_add_in_the_order_of_the_members():
    """On the complete graph all get the same bits."""
    x = np.random.default_rng(1).normal(size=(4, 1000)).astype("f4")
    found = together(4, lambda t: neighbor_allreduce(x[t.index], topology.complete(4), t))
    quarter = x * np.float32(0.25)
    expected = ((quarter[0] + quarter[1]) + quarter[2]) + quarter[3]
    assert all(one.tobytes() == expected.tobytes() for one in found)


def test_halves_are_rounded_once():
    x = [np.array([2048.0], "e"), np.array([1.0], "e"), np.array([1.0], "e")]
    out = np.empty(1, "e")
    weighted_sum(x, [1.0, 1.0, 1.0], out)
    assert out[0] == 2050  # in float16, 2048 + 1 is 2048


def test_out_may_be_what_is_given_or_a_view_of_it_or_lie_in_strides():
    def body(team):
        graph = topology.ring(2)
        memory = np.arange(100_001.0) * (team.index + 1)  # more than a block
        neighbor_allreduce(memory[:-1], graph, team, out=memory[1:])
        np.testing.assert_array_equal(memory[1:], 1.5 * np.arange(100_000))
        x = np.arange(6.0) * (team.index + 1)
        apart = np.full(6, np.nan)
        assert neighbor_allreduce(x, graph, team, out=apart) is apart
        np.testing.assert_array_equal(apart, 1.5 * np.arange(6))
        np.testing.assert_array_equal(x, np.arange(6) * (team.index + 1))
        small = np.arange(7.0) * (team.index + 1)  # fewer than a block
        neighbor_allreduce(small[:-1], graph, team, out=small[1:])
        np.testing.assert_array_equal(small[1:], 1.5 * np.arange(6))
        assert neighbor_allreduce(x, graph, team, out=x) is x
        np.testing.assert_array_equal(x, 1.5 * np.arange(6))
        out = np.zeros((6, 2))
        neighbor_allreduce(x[::-1], graph, team, out=out[:, 1])
        np.testing.assert_array_equal(out[:, 1], 1.5 * np.arange(6)[::-1])

    together(2, body)


def test_one_member_alone():
    def body(team):
        x = value(0)
        found = neighbor_allreduce(x, topology.ring(1), team)
        np.testing.assert_array_equal(found, x)
        assert found is not x

    together(1, body)


# -- weights of the call -----------------------------------------------------------------------


@places
def test_weights_of_the_call(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        n, i = team.size, team.index
        if n == 1:
            return
        x = [value(j) for j in range(n)]
        before, after = (i - 1) % n, (i + 1) % n
        # rows: 3/4 of the own, 1/4 of the one before; edges by the weights alone
        found = neighbor_allreduce(
            x[i], None, comm,
            self_weight=0.75, receive_weights={before: 0.25}, send_weights={after: 1.0},
        )  # fmt: skip
        np.testing.assert_array_equal(found, 0.75 * x[i] + 0.25 * x[before])
        # columns: each gives away another part of what it has
        part = [0.5, 0.25, 0.125, 0.375]
        found = neighbor_allreduce(
            x[i], topology.from_matrix(_shift(n), allow_disconnected=True), comm,
            self_weight=1 - part[i], send_weights={after: part[i]},
        )  # fmt: skip
        np.testing.assert_array_equal(found, (1 - part[i]) * x[i] + part[before] * x[before])
        # both: the factors that come make the row sum to 1
        found = neighbor_allreduce(
            x[i], None, comm,
            self_weight=0.5, receive_weights={before: 0.25}, send_weights={after: 2.0},
        )  # fmt: skip
        np.testing.assert_array_equal(found, 0.5 * x[i] + 0.5 * x[before])

    played(place, body, monkeypatch)


def _shift(n):
    return np.roll(np.eye(n), 1, axis=0) / 2 + np.eye(n) / 2


ROW = "expected self_weight and receive_weights to sum to 1 within 1e-09, got"


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({"self_weight": 0.5}, ROW),
        ({"receive_weights": {1: 0.3}}, ROW),
        (
            {"receive_weights": {}},
            "expected weights for [1], the neighbours of member 0; member 1",
        ),
        ({"receive_weights": {0: 0.3}}, "the neighbours of member 0; got 0"),
        ({"receive_weights": [0.5]}, "expected a dict of members and weights, got [0.5]"),
        ({"send_weights": {1: -1.0}}, "send_weights[1]: expected a number >= 0 and finite"),
        ({"self_weight": float("nan")}, "self_weight: expected a number >= 0"),
    ],
)
def test_weights_that_do_not_average_are_refused(weights, said):
    def body(team):
        if team.index:
            return
        graph = topology.from_matrix([[0.75, 0.25], [0.25, 0.75]])
        with pytest.raises(UsageError) as error:
            neighbor_allreduce(np.zeros(3), graph, team, **weights)
        assert said in str(error.value), str(error.value)

    def both(team):
        neighbor_allreduce(np.zeros(3), topology.ring(2), team)
        body(team)

    together(2, both)


def test_factors_that_come_must_make_the_row_sum_to_one():
    def body(team):
        other = 1 - team.index
        neighbor_allreduce(
            np.zeros(3), None, team,
            self_weight=0.5, receive_weights={other: 0.5}, send_weights={other: 0.9},
        )  # fmt: skip

    for error in outcomes(2, body):
        assert "multiplied by the factors that came, to sum to 1" in str(error)
        assert "got 0.95 on member" in str(error)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("graph", "step", "said"),
    [
        (topology.ring(3), None, "expected one of 2 members, as many as there are, got <ring(3)"),
        (topology.one_peer_exponential(2), None, "step: expected the number of the step"),
        (np.eye(2), None, "expected a Topology or Schedule of mpiml.topology, got array("),
        (None, None, "expected a Topology or Schedule of mpiml.topology, got None"),
        (
            topology.from_matrix([[0.5, 0.25], [0.5, 0.75]]), None,
            "expected row-stochastic weights, got <topology",
        ),
    ],
)  # fmt: skip
def test_topologies_that_do_not_fit_are_refused(graph, step, said):
    def body(team):
        neighbor_allreduce(np.zeros(3), graph, team, step=step)

    for error in outcomes(2, body):
        assert isinstance(error, UsageError)
        assert "neighbor_allreduce" in str(error)
        assert said in str(error)


@pytest.mark.parametrize(
    ("x", "out", "said"),
    [
        (np.zeros(3, int), None, "expected floating-point or complex numbers, got int64"),
        ({"a": np.zeros(3, bool)}, None, "leaf ['a']: expected floating-point"),
        (np.zeros(3), np.zeros(4), "out: expected an array that can be written, of ndarray"),
        (np.zeros(3), np.frombuffer(bytes(24)), "which cannot be written"),
        ([np.zeros(3)], np.zeros(3), "out: expected a tree like x"),
        ("text", None, "expected an array, got 'text'"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_neighbours_hear_of_it(x, out, said):
    def body(team):
        graph = topology.ring(3)
        try:
            if team.index == 1:
                neighbor_allreduce(x, graph, team, out=out)
            else:
                neighbor_allreduce(np.zeros(3), graph, team)
        except UsageError as error:
            # the next call is as if nothing had been
            found = neighbor_allreduce(np.full(2, float(team.index)), graph, team)
            np.testing.assert_allclose(found, 1.0)
            return str(error)

    errors = together(3, body)
    assert said in errors[1]
    for other in (0, 2):
        assert "the test: member 1 could not take part in neighbor_allreduce" in errors[other]
        assert said in errors[other]
        assert f"This is member {other}." in errors[other]


@places
def test_mismatched_neighbours_are_named_on_both(place, monkeypatch):
    if place == 1:
        pytest.skip("nobody else")

    def body(comm):
        team = team_of(comm, "the test")
        odd = team.index == 1
        graph = topology.ring(team.size)
        cases = [
            ({}, {"x": np.zeros((4, 2))}, "(3,) float64", "(4, 2) float64"),
            ({}, {"x": np.zeros(3, "f4")}, "(3,) float64", "(3,) float32"),
            ({"name": "a"}, {"name": "b"}, "name='a'", "name='b'"),
            ({}, {"x": {"w": np.zeros(3)}}, "the array (3,)", "['w'] (3,)"),
        ]
        for usual, other, here, there in cases:
            arguments = {"x": np.zeros(3), **(other if odd else usual)}
            near = team.index in (1, *graph.neighbors[1])
            if not near:
                neighbor_allreduce(arguments.pop("x"), graph, comm, **arguments)
                continue
            with pytest.raises(UsageError) as error:
                neighbor_allreduce(arguments.pop("x"), graph, comm, **arguments)
            said = str(error.value)
            assert here in said, said
            assert there in said, said
            assert team.names[1] in said, said
            assert "expected the same call on neighbours" in said
        x = neighbor_allreduce(
            np.full(3, float(team.index)), topology.complete(team.size), comm
        )
        np.testing.assert_allclose(x, (team.size - 1) / 2)

    played(place, body, monkeypatch)


def test_who_only_sends_hears_of_it_too():
    """0 -> 1 -> 2 -> 0: member 1 sees that 0 has other shapes, and 0 hears it from 1."""

    def body(team):
        graph = topology.from_matrix(_shift(3))
        assert list(graph.receives(1)) == [0]
        said = []
        for _ in range(4):
            try:
                neighbor_allreduce(np.zeros(4 if team.index == 0 else 3), graph, team)
            except UsageError as error:
                said.append(str(error))
                break
        return said

    # 0 and 1 differ, and so do 0 and 2
    for member, (said,) in enumerate(together(3, body)):
        assert "expected the same call on neighbours" in said
        assert "member 0" in said
        assert member == 0 or f"member {member}" in said


def test_other_topologies_are_a_mismatch():
    def body(team):
        graph = topology.ring(4) if team.index else topology.complete(4)
        try:
            neighbor_allreduce(np.zeros(3), graph, team)
        except UsageError as error:
            return str(error)

    found = together(4, body)
    assert "topology=complete(4) of 4" in found[0]
    assert "topology=ring(4) of 4" in found[0]
    assert "topology=complete(4) of 4" in found[1]
    assert "topology=complete(4) of 4" in found[3]


# -- who waits for whom ------------------------------------------------------------------------


@places
def test_a_late_member_delays_its_neighbours_only(place, monkeypatch):
    """On a path 0 - 1 - 2 - 3 member 0 comes late; 2 and 3 do what they can without it."""
    members = place
    if isinstance(place, str):
        from mpi4py import MPI

        members = 4 if place.startswith("two on") else MPI.COMM_WORLD.size
    if members < 4:
        pytest.skip("needs four members")

    def body(comm):
        team = team_of(comm, "the test")
        graph = topology.metropolis(4, [(0, 1), (1, 2), (2, 3)], "path")
        neighbor_allreduce(np.zeros(1), graph, comm)  # all are there
        mail = team.kept["mail"]
        word = mail.open("a word")
        w = graph.matrix()
        if team.index == 0:
            word.receive(3).wait("a word")  # member 3 has done its round
            assert neighbor_allreduce(np.zeros(1), graph, comm)[0] == pytest.approx(w[0, 1])
        else:
            x = neighbor_allreduce(np.full(1, float(team.index)), graph, comm)
            assert x[0] == pytest.approx(w[team.index] @ np.arange(4.0))
            if team.index == 3:
                word.send(0, b"go")

    played(place, body, monkeypatch)


def test_a_sender_is_two_calls_ahead_at_most():
    """0 sends to 1 and hears from nobody; 1 begins when 0 has been found waiting for it."""
    stuck = threading.Event()
    done = []

    class Hooks(Impatient):
        def waiting(self, seconds, missing, label):
            super().waiting(seconds, missing, label)
            if "weights given" in str(label) and list(missing) == [1]:
                stuck.set()

    def body(team):
        own, heard, sent = (1.0, {}, {1: 1.0}) if team.index == 0 else (0.5, {0: 0.5}, {})
        weights = {"self_weight": own, "receive_weights": heard, "send_weights": sent}
        exchange_of(team)
        if team.index == 1:
            assert stuck.wait(LIMIT)
            assert done == [0, 1]
        own = np.empty(1)
        for call in range(5):
            own[:] = call
            x = neighbor_allreduce(own, None, team, **weights)
            assert x[0] == call  # what was there at the time of the call
            if team.index == 0:
                done.append(call)

    together(2, body, Hooks(["member 0", "member 1"]))
    assert done == [0, 1, 2, 3, 4]


def test_memory_is_bounded_while_others_are_late():
    def body(team):
        exchange_memory = []
        graph = topology.ring(2)
        for call in range(50):
            x = neighbor_allreduce(np.full(1000, float(call)), graph, team)
            snapshots = team.kept["neighbors"]._snapshots
            exchange_memory.append(len(snapshots._free) + len(snapshots._flying))
            assert x[0] == call
        assert max(exchange_memory) <= 4

    together(2, body)


# -- the end of a neighbour --------------------------------------------------------------------


def failing(comm):
    team = team_of(comm, "the test")
    graph = topology.ring(team.size)
    neighbor_allreduce(np.zeros(3), graph, comm)
    if team.index == 1:
        raise ArithmeticError("member 1 has no data")
    for _ in range(3):
        neighbor_allreduce(np.zeros(3), graph, comm)


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_member_that_fails_ends_the_others(replicas):
    with pytest.raises(ArithmeticError, match="member 1 has no data"):
        everywhere(replicas, failing)


@pytest.mark.mpi(min_size=2)
def test_a_member_that_fails_ends_the_others_on_ranks():
    with pytest.raises(ArithmeticError, match="member 1 has no data"):
        played("nodes on ranks", failing)


def leaving(comm):
    team = team_of(comm, "the test")
    graph = topology.ring(team.size)
    neighbor_allreduce(np.zeros(3), graph, comm)
    if team.index != 1:
        neighbor_allreduce(np.zeros(3), graph, comm)


@pytest.mark.parametrize("replicas", [2, 4])
def test_a_member_that_leaves_is_named(replicas):
    with pytest.raises(
        UsageError, match=r"neighbor_allreduce.*member/1 .*has returned and will"
    ):
        everywhere(replicas, leaving)


def test_outside_of_a_node():
    with pytest.raises(UsageError, match="neighbor_allreduce: comm=None means the role"):
        neighbor_allreduce(np.zeros(3), topology.ring(1))


def test_the_package_lists_what_it_has():
    from mpiml.collectives import neighbors

    assert "neighbor_allreduce" in dir(neighbors)
    with pytest.raises(AttributeError):
        neighbors.nothing  # noqa: B018
    assert mpiml.topology is topology
