"""Plays a program of one body and some services, in threads or on the ranks of mpiexec.

    @both
    def test_add(mode):
        def body(counter):
            assert counter.add(2) == 2
        play(mode, body, counter=Counter)

Asserts stand in the body: what it raises ends the program and fails the test on every rank.
"""

import threading

import pytest

import mpiml

__all__ = ["LIMIT", "Gate", "both", "launched", "play"]

both = pytest.mark.parametrize(
    "mode", ["threads", pytest.param("mpi", marks=pytest.mark.mpi(min_size=2))]
)
LIMIT = 30.0  # seconds after which something hangs


def play(mode, body, *, concurrency=1, allow=None, replicas=None, after=None, **services):
    """Run ``body(**clients)`` beside `services`; its value on rank 0, else None.

    `services` are classes or nodes; `replicas` maps a label to a number. `after` takes the
    handles by name, for ``configure``. Ranks that are left over do nothing.
    """
    program = mpiml.Program("play")
    handles = {}
    for label, service in services.items():
        node = mpiml.ServiceNode(service) if isinstance(service, type) else service
        turns = concurrency.get(label, 1) if isinstance(concurrency, dict) else concurrency
        count = {} if not (replicas or {}).get(label) else {"replicas": replicas[label]}
        handles[label] = program.add_node(
            node, label=label, concurrency=turns, allow=allow, **count
        )
    if after is not None:
        after(handles)
    program.add_node(mpiml.PyNode(body, **handles), label="body")
    result = launched(mode, program)
    return None if result is None else result["body"][0]


def launched(mode, program):
    """Launch a program; its result on rank 0, else None. Ranks that are left over do nothing."""
    comm = None
    if mode == "mpi":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        if comm.size > sum(role.replicas for role in program.roles):
            program.add_node(mpiml.PyNode(_nothing), label="spare", replicas=mpiml.FILL)
    result = mpiml.launch(program, comm=comm)
    return result if comm is None or comm.rank == 0 else None


def _nothing():
    pass


class Gate:
    """A service that holds methods back until it is told; the base of others in the tests."""

    def __init__(self):
        self.event = threading.Event()
        self.inside = 0
        self.most = 0
        self.seen = []
        self.lock = threading.Lock()

    def hold(self, tag=None):
        """Return `tag` once `open` has been called."""
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
            self.seen.append(tag)
        assert self.event.wait(LIMIT)
        with self.lock:
            self.inside -= 1
        return tag

    def open(self):
        """Let go."""
        self.event.set()

    def note(self, tag, *_):
        """Remember `tag`."""
        self.seen.append(tag)
        return tag

    def read(self):
        """What has been seen."""
        return list(self.seen)
