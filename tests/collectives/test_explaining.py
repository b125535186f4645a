"""`explain` and the rule it tells; the same sums by memory and by messages."""

import numpy as np
import pytest

from mpiml.collectives import allreduce, explain
from mpiml.errors import UsageError
from tests.collectives.together import together


def test_one_line_says_members_messages_and_the_way():
    tree = {"a": [np.zeros(3, "f4")] * 5, "b": np.zeros(100_000, "f4"), "c": np.zeros(2)}
    lines = together(3, lambda team: explain(tree, "mean", team))
    assert set(lines) == {
        "allreduce(op='mean') of 7 arrays, 400,076 bytes, among 3 members on 1 host: 3 messages "
        "(1 of several arrays), copied through shared memory: one host"
    }


def test_what_cannot_be_reduced_is_refused():
    with pytest.raises(UsageError, match="explain"):
        explain([None], comm=None)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("way", ["memory", "messages"])
def test_the_rule_can_be_overridden(way, monkeypatch):
    from mpi4py import MPI

    monkeypatch.setenv("MPIML_ALLREDUCE", way)
    comm = MPI.COMM_WORLD.Dup()
    x = np.arange(100_001, dtype="f4") * (comm.rank + 1)
    assert f"as MPIML_ALLREDUCE={way} says" in explain(x, comm=comm)
    factor = comm.size * (comm.size + 1) // 2
    np.testing.assert_array_equal(
        allreduce(x, comm=comm), np.arange(100_001, dtype="f4") * factor
    )
    comm.Free()
