"""The command line of ``mpiml bench``."""

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import FrameType

from mpiml.bench import peers
from mpiml.bench.measure import Report, render, to_json
from mpiml.bench.spawn import BenchError, Options, Ranks
from mpiml.config import Config
from mpiml.errors import UsageError

__all__ = ["NAMES", "bench", "main", "parse"]

NAMES = {
    "rpc": "calls: small, in flight, to a service that computes, from many clients, to a group",
    "pubsub": "messages of topics: one way, in a row, to several subscribers",
    "ps": "the parameter server: pulls, pushes, many workers, time to a loss",
    "arrays": "results and arguments of 1 KiB to 16 MiB",
    "allreduce": "sums of 8 B to 256 MiB over the ranks of a host, and over two hosts",
    "onesided": "additions to shared memory of a host and of another, beside MPI's windows",
    "neighbors": "averages with neighbours, beside raw messages; steps beside a slow rank",
    "gpu": "sums of arrays on CUDA devices, of 8 B to 256 MiB",
    "external": "a code in C: calls, publishing, streams, its steps, beside raw MPI in C",
    "startup": "the import, the memory of a rank, many ranks on few cores",
    "poll": "mpiml.poll() and small calls where one thread makes all calls of MPI",
    "idle": "what an idle service costs, and how soon it answers",
    "scale": "2 to 128 ranks on few cores: start, end, a million calls, memory, a model",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark and print what it found; returns the exit status.

    Local: no MPI in this process; ranks are started as children. Status 0 says that it was
    measured, not that a goal was reached: the table says that.

    Parameters
    ----------
    argv
        The arguments; those of this process by default.
    """
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
    except SystemExit as end:
        return 2 if end.code else 0
    try:
        where = Config.read()
        if where.launcher is not None:
            if where.rank_hint in (None, 0):
                raise UsageError(
                    "mpiml bench starts its own ranks, but a launcher started this process. "
                    "Leave the launcher out; --ranks sets a number."
                )
            return 2
        with _ended_by_signals():
            report = bench(options)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except UsageError as error:
        print(f"mpiml bench: {error}", file=sys.stderr)
        return 2
    except BenchError as error:
        print(f"mpiml bench: {error}", file=sys.stderr)
        return 1
    print(to_json(report) if options.json else render(report), flush=True)
    return 0


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let SIGTERM end this process by an exception, so that its ranks end too."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def bench(options: Options) -> Report:
    """Run a benchmark. Local: starts ranks; no MPI in this process."""
    ranks = Ranks()
    module = import_module(f"mpiml.bench.{options.name}")
    rows, notes = module.measure(options, ranks)
    if options.peers:
        more, said = peers.measure(options, rows)
        rows, notes = rows + more, notes + said
    return Report(options.name, ranks.facts(options.quick), rows, notes)


def parse(argv: Sequence[str]) -> Options:
    """Read the command line. Local: a pure function, but for what argparse prints."""
    names = "\n".join(f"  {name:<9} {what}" for name, what in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="mpiml bench",
        description="Measure mpiml on this machine, with raw mpi4py beside it in the same run.\n\n"
        + names,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", choices=NAMES, metavar="NAME", help=" | ".join(NAMES))
    parser.add_argument(
        "--ranks",
        type=_count,
        metavar="N",
        help="ranks of the large run (rpc 8, pubsub 4, ps 4, startup 64, allreduce 2, scale 128)",
    )
    parser.add_argument(
        "--calls", type=_count, metavar="N", help="calls in total, of scale (1,000,000)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument(
        "--quick", action="store_true", help="few repetitions, to see that it works"
    )
    parser.add_argument(
        "--peers", action="store_true", help="measure other systems too, where installed"
    )
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        type=_peer,
        metavar="PEER=PATH",
        help=f"the Python that has a peer ({', '.join(peers.PEERS)})",
    )
    found = parser.parse_args(argv)
    return Options(
        found.name, found.ranks, found.json, found.quick, found.peers or bool(found.peer_python),
        dict(found.peer_python), found.calls,
    )  # fmt: skip


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {value}")
    return value


def _peer(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if name not in peers.PEERS or not equals or not path:
        raise argparse.ArgumentTypeError(
            f"expected PEER=PATH with one of {', '.join(peers.PEERS)}, got {text!r}"
        )
    return name, path
