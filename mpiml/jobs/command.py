"""The command ``mpiml jobs``: list the templates, show one filled in, check the machine."""

import argparse
import json
import sys
from collections.abc import Sequence

from mpiml.errors import UsageError
from mpiml.jobs.filling import OPTIONS, fill, options_of
from mpiml.jobs.templates import Template, find, templates

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status.

    Local: no MPI in this process.

    Parameters
    ----------
    argv
        The arguments; those of this process by default.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        options = _parser(argv).parse_args(argv)
        if options.what == "list":
            print(_table(templates()), end="")
        elif options.what == "show":
            given = {name: getattr(options, name.replace("-", "_"), None) for name in OPTIONS}
            values = {name: value for name, value in given.items() if value is not None}
            print(fill(find(options.template).text, values), end="")
        else:
            return _check(options.json, options.timeout)
    except SystemExit as end:
        return 2 if end.code else 0
    except UsageError as error:
        print(f"mpiml jobs: {error}", file=sys.stderr)
        return 2
    return 0


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpiml jobs",
        description="Job scripts for clusters: `mpiml jobs show program --hosts 4 "
        "--ranks-per-host 8 --time 2:00:00 --program train.py > train.sbatch`.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="COMMAND")
    commands.add_parser("list", help="list the templates")
    show = commands.add_parser(
        "show",
        help="print a template, filled in",
        description="Print a template with these values in it; what is not given stays as it is.",
        allow_abbrev=False,
    )
    names = [template.name for template in templates()]
    show.add_argument("template", metavar="TEMPLATE", help=", ".join(names))
    here = [OPTIONS[name] for name in _wanted(argv, names)]
    for option in here:
        show.add_argument(f"--{option.name}", metavar="X", help=option.help)
    check = commands.add_parser(
        "check",
        help="look whether the templates can run here",
        description="Look for Slurm, a launcher that fits this Python's MPI, shared memory and "
        "Apptainer; each failure comes with its cure. Status 1: a check has failed.",
        allow_abbrev=False,
    )
    check.add_argument("--json", action="store_true", help="print JSON instead of text")
    check.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds for each look (60)"
    )
    return parser


def _wanted(argv: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the options that the help of this line shows: those that the template has."""
    chosen = [word for word in argv if word in names]
    helps = {"-h", "--help"} & set(argv)
    return options_of(find(chosen[0]).text) if helps and chosen else list(OPTIONS)


def _table(rows: Sequence[Template]) -> str:
    width = max(len(row.name) for row in rows)
    return "".join(f"{row.name:<{width}}  {row.about}\n" for row in rows)


def _check(as_json: bool, timeout: float) -> int:
    from mpiml.doctor.report import render
    from mpiml.jobs.checking import job_checks

    checks = job_checks(timeout)
    status = int(any(check.state == "fail" for check in checks))
    if as_json:
        found = {"status": status, "checks": [check._asdict() for check in checks]}
        print(json.dumps(found, indent=2))
    else:
        print(render(checks))
    return status
