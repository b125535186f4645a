"""Native work without the GIL, in daemon threads, when the interpreter ends."""

import sys
from pathlib import Path

import pytest

from tests.mpi import child

PROGRAM = """
import threading
from mpiml import _native as native

big = bytearray(4_000_000)
other = bytearray(4_000_000)
def memory(nbytes):  # of a line of its own
    import mmap
    return mmap.mmap(-1, nbytes)
doorbell = native.Doorbell(memory(4096), 0)
gate = native.Gate(memory(max(4096, native.gate_bytes(1))), 0, 1)
begun = threading.Semaphore(0)
def work():
    begun.release()
    while True:
        {call}
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
for _ in range(3):
    begun.acquire()
"""
CALLS = {
    # what releases it for as long as there is much to do, or to wait for
    "copy": "native.copy(big, other)",
    "checksum": "native.checksum(big)",
    "doorbell": "doorbell.wait(0, 0, 1)",
    "snapshot": "gate.snapshot(big, other)",
}


@pytest.mark.parametrize("call", CALLS)
def test_daemon_threads_do_not_abort_a_process_that_ends(tmp_path, call):
    file = tmp_path / "ends.py"
    file.write_text(PROGRAM.format(call=CALLS[call]))
    for _ in range(3):
        ended = child(sys.executable, file, timeout=30)
        assert ended.rc == 0, ended
        assert not ended.stderr, ended


def test_nothing_releases_the_gil_in_another_way():
    sources = Path(__file__).parents[2] / "mpiml/native"
    files = [*sources.glob("*.cpp"), *sources.glob("*.hpp")]
    assert len(files) > 20
    ways = ("gil_scoped_release", "PyEval_SaveThread", "Py_BEGIN_ALLOW_THREADS")
    users = {f.name for f in files if any(way in f.read_text() for way in ways)}
    assert users == {"gil.hpp"}
