"""Which lines of a template may be edited, and the template with other values in them: pure.

=============================================  ============================================
``#SBATCH --nodes=1``, ``##SBATCH --account=``  an option of sbatch; two marks: not given
``PROGRAM=${PROGRAM:-hello.py}  # why``         a variable of the script and its default
``replicas: 2 # --hosts``                       a value of a manifest, and the option's name
=============================================  ============================================
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from mpiml.errors import UsageError
from mpiml.options import parse_duration

__all__ = ["OPTIONS", "Option", "fill", "options_of"]


class Option(NamedTuple):
    """One thing that ``mpiml jobs show`` can fill in.

    Attributes
    ----------
    name
        The option, without its dashes.
    help
        What it is.
    sbatch
        Option of sbatch that says it; empty: none does.
    check
        Returns the text that stands in a Slurm script, and the one of a manifest.
    last
        Whether it is about the last part of a heterogeneous job alone.
    variable
        Name in the script; empty: none.
    """

    name: str
    help: str
    sbatch: str = ""
    check: Callable[[str], tuple[str, str]] = lambda text: (text, text)
    last: bool = False
    variable: str = ""


def _count(text: str) -> tuple[str, str]:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise UsageError(f"expected a whole number of at least 1, got {text!r}")
    return text, text


def _time(text: str) -> tuple[str, str]:
    """Slurm reads ``90`` as minutes and ``01:30`` as such too, so it is written out whole."""
    seconds = math.ceil(parse_duration(text))
    if seconds < 1:
        raise UsageError(f"expected a time above 0, got {text!r}")
    hours, rest = divmod(seconds, 3600)
    return f"{hours:02}:{rest // 60:02}:{rest % 60:02}", str(seconds)


def _warning(text: str) -> tuple[str, str]:
    seconds = str(math.ceil(parse_duration(text)))
    return f"B:USR1@{seconds}", seconds


def _switch(text: str) -> tuple[str, str]:
    if text not in ("yes", "no"):
        raise UsageError(f"expected yes or no, got {text!r}")
    return text, text


def _seeds(text: str) -> tuple[str, str]:
    if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", text):
        raise UsageError(f"expected seeds such as 0-9, 1,5,7 or 0-99%8, got {text!r}")
    return text, text


OPTIONS = {
    option.name: option
    for option in (
        Option("name", "name of the job", "job-name"),
        Option("hosts", "hosts (hetero: without the fat one)", "nodes", _count, True),
        Option("ranks-per-host", "ranks on each", "ntasks-per-node", _count, True),
        Option("cpus-per-rank", "cores of each rank", "cpus-per-task", _count, True),
        Option("cpus-per-host", "cores of each host", "", _count),
        Option("gpus-per-host", "GPUs on each host", "gpus-per-node", _count),
        Option("memory", "memory of each host, as Slurm or Kubernetes writes it", "mem"),
        Option("time", "time limit: 90 (seconds), 30m, 2:00:00, 1-00:00:00", "time", _time),
        Option("warning", "how long before it the program is told to stop", "signal", _warning),
        Option("partition", "partition of the cluster", "partition"),
        Option("account", "account to be charged", "account"),
        Option("seeds", "0-9, or 0-99%%8: at most 8 at a time", "array", _seeds),
        Option("environment", "where mpiml is installed", variable="VENV"),
        Option("modules", "environment modules to load first", variable="MODULES"),
        Option("launcher", "mpirun, srun --mpi=pmix, srun --mpi=pmi2", variable="LAUNCHER"),
        Option("image", "container image", variable="IMAGE"),
        Option("container", "command that runs an image", variable="CONTAINER"),
        Option("solver", "the MPI code and its arguments", variable="SOLVER"),
        Option("solver-ranks", "ranks of the MPI code", "", _count, variable="SOLVER_RANKS"),
        Option("program", "file of the program", variable="PROGRAM"),
        Option(
            "arguments", "arguments of its build(), quoted as in a shell", variable="ARGUMENTS"
        ),
        Option("requeue", "yes: run again after a checkpoint", "", _switch, variable="REQUEUE"),
    )
}
"""Every option of ``mpiml jobs show``, by name."""


def options_of(text: str) -> list[str]:
    """Return the names of the options that a template has a place for. Local: no MPI."""
    return [name for name, option in OPTIONS.items() if any(_found(option, text))]


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return a template with other values.

    Local: no MPI.

    Parameters
    ----------
    text
        The template.
    values
        What the user typed, by name of the option.

    Raises
    ------
    UsageError
        The template has no place for one, or the value is not one; names the option. Or the
        solver's ranks leave none to the program.
    """
    for name, value in values.items():
        option = OPTIONS[name]
        if "\n" in value:
            raise UsageError(f"--{name}: expected one line, got {value!r}")
        try:
            for_slurm, for_manifest = option.check(value)
        except UsageError as error:
            raise UsageError(f"--{name}: {error}") from None
        sbatch, variable, manifest = _found(option, text)
        if sbatch:
            for match in reversed(sbatch[-1:] if option.last else sbatch):
                line = f"#SBATCH --{option.sbatch}={_word(for_slurm, name)}"
                text = text[: match.start()] + line + text[match.end() :]
        elif variable:
            for match in reversed(variable):
                text = text[: match.start(1)] + _quoted(for_slurm) + text[match.end(1) :]
        elif manifest:
            for match in reversed(manifest):
                text = text[: match.start(1)] + _scalar(for_manifest) + text[match.end(1) :]
        else:
            places = ", ".join(f"--{place}" for place in options_of(text))
            raise UsageError(f"--{name}: this template has no place for it; it has {places}")
    if values:
        _check_solver(text)
        _check_warning(text)
    return text


def _check_warning(text: str) -> None:
    """Refuse a job that is warned of its end as soon as it begins."""
    limit = re.search(r"^#SBATCH --time=(\d+):(\d+):(\d+)$", text, re.MULTILINE)
    ahead = re.search(r"^#SBATCH --signal=B:USR1@(\d+)$", text, re.MULTILINE)
    if limit is None or ahead is None:
        return
    hours, minutes, rest = map(int, limit.groups())
    seconds = 3600 * hours + 60 * minutes + rest
    if seconds <= int(ahead[1]):
        raise UsageError(
            f"--time: expected more than --warning, which tells the program {ahead[1]} s before the "
            f"end to stop, got {seconds} s"
        )


def _check_solver(text: str) -> None:
    """Refuse a coupled job whose MPI code leaves no rank to the program."""
    numbers = [
        re.search(pattern, text, re.MULTILINE)
        for pattern in (
            r"^SOLVER_RANKS=\$\{SOLVER_RANKS:-(\d+)\}",
            r"^#SBATCH --nodes=(\d+)$",
            r"^#SBATCH --ntasks-per-node=(\d+)$",
        )
    ]
    solver, hosts, each = (int(found[1]) if found else None for found in numbers)
    if solver is None or hosts is None or each is None or solver < hosts * each:
        return
    raise UsageError(
        f"--solver-ranks: expected at most {hosts * each - 1}, since {hosts} hosts with {each} ranks "
        f"each have {hosts * each} and the program needs one at least, got {solver}. Give more "
        "--hosts or --ranks-per-host"
    )


def _found(option: Option, text: str) -> list[list[re.Match[str]]]:
    """Return where an option of sbatch, a variable and a value of a manifest stand."""
    found: list[list[re.Match[str]]] = []
    for name, pattern in (
        (option.sbatch, r"^##?SBATCH --{}=.*$"),
        (option.variable, r"^{0}=\$\{{{0}:-((?:\\.|[^\\}}\n])*)\}}"),
        (option.name, r"^[ -]*[\w.]+: (.*?)(?= # --{}$)"),
    ):
        lines = re.finditer(pattern.format(re.escape(name)), text, re.MULTILINE) if name else ()
        found.append(list(lines))
    return found


def _word(value: str, name: str) -> str:
    if not value or re.search(r"[\s'\"#]", value):
        raise UsageError(f"--{name}: expected one word, got {value!r}")
    return value


def _quoted(value: str) -> str:
    """Return text for the inside of ``${NAME:-...}`` of a shell."""
    return re.sub(r"([\\'\"`$}])", r"\\\1", value)


def _scalar(value: str) -> str:
    """Return text of a YAML value: plain where that is a number or a simple word."""
    if re.fullmatch(r"[A-Za-z0-9][\w./:@-]*", value) and not value.endswith(":"):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
