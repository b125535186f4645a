"""How jobs end that hold one-sided memory: in order, without a close, by a death."""

import pytest

from tests.mpi import environment, mpiexec

LEFT = """
import mpiml.world; mpiml.world.start()
import numpy as np
from mpi4py import MPI
from mpiml.collectives import RingModel, SharedModel, Window
comm = MPI.COMM_WORLD
model, ring = SharedModel(comm, np.zeros(1000)), RingModel(comm, np.zeros(10))
window = Window(comm, np.zeros(10))
model.add(np.ones(1000)); ring.add(np.ones(10)); window.accumulate(0, np.ones(10))
model.barrier()
print("end", model.tree[0] == comm.size)
"""


@pytest.mark.parametrize("size", ["1", "2", "4"])
def test_memory_that_nobody_closed_ends_with_the_job_without_a_word(
    tmp_path, mpi_launcher, size
):
    file = tmp_path / "left.py"
    file.write_text(LEFT)
    ended = mpiexec(4, file, timeout=60, env=environment(MPIML_HOST_SIZE=size)).check()
    assert ended.stdout.count("end True") == 4
    assert ended.stderr == ""


LATE = """
import mpiml.world; mpiml.world.start()
import numpy as np
from mpi4py import MPI
from mpiml.collectives import RingModel, SharedModel, Window
from mpiml.errors import ServiceGoneError
comm = MPI.COMM_WORLD.Dup()
held = [kind(comm, np.zeros(10)) for kind in (SharedModel, RingModel, Window)]
for each in held:
    each.barrier()
{end}
for each in held:
    try:
        each.barrier()
    except ServiceGoneError as error:
        text = "MPI has been finalised in this process, or the communicator freed"
        print("told", text in str(error))
    each.close()
"""


@pytest.mark.parametrize("size", ["1", "2"])
@pytest.mark.parametrize("end", ["MPI.Finalize()", "comm.Free()"])
def test_what_is_closed_after_the_end_of_its_communicator_is_closed(
    tmp_path, mpi_launcher, end, size
):
    file = tmp_path / "late.py"
    file.write_text(LATE.format(end=end))
    ended = mpiexec(2, file, timeout=60, env=environment(MPIML_HOST_SIZE=size)).check()
    assert ended.stdout.split().count("told") == 6, ended
    assert "False" not in ended.stdout, ended


DIES = """
import os, signal, sys
import mpiml.world; mpiml.world.start()
import numpy as np
from mpi4py import MPI
from mpiml.collectives import SharedModel
from mpiml.errors import MpimlError
comm = MPI.COMM_WORLD
model = SharedModel(comm, np.zeros(1000))
model.barrier()
print("begun", flush=True)
comm.Barrier()
if comm.rank == comm.size - 1:
    {death}
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        model.add(np.ones(1000))
        model.snapshot()
        {also}
except MpimlError as error:
    print("error", type(error).__name__, flush=True)
    comm.Abort(3)
"""
CASES = {
    "within an update": ("model._block.gate.enter()", "pass"),
    "before a barrier": ("pass", "model.barrier()"),
}


# on a host of its own it holds nobody up within an update
@pytest.mark.parametrize(
    ("case", "size"),
    [("within an update", "3"), ("before a barrier", "3"), ("before a barrier", "1")],
)
def test_the_death_of_a_rank_ends_the_others(tmp_path, mpi_launcher, case, size):
    """By its launcher, or by the error of who waits for it: nobody hangs in either way."""
    death, also = CASES[case]
    file = tmp_path / "dies.py"
    file.write_text(DIES.format(death=death, also=also))
    ended = mpiexec(3, file, timeout=60, env=environment(MPIML_HOST_SIZE=size))
    assert "begun" in ended.stdout, ended
    assert ended.rc not in (0, None), ended
    assert not ended.leftovers
