"""What a process sees of the machine under it: masks, control groups, devices. No MPI."""

import os
from collections.abc import Callable

__all__ = ["affinity", "assume", "folder_number", "group_quota", "read_text", "visible_gpus"]

GONE = 1  # the number of a working folder that is missing
_assumed: list[
    frozenset[int]
] = []  # the cores that OpenMP's threads have, if this one has fewer


def affinity(process: int = 0) -> frozenset[int]:
    """Return the cores that a process may run on, this one by default. Local."""
    if not process and _assumed:
        return _assumed[0]
    try:
        return frozenset(os.sched_getaffinity(process))
    except (AttributeError, OSError):  # not Linux; not ours to see
        return frozenset() if process else frozenset(range(os.cpu_count() or 1))


def assume(cores: frozenset[int]) -> None:
    """Let `affinity` of this process answer so from now on. Local."""
    _assumed[:] = [cores]


def folder_number() -> int:
    """Return a number made of the path of the working folder, or 1 where that is gone. Local."""
    from binascii import crc32

    try:
        return max(2, crc32(os.getcwd().encode(errors="surrogateescape")))
    except OSError:
        return GONE


def read_text(path: str) -> str | None:
    """Return the text of a file, or None where there is none to be read. Local."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def _listed(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def visible_gpus(visible: str | None) -> tuple[int, ...]:
    """Return device numbers as CUDA would show them, without loading CUDA. Local."""
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        if all(name.isdigit() for name in names):
            return tuple(sorted({int(name) for name in names}))
        # CUDA stops at the first name it cannot use; UUIDs have no number, so count them.
        stop = next(
            (i for i, n in enumerate(names) if n in ("", "-1", "NoDevFiles")), len(names)
        )
        return tuple(range(stop))
    devices = [n for n in _listed("/dev") if n.startswith("nvidia") and n[6:].isdigit()]
    driver = _listed("/proc/driver/nvidia/gpus")
    # The driver lists every device of the machine, a container only has some device files.
    return tuple(range(min(len(devices), len(driver)) if devices and driver else len(devices)))


def group_quota(group: str, read: Callable[[str], str | None]) -> float | None:
    """Return the cores that the control group of a process grants, or None without a limit.

    Local: no MPI.

    Parameters
    ----------
    group
        Text of ``/proc/self/cgroup``.
    read
        Returns the text of a file, or None where there is none.
    """
    found: list[float] = []
    for line in group.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # A limit may sit on any ancestor, and inside a container the own path need not exist.
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            folder = "/".join(["", *parts[:depth]])
            if not controllers:
                found += _ratio(read(f"/sys/fs/cgroup{folder}/cpu.max"))
            elif "cpu" in controllers.split(","):
                quota = read(f"/sys/fs/cgroup/cpu{folder}/cpu.cfs_quota_us")
                period = read(f"/sys/fs/cgroup/cpu{folder}/cpu.cfs_period_us")
                found += _ratio(f"{quota} {period}")
    return min(found, default=None)


def _ratio(text: str | None) -> list[float]:
    """Read quota and period; v2 writes ``max`` and v1 writes -1 for no limit."""
    fields = (text or "").split()
    if len(fields) == 2 and fields[0].isdigit() and fields[1].isdigit() and int(fields[1]):
        return [int(fields[0]) / int(fields[1])]
    return []
