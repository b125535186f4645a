"""Averages between hosts of the means in the hosts, by hand."""

import numpy as np
import pytest

from mpiml import topology
from mpiml.collectives.members import team_of
from mpiml.collectives.neighbors import hierarchical_neighbor_allreduce as averaged
from mpiml.collectives.neighbors import hosts
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.together import outcomes


def by_hand(team, x, graph):
    hosts = sorted(set(team.hosts))
    means = np.stack([x[[h == host for h in team.hosts]].mean(axis=0) for host in hosts])
    return (graph.matrix() @ means)[hosts.index(team.hosts[team.index])]


@places
def test_means_of_hosts(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        hosts = len(set(team.hosts))
        if str(place).startswith("hosts"):
            assert hosts == (team.size if "one" in place else -(-team.size // 2))
        x = np.random.default_rng(3).normal(size=(team.size, 5))
        graph = topology.star(hosts)
        own = x[team.index].copy()
        found = averaged(own, topology.star, comm)
        np.testing.assert_allclose(found, by_hand(team, x, graph), rtol=1e-13)
        np.testing.assert_array_equal(own, x[team.index])
        tree = {"a": own.astype("f4"), "b": [own[:2].copy()]}
        assert averaged(tree, graph, comm, out=tree, name="tree") is tree
        np.testing.assert_allclose(tree["a"], by_hand(team, x, graph), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(tree["b"][0], by_hand(team, x, graph)[:2], rtol=1e-13)
        one_peer = topology.one_peer_exponential(hosts)
        for step in range(3):
            found = averaged(own, one_peer, comm, step=step)
            np.testing.assert_allclose(found, by_hand(team, x, one_peer[step]), rtol=1e-13)

    played(place, body, monkeypatch)


@places
def test_what_one_member_cannot_do_all_of_its_host_hear(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        last = team.index == team.size - 1
        graph = topology.complete(len(set(team.hosts)))
        with pytest.raises(UsageError) as error:
            averaged(np.zeros(3, int) if last else np.zeros(3), graph, comm)
        assert "expected floating-point or complex numbers, got int64" in str(error.value)
        if team.size > 1:
            with pytest.raises(UsageError) as error:
                averaged(np.zeros(4 if last else 3), graph, comm)
            assert "(3,)" in str(error.value)
            assert "(4,)" in str(error.value)
        found = averaged(np.ones(2), graph, comm)
        np.testing.assert_allclose(found, 1.0)

    played(place, body, monkeypatch)


@pytest.mark.parametrize("graph", [topology.ring(2), topology.ring, None])
def test_topologies_are_of_hosts(graph):
    found = outcomes(2, lambda team: averaged(np.zeros(2), graph, team))
    for outcome in found:
        if graph is topology.ring:
            np.testing.assert_array_equal(outcome, 0)
        else:
            assert "(members are hosts here: 1)" in str(outcome)


@pytest.mark.parametrize("odd", [0, 1])
def test_a_topology_that_is_wrong_on_one_member_is_an_error_of_its_host(odd):
    """And the next call is as if it had not been."""

    def body(team):
        graph = topology.ring(3) if team.index == odd else topology.ring
        with pytest.raises(UsageError, match=r"members are hosts here: 1"):
            averaged(np.zeros(2), graph, team)
        x = np.full(2, float(team.index))
        np.testing.assert_array_equal(averaged(x, topology.ring, team), 0.5)

    assert not [o for o in outcomes(2, body) if isinstance(o, BaseException)]


@places
def test_an_error_of_the_first_member_ends_the_wait_of_its_host(place, monkeypatch):
    """Whatever it is: a process that lives may fail otherwise than by what it was given."""

    class Broken(BaseException):
        pass

    def broken(team, exchange, *_):
        exchange.skip()  # the call counts, as in the others
        raise Broken("no luck")

    def body(comm):
        team = team_of(comm, "the test")
        graph = topology.complete(len(set(team.hosts)))
        found = averaged(np.ones(2), graph, comm)
        np.testing.assert_allclose(found, 1.0)
        leads = team.index == team.local[0]
        team.exchange(b"", "the test")
        monkeypatch.setattr(hosts, "mixed", broken)
        team.exchange(b"", "the test")
        with pytest.raises(Broken if leads else ServiceGoneError, match="no luck"):
            averaged(np.ones(2), graph, comm)
        team.exchange(b"", "the test")
        monkeypatch.undo()

    played(place, body, monkeypatch)


@places
def test_members_that_compare_nothing_hear_of_errors_too(place, monkeypatch):
    monkeypatch.setenv("MPIML_CHECK", "0")

    def body(comm):
        team = team_of(comm, "the test")
        last = team.index == team.size - 1
        graph = topology.complete(len(set(team.hosts)))
        for x in (np.zeros(3, int), None):  # again: nothing is left of an error
            with pytest.raises(UsageError, match="expected"):
                averaged(x if last else np.zeros(3), graph, comm)
            np.testing.assert_allclose(averaged(np.ones(2), graph, comm), 1.0)

    played(place, body, monkeypatch)


def test_edges_are_made_once_for_equal_topologies(monkeypatch):
    """Of a function too, which is called each time: it may return another one."""
    made = []

    def counted(*args):
        made.append(args)
        return edges_of(*args)

    edges_of = hosts.edges_of
    monkeypatch.setattr(hosts, "edges_of", counted)
    names = iter(["one", "one", "two"])

    def body(team):
        for graph in (topology.ring, topology.ring(1), topology.ring):
            averaged(np.zeros(2), graph, team)
        assert len(made) == 1
        for _ in range(3):
            averaged(np.zeros(2), lambda n: topology.from_matrix(np.eye(n), next(names)), team)
        assert len(made) == 3

    assert outcomes(1, body) == [None]
