"""The command line of ``mpiml run``: run options, the program's file, the options of `build`.

    mpiml run [run options] FILE[:NAME] [options of the program]

What stands before the file belongs to mpiml, what follows it to the file's `build`, whose
signature is its command line. Nothing here touches MPI, prints, or exits: a wrong command
line is a `UsageError` whose text is the usage and the reason, and a wish for help is `Help`,
so that of many ranks which read the same line one can speak for all.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from mpiml.loading import Help, call_build, load

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "Help",
    "Options",
    "call_build",
    "load",
    "parse",
    "parse_script",
    "rank_argv",
]


class Options(NamedTuple):
    """The run options of one program, and where the program is; times are seconds."""

    n: int | None = None
    mpi: Literal["auto", "openmpi", "mpich"] = "auto"
    dry_run: bool = False
    threads: int | None = None
    grace: float = 10.0
    stall_warning: float = 60.0
    seed: int = 0
    max_time: float | None = None
    log_dir: "Path | None" = None
    progress: bool | None = None
    file: str | None = None
    build: str = "build"
    build_args: tuple[str, ...] = ()


def _split_target(target: str) -> tuple[str, str]:
    """``hello.py:build`` → its two halves; a file whose own name has a colon stays whole."""
    head, colon, name = target.rpartition(":")
    if colon and head and name.isidentifier() and not os.path.exists(target):
        return head, name
    return target, "build"


def parse(argv: Sequence[str]) -> Options:
    """Read the command line of ``mpiml run``.

    Local: no MPI, no output.

    Parameters
    ----------
    argv
        The arguments, without the command's own name.

    Raises
    ------
    UsageError
        The line is wrong. Its text is the usage and the reason; the status is 2.
    Help
        ``--help`` was given. Its text goes to stdout; the status is 0.
    """
    if argv and not argv[0].startswith("-"):  # no run options: most ranks need no argparse
        file, build = _split_target(argv[0])
        return Options(file=file, build=build, build_args=tuple(argv[1:]))
    from mpiml import options

    found, args = options.read(list(argv))
    file, build = _split_target(found.pop("file"))
    kept = {key: value for key, value in found.items() if key in Options._fields}
    return Options(**kept, file=file, build=build, build_args=args)


def parse_script(argv: Sequence[str], name: str = "build") -> Options:
    """Read the line of ``python hello.py ...``, for a file that calls ``launch(build)`` itself.

    Local: everything follows the file there, so everything belongs to `build`.

    Parameters
    ----------
    argv
        As in `sys.argv`: the file, then the arguments.
    name
        The name of the function that was given to `launch`.
    """
    return Options(file=argv[0], build=name, build_args=tuple(argv[1:]))


def rank_argv(options: Options) -> list[str]:
    """Return the line that gives a rank these options: no ``-n``, ``--mpi``, ``--dry-run``."""
    argv: list[str] = []
    for field in ("threads", "grace", "stall_warning", "seed", "max_time", "log_dir"):
        value = getattr(options, field)
        if value != Options._field_defaults[field]:
            argv += [f"--{field.replace('_', '-')}", str(value)]
    if options.progress is not None:
        argv.append("--progress" if options.progress else "--no-progress")
    return [*argv, f"{options.file}:{options.build}", *options.build_args]
