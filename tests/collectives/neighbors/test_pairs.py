"""Pair gossip, each mean by hand."""

import numpy as np
import pytest

from mpiml import topology
from mpiml.collectives.members import team_of
from mpiml.collectives.neighbors import PairGossip, gossip
from mpiml.errors import UsageError
from mpiml.topology import RandomPairs
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.together import outcomes, together


@places
def test_partners_take_their_mean(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        pairs = RandomPairs(team.size, seed=5)
        x = np.arange(3.0 * team.size).reshape(team.size, 3) ** 2
        meeting = PairGossip(pairs, comm)
        own = {"w": x[team.index].copy()}
        for step in range(6):
            assert meeting.partner == pairs.partner(team.index, step)
            other = x[team.index] if meeting.partner is None else x[meeting.partner]
            own = meeting.mix(own)
            np.testing.assert_array_equal(own["w"], (x[team.index] + other) / 2)
            for a, b in pairs.pairs(step):
                x[a] = x[b] = (x[a] + x[b]) / 2
        assert meeting.step == 6
        out = np.empty(3)
        assert gossip(x[team.index], pairs, 9, comm, out=out) is out
        mine = pairs.partner(team.index, 9)
        np.testing.assert_array_equal(
            out, (x[team.index] + x[team.index if mine is None else mine]) / 2
        )

    played(place, body, monkeypatch)


def test_the_sum_stays_and_all_come_to_the_mean():
    def body(team):
        x = np.full(2, 2.0**team.index)
        for step in range(60):
            x = gossip(x, RandomPairs(5, 1), step, team)
        return x

    found = together(5, body)
    np.testing.assert_allclose(found, 31 / 5, rtol=1e-4)
    assert sum(x[0] for x in found) == pytest.approx(31, rel=1e-14)


@pytest.mark.parametrize("pairs", [RandomPairs(3), topology.ring(2), None])
def test_pairs_that_do_not_fit(pairs):
    for error in outcomes(2, lambda team: gossip(np.zeros(2), pairs, 0, team)):
        assert "gossip: pairs: expected mpiml.topology.RandomPairs of 2 members" in str(error)
    for error in outcomes(2, lambda team: PairGossip(pairs, team)):
        assert "PairGossip: pairs: expected mpiml.topology.RandomPairs of 2" in str(error)


def test_partners_at_other_steps_are_a_mismatch():
    for error in outcomes(
        2, lambda team: gossip(np.zeros(2), RandomPairs(2), team.index, team)
    ):
        assert isinstance(error, UsageError)
        assert "step=0" in str(error)
        assert "step=1" in str(error)
