"""Allreduce of arrays on CUDA devices: in device memory, staged, and what users write by hand.

Two ranks share the machine's device, or have one each. Every rank refills its array before each
repetition, which lasts from a barrier to the end on the slowest rank; all ways have blocks in
turn, in one run. ``x raw`` compares with an array that is copied to the host, summed by
``Allreduce(IN_PLACE)`` and copied back. The bounds are copies made by all ranks at once: of S
bytes within the device, which moves the 2nS bytes that n results need, and of S bytes to the
host and S bytes back, in both directions at a time, from pinned memory.
"""

from pathlib import Path
from typing import Any

from mpiml.bench.allreduce_rounds import MIB, SIZES
from mpiml.bench.measure import Row, figure, sampled, summarize
from mpiml.bench.spawn import Options, Ranks
from mpiml.doctor.machine import check_gpu
from mpiml.errors import UsageError

__all__ = ["gpu_rows", "measure"]

#: Size -> rounds, repetitions of a block, and those before them that do not count.
PLANS = {
    False: {
        "8 B": (6, 20, 5), "64 KiB": (6, 20, 5), "1 MiB": (6, 10, 3), "16 MiB": (6, 6, 2),
        "64 MiB": (5, 4, 1), "256 MiB": (4, 2, 1),
    },
    True: {"64 KiB": (1, 3, 1), "1 MiB": (1, 2, 1), "16 MiB": (1, 1, 1)},
}  # fmt: skip
TITLES = {
    "by_hand": "x.get(), Allreduce, x.set()",
    "bucket": "  Bucket of CuPy arrays",
    "staged": "  Bucket, through pinned memory",
    "mpi": "  Bucket, straight to MPI",
    "outside": "  allreduce(x, out=x)",
    "half": "  Bucket, as many bytes of float16",
    "half_staged": "  the same, through pinned memory",
}


def measure(options: Options, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows and notes of ``mpiml bench gpu``.

    Local: starts ranks; no MPI in this process.

    Raises
    ------
    UsageError
        There is no CUDA device that CuPy computes on.
    """
    n = 2 if options.ranks is None else options.ranks
    if n < 2:
        raise UsageError(f"--ranks {n}: expected 2 or more")
    device = check_gpu(Path("/dev"), 120.0)
    if device.state != "ok":
        cure = device.cure or "Run it on a machine that has one."
        raise UsageError(f"no CUDA device: {device.found}. {cure}")
    found = ranks.scenario("gpu_ways:sizes", n, {"sizes": PLANS[options.quick]})
    about = found.pop("about")
    rows = [row for size in found for row in gpu_rows(size, found[size], n)]
    notes = [
        f"{n} ranks on {about['devices']}; CuPy {about['cupy']}, CUDA {about['cuda']}, "
        f"driver's {about['driver']}; float32 unless the row says otherwise.",
        f"way of the bucket: {about['way']}",
        f"MPI and device memory: {about['mpi']}",
    ]
    return rows, notes


def gpu_rows(size: str, found: dict[str, list[float]], n: int) -> list[Row]:
    """Return the rows of one size.

    Local: a pure function.

    Parameters
    ----------
    size
        Its name, a key of `SIZES`.
    found
        Way -> seconds; "copy" and "link" are the bounds.
    n
        How many ranks there were.
    """
    nbytes = SIZES[size]
    unit = "µs" if nbytes < MIB else "ms"
    key = size.replace(" ", "")
    raw = found["by_hand"]
    rows = []
    for way, title in TITLES.items():
        if way in found:
            what = title if title.startswith(" ") else f"{size}: {title}"
            rows.append(sampled(f"{key}_{way}", what, unit, found[way], raw))
    if nbytes >= MIB:
        rows += _bound(key, "copy", "  copy within the device", found, 2 * n * nbytes, "bucket")
        rows += _bound(
            key, "link", "  copy to the host and back", found, 2 * n * nbytes, "staged"
        )
    return rows


def _bound(
    key: str, name: str, title: str, found: dict[str, list[float]], moved: int, way: str
) -> list[Row]:
    took = found[name]
    median = summarize(took).median
    share: Any = median / summarize(found[way]).median
    return [
        sampled(f"{key}_{name}", title, "ms", took),
        figure(
            f"{key}_{name}_speed", "    bytes moved by it", "GB/s", moved / median, len(took)
        ),
        figure(
            f"{key}_{way}_bound", f"    {TITLES[way].strip()}, of it", "%", share, len(took)
        ),
    ]
