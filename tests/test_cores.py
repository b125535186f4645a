"""OMP_NUM_THREADS: the cores of a rank, unless it is set."""

import os
import sys

import pytest

from mpiml import cores, hosts
from mpiml.config import Config
from mpiml.cores import settle_cores, share_cores
from tests.mpi import environment, mpiexec

RANK = Config(launcher="openmpi", local_size_hint=4)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """A machine of 8 cores without a limit."""
    facts = hosts.Facts("h", frozenset(range(8)))
    monkeypatch.setattr(
        cores, "local_facts", lambda config: facts._replace(given=config.cpus_per_task or 0)
    )
    monkeypatch.setattr(cores, "_ours", [])


@pytest.mark.parametrize(
    ("config", "threads"),
    [
        (RANK, "2"),
        (RANK._replace(local_size_hint=16), "1"),
        (RANK._replace(local_size_hint=None), "8"),
        (RANK._replace(cpus_per_task=3), "3"),
        (RANK._replace(cpus_per_task=64), "8"),
        (RANK._replace(omp_set=True), None),
        (Config(), None),
    ],
)
def test_the_cores_of_a_rank(config, threads):
    environ = {}
    share_cores(config, environ)
    assert environ.get("OMP_NUM_THREADS") == threads


def test_settling_corrects_only_what_was_ours():
    environ = {}
    share_cores(RANK, environ)
    settle_cores(5, environ)
    assert environ == {"OMP_NUM_THREADS": "5"}
    environ["OMP_NUM_THREADS"] = "7"  # the user's program has its own idea
    settle_cores(5, environ)
    assert environ == {"OMP_NUM_THREADS": "7"}
    cores._ours.clear()
    other = {}
    settle_cores(5, other)
    assert other == {}


def test_a_rank_of_a_run_has_it_set_before_numpy(mpi_launcher, tmp_path):
    file = tmp_path / "threads.py"
    file.write_text(
        "import os\n"
        "import mpiml\n"
        "def build():\n"
        "    program = mpiml.Program('threads')\n"
        "    node = mpiml.PyNode(os.environ.get, 'OMP_NUM_THREADS')\n"
        "    program.add_node(node, label='n', replicas=mpiml.FILL)\n"
        "    program.add_node(mpiml.PyNode(show), label='show')\n"
        "    return program\n"
        "def show():\n"
        "    print('threads', os.environ.get('OMP_NUM_THREADS'))\n"
    )
    args = (2, "-m", "mpiml.run", file)
    mine = max(1, len(os.sched_getaffinity(0)) // 2)
    ended = mpiexec(*args, env=environment(OMP_NUM_THREADS=None)).check()
    assert int(ended.stdout.split()[-1]) <= mine
    ended = mpiexec(*args, env=environment(OMP_NUM_THREADS="3")).check()
    assert ended.stdout.split()[-1] == "3"


def test_it_does_not_load_numpy():
    from tests.mpi import child

    code = "import sys, mpiml.cores, mpiml.run; sys.exit('numpy' in sys.modules)"
    child(sys.executable, "-c", code).check()
