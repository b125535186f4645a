"""Doorbell: every ring is seen, by threads and by other processes, asleep or not."""

import gc
import mmap
import os
import signal
import struct
import subprocess
import sys
import threading

import pytest

from mpiml._native import Doorbell, set_timer_slack

LINE = 64
# A wait that times out looks at the count once more, so only one without end shows a lost wake.
FOREVER_US = 10**12


def shared(lines):
    return mmap.mmap(-1, lines * LINE)


def line(memory, i):
    """What stands in line i: (seq, sleepers)."""
    return struct.unpack_from("=II", memory, i * LINE)


def test_ring_counts_only_its_own_line():
    memory = shared(4)
    bells = [Doorbell(memory, i) for i in range(4)]
    for k in range(3):
        bells[k].ring(2)
    bells[2].ring(0)
    assert [b.value() for b in bells] == [1, 0, 3, 0]
    assert [line(memory, i) for i in range(4)] == [(1, 0), (0, 0), (3, 0), (0, 0)]
    assert not any(memory[i * LINE + 8 : (i + 1) * LINE].strip(b"\0") for i in range(4))


@pytest.mark.parametrize("spin_us", [0, 1])
@pytest.mark.parametrize("timeout_us", [0, 1])
def test_wait_tells_whether_the_bell_rang(spin_us, timeout_us):
    memory = shared(2)
    bell = Doorbell(memory, 1)
    seen = bell.value()
    assert bell.wait(seen, spin_us, timeout_us) is False
    Doorbell(memory, 0).ring(1)
    assert bell.wait(seen, spin_us, timeout_us) is True
    assert bell.wait(bell.value(), spin_us, timeout_us) is False
    assert line(memory, 1) == (1, 0)  # nobody stays counted as a sleeper


def test_count_wraps_without_losing_a_ring():
    memory = shared(1)
    struct.pack_into("=I", memory, 0, 2**32 - 1)
    bell = Doorbell(memory, 0)
    seen = bell.value()
    bell.ring(0)
    assert (seen, bell.value()) == (2**32 - 1, 0)
    assert bell.wait(seen, 0, 0)


@pytest.mark.parametrize("spin_us", [0, FOREVER_US])
def test_one_ring_wakes_every_thread_of_the_line(spin_us):
    memory = shared(2)
    bell, other = Doorbell(memory, 0), Doorbell(memory, 1)
    inside = threading.Semaphore(0)
    rang = []

    def sleeper():
        seen = bell.value()
        inside.release()
        rang.append(bell.wait(seen, spin_us, FOREVER_US))

    threads = [threading.Thread(target=sleeper, daemon=True) for _ in range(3)]
    for t in threads:
        t.start()
    for _ in threads:
        assert inside.acquire(timeout=60)
    while spin_us == 0 and line(memory, 0)[1] < len(threads):
        os.sched_yield()  # all three have to be asleep, not just on the way
    other.ring(0)
    for t in threads:
        t.join(20)
    assert rang == [True] * 3
    assert line(memory, 0) == (1, 0)


PLAYER = """
import mmap, sys
from mpiml._native import Doorbell
path, me, rounds, spin_us, forever = sys.argv[1], *map(int, sys.argv[2:])
with open(path, "r+b") as f:
    bell = Doorbell(mmap.mmap(f.fileno(), 0), me)
for seen in range(rounds):
    if me == 0:
        bell.ring(1)
    if not bell.wait(seen, spin_us, forever):
        sys.exit("gave up")
    if me == 1:
        bell.ring(0)
"""


# With a spinning partner the ring comes just as the other side goes to sleep.
@pytest.mark.parametrize("partner_spin_us", [0, 50])
def test_no_wake_is_lost_between_two_processes(tmp_path, partner_spin_us):
    path, rounds = tmp_path / "bells", 20_000
    path.write_bytes(bytes(2 * LINE))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    players = [
        subprocess.Popen(
            [sys.executable, "-c", PLAYER, *map(str, (path, me, rounds, spin_us, FOREVER_US))],
            env=env,
        )
        for me, spin_us in enumerate((0, partner_spin_us))
    ]
    try:
        assert [p.wait(30) for p in players] == [0, 0]  # a lost wake would hang here
    finally:
        for p in players:
            p.kill()
            p.wait()
    assert [line(path.read_bytes(), i) for i in (0, 1)] == [(rounds, 0), (rounds, 0)]


def test_a_signal_ends_the_sleep_so_that_its_handler_runs():
    bell = Doorbell(shared(1), 0)
    before = signal.signal(signal.SIGALRM, lambda *_: bell.ring(0))
    # The timer repeats: its first signal may come before the sleep begins.
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    try:
        while not bell.wait(0, 0, FOREVER_US):  # a wait that is not cut short hangs here
            pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert bell.value() >= 1


def test_memory_stays_open_while_a_doorbell_uses_it():
    memory = shared(1)
    bell = Doorbell(memory, 0)
    with pytest.raises(BufferError):
        memory.close()
    bell.ring(0)
    del bell
    gc.collect()
    memory.close()


@pytest.mark.parametrize("i", [-1, 2, 2**40])
def test_a_bad_index_names_the_range(i):
    memory = shared(2)
    with pytest.raises(IndexError, match=rf"Doorbell: expected a line in 0\.\.1, got {i}"):
        Doorbell(memory, i)
    bell = Doorbell(memory, 0)
    with pytest.raises(IndexError, match=rf"ring: expected a line in 0\.\.1, got {i}"):
        bell.ring(i)
    assert bytes(memory) == bytes(2 * LINE)


def test_bad_memory_is_refused():
    with pytest.raises(BufferError, match="expected writable memory"):
        Doorbell(bytes(LINE), 0)
    with pytest.raises(ValueError, match=r"multiple of 64 bytes.*got 100"):
        Doorbell(bytearray(100), 0)
    with pytest.raises(ValueError, match="got 0"):
        Doorbell(bytearray(), 0)
    with pytest.raises(ValueError, match="aligned"):
        Doorbell(memoryview(shared(2))[1 : LINE + 1], 0)
    with pytest.raises(TypeError, match="bytes-like"):
        Doorbell(3, 0)


def test_bad_times_are_refused():
    bell = Doorbell(shared(1), 0)
    for spin_us, timeout_us in ((-1, 0), (0, -1)):
        with pytest.raises(ValueError, match=f"got {spin_us} and {timeout_us}"):
            bell.wait(0, spin_us, timeout_us)
    with pytest.raises(ValueError, match="expected ns >= 1, got 0"):
        set_timer_slack(0)


def test_timer_slack_is_that_of_the_calling_thread():
    got = []

    def ask():  # in a thread of its own, to leave this one as it is
        set_timer_slack(1234)
        with open(f"/proc/{threading.get_native_id()}/timerslack_ns") as f:
            got.append(int(f.read()))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert got == [1234]
