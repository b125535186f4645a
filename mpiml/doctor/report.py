"""The doctor's command: runs the checks and prints what came out."""

import argparse
import json
import sys
from collections.abc import Sequence

from mpiml.config import Config
from mpiml.doctor.check import Check

__all__ = ["Check", "main", "render"]

WORDS = {"ok": "ok", "note": "note", "warn": "WARN", "fail": "FAIL"}


def render(checks: Sequence[Check]) -> str:
    """Return the checks as lines of text, each failure with its cure below it.

    Local: no MPI.
    """
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        lines.append(f"{WORDS[check.state]:<5} {check.name:<{width}}  {check.found}")
        if check.cure:
            lines.append(f"{'':<5} {'':<{width}}  cure: {check.cure}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the doctor; returns 0, or 1 where something that mpiml needs is missing.

    Local: no MPI in this process; two ranks are started as children. As one of several ranks
    that a launcher started: collective over COMM_WORLD, and rank 0 speaks for all.

    Parameters
    ----------
    argv
        The arguments; those of this process by default.
    """
    parser = argparse.ArgumentParser(
        prog="mpiml doctor",
        description="Try what this machine's MPI, threads, windows, shared memory, HDF5, GPU and "
        "Slurm can do; each failure comes with its cure. Under mpiexec: with the ranks and hosts of the job. Status 1: mpiml cannot run.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds for each trial (60)"
    )
    try:
        options = parser.parse_args(argv)
    except SystemExit as end:
        return 2 if end.code else 0
    where = Config.read_foreign()
    if where.launcher is not None and (where.size_hint or 1) > 1:
        return _in_job(where, options.timeout, options.json)
    if where.rank_hint not in (None, 0):
        return 0  # another rank of the same job speaks
    from mpiml.doctor.machine import machine_checks
    from mpiml.doctor.ranks import rank_checks

    checks = machine_checks(options.timeout)
    gpu = any(check.name == "gpu" and check.state == "ok" for check in checks)
    checks += rank_checks(options.timeout, gpu)
    return _show(checks, options.json)


def _show(checks: Sequence[Check], as_json: bool) -> int:
    """Print the report; return the exit status."""
    status = int(any(check.state == "fail" for check in checks))
    if as_json:
        found = {"status": status, "checks": [check._asdict() for check in checks]}
        print(json.dumps(found, indent=2))
    else:
        print(render(checks))
    sys.stdout.flush()
    return status


def _in_job(config: Config, timeout: float, as_json: bool) -> int:
    """Be one rank of a job whose rank 0 shows one report. Collective over COMM_WORLD."""
    from mpiml.doctor.job import abort, run_in_job

    checks, spoiled = run_in_job(config, timeout, lambda rows: _show(rows, as_json))
    status = _show(checks, as_json) if checks else 0
    if spoiled:
        abort(status)
    return status
