"""Whether members may read each other's memory: all can, or none does."""

import numpy as np
import pytest

from mpiml.collectives import allreduce, explain, peers
from tests.collectives.test_bucket import everywhere, members_of
from tests.collectives.together import together

LARGE = np.ones(1 << 18, "f4")


@everywhere
def test_processes_of_one_user_may(members):
    def body(comm):
        assert "read by the others" in explain(LARGE, comm=comm)
        return True

    members_of(members)(body)


def _refused(*_):
    raise RuntimeError("cannot read the memory of process 7: Operation not permitted")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [(_refused, "Operation not permitted"), (lambda *_: None, "is another one here")],
    ids=["refused by the system", "another process with the number"],
)
@pytest.mark.parametrize("time", [0, 8])
def test_one_that_may_not_keeps_all_from_it(monkeypatch, wrong, said, time):
    times = iter(range(9))  # three members try three each
    real = peers.read_peer
    monkeypatch.setattr(
        peers, "read_peer", lambda *args: (wrong if next(times) == time else real)(*args)
    )

    def body(team):
        text = explain(LARGE, comm=team)
        assert "copied through shared memory: one host" in text
        assert "may not read each other's memory (member" in text
        assert said in text
        np.testing.assert_array_equal(allreduce(LARGE, comm=team), 3 * LARGE)
        return text

    assert len(set(together(3, body))) == 1
