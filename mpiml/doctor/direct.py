"""``python -m mpiml.doctor.direct``: lets two ranks exchange device arrays, tells how it went.

What a program's ranks start when their MPI says that it takes device memory (see
`mpiml.collectives.device.direct`): a process that loads no MPI itself, since it starts
``mpiexec``. One line of JSON on stdout: ``allowed`` and ``why``.
"""

import json
import sys
from collections.abc import Sequence

from mpiml.doctor.ranks import check_launcher, read_probe, starter
from mpiml.errors import UsageError
from mpiml.mpiexec import find_mpiexec, library

__all__ = ["main", "try_ranks"]


def try_ranks(timeout: float) -> tuple[bool, str]:
    """Return whether two ranks could exchange device arrays by MPI, and what came of it.

    Local: no MPI in this process.
    """
    checks, launcher = check_launcher(find_mpiexec, library)
    if launcher is None:
        return False, f"no trial exchange: {checks[-1].found}"
    try:
        run = starter(launcher, timeout)
    except UsageError as error:
        return False, f"no trial exchange: {error}"
    step = read_probe(["gpu"], run)["gpu"]
    if step["ok"]:
        return True, "a trial exchange worked"
    return False, f"the trial exchange failed: {step['error']}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the answer; returns 0, whatever it is.

    Local: no MPI in this process; two ranks are started as children.

    Parameters
    ----------
    argv
        The time limit in seconds; that of this process by default.
    """
    given = sys.argv[1:] if argv is None else argv
    allowed, why = try_ranks(float(given[0]) if given else 60.0)
    print(json.dumps({"allowed": allowed, "why": why}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
