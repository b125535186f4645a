"""Members of a collective as threads of this process, without MPI."""

import threading

from mpiml.collectives.room import Room
from mpiml.collectives.team import PlainHooks, Team

LIMIT = 20  # seconds, after which a test that hangs fails


class Impatient(PlainHooks):
    """Ends every wait after `LIMIT`, so that no test hangs."""

    def __init__(self, names):
        super().__init__(names, [0] * len(names), 1e9)

    def waiting(self, seconds, missing, label):
        if seconds > LIMIT:
            raise AssertionError(f"{label}: still waiting for {missing} after {seconds:.0f} s")


def team(index, size, room, hooks=None):
    names = [f"member {i}" for i in range(size)]
    return Team(
        index, [0] * size, [0] * size, None, room, names, "the test",
        hooks or Impatient(names), spin_us=0, yield_us=50,
    )  # fmt: skip


def together(size, body, hooks=None):
    """Run ``body(team)`` for each of `size` members at once; return what they return.

    What a member raises is returned in its place by `outcomes`, and raised here.
    """
    found = outcomes(size, body, hooks)
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return found


def outcomes(size, body, hooks=None):
    """Do the same, with exceptions among the results."""
    room = Room(size)
    found = [None] * size

    def run(index):
        try:
            found[index] = body(team(index, size, room, hooks))
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT)
        assert not thread.is_alive(), "a member hangs"
    return found
