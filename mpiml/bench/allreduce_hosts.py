"""Allreduce between two hosts of 2 ranks: network namespaces of this machine."""

from typing import Any

from mpiml.bench.measure import Goal, Row, figure, sampled, summarize
from mpiml.bench.spawn import BenchError, Ranks
from mpiml.bench.two_hosts import TwoHosts

__all__ = ["host_rows", "hosts"]

#: Size -> rounds, repetitions of a block, and those before them.
PLANS: dict[bool, dict[str, Any]] = {
    False: {"sizes": {"64 KiB": (6, 10, 3), "1 MiB": (6, 6, 2), "16 MiB": (4, 3, 1)},
            "counted": 5},
    True: {"sizes": {"1 MiB": (1, 2, 1)}, "counted": 2},
}  # fmt: skip
TITLES = {
    "mpi": "Allreduce(a, b) of all",
    "mpi_in_place": "  Allreduce(IN_PLACE, a) of all",
    "leaders": "  Allreduce among leaders alone",
    "bucket": "  Bucket, in place",
}
#: Of the bytes of the leaders' own allreduce: acknowledgements vary from run to run.
SLACK = 1.02


def hosts(n: int, quick: bool, ranks: Ranks) -> tuple[list[Row], list[str]]:
    """Return the rows of two hosts, or no rows and why.

    Local: starts ranks; no MPI in this process.
    """
    with TwoHosts(ranks) as two:
        why = two.why_not()
        if why:
            return [], [f"two hosts: not measured, {why}"]
        try:
            sizes = two.scenario("allreduce_apart:houses", {})["sizes"]
        except BenchError as error:
            why = str(error).strip().splitlines()[-1]
            return [], [f"two hosts: not measured, MPI does not start on them: {why}"]
        if sizes != [2, 2]:
            return [], [f"two hosts: not measured, MPI splits by host into {sizes}"]
        found = two.scenario("allreduce_apart:apart", PLANS[quick])
    rows = [
        row for size, took in found["sizes"].items()
        for row in host_rows(size, took, found["bytes"][size])
    ]  # fmt: skip
    return rows, [
        "two hosts: network namespaces joined by a bridge, 2 ranks each, all on this machine; bytes "
        "on the link: both directions."
    ]


def host_rows(size: str, took: dict[str, list[float]], passed: dict[str, float]) -> list[Row]:
    """Return the rows of one size: seconds of each way, then bytes of each on the link.

    Local: a pure function.
    """
    key = f"hosts_{size.replace(' ', '')}"
    raw = min((took[way] for way in ("mpi", "mpi_in_place")), key=lambda s: summarize(s).median)
    most = SLACK * passed["leaders"]
    goal = Goal("<= among leaders", lambda value, ratio: value <= most)
    rows = []
    for way, title in TITLES.items():
        what = title if title.startswith(" ") else f"2 hosts, {size}: {title}"
        rows.append(sampled(f"{key}_{way}", what, "ms", took[way], raw))
    for way, title in TITLES.items():
        what = f"  on the link: {title.strip()}"
        rows.append(
            figure(f"{key}_{way}_link", what, "MiB", passed[way], 1,
                   goal if way == "bucket" else None, passed[way] / passed["leaders"])
        )  # fmt: skip
    return rows
