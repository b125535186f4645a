"""Starting the ranks of a benchmark, and what is said of the machine they ran on.

The process that measures never loads MPI: a nested ``mpiexec`` fails silently when its parent
has called MPI_Init. A scenario is a function ``f(comm, plan)`` of a module of this package; all
ranks call it, and what it returns on rank 0 comes back as JSON.
"""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpiml.doctor.check import Outcome, attempt
from mpiml.errors import MpimlError, UsageError
from mpiml.mpiexec import find_mpiexec, in_container, launch_environ
from mpiml.starter import sweep

__all__ = ["BenchError", "Options", "Ranks", "only_two"]

#: What of the environment changes figures, and so stands in the header.
SHOWN = ("OMP_NUM_THREADS", "OMPI_MCA_mpi_yield_when_idle", "PYTHONOPTIMIZE")
PACKAGES = ("mpiml", "mpi4py", "numpy")


class BenchError(MpimlError):
    """A benchmark, or the ranks it started, did not come to an end."""


class Options(NamedTuple):
    """The command line of a benchmark.

    Attributes
    ----------
    ranks
        Ranks of the large run; None for the benchmark's own number.
    quick
        A few repetitions, to see that it works: no figures to quote.
    peers
        Whether to measure other systems too.
    pythons
        Peer -> the Python that has it; this one by default.
    calls
        Calls in total, where a benchmark makes many; None for its own number.
    """

    name: str = ""
    ranks: int | None = None
    json: bool = False
    quick: bool = False
    peers: bool = False
    pythons: Mapping[str, str] = {}
    calls: int | None = None


class Ranks:
    """Starts ranks on this machine, with the mpiexec and environment that ``mpiml run`` uses.

    Local: no MPI in this process.

    Parameters
    ----------
    timeout
        Seconds that each start may take.

    Raises
    ------
    UsageError
        No launcher fits, or it would refuse to run.
    """

    def __init__(self, timeout: float = 600.0) -> None:
        self.timeout = timeout
        self.launcher = find_mpiexec()
        self.environ, _ = launch_environ(
            self.launcher.mpi,
            os.environ,
            root=os.geteuid() == 0,
            container=in_container(os.environ),
        )
        self.environ["MPIML_LAUNCHER_PID"] = str(os.getpid())  # by which `sweep` finds the rest
        self.environ["MPIML_LAUNCHER_HOST"] = os.uname().nodename
        # One thread of BLAS in each rank: with more, two ranks would measure their quarrel.
        self.environ.setdefault("OMP_NUM_THREADS", "1")
        here = str(Path(__file__).resolve().parents[2])  # a checkout beside the current folder
        paths = [here, self.environ.get("PYTHONPATH")]
        self.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.library = ""
        self.load_before = os.getloadavg()[0]

    def run(
        self,
        n: int,
        argv: Sequence[str],
        *,
        before: Sequence[str] = (),
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Outcome:
        """Start `n` ranks of ``python ARGV`` and wait for them.

        Parameters
        ----------
        n, argv
            How many, and of what.
        before, options
            What stands before ``mpiexec`` and directly behind it.
        environ
            What is set besides.

        Raises
        ------
        BenchError
            They ended with another status than 0, or not in time.
        """
        command = [*before, str(self.launcher.path), *options, "-n", str(n)]
        command += [sys.executable, *argv]
        try:
            outcome = attempt(command, self.timeout, self.environ | dict(environ or {}))
        finally:  # also when this process is interrupted: mpiexec has a session of its own
            sweep(os.getpid())
        if outcome.status != 0:
            how = "no end in time" if outcome.status is None else f"status {outcome.status}"
            raise BenchError(
                f"{n} ranks of `python {' '.join(argv)[:120]}`: expected status 0 within "
                f"{self.timeout:g} s, got {how}. They said:\n{outcome.stderr[-4000:]}"
            )
        return outcome

    def scenario(
        self, where: str, n: int, plan: Mapping[str, Any], **how: Any
    ) -> dict[str, Any]:
        """Run ``module:function`` of this package on `n` ranks; return what rank 0 found.

        `how` are keywords of `run`.
        """
        with tempfile.TemporaryDirectory(prefix="mpiml-bench-") as folder:
            out = Path(folder) / "found.json"
            self.run(n, ["-m", "mpiml.bench._worker", where, json.dumps(plan), str(out)], **how)
            found: dict[str, Any] = json.loads(out.read_text())
        self.library = found.pop("library")
        return found

    def facts(self, quick: bool) -> dict[str, Any]:
        """Describe machine, MPI and versions; called after the measurement."""
        from datetime import datetime
        from importlib.util import find_spec

        facts: dict[str, Any] = {
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "cpu": _cpu(),
            "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
            "load before, after": f"{self.load_before:.1f}, {os.getloadavg()[0]:.1f}",
            "kernel": f"{platform.system()} {platform.release()}",
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "mpi": self.library or str(self.launcher.mpi),
            "launcher": str(self.launcher.mpi),
            "native module": "yes" if find_spec("mpiml._native") else "no",
            "clock": "time.perf_counter",
        }
        facts |= {name: _version(name) for name in PACKAGES}
        facts |= {name: self.environ[name] for name in SHOWN if name in self.environ}
        if quick:
            facts["quick"] = "few repetitions, to see that it works: no figures to quote"
        return facts


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        if name == "mpiml":
            import mpiml

            return f"{mpiml.__version__} (not installed)"
        return "not installed"


def only_two(options: Options) -> None:
    """Refuse ``--ranks`` where two ranks are what is measured.

    Raises
    ------
    UsageError
        Another number was asked for.
    """
    if options.ranks not in (None, 2):
        raise UsageError(
            f"--ranks {options.ranks}: {options.name} measures two ranks. Leave --ranks out; "
            "rpc, pubsub, ps, startup and allreduce take it."
        )
