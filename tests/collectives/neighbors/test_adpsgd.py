"""AD-PSGD: what a meeting does, what is kept, who waits for whom, and what is refused."""

import gc
import threading
import weakref

import numpy as np
import pytest

import mpiml
from mpiml import optim, topology
from mpiml.collectives import allreduce
from mpiml.collectives.mail import mail_of
from mpiml.collectives.members import team_of
from mpiml.collectives.neighbors import ADPSGD
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives.everywhere import everywhere
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.together import outcomes, together

LIMIT = 20


def made(team, start, lr=0.5, graph=None):
    """A model whose members begin apart: `params` and x are `start`."""
    graph = topology.bipartite(team.size) if graph is None else graph
    model = ADPSGD({"w": np.zeros_like(start)}, optim.SGD(lr), graph, team)
    model._thread.pause("apart")
    team.exchange(b"", "apart")  # the first meetings are over
    with model._shared.lock:
        model._shared.leaves[0][...] = start
    model.params["w"][...] = start
    team.exchange(b"", "apart")
    model._thread.resume()
    return model


@places
def test_meetings_keep_the_sum_and_bring_all_to_the_mean(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        n = team.size
        # 2^40 times whole numbers: a hundred halvings of them are exact
        start = np.full(5, 2.0**40 * 3**team.index)
        model = made(team, start)
        nothing = {"w": np.zeros(5)}
        for _ in range(8):
            model.step(nothing)
        model.finish()
        own = model.params["w"].copy()
        assert (own == own[0]).all()
        total = allreduce(own, "sum", comm)
        assert total[0] == 2.0**40 * sum(3**i for i in range(n))  # to the last bit
        count = allreduce(float(model.statistics()["meetings"]), "sum", comm)
        active = (n + 1) // 2
        assert count == 0 if n == 1 else count == 2 * (active * 10)
        if n == 2:
            assert own[0] == 2.0**41

    played(place, body, monkeypatch)


def test_a_meeting_and_a_step_by_hand():
    """Two members: x <- mean, then x <- x - lr g, g as computed before the meeting."""

    def body(team):
        model = made(team, np.array([4.0, 8.0]) * (1 + team.index))  # 0 is active
        if team.index == 0:
            model.step({"w": np.array([1.0, 2.0])})
            np.testing.assert_array_equal(model.params["w"], [6.0 - 0.5, 12.0 - 1.0])
            done.set()
        assert done.wait(LIMIT)
        if team.index == 1:
            model._thread.pause("look")
        model.finish()
        return model.params["w"].copy()

    done = threading.Event()
    first, second = together(2, body)
    # after the step, and before `finish`, there was another meeting
    np.testing.assert_array_equal(first, [(5.5 + 6) / 2, (11 + 12) / 2])
    np.testing.assert_array_equal(second, first)


def test_gradients_are_computed_at_a_copy():
    """A passive member's `params` stay while it is asked, and are x after its step."""

    def body(team):
        model = made(team, np.full(2, float(team.index)))
        before = model.params["w"].copy()
        if team.index == 0:
            for _ in range(3):
                model.step({"w": np.zeros(2)})
            met.set()
        else:
            assert met.wait(LIMIT)
            np.testing.assert_array_equal(model.params["w"], before)
            model.step({"w": np.ones(2)})
            np.testing.assert_array_equal(model.params["w"], 0.5 - 0.5)
        team.exchange(b"", "done")
        model.finish()

    met = threading.Event()
    together(2, body)


@places
def test_members_make_steps_at_their_own_pace_and_find_the_minimum(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        n, i = team.size, team.index
        params = np.full(3, 9.0, "f4")
        model = ADPSGD(params, optim.SGD(0.05), topology.bipartite(n), comm)
        for _ in range(150 + 40 * i):
            model.step(model.params - np.float32(i))
        allreduce(np.zeros(1), comm=comm)  # one that began late may have drawn the others back
        for _ in range(100):
            model.step(model.params - np.float32(i))
        model.meet()
        low, high = 0, n - 1
        assert (low - 0.2 <= params).all()
        assert (params <= high + 0.2).all()
        model.step(np.zeros(3, "f4"))
        kept = model.state_dict()
        model.step(np.ones(3, "f4"))
        model.load_state_dict(kept)
        assert model.steps == 251 + 40 * i
        model.finish()
        model.finish()  # does nothing
        with pytest.raises(ServiceGoneError, match=r"ADPSGD.step: finish\(\) has been called"):
            model.step(np.zeros(3, "f4"))
        model.close()

    played(place, body, monkeypatch)


def test_a_passive_member_that_computes_keeps_nobody_waiting():
    """Member 1 is in its gradient all the time; 0 makes its steps meanwhile."""

    def body(team):
        model = ADPSGD(np.zeros(2), optim.SGD(1.0), topology.bipartite(2), team)
        if team.index == 0:
            for _ in range(20):
                model.step(np.zeros(2))
            done.set()
        else:
            assert done.wait(LIMIT)
        model.finish()

    done = threading.Event()
    together(2, body)


def test_an_active_member_that_computes_keeps_nobody_waiting():
    def body(team):
        model = ADPSGD(np.zeros(2), optim.SGD(1.0), topology.bipartite(4), team)
        if team.index == 0:
            assert done.wait(LIMIT)
        else:
            for _ in range(20):
                model.step(np.zeros(2))
            team_done[team.index] = True
            if len(team_done) == 3:
                done.set()
        model.finish()

    done, team_done = threading.Event(), {}
    together(4, body)


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (topology.ring(3), "members 1 and 2 are neighbours and would be on one side"),
        (topology.complete(3), "expected a bipartite graph"),
        (topology.bipartite(4), "expected one of 3 members, as many as there are"),
        (topology.ActivePassive(topology.star(2)), "expected one of 3 members"),
        (
            topology.one_peer_exponential(3),
            "expected a Topology that is bipartite, such as mpiml.topology.bipartite(n)",
        ),
        (np.eye(3), "such as mpiml.topology.bipartite(n), got "),
        (
            topology.from_matrix(np.eye(3), allow_disconnected=True),
            "expected all members to be connected",
        ),
    ],
)
def test_what_is_no_bipartite_graph_is_refused_on_all(graph, said):
    for error in outcomes(3, lambda t: ADPSGD(np.zeros(2), optim.SGD(1.0), graph, t)):
        assert isinstance(error, UsageError)
        assert "ADPSGD: topology" in str(error)
        assert said in str(error)


def test_seeds_that_differ_are_refused():
    make = lambda t: ADPSGD(  # noqa: E731
        np.zeros(2), optim.SGD(1.0), topology.star(2), t, seed=t.index
    )
    for error in outcomes(2, make):
        assert "seed=0" in str(error)
        assert "seed=1" in str(error)


def test_gradients_that_do_not_fit_change_nothing():
    def body(team):
        model = ADPSGD(np.zeros(2), optim.SGD(1.0), topology.star(2), team)
        with pytest.raises(UsageError, match=r"ADPSGD.step: grads"):
            model.step(np.zeros(3))
        model.step(np.zeros(2))
        model.finish()
        assert model.steps == 1

    together(2, body)


def failing(comm):
    team = team_of(comm, "the test")
    model = ADPSGD(np.zeros(2), optim.SGD(1.0), topology.bipartite(team.size), comm)
    model.step(np.zeros(2))
    if team.index == 1:
        raise ArithmeticError("member 1 has no data")
    while True:
        model.step(np.zeros(2))


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_member_that_fails_ends_the_others(replicas):
    with pytest.raises(ArithmeticError, match="member 1 has no data"):
        everywhere(replicas, failing)


@pytest.mark.mpi(min_size=2)
def test_a_member_that_fails_ends_the_others_on_ranks():
    with pytest.raises(ArithmeticError, match="member 1 has no data"):
        played("nodes on ranks", failing)


def leaving(comm):
    team = team_of(comm, "the test")
    model = ADPSGD(np.zeros(2), optim.SGD(1.0), topology.bipartite(team.size), comm)
    model.step(np.zeros(2))
    if team.index == 0:
        model.finish()


def test_a_member_that_ends_without_finish_is_told_of_it():
    with pytest.raises(
        UsageError, match=r"has returned .* ADPSGD\.finish\(\) after its last step"
    ):
        everywhere(2, leaving)


def stopped():
    me = mpiml.context()
    model = ADPSGD(np.zeros(2), optim.SGD(1.0), topology.bipartite(me.replicas))
    while True:
        model.step(np.zeros(2))
        if me.index == 0 and model.steps == 5:
            me.stop()
        if me.stopping:
            return model.steps


def test_a_program_that_stops_ends_all():
    program = mpiml.Program("stops")
    program.add_node(mpiml.PyNode(stopped), label="member", replicas=3)
    steps = mpiml.launch(program)["member"]
    assert len(set(steps)) == 1  # the round agreed on
    assert steps[0] >= 5


@places
def test_models_that_are_closed_leave_nothing_behind(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        guests = mail_of(team).office.guests
        team.exchange(b"", "made")
        before, kept = len(guests), []
        team.exchange(b"", "counted")
        for _ in range(3):
            model = ADPSGD(
                np.zeros(50_000), optim.SGD(0.1), topology.bipartite(team.size), team
            )
            for _ in range(3):
                model.step(np.ones(50_000))
            model.finish()
            model.close()
            kept.append(weakref.ref(model._shared.memory))
            del model
            gc.collect()
        team.exchange(b"", "closed")
        assert len(guests) == before
        assert [ref() for ref in kept] == [None] * 3

    played(place, body, monkeypatch)
    assert not [t for t in threading.enumerate() if t.name == "mpiml meetings"]
