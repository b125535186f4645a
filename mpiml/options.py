"""The run options of ``mpiml run``, read by argparse; see `mpiml.cmdline`.

Apart, since a line that begins with the file has none, and argparse costs each rank 5 ms.
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mpiml.errors import UsageError
from mpiml.loading import PROG, Help

__all__ = ["parse_duration", "read"]

# Options whose issue is not built yet: shown by --help, refused by name.
LATER = {
    "--spares": "the fault release",
    "--trace": "a later release",
    "--checkpoint": "the fault release",
    "--resume": "the fault release",
}

UNITS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


class _Parser(argparse.ArgumentParser):
    """argparse, but raising: which rank prints, and when it may end, is not decided here."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.format_usage()}{self.prog}: error: {message}")

    def print_help(self, file: object = None) -> None:
        raise Help(self.format_help())


class _ComesLater(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        name = self.option_strings[0]
        parser.error(f"{name} comes with {LATER[name]}.")


def parse_duration(text: str) -> float:
    """Seconds from ``90``, ``1.5``, ``45s``, ``1h30m``, ``2d``, ``MM:SS``, ``HH:MM:SS``, ``D-HH:MM:SS``.

    Parameters
    ----------
    text
        What the user typed.

    Returns
    -------
    float
        Seconds, finite and not negative.

    Raises
    ------
    UsageError
        If it is none of these forms.

    Examples
    --------
    >>> parse_duration("1h30m"), parse_duration("01:30:00"), parse_duration("2.5")
    (5400.0, 5400.0, 2.5)
    """
    text = text.strip().lower()
    if re.fullmatch(r"\d+(\.\d*)?|\.\d+", text):
        return float(text)
    if re.fullmatch(r"(\d+(\.\d+)?[dhms])+", text):
        parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
        units = [unit for _, unit in parts]
        if units == sorted(set(units), key="dhms".index):
            return sum(float(number) * UNITS[unit] for number, unit in parts)
    clock = re.fullmatch(r"(?:(\d+)-(?=\d+:\d\d:))?(?:(\d+):)?(\d+):(\d\d(?:\.\d+)?)", text)
    if clock:
        days, hours, minutes, seconds = (float(part or 0) for part in clock.groups())
        if seconds < 60 and (minutes < 60 or clock.group(2) is None):
            return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    raise UsageError(
        f"expected seconds or a form such as 90, 1h30m, 01:30:00, got {text!r}",
    )


def _typed(name: str, convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """`convert` with a message that argparse shows whole (its own hides ours)."""

    def parser(text: str) -> Any:
        try:
            return convert(text)
        except ValueError as error:
            reason = str(error) if isinstance(error, UsageError) else f"not {name}: {text!r}"
            raise argparse.ArgumentTypeError(reason) from None

    return parser


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise UsageError(f"expected a number of at least 1, got {text}")
    return value


def _wait(text: str) -> float:
    value = parse_duration(text)
    if value <= 0 or not math.isfinite(value):
        raise UsageError(f"expected a time above 0, got {text!r}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise UsageError(f"expected a seed of at least 0, got {text}")
    return value


def _parser() -> _Parser:
    parser = _Parser(
        prog=PROG,
        usage=f"{PROG} [run options] FILE[:NAME] [options of the program]",
        description="Run the program graph that the function `build` of a file returns.",
        epilog="Options after FILE are the parameters of its build: "
        f"`{PROG} FILE --help` lists them. Under mpirun, mpiexec or srun: "
        "`mpirun -n 4 python -m mpiml.run FILE`.",
        allow_abbrev=False,
        add_help=True,
    )
    count, wait = _typed("a whole number", _count), _typed("a time", _wait)
    add = parser.add_argument
    add("-n", type=count, metavar="N", help="start mpiexec with N ranks")
    add("--mpi", choices=["auto", "openmpi", "mpich"], default="auto",
        help="whose mpiexec -n starts (auto: the one of the MPI that mpi4py loads)")  # fmt: skip
    add("--dry-run", action="store_true",
        help="print graph, placement and environment; start nothing")  # fmt: skip
    add("--threads", type=count, metavar="N",
        help="without MPI, in one process: what FILL stands for (1)")  # fmt: skip
    add("--grace", type=_typed("a time", parse_duration), default=10.0, metavar="S",
        help="seconds a stopping node may still run (10)")  # fmt: skip
    add("--stall-warning", type=wait, default=60.0, metavar="S",
        help="report who waits for whom when nothing moved for S seconds (60)")  # fmt: skip
    add("--seed", type=_typed("a whole number", _seed), default=0, metavar="S",
        help="seed of every node's generator (0)")  # fmt: skip
    add("--max-time", type=wait, metavar="T",
        help="stop in order after T: seconds, 1h30m or HH:MM:SS")  # fmt: skip
    add("--log-dir", type=Path, metavar="DIR", help="a file of output per node, in DIR")
    add("--progress", action=argparse.BooleanOptionalAction, help="show the progress line")
    for name, metavar in [("--spares", "K"), ("--trace", "DIR"), ("--checkpoint", "DIR")]:
        add(name, action=_ComesLater, metavar=metavar, help=f"comes with {LATER[name]}")
    add("--resume", action=_ComesLater, nargs=0, help=f"comes with {LATER['--resume']}")
    add("file", metavar="FILE[:NAME]", help="a Python file, and its function (build)")
    return parser


def _place_of_file(parser: _Parser, argv: Sequence[str]) -> int:
    """Index of the first word that is neither an option nor its value.

    By hand, since argparse's REMAINDER treats ``--`` differently in each Python.
    """
    bare = {
        text
        for action in parser._actions
        if action.nargs == 0
        for text in action.option_strings
    }
    i = 0
    while i < len(argv) and argv[i].startswith("-") and argv[i] != "--":
        joined = "=" in argv[i] or (argv[i].startswith("-n") and len(argv[i]) > 2)
        i += 1 if joined or argv[i] in bare else 2
    return i + (argv[i : i + 1] == ["--"])


def read(argv: list[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Read the run options and the file, by their names, and what is left for `build`.

    Raises
    ------
    UsageError
        The line is wrong.
    Help
        ``--help`` was given.
    """
    parser = _parser()
    end = _place_of_file(parser, argv) + 1
    found = vars(parser.parse_args(argv[:end]))
    if found["n"] is not None and found["threads"] is not None:
        parser.error("--threads N is for a run without MPI, -n N starts one; give one of them.")
    return found, tuple(argv[end:])
