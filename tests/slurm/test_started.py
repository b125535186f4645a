"""What a real srun makes of ranks that their MPI would not start."""

import sys

import pytest

from tests.mpi import ROOT, vendor
from tests.slurm.test_templates import GRAPH, check_nothing_left, shared_memory

pytestmark = pytest.mark.slow

# One of the ranks believes that it has MPICH, and the others sit in MPI_Init.
ANOTHER = """
import runpy
import sys

import mpiml.world

if {other}:
    mpiml.world.described = lambda: "MPICH Version: 5.0.2"
sys.argv = ["mpiml.run", "{graph}:build"]
runpy.run_module("mpiml.run", run_name="__main__")
"""
JOB = """#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=2
PYTHONPATH={root} srun --mpi=pmix -n 4 --multi-prog ranks
"""


@pytest.fixture
def started(slurm, here):
    """Start a job in which these ranks, as srun writes them, have another MPI; its number."""

    def start(others, rest):
        (here / "job").write_text(JOB.format(root=ROOT))
        rows = []
        for ranks, other in ((others, True), (rest, False)):
            file = here / f"other_{other}.py"
            file.write_text(ANOTHER.format(other=other, graph=GRAPH))
            rows += [f"{ranks} {sys.executable} {file}"] if ranks else []
        (here / "ranks").write_text("\n".join(rows) + "\n")
        return slurm.submit(here / "job", cwd=here)

    if vendor() != "openmpi":
        pytest.skip("with Open MPI, which srun --mpi=pmix starts")
    return start


def test_a_rank_with_another_mpi_speaks_and_ends_the_step(slurm, here, started):
    before = shared_memory(slurm)
    job = started("2", "0-1,3")
    assert slurm.wait(job).state == "FAILED"
    said = (here / "out").read_text()
    assert said.count("mpi4py loads MPICH 5.0.2") == 1, said
    assert "Said by rank 2 on host" in said
    check_nothing_left(slurm, job, before)


def test_where_all_ranks_are_refused_one_speaks(slurm, here, started):
    done = slurm.wait(started("0-3", ""))
    said = (here / "out").read_text()
    assert (done.state, said.count("srun --mpi=pmi2")) == ("FAILED", 1), said
