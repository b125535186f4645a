"""What the doctor's ``mpiexec -n 2`` child tries, one step after the other.

Before a step, rank 0 writes its name to stdout, and after it what came out, so that a crash
or a hang has a name too. Each step is collective over both ranks.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MARK", "STEPS", "main"]

MARK = "mpiml-probe "
COUNTS = (1, 1_000, 10_000, 1_000_000)


def _library(comm: "MPI.Intracomm") -> dict[str, Any]:
    """Tell who is here: library, version, ranks. Collective."""
    from mpi4py import MPI

    text = MPI.Get_library_version().splitlines()[0].rstrip("\0").strip()
    cores = comm.gather(len(os.sched_getaffinity(0)))
    return {"library": text, "mpi": MPI.Get_version(), "ranks": comm.size, "cores": cores}


def _threads(comm: "MPI.Intracomm") -> dict[str, Any]:
    """Let two threads a rank talk at once, each on its own communicator, if they may. Collective.

    The level is the lower one of the two ranks.
    """
    from mpi4py import MPI

    level = comm.allreduce(MPI.Query_thread(), MPI.MIN)
    names = ["SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE"]
    name = names[[getattr(MPI, f"THREAD_{n}") for n in names].index(level)]
    if level < MPI.THREAD_FUNNELED:
        raise RuntimeError(f"thread level {name}")
    if level < MPI.THREAD_MULTIPLE:
        return {"level": name}
    comms = [comm.Dup(), comm.Dup()]
    other = 1 - comm.rank
    right: list[bool] = []

    def talk(mine: "MPI.Intracomm") -> None:
        buffer = bytearray(8)
        for i in range(200):
            sent = i.to_bytes(8, "little")
            mine.Sendrecv(sent, other, recvbuf=buffer, source=other)
            right.append(bytes(buffer) == sent)

    workers = [threading.Thread(target=talk, args=(mine,), daemon=True) for mine in comms]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for mine in comms:
        mine.Free()
    if len(right) != 400 or not all(right):
        raise RuntimeError("messages of two threads were mixed up")
    return {"level": name}


def _dup(comm: "MPI.Intracomm") -> dict[str, Any]:
    """Duplicate and free a communicator a thousand times. Collective."""
    for _ in range(1000):
        comm.Dup().Free()
    return {}


def _matched_probe(comm: "MPI.Intracomm") -> dict[str, Any]:
    """Receive by matched probe, large and small. Collective."""
    from mpi4py import MPI

    other, status = 1 - comm.rank, MPI.Status()
    for size in (0, 8, 100_000, 4_000_000):
        sent = comm.Isend(bytes(size), other, 7)
        message = None
        while message is None:
            message = comm.Improbe(MPI.ANY_SOURCE, 7, status)
        if status.Get_count(MPI.BYTE) != size:
            raise RuntimeError(f"probed {status.Get_count(MPI.BYTE)} bytes of {size}")
        message.Recv(bytearray(size))
        sent.Wait()
    return {}


def _array(memory: Any, dtype: Any) -> Any:
    """Return MPI's memory as an array: `Any`, since mpi4py's stubs know no buffer protocol."""
    import numpy as np

    return np.frombuffer(memory, dtype=dtype)


def _shared(comm: "MPI.Intracomm") -> dict[str, Any]:
    """Share a megabyte by a window and read what the other rank wrote. Collective."""
    import numpy as np
    from mpi4py import MPI

    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert isinstance(host, MPI.Intracomm)
    window = MPI.Win.Allocate_shared(1 << 20, 1, comm=host)
    mine = _array(window.tomemory(), np.uint8)
    window.Lock_all()
    mine[:] = host.rank + 1
    window.Sync()
    host.Barrier()
    window.Sync()
    peer = (host.rank + 1) % host.size
    theirs = _array(window.Shared_query(peer)[0], np.uint8)
    right = bool((theirs == peer + 1).all())
    host.Barrier()
    window.Unlock_all()
    del mine, theirs
    window.Free()
    ranks = host.size
    host.Free()
    if not right:
        raise RuntimeError("what one rank wrote, the other did not see")
    return {"ranks_of_a_host": ranks}


def _windows(comm: "MPI.Intracomm") -> dict[str, Any]:
    """Accumulate into the other rank's window, passive target, in four sizes. Collective."""
    import numpy as np
    from mpi4py import MPI

    micros = {}
    for count in COUNTS:
        window = MPI.Win.Allocate(count * 8, 8, comm=comm)
        mine = _array(window.tomemory(), np.float64)
        mine[:] = 0
        comm.Barrier()
        add, times = np.ones(count), 3
        began = time.perf_counter()
        for _ in range(times):
            window.Lock(1 - comm.rank, MPI.LOCK_SHARED)
            window.Accumulate(add, 1 - comm.rank, op=MPI.SUM)
            window.Unlock(1 - comm.rank)
        micros[str(count)] = round((time.perf_counter() - began) / times * 1e6, 1)
        comm.Barrier()
        window.Lock(comm.rank)
        right = bool((mine == times).all())
        window.Unlock(comm.rank)
        del mine
        window.Free()
        if not right:
            raise RuntimeError(f"{count} elements: expected {times} in each, got others")
    return {"microseconds": micros}


def _ulfm(comm: "MPI.Intracomm") -> dict[str, Any]:
    """Revoke a scratch duplicate: the one call of ULFM that mpi4py does not emulate. Collective."""
    from mpi4py import MPI

    scratch = comm.Dup()
    scratch.Set_errhandler(MPI.ERRORS_RETURN)
    scratch.Revoke()
    if not scratch.Is_revoked():
        raise RuntimeError("Revoke did nothing")
    return {}


def _gpu(comm: "MPI.Intracomm") -> dict[str, Any]:
    """Hand device arrays to MPI: message, broadcast and sum, short and long. Collective."""
    import cupy
    from mpi4py import MPI

    cupy.cuda.Device(comm.rank % cupy.cuda.runtime.getDeviceCount()).use()
    other = 1 - comm.rank
    for count in (1, 1_000, 1_000_000):  # short and long messages take different ways
        mine = cupy.arange(count, dtype="float64") + comm.rank
        theirs = cupy.zeros_like(mine)
        cupy.cuda.get_current_stream().synchronize()
        comm.Sendrecv(mine, other, recvbuf=theirs, source=other)
        _same(theirs, cupy.arange(count) + other, f"message of {count}")
        # Allreduce has been seen to work where Bcast did not.
        comm.Bcast(theirs, 0)
        _same(theirs, cupy.arange(count) + 1, f"broadcast of {count}")
        comm.Allreduce(MPI.IN_PLACE, mine)
        _same(mine, 2 * cupy.arange(count) + 1, f"sum of {count}")
    return {}


def _same(got: Any, expected: Any, what: str) -> None:
    if not bool((got == expected).all()):
        raise RuntimeError(f"{what}: other numbers arrived than were sent")


def _gpu_map(comm: "MPI.Intracomm") -> dict[str, Any]:
    """Map the other rank's device memory and read it. Collective."""
    import cupy

    from mpiml.collectives.device.cuda import cuda_device

    device = cuda_device(comm.rank % cupy.cuda.runtime.getDeviceCount())
    slab = device.slab(1 << 20, exported=True)
    device.write(slab.pointer + 4096, f"rank {comm.rank}".encode())
    handle, title = comm.allgather((device.handle(slab), device.title))[1 - comm.rank]
    try:
        read = device.read(device.map(handle) + 4096, 6).decode(errors="replace")
    finally:
        comm.Barrier()
    if read != f"rank {1 - comm.rank}":
        raise RuntimeError(f"the other rank's memory was expected, {read!r} was read")
    return {"devices": sorted({title, device.title})}


STEPS: dict[str, Callable[["MPI.Intracomm"], dict[str, Any]]] = {
    "library": _library,
    "threads": _threads,
    "dup": _dup,
    "matched_probe": _matched_probe,
    "shared": _shared,
    "windows": _windows,
    "ulfm": _ulfm,
    "gpu": _gpu,
    "gpu_map": _gpu_map,
}


def main(names: list[str]) -> int:
    """Try the named steps; returns the exit status.

    Collective: over the two ranks of COMM_WORLD.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for name in names:
        _say(comm.rank, {"step": name})
        try:
            # An MPI error must come back as an exception, not end the job.
            comm.Set_errhandler(MPI.ERRORS_RETURN)
            if comm.size != 2 and name != "library":
                raise RuntimeError(f"expected 2 ranks, got {comm.size}")
            found: dict[str, Any] = {"ok": True, **STEPS[name](comm)}
        except Exception as error:  # whatever it is, it is the finding
            found = {
                "ok": False,
                "error": f"{type(error).__name__}: {error}".splitlines()[0].rstrip(": "),
            }
        _say(comm.rank, {"step": name, **found})
    return 0


def _say(rank: int, line: dict[str, Any]) -> None:
    if rank == 0:
        print(MARK + json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
