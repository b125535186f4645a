"""Try a program on several hosts made of this machine: ``python -m mpiml.bench.on_hosts``.

    python -m mpiml.bench.on_hosts 2,1 program.py [options of the program]
    python -m mpiml.bench.on_hosts --cut 5 --mend 20 2,2 program.py

Two hosts of 2 ranks and 1 rank; two of 2 ranks each, the second of which is cut off after 5 s and
joined again after 20. Needs root, ``ip``, ``mount`` and ``unshare``.
"""

import subprocess
import sys
import threading
from argparse import REMAINDER, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence

from mpiml.bench.several_hosts import SeveralHosts
from mpiml.bench.spawn import Ranks
from mpiml.errors import UsageError
from mpiml.seconds import as_seconds

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Make the hosts, run ``mpiml.run`` on all their ranks, and return its status.

    Local: starts child processes; no MPI in this process.
    """
    parser = ArgumentParser(
        prog="python -m mpiml.bench.on_hosts",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cut", type=float, metavar="S", help="cut the last host off after S s"
    )
    parser.add_argument("--mend", type=float, metavar="S", help="join it again after S s")
    parser.add_argument("slots", help="ranks of each host, such as 2,1")
    parser.add_argument(
        "words", nargs=REMAINDER, metavar="program", help="file, and its options"
    )
    asked = parser.parse_args(argv)
    numbers = asked.slots.split(",")
    if not all(w.isdecimal() and int(w) for w in numbers):
        parser.error(
            f"expected ranks of each host, 1 or more, such as 2,1, got {asked.slots!r}"
        )
    if not asked.words:
        parser.error(f"expected a program after the ranks {asked.slots}, got none")
    for seconds in (asked.cut, asked.mend):
        if seconds is not None and as_seconds(seconds) is None:
            parser.error(f"--cut, --mend: expected seconds >= 0, got {seconds}")
    with SeveralHosts(Ranks(), [int(w) for w in numbers], programs=True) as hosts:
        why = hosts.why_not()
        if why:
            raise UsageError(f"no hosts of this machine: {why}")
        print(f"hosts: {' '.join(hosts.names)}", file=sys.stderr, flush=True)
        command, environ = hosts.command(["-m", "mpiml.run", *asked.words])
        timers = [
            threading.Timer(seconds, how, [hosts.names[-1]])
            for seconds, how in ((asked.cut, hosts.cut), (asked.mend, hosts.mend))
            if seconds is not None
        ]
        for timer in timers:
            timer.start()
        try:
            return subprocess.call(command, env=environ)
        finally:
            for timer in timers:
                timer.cancel()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"mpiml: {error}")
