"""The console script ``mpiml``: ``mpiml run|bench|doctor|jobs`` are ``python -m mpiml.…``."""

import sys
from collections.abc import Sequence

from mpiml.errors import UsageError

__all__ = ["main"]

USAGE = "usage: mpiml {run,bench,doctor,jobs} [options]\n       mpiml --version | --help\n"
HELP = f"""{USAGE}
commands:
  run     run the program graph of a file: mpiml run -n 4 hello.py
  bench   measure this machine: mpiml bench rpc
  doctor  what this machine's MPI can do, and the cure for what it cannot
  jobs    job scripts for Slurm and Kubernetes: mpiml jobs show program --hosts 4

`mpiml COMMAND --help` says more; `python -m mpiml.COMMAND` is the same.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of mpiml's commands; returns the exit status.

    Collective: ``mpiml run`` under an MPI launcher is, over all its ranks. Local otherwise.

    Parameters
    ----------
    argv
        The arguments; those of this process by default.
    """
    own = argv is None
    argv = sys.argv[1:] if argv is None else argv
    name, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if name in ("-h", "--help"):
        print(HELP, end="")
    elif name == "--version":
        from importlib.metadata import version

        print(f"mpiml {version('mpiml')}")
    elif name == "run":
        if own:  # this process is the command
            from mpiml import early

            early.listen()
        from mpiml.run import main as run

        return run(rest)
    elif name == "doctor":
        from mpiml.doctor import main as doctor

        return doctor(rest)
    elif name == "jobs":
        from mpiml.jobs import main as jobs

        return jobs(rest)
    elif name == "bench":
        return _module("mpiml.bench", rest)
    else:
        reason = f"unknown command {name!r}" if name else "a command is missing"
        print(f"{USAGE}mpiml: error: {reason}", file=sys.stderr)
        return 2
    return 0


def _module(name: str, argv: list[str]) -> int:
    """Run a module as ``python -m`` does, and return its status."""
    import runpy

    sys.argv = [name, *argv]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except UsageError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    return 0
