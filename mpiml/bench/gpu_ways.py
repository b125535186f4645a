"""On the ranks: the same sum of device arrays in several ways, timed in turn."""

from contextlib import ExitStack
from typing import Any

import numpy as np

from mpiml.bench.allreduce_rounds import SIZES, Way, in_turn, way_of
from mpiml.collectives import Bucket, allreduce
from mpiml.collectives.device.arrays import device_of, lend
from mpiml.collectives.device.channel import open_device
from mpiml.collectives.device.direct import agree_direct
from mpiml.collectives.labels import Label
from mpiml.collectives.members import team_of
from mpiml.collectives.regions import Leaf, Regions

__all__ = ["sizes"]

_LABEL = Label("bench")


def sizes(comm: Any, plan: dict[str, Any]) -> dict[str, Any]:
    """Measure all sizes.

    Collective over `comm`, whose ranks share a host.

    Parameters
    ----------
    comm
        The communicator.
    plan
        ``sizes``: size -> ``[rounds, repeats, warm]``.

    Returns
    -------
    dict
        Size -> way -> seconds; ``about``: what was measured on.
    """
    import cupy

    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    found: dict[str, Any] = {"about": _about(comm, cupy)}
    for size, how in plan["sizes"].items():
        found[size] = _size(comm, cupy, SIZES[size], how)
        cupy.get_default_memory_pool().free_all_blocks()
    return found


def _about(comm: Any, cupy: Any) -> dict[str, str]:
    runtime = cupy.cuda.runtime
    device = device_of([cupy.zeros(1)], [""], "bench")
    places = comm.allgather((device.identity, device.title))
    names = sorted({title for _, title in places})
    direct = agree_direct(team_of(comm, "bench"), _LABEL)
    with Bucket(comm, cupy.zeros(16, "f4")) as bucket:
        way = bucket.statistics()["way"]
    return {
        "devices": f"{len(set(places))} x {' and '.join(names)}",
        "cupy": cupy.__version__,
        "cuda": _version(runtime.runtimeGetVersion()),
        "driver": _version(runtime.driverGetVersion()),
        "way": way,
        "mpi": direct.why,
    }


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _size(comm: Any, cupy: Any, nbytes: int, how: list[int]) -> dict[str, list[float]]:
    """Time all ways at one size."""
    count = nbytes // 4
    with ExitStack() as stack:
        bucket = stack.enter_context(Bucket(comm, cupy.zeros(count, "f4")))
        half = stack.enter_context(Bucket(comm, cupy.zeros(2 * count, "f2")))
        ways = {"by_hand": _by_hand(comm, cupy, count)}
        ways["bucket"] = _settled(cupy, comm, "bucket", bucket.tree, bucket.allreduce)
        ways["staged"] = _forced(stack, comm, cupy, count, "float32", "host", "staged")
        if agree_direct(team_of(comm, "bench"), _LABEL).allowed:
            ways["mpi"] = _forced(stack, comm, cupy, count, "float32", "mpi", "mpi")
        x = cupy.zeros(count, "f4")
        ways["outside"] = _settled(
            cupy, comm, "outside", x, lambda: allreduce(x, comm=comm, out=x)
        )
        ways["half"] = _settled(cupy, comm, "half", half.tree, half.allreduce)
        ways["half_staged"] = _forced(
            stack, comm, cupy, 2 * count, "float16", "host", "half_staged"
        )
        ways |= _bounds(cupy, count)
        return in_turn(comm, ways, *how)


def _settled(cupy: Any, comm: Any, name: str, mine: Any, run: Any) -> Way:
    """Return a way whose refill is over before the clock starts."""
    way = way_of(name, comm, mine, run, lambda: mine)

    def refill(i: int) -> None:
        way.refill(i)
        cupy.cuda.runtime.deviceSynchronize()

    return way._replace(refill=refill)


def _by_hand(comm: Any, cupy: Any, count: int) -> Way:
    """Return what one writes without mpiml: to the host, `Allreduce`, and back."""
    from mpi4py import MPI

    x, host = cupy.zeros(count, "f4"), np.zeros(count, "f4")

    def run() -> None:
        x.get(out=host)
        comm.Allreduce(MPI.IN_PLACE, host)
        x.set(host)
        cupy.cuda.runtime.deviceSynchronize()

    return _settled(cupy, comm, "by_hand", x, run)


def _forced(
    stack: ExitStack, comm: Any, cupy: Any, count: int, dtype: str, way: str, name: str
) -> Way:
    """Return a bucket's allreduce that takes one way only."""
    regions = Regions([Leaf("", (count,), dtype)])
    device = device_of([cupy.zeros(1)], [""], "bench")
    memory, channel = open_device(team_of(comm, "bench"), regions, device, True, _LABEL, (way,))
    stack.callback(channel.close)
    label = Label(f"bench {name}", "sum", leaves=regions.digest_text())
    (mine,) = memory.views(regions)
    return _settled(cupy, comm, name, mine, lambda: channel.allreduce("sum", label))


def _bounds(cupy: Any, count: int) -> dict[str, Way]:
    """Return the copies that no way can be faster than, made by all ranks at once."""
    arrays = cupy.ones(count, "f4"), cupy.zeros(count, "f4")
    source, target = map(lend, arrays)
    device = device_of(arrays, ["", ""], "bench")
    inward, outward = device.lanes()
    here, there = np.zeros((2, 4 * count), np.uint8)
    pins = device.pin(here), device.pin(there)

    def copy() -> None:
        device.copy(target.pointer, source.pointer, source.nbytes)
        device.finish()

    def link() -> None:
        inward.to_host(here, source.pointer)
        outward.to_device(target.pointer, there)
        inward.mark().wait()
        outward.mark().wait()

    def look(i: int, whole: bool) -> None:
        assert pins  # they last as long as the ways

    return {"copy": Way(lambda i: None, copy, look), "link": Way(lambda i: None, link, look)}
