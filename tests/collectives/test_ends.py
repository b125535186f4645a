"""How operations end early: by signals, forks, the end of a process, and what others hear."""

import sys

import numpy as np
import pytest

from mpiml.collectives import Bucket
from mpiml.errors import UsageError
from tests.collectives.together import together
from tests.mpi import child, mpiexec

SIGNAL = """
import signal, threading, numpy as np
from mpi4py import MPI
from mpiml.collectives import Bucket
from mpiml.errors import ServiceGoneError
class Alarm(Exception): pass
def ring(*_): raise Alarm
signal.signal(signal.SIGALRM, ring)
comm = MPI.COMM_WORLD
bucket = Bucket(comm, np.zeros({length}))
bucket.tree[:] = 1
if comm.rank == 0:
    signal.setitimer(signal.ITIMER_REAL, {after})
    try:
        bucket.allreduce()
        print("not interrupted")
    except Alarm:
        pass
    comm.Barrier()
else:
    comm.Barrier()  # after the alarm
try:
    bucket.allreduce("max")
    bucket.allreduce("max")
    print("no error", bucket.tree)
except (ServiceGoneError, ValueError) as error:
    print("error", comm.rank)
"""


@pytest.mark.parametrize("length", [4, 100_000])
@pytest.mark.parametrize("after", [0.01, 0.2])
def test_an_operation_that_a_signal_ends_is_an_error_on_all_not_a_wrong_sum(
    tmp_path, mpi_launcher, length, after
):
    file = tmp_path / "interrupted.py"
    file.write_text(SIGNAL.format(length=length, after=after))
    ended = mpiexec(2, file, timeout=30).check()
    assert sorted(ended.stdout.split("\n")[:2]) == ["error 0", "error 1"], ended


LEFT = """
import numpy as np
from mpi4py import MPI
from mpiml.collectives import Bucket
bucket = Bucket(MPI.COMM_WORLD, np.zeros({length}))
requests = [bucket.iallreduce() for _ in range(200)]
print("end")
"""


@pytest.mark.parametrize("length", [10, 300_000])
def test_a_process_may_end_with_requests_under_way(tmp_path, mpi_launcher, length):
    file = tmp_path / "left.py"
    file.write_text(LEFT.format(length=length))
    ended = mpiexec(2, file, timeout=30).check()
    assert ended.stdout.split() == ["end", "end"]


RAISES = """
import sys, numpy as np
from mpi4py import MPI
from mpiml.collectives import Bucket, allreduce
comm = MPI.COMM_WORLD
with Bucket(comm, np.zeros(3)) as bucket:
    for step in range(4):
        if step == 2 and comm.rank == 1:
            sys.exit(0)
        bucket.allreduce() if {bucket} else allreduce(np.zeros(3), comm=comm)
"""


@pytest.mark.parametrize("bucket", [True, False])
def test_a_rank_that_ends_is_named_by_those_that_wait(tmp_path, mpi_launcher, bucket):
    file = tmp_path / "raises.py"
    file.write_text(RAISES.format(bucket=bucket))
    ended = mpiexec(2, "-m", "mpi4py", file, timeout=60)
    assert "rank 1 closed it, left it halfway, or has ended" in ended.stderr, ended


FORK = """
import os, numpy as np
from mpiml.collectives import Bucket
from mpiml.errors import UsageError
from mpi4py import MPI
bucket = Bucket(MPI.COMM_SELF, np.zeros(3))
pid = os.fork()
if pid == 0:
    status = 1
    for call in (bucket.allreduce, bucket.iallreduce):
        try:
            call()
        except UsageError as error:
            status = 0 if "forked child" in str(error) else 2
    os._exit(status)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
bucket.allreduce()
print("parent goes on")
"""


def test_a_forked_child_is_no_member(tmp_path, mpi_launcher):
    file = tmp_path / "forks.py"
    file.write_text(FORK)
    ended = child(sys.executable, file).check()
    assert "parent goes on" in ended.stdout


@pytest.mark.mpi(min_size=2)
def test_buckets_keep_no_file_open():
    import os

    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    first = Bucket(comm, np.zeros(3))
    files = len(os.listdir("/proc/self/fd"))
    more = [Bucket(comm, np.zeros(3)) for _ in range(30)]
    assert len(os.listdir("/proc/self/fd")) <= files + 1
    for bucket in (first, *more):
        bucket.close()


def test_close_waits_for_what_was_begun():
    def body(team):
        with Bucket(team, np.zeros(50_000)) as bucket:
            tree = bucket.tree
            tree[:] = 1
            bucket.iallreduce()
        return tree[0]

    assert together(3, body) == [3.0] * 3


def test_arrays_can_be_written_by_name():
    def body(team):
        with Bucket(team, {"w": np.zeros(3), "deep": {"b": np.zeros(2)}}) as bucket:
            bucket["w"] = [1, 2, 3]
            bucket["w"] += 1
            with pytest.raises(UsageError, match="only an array can be written"):
                bucket["deep"] = {"b": np.ones(2)}
            bucket.allreduce()
            return bucket["w"].tolist()

    assert together(2, body) == [[4.0, 6.0, 8.0]] * 2
