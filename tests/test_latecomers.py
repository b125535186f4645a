"""Ranks that wait for others at the start: one of a host says so, and a limit ends them."""

import os
import queue
import socket

import pytest

from mpiml.latecomers import awaited
from tests.mpi import mpiexec

LIMIT = 20.0


@pytest.fixture
def said(monkeypatch):
    """What is written, line by line; a name of this test's own."""
    lines = queue.Queue()
    monkeypatch.setattr("mpiml.latecomers._say", lines.put)
    monkeypatch.setattr("mpiml.latecomers._AHEAD", 0.0)
    monkeypatch.setattr("os.getppid", lambda: -1)
    return lines


def test_who_waits_says_so_and_for_how_many(said):
    with awaited(1, 4, patience=0.01):
        text = said.get(timeout=LIMIT)
    assert text.startswith("rank 1 has been waiting for 0.01 s for all 4 ranks of the commun")
    assert "mpiml_attach in C" in text


def test_nothing_is_said_where_all_come_at_once_or_nobody_else_is_there(said):
    with awaited(0, 2, 1000.0, patience=1000.0):
        pass
    with awaited(0, 1, 0.0, patience=0.0, leave=said.put):
        pass
    assert said.empty()


def test_a_limit_ends_the_process_with_a_line(said):
    left = queue.Queue()
    with awaited(0, 2, 0.02, patience=0.01, leave=left.put):
        assert left.get(timeout=LIMIT) == 143
    assert "has been waiting" in said.get_nowait()
    assert said.get_nowait().startswith(
        "--max-time: rank 0 has waited in vain for 0.02 s for all"
    )
    assert said.empty()


def test_one_rank_of_a_host_speaks(said):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(f"\0mpiml waits {os.getuid()} -1")
        left = queue.Queue()
        with awaited(0, 2, 0.0, patience=0.0, leave=left.put):
            assert left.get(timeout=LIMIT) == 143
    assert said.empty()


ABSENT = """
from mpi4py import MPI
import mpiml

program = mpiml.Program("absent")
program.add_node(mpiml.PyNode(print), label="node", replicas=mpiml.FILL)
if MPI.COMM_WORLD.rank == 0:
    MPI.COMM_WORLD.recv(source=1)  # in place of launch
mpiml.launch(program, MPI.COMM_WORLD, max_time=1)
"""


@pytest.mark.usefixtures("mpi_launcher")
def test_max_time_ends_a_start_for_which_ranks_are_missing(tmp_path):
    file = tmp_path / "absent.py"
    file.write_text(ABSENT)
    ended = mpiexec(3, str(file), timeout=60)
    assert ended.rc == 143, ended
    assert ended.stderr.count("has waited in vain for 1 s for all 3 ranks") == 1, ended
    assert not ended.leftovers
