"""The pipeline between device and host memory, on lanes that run whenever they like."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.collectives.device.stages import Staging, chunk_size, run_stages
from tests.fake_device import FakeLane


class Told:
    """Writes down the steps."""

    def __init__(self):
        self.steps = []

    def __getattr__(self, name):
        return lambda *args: self.steps.append((name, *args))


def test_the_order_of_steps_for_four_chunks():
    told = Told()
    run_stages(told, 4, 3)
    assert told.steps == [
        ("fetch", 0, 0),
        ("fetch", 1, 1),
        ("arrived", 0),
        ("combine", 0, 0),
        ("put", 0, 0),
        ("fetch", 2, 2),
        ("arrived", 1),
        ("combine", 1, 1),
        ("put", 1, 1),
        ("fetch", 3, 0),
        ("arrived", 2),
        ("combine", 2, 2),
        ("put", 2, 2),
        ("arrived", 0),
        ("combine", 3, 0),
        ("put", 3, 0),
        ("drain",),
    ]


@given(st.integers(0, 40), st.integers(1, 5))
def test_each_chunk_takes_each_step_once_and_slots_are_not_mixed_up(chunks, slots):
    told = Told()
    run_stages(told, chunks, slots)
    for name in ("fetch", "combine", "put"):
        assert [s[1] for s in told.steps if s[0] == name] == list(range(chunks))
    holder = {}
    for name, *args in told.steps:
        if name == "fetch":
            assert holder.get(args[1]) is None  # the chunk before has been put
            holder[args[1]] = args[0]
        elif name in ("combine", "put"):
            assert holder[args[1]] == args[0]
            if name == "put":
                holder[args[1]] = None
    assert told.steps[-1] == ("drain",)


@pytest.mark.parametrize("slots", [3, 4])
def test_a_copy_each_way_is_under_way_while_chunks_are_combined(slots):
    told = Told()
    run_stages(told, 8, slots)
    for chunk in range(1, 7):
        before = told.steps[: told.steps.index(("combine", chunk, chunk % slots))]
        waited = {s[1] for s in before if s[0] == "arrived"}
        assert ("fetch", chunk + 1, (chunk + 1) % slots) in before
        assert ("put", chunk - 1, (chunk - 1) % slots) in before
        assert waited <= {c % slots for c in range(chunk + 1)}


@given(
    lines=st.integers(0, 60),
    most=st.integers(1, 9),
    slots=st.integers(1, 4),
    drawn=st.data(),
)
def test_all_bytes_go_through_whatever_the_lanes_do(lines, most, slots, drawn):
    nbytes = 64 * lines
    device = np.random.default_rng(lines).integers(0, 200, nbytes, dtype=np.uint8)
    before = device.copy()
    size = 64 * most
    chunks = -(-nbytes // size)
    host = [np.zeros(size, np.uint8) for _ in range(slots)]
    lanes = []

    def nudge():  # some of what is pending gets done, on either lane
        for lane in lanes:
            for _ in range(drawn.draw(st.integers(0, len(lane.work)))):
                lane.step()

    lanes += [FakeLane(nudge), FakeLane(nudge)]
    combined = []

    def combine(slot, n):
        nudge()
        combined.append(n)
        host[slot][:n] += 1
        nudge()

    pointer = device.ctypes.data
    run_stages(Staging(*lanes, pointer, nbytes, host, size, combine), chunks, slots)
    assert np.array_equal(device, before + 1)
    assert sum(combined) == nbytes
    assert not lanes[0].work
    assert not lanes[1].work


def test_an_error_leaves_no_copy_under_way():
    device = np.zeros(640, np.uint8)
    host = [np.zeros(64, np.uint8) for _ in range(3)]
    lanes = FakeLane(), FakeLane()

    def combine(slot, nbytes):
        if lanes[1].begun:
            raise RuntimeError("stopped")

    staging = Staging(*lanes, device.ctypes.data, 640, host, 64, combine)
    with pytest.raises(RuntimeError, match="stopped"):
        run_stages(staging, 10, 3)
    assert not lanes[0].work
    assert not lanes[1].work


@given(st.integers(0, 1 << 40))
def test_chunks_are_powers_of_two_and_waste_little(nbytes):
    size = chunk_size(nbytes)
    assert size.bit_count() == 1
    assert 4 << 10 <= size <= 4 << 20
    padded = -(-nbytes // size) * size
    assert padded <= max(2 * nbytes, 64 << 10)
    if nbytes >= 256 << 10:
        assert padded <= 1.25 * nbytes
        assert nbytes // size >= 4
