"""A code in C beside a program: calls, publishing, streams, its steps, beside raw MPI in C."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import mpiml
from mpiml.bench.measure import Row, at_least, at_most, figure, ratio_at_most, sampled
from mpiml.bench.spawn import BenchError, Options, Ranks
from mpiml.doctor.check import attempt
from mpiml.starter import sweep

__all__ = ["measure", "rows_of"]

SOURCES = Path(mpiml.__file__).resolve().parents[1] / "libmpiml"
CALLERS, SOLVERS = 1, 2
KEPT = 8  # messages that libmpiml/bench/external.py keeps of a stream
MIB = 1 << 20
SMALL = 1 << 10


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench external``.

    Local: compiles the library and a driver, and starts ranks; no MPI in this process.
    """
    compiler = _compiler()
    if compiler is None or not SOURCES.is_dir():
        return [], ["no compiler, or no sources: expected mpicc, and libmpiml in a checkout"]
    with tempfile.TemporaryDirectory(prefix="mpiml-bench-") as folder:
        driver = _compiled(compiler, Path(folder) / "external")
        jobs = _Jobs(driver, ranks, options.quick)
        times = 1 if options.quick else 5
        found: dict[str, list[dict[str, Any]]] = {}
        for _ in range(times):
            for name, *run in _RUNS:
                if name == "step":
                    rate = found["stream"][-1]["rate"] / 10
                    run[1] = (*run[1], f"{rate:.0f}")
                found.setdefault(name, []).append(jobs.run(name.partition(" ")[0], *run))
    return rows_of(found), [
        "Each figure: medians of several starts, those of raw MPI and ours in turn.",
        "Without a thread a transfer runs inside the calls, of raw MPI too: that is in its publish.",
        f"Streams: {SOLVERS} solver ranks to 1; the topic keeps {KEPT} messages. Raw from one array "
        "reads what a cache still holds; a message that is kept needs an array of its own.",
        "A step computes for so long that messages come at 10 % of the stream's rate.",
    ]


# name, what Python runs (None: raw), arguments of the driver, its ranks
_RUNS: tuple[Any, ...] = (
    ("raw-call", None, (str(MIB),), 2),
    ("call", "service", (str(MIB),), CALLERS),
    ("call small", "service", (str(SMALL),), CALLERS),
    ("raw-publish", None, (str(MIB),), 2),
    ("publish", "reader", (str(MIB),), 1),
    ("publish small", "reader", (str(SMALL),), 1),
    ("raw-stream", None, (str(MIB),), SOLVERS + 1),
    ("raw-stream apart", None, (str(MIB), str(KEPT)), SOLVERS + 1),
    ("stream", "reader", (str(MIB),), SOLVERS),
    ("step", "reader", (str(MIB),), SOLVERS),
)


def rows_of(found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    """Return the rows, from what the driver has printed. Local: pure."""

    def of(name: str, key: str, scale: float = 1.0) -> list[float]:
        return [scale * one[key] for one in found[name]]

    us = 1e-6
    raw, raw_both = of("raw-call", "there_us", us), of("raw-call", "there_and_back_us", us)
    rate, apart = of("raw-stream", "rate"), of("raw-stream apart", "rate")
    over = [one["publish_us"] - one["copy_us"] for one in found["publish small"]]
    raw_put = of("raw-publish", "publish_us", us)
    share = sorted(of("step", "share"))[len(found["step"]) // 2]
    one, several = (
        sorted(a / b for a, b in zip(of("stream", "rate"), raws, strict=True))
        for raws in (rate, apart)
    )
    return [
        sampled("raw_call", "raw Send/Recv, 1 MiB there, 64 B back", "µs", raw),
        sampled("call", "mpiml_call, 1 MiB there", "µs", of("call", "there_us", us), raw,
                ratio_at_most(1.3)),
        sampled("raw_echo", "raw Send/Recv, 1 MiB there and back", "µs", raw_both),
        sampled("echo", "mpiml_call, 1 MiB there and back", "µs",
                of("call", "there_and_back_us", us), raw_both),
        sampled("call_small", "mpiml_call, 1 KiB there", "µs", of("call small", "there_us", us)),
        sampled("raw_publish", "raw copy, Isend, progress of 1 MiB", "µs", raw_put),
        sampled("publish", "mpiml_publish, 1 MiB", "µs", of("publish", "publish_us", us), raw_put),
        sampled("publish_small", "mpiml_publish, 1 KiB", "µs",
                of("publish small", "publish_us", us)),
        figure("publish_over", "  beyond a copy", "µs", us * max(0.0, sorted(over)[len(over) // 2]),
               len(over), at_most(5, "µs")),
        sampled("raw_stream", f"raw, {SOLVERS} ranks to 1, 1 MiB in a row", "GB/s", rate),
        sampled("raw_apart", f"  from {KEPT} arrays in turn into as many", "GB/s", apart),
        sampled("stream", f"topic, {SOLVERS} solver ranks to 1", "GB/s", of("stream", "rate")),
        figure("stream_share", "  of raw from one array", "%", one[len(one) // 2], len(one),
               at_least(80, "%")),
        figure("stream_apart", f"  of raw from {KEPT} arrays", "%", several[len(several) // 2],
               len(several), at_least(80, "%")),
        figure("step", "share of a step inside mpiml_*, at 10 % of it", "%", share,
               len(found["step"]), at_most(5, "%")),
    ]  # fmt: skip


class _Jobs:
    """Starts the driver, alone or with a program in Python."""

    def __init__(self, driver: Path, ranks: Ranks, quick: bool) -> None:
        self._driver = driver
        self._ranks = ranks
        self._environ = {**ranks.environ, **({"BENCH_QUICK": "1"} if quick else {})}

    def run(
        self, mode: str, only: str | None, given: tuple[str, ...], n: int
    ) -> dict[str, Any]:
        """Return what one run of the driver has printed."""
        ranks = self._ranks
        command = [str(ranks.launcher.path), "-n", str(n), str(self._driver), mode, *given]
        if only is not None:
            program = str(SOURCES / "bench" / "external.py")
            python = [sys.executable, "-m", "mpiml.run", program, "--only", only]
            command += [":", "-n", "1", *python]
        try:
            outcome = attempt(command, ranks.timeout, self._environ)
        finally:
            sweep(os.getpid())
        lines = [line for line in outcome.stdout.splitlines() if line.startswith("{")]
        if outcome.status != 0 or not lines:
            raise BenchError(
                f"{' '.join(command)}: expected a line of JSON and status 0, got status "
                f"{outcome.status}. It said:\n{outcome.stderr[-4000:]}"
            )
        found: dict[str, Any] = json.loads(lines[0])
        return found


def _compiler() -> str | None:
    beside = Path(sys.prefix, "bin", "mpicc")
    if beside.exists():
        return str(beside)
    return shutil.which("mpicc") or shutil.which("mpicc.openmpi")


def _compiled(compiler: str, target: Path) -> Path:
    sources = [SOURCES / "bench" / "external.c", *sorted((SOURCES / "src").glob("*.c"))]
    command = [
        compiler, "-O2", "-std=c11", "-D_POSIX_C_SOURCE=200809L", f"-I{SOURCES / 'include'}",
        *map(str, sources), "-lm", "-o", str(target),
    ]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if made.returncode:
        raise BenchError(
            f"{compiler}: expected libmpiml to compile, got:\n{made.stderr[-4000:]}"
        )
    return target
