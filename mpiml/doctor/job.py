"""The doctor inside of a job: ``mpirun -n 4 python -m mpiml.doctor``.

Every rank looks around; one of each host tries what needs no ranks, before MPI starts, since it
starts processes; then all ranks try together what programs rely on. Rank 0 prints one report.
A trial that does not end in time ends the job, with its name: the main thread is inside of MPI
then, and a timer speaks.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from mpiml.config import Config
from mpiml.doctor.check import Check
from mpiml.doctor.machine import machine_checks
from mpiml.doctor.merge import compare, host_rows, merge
from mpiml.doctor.ranks import CURES
from mpiml.doctor.trials import Place, trials
from mpiml.errors import UsageError
from mpiml.hosts import Facts, local_facts
from mpiml.refusal import end_job, lonely
from mpiml.started import doubt, launcher_of, refuse_start, refuse_world
from mpiml.vendors import family, title

__all__ = ["Seen", "abort", "report_of", "run_in_job"]


#: What is compared over ranks, or tried with them, needs no row of each host where it is well.
_TOLD_BELOW = ("cores", "mpi4py", "numpy", "single copy")


_TRIALS = 10  # timeouts, until MPI has to be up: each host's trials come before
_LATE = (
    "ranks",
    "fail",
    "See that all hosts load the same MPI, and reach each other; or try another MPI library.",
)


class Seen(NamedTuple):
    """What one rank tells the others.

    Attributes
    ----------
    facts
        Its host.
    versions
        By row: what must be equal everywhere.
    folder
        Its working folder.
    rows
        What it tried without ranks; empty where another rank of the host did.
    """

    facts: Facts
    versions: dict[str, str]
    folder: str
    rows: Sequence[Check]


def run_in_job(
    config: Config, timeout: float, show: Callable[[list[Check]], object]
) -> tuple[list[Check], bool]:
    """Run all checks together with the other ranks of the job.

    Collective over COMM_WORLD; initialises MPI.

    Parameters
    ----------
    config
        What the launcher's variables say.
    timeout
        Seconds that each trial may take.
    show
        Prints a report; called by a timer where a trial does not end.

    Returns
    -------
    checks, spoiled
        The report, empty on all ranks but 0; and whether MPI cannot be finalised any more, so
        that rank 0 is to `abort` the job after the report.
    """
    speaks = config.rank_hint in (None, 0)
    first = config.local_rank_hint in (None, 0) or speaks
    rows: list[Check] = []
    if first and not config.singleton_trap:
        rows = machine_checks(timeout)
    with _Watch(speaks, timeout, show) as watch:
        watch.begin("start")  # waits for the trials of other hosts
        try:
            comm = _start(config)
        except UsageError as error:
            _refuse(error, rows if speaks else [], speaks, show)
        seen = comm.gather(Seen(local_facts(config), _versions(), _folder(), rows))
        watch.comm = comm
        if seen is not None:
            watch.rows += report_of(seen, config)
        names = comm.bcast(None if seen is None else [one.facts.name for one in seen])
        keys = comm.bcast(
            None if seen is None else [one.facts[:1] + one.facts[5:6] for one in seen]
        )
        numbers = list(dict.fromkeys(keys))
        place = Place([numbers.index(key) for key in keys], names, family(_library()))
        for name, trial in trials(place):
            watch.begin(name)
            check = trial(comm, place)
            if check is not None:
                watch.rows.append(check)
        spoiled = any(row.name == "any source" and row.state == "fail" for row in watch.rows)
        return watch.rows, spoiled


def abort(status: int) -> None:
    """End all ranks, whose MPI_Finalize would wait for messages that are lost. Local."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Abort(status)


def report_of(seen: Sequence[Seen], config: Config) -> list[Check]:
    """Merge what the ranks have seen. Local: a pure function."""
    machines = list(dict.fromkeys((one.facts.name, one.facts.machine) for one in seen))
    labels = {}
    for i, (name, machine) in enumerate(machines):  # two machines may have one name
        again = sum(name == other for other, _ in machines[:i])
        labels[name, machine] = f"{name} ({again + 1})" if again else name
    names = [labels[one.facts.name, one.facts.machine] for one in seen]
    hosts: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        hosts.setdefault(name, []).append(rank)
    own = {
        host: next((seen[rank].rows for rank in ranks if seen[rank].rows), ())
        for host, ranks in hosts.items()
    }
    kept = {
        host: [row for row in rows if row.state != "ok" or row.name not in _TOLD_BELOW]
        for host, rows in own.items()
        if rows
    }
    checks = merge(kept, hosts)
    found = f"{len(seen)}, started by {launcher_of(config)}"
    checks.append(Check("ranks", "ok", found))
    for what in seen[0].versions:
        checks.append(compare(what, [one.versions[what] for one in seen], names))
    checks.append(compare("working folder", [one.folder for one in seen], names))
    facts = [one.facts for one in seen]
    return checks + host_rows(facts, config.launcher, not config.omp_set)


def _start(config: Config) -> Any:
    from mpiml import world

    with lonely(config):
        refuse_start(config, world.described())
    if text := doubt(config, world.described()):
        sys.stderr.write(f"mpiml: {text}\n")
        sys.stderr.flush()
    comm = world.start()
    with lonely(config):
        refuse_world(config, world.described(), comm.size)
    return comm


def _refuse(
    error: UsageError,
    rows: Sequence[Check],
    speaks: bool,
    show: Callable[[list[Check]], object],
) -> NoReturn:
    """Say in this rank's turn why MPI does not start here, and end the job."""
    time.sleep(getattr(error, "mpiml_turn", 0.0))
    if speaks or getattr(error, "mpiml_rank", -1) >= 0:
        found, _, cure = str(error).partition(" Use ")
        cure = f"Use {cure}" if cure else "See there."
        show([*rows, Check("ranks", "fail", found, cure)])
    end_job(1)
    raise SystemExit(1)


def _library() -> str:
    from mpiml import world

    return world.described()


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("mpiml", "mpi4py", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found | {"mpi library": title(_library())}


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "missing"


class _Watch:
    """Ends the job with a report when a trial does not end; `comm` is None until MPI is up."""

    def __init__(
        self, speaks: bool, timeout: float, show: Callable[[list[Check]], object]
    ) -> None:
        self.rows: list[Check] = []
        self.comm: Any = None
        self._speaks, self._timeout, self._show = speaks, timeout, show
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "_Watch":
        return self

    def __exit__(self, *args: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def begin(self, name: str) -> None:
        """Give the trial of this name its time."""
        self.__exit__()
        limit = self._timeout * (_TRIALS if self.comm is None else 1)
        # Rank 0 has the report: it speaks first, and ends the others.
        late = limit if self._speaks else limit + 10.0
        self._timer = threading.Timer(late, self._end, (name,))
        self._timer.daemon = True
        self._timer.start()

    def _end(self, name: str) -> None:
        row, _, cure = CURES.get(name, _LATE)
        if self._speaks:
            self._show([*self.rows, Check(row, "fail", "the ranks did not end in time", cure)])
        if self.comm is None:
            end_job(1)
            os._exit(1)
        else:
            self.comm.Abort(1)
