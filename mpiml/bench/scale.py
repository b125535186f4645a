"""Many ranks on few cores: start and end, a million calls, memory, and a model of all that."""

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from mpiml.bench.measure import Goal, Row, figure, ratio_at_most, sampled, summarize
from mpiml.bench.scale_memory import MARK
from mpiml.bench.scale_model import Machine, launch
from mpiml.bench.spawn import BenchError, Options, Ranks
from mpiml.errors import UsageError

__all__ = ["fitted", "measure", "sizes"]

PLANS = {
    False: {
        "ranks": 128,
        "starts": 3,
        "rounds": 9,
        "count": 2000,
        "launches": 5,
        "calls": 10**6,
    },
    True: {"ranks": 4, "starts": 1, "rounds": 2, "count": 100, "launches": 1, "calls": 1000},
}
HERE = Path(__file__).parent
FAR = (100, 1000, 10_000)  # ranks with a core each, for which only the model speaks
_PLACED = 1000  # ranks of a program that is placed without MPI

_Plan = dict[str, int]


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench scale``.

    Local: starts ranks; no MPI in this process.
    """
    plan = dict(PLANS[options.quick])
    if options.ranks is not None:
        plan["ranks"] = options.ranks
    if options.calls is not None:
        plan["calls"] = options.calls
    if plan["ranks"] < 2:
        raise UsageError(f"--ranks {plan['ranks']}: expected 2 or more")
    with tempfile.TemporaryDirectory(prefix="mpiml-bytecode-") as folder:
        # As after an installation: else each rank would compile what it imports.
        ranks.environ |= {"PYTHONPYCACHEPREFIX": folder, "PYTHONDONTWRITEBYTECODE": ""}
        rows = _starts(plan, ranks)
        parameters, told = _parameters(plan, ranks)
        rows += told
        rows += _launches(plan, ranks, parameters)
        rows += _calls(plan, ranks)
    return rows, [
        "start: from the call of mpiexec to its return. plain: mpi4py, numpy, the same "
        "communicators, a barrier.",
        "model: docs/scale.md; its work a rank is that of the smallest size, the rest was "
        "measured apart.",
    ]


def sizes(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most`. Local."""
    return sorted({2**i for i in range(1, most.bit_length())} | {most})


# -- processes -----------------------------------------------------------------------------------


def _starts(plan: _Plan, ranks: Ranks) -> list[Row]:
    rows = []
    commands = {
        "plain": ["-m", "mpiml.bench.scale_plain"],
        "mpiml": ["-m", "mpiml.run", str(HERE / "hello.py")],
    }
    for argv in commands.values():
        ranks.run(2, argv)  # bytecode, and the page cache
    for n in sizes(plan["ranks"]):
        took: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(plan["starts"]):
            for name, argv in commands.items():
                began = perf_counter()
                ranks.run(n, argv)
                took[name].append(perf_counter() - began)
        last = n == plan["ranks"]
        rows.append(sampled(f"plain_{n}", f"{n} ranks: plain mpi4py", "s", took["plain"]))
        rows.append(
            sampled(f"start_{n}", "  mpiml, hello", "s", took["mpiml"], took["plain"],
                    ratio_at_most(1.5) if last else None)
        )  # fmt: skip
    return rows


# -- the model -----------------------------------------------------------------------------------


def _parameters(plan: _Plan, ranks: Ranks) -> tuple[Machine, list[Row]]:
    found = ranks.scenario("scale_inside:messages", 2, plan)
    placing = _placing()
    machine = fitted(found, placing)
    told = [
        figure("L", "LogGP: latency L", "µs", machine.L, len(found["pingpong"])),
        figure("o", "  overhead o at each end", "µs", machine.o, len(found["send"])),
        sampled("g", "  gap g", "µs", found["gap"]),
        figure("G", "  a MiB, G", "µs", machine.G * (1 << 20), len(found["byte"])),
        figure("frame", "  overhead of a frame of mpiml", "µs", machine.frame),
        sampled("duplicate", "  a communicator, 2 ranks", "µs", found["duplicate"]),
        figure("placing", "  each rank of the job, on each rank", "µs", placing),
    ]
    return machine, told


def fitted(found: Mapping[str, list[float]], placing: float) -> Machine:
    """Return the parameters that samples of `scale_inside.messages` give. Local.

    An overhead is the mean of both ends, and at most half of a message's way.
    """
    middle = {name: summarize(found[name]).median for name in found if found[name]}
    way = middle["pingpong"]
    o = min((middle["send"] + middle["receive"]) / 2, way / 2)
    latency = way - 2 * o
    frame = max(o, (middle["call"] - latency) / 2)
    return Machine(
        latency,
        o,
        max(middle["gap"], o),
        middle["byte"],
        frame,
        middle["duplicate"],
        0.0,
        placing,
    )


def _placing() -> float:
    """Return the seconds that each rank of a program costs a rank that starts it."""
    from mpiml.bench.hello import build
    from mpiml.handshake import Record, alone
    from mpiml.layout import lay_out, split_layers

    program = build()
    program.check()
    own = alone(None)
    records = [own._replace(token=os.urandom(8)).pack() for _ in range(_PLACED)]
    took = []
    for _ in range(3):
        began = perf_counter()
        seen: dict[Any, Any] = {}
        heard = [Record.unpack(data, rank, seen) for rank, data in enumerate(records)]
        plan, _hosts = lay_out(program, [r.facts for r in heard], [None] * _PLACED)
        vertices = program.expand(plan.replicas)
        split_layers(vertices, list(vertices.owners(plan.ranks)), 0)
        took.append((perf_counter() - began) / _PLACED)
    return min(took)


def _launches(plan: _Plan, ranks: Ranks, machine: Machine) -> list[Row]:
    """Return what a launch takes and what the model says, for each size, and far beyond."""
    cores = len(os.sched_getaffinity(0))
    here = machine._replace(cores=cores)
    rows: list[Row] = []
    for n in sizes(plan["ranks"]):
        found = ranks.scenario("scale_inside:launches", n, plan)["launch"]
        middle = summarize(found).median
        if not rows:  # the smallest size tells what a launch costs a rank
            rest = launch(here, n).total
            here = here._replace(work=max(0.0, middle - rest) / here.share(n))
        said = launch(here, n).total
        rows.append(
            sampled(f"launch_{n}", f"{n} ranks: a launch that does nothing", "ms", found)
        )
        rows.append(
            figure(f"model_{n}", "  the model", "ms", said, ratio=said / middle, goal=_near(n))
        )
    for n in FAR:
        part = launch(here._replace(cores=0), n)
        shares = ", ".join(f"{k} {v * 1e3:.3g}" for k, v in part._asdict().items())
        what = f"model, {n:,} ranks with a core each ({shares} ms)"
        rows.append(figure(f"far_{n}", what, "ms", part.total))
    return rows


def _near(n: int) -> Goal | None:
    """Return that the model is right within a factor of two, where it is more than a fit."""
    if n == 2:
        return None
    return Goal("0.5 .. 2 x raw", lambda _, ratio: ratio is not None and 0.5 <= ratio <= 2)


# -- calls and memory ----------------------------------------------------------------------------


def _calls(plan: _Plan, ranks: Ranks) -> list[Row]:
    rows = []
    few = {}
    for n in sorted({2, plan["ranks"]}):
        count = plan["calls"] if n == plan["ranks"] else 1000
        found = ranks.scenario("scale_inside:calls", n, plan | {"calls": count})
        plain = _plain_memory(n, ranks)
        more = [size - plain for size in found["private"]]
        few[n] = summarize(more).median
        if n == plan["ranks"]:
            rows += [
                figure("calls", f"{n} ranks: calls made", "calls", found["calls"]),
                figure("calls_s", "  in", "s", found["seconds"]),
                figure("rate", "  calls a second", "/s", found["calls"] / found["seconds"]),
            ]
        rows += [
            figure(f"private_plain_{n}", f"{n} ranks: private memory, plain", "MiB", plain),
            sampled(f"private_{n}", "  mpiml over it", "MiB", more),
        ]
    if len(few) > 1:
        grown = (few[plan["ranks"]] - few[2]) / (plan["ranks"] - 2)
        rows.append(figure("grown", "  and with each rank more", "MiB", grown))
    return rows


def _plain_memory(n: int, ranks: Ranks) -> float:
    """Return the median of the private bytes of plain ranks."""
    said = ranks.run(n, ["-m", "mpiml.bench.scale_plain", "memory"]).stdout
    found = re.findall(rf"{re.escape(MARK)} (\d+) (\d+)", said)
    if len(found) != n:
        raise BenchError(f"expected {n} lines with {MARK!r}, got {len(found)}: {said[:2000]!r}")
    return summarize([int(private) for _, private in found]).median
