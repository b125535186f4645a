"""Reading another process's memory, as MPI does for long messages within a host."""

import ctypes
import os

__all__ = ["CURE", "allow_reading", "read_of"]

CURE = (
    'If long messages in a host fail ("Read -1, expected N, errno = 1"): OMPI_MCA_smsc=^cma '
    "(Open MPI 5), OMPI_MCA_btl_vader_single_copy_mechanism=none (Open MPI 4); or start the "
    "container with --cap-add=SYS_PTRACE."
)
_PTRACER, _ANYBODY = 0x59616D61, -1  # prctl: who may look into this process, where Yama asks


def allow_reading() -> None:
    """Let other processes of this user read this one, where the kernel asks (Yama). Local."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PTRACER, ctypes.c_ulong(_ANYBODY), 0, 0, 0)


def read_of(pid: int, address: int, expected: bytes) -> str:
    """Read memory of another process; return why that failed, "" if it did not. Local."""

    class Part(ctypes.Structure):
        _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))

    read = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
    if read is None:
        return "this system has no process_vm_readv"
    into = ctypes.create_string_buffer(len(expected))
    here = Part(ctypes.addressof(into), len(expected))
    there = Part(address, len(expected))
    count = read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    if count == len(expected) and into.raw == expected:
        return ""
    if count < 0:
        return f"process_vm_readv: {os.strerror(ctypes.get_errno())}"
    return f"process_vm_readv: {into.raw!r} was read, {expected!r} was expected"
