"""``python -m mpiml.run``: run the program of a file, wherever this process finds itself.

===========================  =============================================================
``-n N`` on the line         this process starts ``mpiexec`` and stands in for it (`starter`)
started by an MPI launcher   this process is a rank
neither                      this process is everything: nodes are threads
===========================  =============================================================

A rank that ended before MPI_Init would leave the others waiting for ever (under MPICH), so
what goes wrong there early is not raised where it happens: it is handed to
`mpiml.launch.run_program`, which initialises MPI and takes it into its first collective.
"""

from mpiml import early

if __name__ == "__main__":
    early.listen()  # before the imports below, which take longer than a signal

import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from mpiml.cmdline import Help, Options, call_build, load, parse
from mpiml.config import Config
from mpiml.cores import keeping_cores, share_cores
from mpiml.errors import PlacementError, UsageError
from mpiml.loading import answering_help
from mpiml.program import Program
from mpiml.started import trapped

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Collective: under an MPI launcher, over all its ranks. Local otherwise.

    Parameters
    ----------
    argv
        The arguments; those of this process by default.
    """
    argv = sys.argv[1:] if argv is None else argv
    # Variables of our own may be wrong, and that is an error like others: see who we are first.
    foreign = {key: value for key, value in os.environ.items() if not key.startswith("MPIML_")}
    where = Config.read(foreign)
    speaks = where.rank_hint in (None, 0)
    try:
        Config.read()
        options = parse(argv)
        _check(options, where)
    except Help as wish:
        return _help(wish, speaks)
    except UsageError as error:
        if where.launcher is None or where.singleton_trap:
            return _usage(error, speaks)
        return _run(_raiser(error), Options(), True)
    if options.dry_run or options.n is not None:
        return _alone(options, where) if speaks else 0
    share_cores(where)  # before NumPy is loaded
    load_program = answering_help(keeping_cores(lambda: _program(options), where), speaks)
    return _run(load_program, options, where.launcher is not None)


def _alone(options: Options, where: Config) -> int:
    """Do what one process does without being a rank: show the program, or start mpiexec."""
    try:
        if options.dry_run:
            return _dry_run(options, where)
        if {"-h", "--help"} & set(options.build_args):
            _program(options)
        from mpiml.starter import start

        return start(options)
    except Help as wish:
        return _help(wish, True)
    except UsageError as error:
        return _usage(error, True)
    except PlacementError as error:
        print(f"mpiml run: {error}", file=sys.stderr)
        return 1


def _help(wish: Help, speaks: bool) -> int:
    if speaks:
        print(wish, end="", flush=True)
    return 0


def _usage(error: UsageError, speaks: bool) -> int:
    if speaks:
        text = str(error)
        print(text if text.startswith("usage:") else f"mpiml run: {text}", file=sys.stderr)
    return 2


def _raiser(error: Exception) -> Callable[[], Program]:
    def load_program() -> NoReturn:
        raise error

    return load_program


def _run(load_program: Callable[[], Program], options: Options, launched: bool) -> int:
    """Hand over to `launch`; a rank that cannot even import it ends the others."""
    try:
        from mpiml.launch import run_program
    except BaseException:
        if launched:
            _abort()
        raise
    return run_program(load_program, options)


def _abort() -> None:
    import traceback

    from mpi4py import MPI

    traceback.print_exc()
    sys.stderr.flush()
    if not MPI.Is_initialized():  # as `world` has told mpi4py, if we came so far
        MPI.Init_thread()
    MPI.COMM_WORLD.Abort(1)


def _program(options: Options) -> Program:
    assert options.file is not None
    sys.argv = [options.file, *options.build_args]  # as the file would see it as a script
    return call_build(load(options.file, options.build), options.build_args)


def _check(options: Options, where: Config) -> None:
    """Refuse what contradicts the way in which this process was started."""
    if where.singleton_trap:
        if options.n is not None or options.dry_run:  # one task does it, and needs no PMI
            return
        raise UsageError(trapped(where.slurm_step_tasks))
    if options.n is not None and where.launcher is not None and (where.size_hint or 1) > 1:
        raise UsageError(
            f"-n {options.n} starts mpiexec, but this is already one of {where.size_hint} ranks "
            "that a launcher started. Leave -n out, or the launcher.",
        )
    if options.threads is not None and where.launcher is not None:
        raise UsageError(
            f"--threads {options.threads} is for a run without MPI, but a launcher started this "
            "process. Leave --threads out, or the launcher.",
        )


def _dry_run(options: Options, where: Config) -> int:
    """Print graph, placement and environment: of N ranks on this one host, or of threads."""
    from mpiml.hosts import Hosts, local_facts
    from mpiml.roles.placement import Ask, place, render
    from mpiml.settings import FILL

    program = _program(options)
    ranks = options.n or where.size_hint or 1
    asks = [
        Ask(
            unit.label,
            None if unit.replicas is FILL else unit.replicas,
            unit.placement,
            len(unit.roles),
        )
        for unit in program.units
        if not any(m.node.outside for i in unit.roles for m in program.roles[i].members)
    ]
    hosts = Hosts([local_facts()] * ranks)
    plan = place(asks, hosts, threads=options.threads)
    print(program)
    print()
    print(render(asks, plan, hosts).rstrip())
    for note in plan.notes:
        print(f"note: {note}")
    print()
    for line in _environment(options, where, hosts.threads_per_rank(0)):
        print(line)
    return 0


def _environment(options: Options, where: Config, threads: int) -> list[str]:
    from mpiml.starter import command, prepare

    omp = "as set" if where.omp_set else str(threads)
    lines = [f"OMP_NUM_THREADS of a rank: {omp}"]
    if options.n is None:
        how = (
            "a launcher has started this"
            if where.launcher
            else "threads of one process, no MPI"
        )
        return [f"start: {how}", *lines]
    try:
        launcher, environ, notes = prepare(options)
    except UsageError as error:  # the graph can be looked at on a machine without MPI
        return [f"start: not possible here: {error}", *lines]
    changed = sorted(key for key in environ if environ[key] != os.environ.get(key))
    removed = sorted(os.environ.keys() - environ.keys())
    return [
        f"start: {launcher}",
        f"command: {' '.join(command(launcher, options))}",
        *(f"set: {key}={environ[key]}" for key in changed if key != "MPIML_LAUNCHER_PID"),
        *(f"removed: {key}" for key in removed),
        *(f"note: {note}" for note in notes),
        *lines,
    ]


if __name__ == "__main__":
    sys.exit(main())
