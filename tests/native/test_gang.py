"""Gang and Plan: members in threads meet, post, reduce, and notice when they differ."""

import hashlib
import mmap
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml._native import GANG_INLINE, Gang, Plan, gang_bytes

ALL, OWN, SHARED, OUT = -1, -2, -3, -4
F32, SUM, MEAN = 0, 0, 1
DONE, WAITING, MISMATCH, LEFT = 0, 1, 2, 3
SLICE = 200_000  # us


def run_all(size, body, box=512, segment=4096, shared=0, limit=60):
    """Run ``body(gang, segment view)`` for each member in a thread of its own."""
    memory = mmap.mmap(-1, gang_bytes(size, box, segment, shared))
    found = [None] * size

    def member(index):
        try:
            gang = Gang(memory, index, size, box, segment, shared, 0, 20, True)
            at = gang.segment_at(index)
            found[index] = body(gang, memoryview(memory)[at : at + segment], index)
        except BaseException as error:
            found[index] = error

    threads = [threading.Thread(target=member, args=(i,), daemon=True) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit)
        assert not thread.is_alive(), "a member hangs"
    for outcome in found:
        if isinstance(outcome, BaseException):
            raise outcome
    return found, memory


def finish(gang, plan, hash=1, compare=True, source=None, out=None):
    for _ in range(200):
        status = gang.run(plan, hash, compare, SLICE, source, out)
        if status != WAITING:
            return status
    raise AssertionError(f"members {gang.missing()} do not come")


def stripes(count, size):
    lines = -(-count // 16)
    return [
        (min(lines * i // size * 16, count), min(lines * (i + 1) // size * 16, count))
        for i in range(size)
    ]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("count", [1, 3, 15, 17, 1023])
def test_stripes_are_combined_in_the_order_of_members(size, count):
    rng = np.random.default_rng(count)
    values = rng.standard_normal((size, count)) * 10.0 ** rng.integers(-6, 7, (size, count))
    values = values.astype(np.float32)
    expected = values[0].copy()
    for other in values[1:]:
        expected += other

    def body(gang, segment, index):
        own = np.frombuffer(segment, np.float32, count)
        plan = Plan()
        plan.sync()
        low, high = stripes(count, size)[index]
        if high > low:
            plan.reduce(F32, SUM, 1.0, 4 * low, high - low, ALL)
        plan.sync()
        digests = []
        for _ in range(5):
            own[:] = values[index]
            assert finish(gang, plan) == DONE
            digests.append(hashlib.sha256(own.tobytes()).hexdigest())
        return set(digests)

    found, _ = run_all(size, body)
    assert set.union(*found) == {hashlib.sha256(expected.tobytes()).hexdigest()}


@pytest.mark.parametrize("nbytes", [4, GANG_INLINE, GANG_INLINE + 4, 512])
def test_a_fast_member_never_laps_a_slow_one(nbytes):
    """Thousands of rounds of one meeting each; members run as the scheduler likes."""
    size, rounds, count = 3, 3000, nbytes // 4
    in_slot = nbytes <= GANG_INLINE

    def body(gang, segment, index):
        own = np.frombuffer(segment, np.float32, count)
        plan = Plan()
        plan.post(0, nbytes, 0, False, in_slot)
        plan.sync()
        plan.reduce_posted(F32, SUM, 1.0, 0, 0, count, OWN, in_slot)
        for round_ in range(rounds):
            own[:] = round_ * (index + 1)
            assert finish(gang, plan) == DONE
            if own[0] != round_ * 6 or own[-1] != round_ * 6:
                return round_, own[0]
        return None

    found, _ = run_all(size, body)
    assert found == [None] * size


def test_members_that_differ_all_notice_and_stay_in_step():
    def body(gang, segment, index):
        own = np.frombuffer(segment, np.float32, 2)
        one = Plan()
        one.post(0, 8, 0, False, True)
        one.sync()
        one.reduce_posted(F32, SUM, 1.0, 0, 0, 2, OWN, True)
        two = Plan()
        two.sync()
        two.sync()
        own[:] = 1
        statuses = [finish(gang, two if index == 1 else one, 5 + (index == 1))]
        own[:] = index
        statuses.append(finish(gang, one, 7))
        return statuses, own.tolist()

    found, _ = run_all(3, body)
    assert found == [([MISMATCH, DONE], [3.0, 3.0])] * 3


def test_without_comparing_hashes_are_not_looked_at():
    def body(gang, segment, index):
        plan = Plan()
        plan.sync()
        return finish(gang, plan, index, compare=False)

    assert run_all(2, body)[0] == [DONE, DONE]


def test_a_member_that_has_left_ends_the_others_wait():
    def body(gang, segment, index):
        plan = Plan()
        plan.sync()
        if index == 1:
            gang.leave()
            return LEFT, []
        return finish(gang, plan), gang.gone()

    found, _ = run_all(3, body)
    assert found[0] == found[2] == (LEFT, [1])


def test_one_who_left_after_an_operation_does_not_spoil_it():
    def body(gang, segment, index):
        plan = Plan()
        plan.sync()
        status = finish(gang, plan)
        gang.leave()
        return status

    assert run_all(4, body)[0] == [DONE] * 4


def test_a_wait_comes_back_and_goes_on_where_it_was():
    ready = threading.Event()

    def body(gang, segment, index):
        own = np.frombuffer(segment, np.float32, 4)
        own[:] = index + 1
        plan = Plan()
        plan.sync()
        if index == 0:
            plan.reduce(F32, MEAN, 2.0, 0, 4, ALL)
        plan.sync()
        if index == 0:
            status = gang.run(plan, 1, True, 1000)
            assert (status, gang.missing(), gang.busy) == (WAITING, [1], True)
            ready.set()
        else:
            assert ready.wait(30)
        assert finish(gang, plan) == DONE
        assert not gang.busy
        return own.tolist()

    assert run_all(2, body)[0] == [[1.5] * 4] * 2


def test_arrays_from_outside_pass_through_the_mailboxes():
    count, size = 300, 3
    values = np.arange(size * count, dtype=np.float32).reshape(size, count)

    def body(gang, segment, index):
        plan = Plan()
        plan.post(0, 4 * count, 0, True)
        plan.sync()
        low, high = stripes(count, size)[index]
        if high > low:
            plan.reduce_posted(F32, SUM, 1.0, 4 * low, 4 * low, high - low, SHARED)
        plan.sync()
        plan.fetch(0, 0, 4 * count)
        out = np.empty(count, np.float32)
        assert finish(gang, plan, source=values[index], out=out) == DONE
        everyone = np.empty((size, count), np.float32)
        gather = Plan()
        gather.post(0, 4 * count, 0, True)
        gather.sync()
        gather.gather(0, 4 * count)
        assert finish(gang, gather, source=values[index], out=everyone) == DONE
        return out, everyone

    found, _ = run_all(size, body, box=4 * count, segment=0, shared=4 * count)
    for out, everyone in found:
        np.testing.assert_array_equal(out, values.sum(0))
        np.testing.assert_array_equal(everyone, values)


@pytest.mark.parametrize("in_place", [False, True])
def test_arrays_from_outside_pass_through_segments_in_chunks(in_place):
    size, chunk, chunks = 3, 256, 5
    count = chunk // 4 * chunks
    values = np.arange(size * count, dtype=np.float32).reshape(size, count)

    def body(gang, segment, index):
        low, high = stripes(chunk // 4, size)[index]
        plan = Plan()
        plan.put(0, chunk, 0)
        for k in range(chunks):
            plan.sync()
            here, there = k % 2 * chunk, (k + 1) % 2 * chunk
            if k:
                plan.get(index, there, (k - 1) * chunk, chunk)
            if high > low:
                plan.reduce(F32, SUM, 1.0, here + 4 * low, high - low, ALL)
            if k + 1 < chunks:
                plan.put((k + 1) * chunk, chunk, there)
        plan.sync()
        plan.get(index, (chunks - 1) % 2 * chunk, (chunks - 1) * chunk, chunk)
        for _ in range(200):
            source = values[index].copy()
            out = source if in_place else np.empty_like(source)
            assert finish(gang, plan, source=source, out=out) == DONE
            np.testing.assert_array_equal(out, values.sum(0))
        return True

    assert run_all(size, body, segment=2 * chunk)[0] == [True] * size


def test_segments_are_combined_to_another_place_and_read_by_all():
    def body(gang, segment, index):
        plan = Plan()
        plan.put(0, 64, 128)
        plan.sync()
        if index == 1:
            plan.reduce(F32, SUM, 1.0, 128, 16, SHARED, 64)
        for member in range(3):
            plan.get(member, 128, 64 + 64 * member, 64)
        plan.sync()
        plan.fetch(64, 0, 64)
        out = np.zeros(64, np.float32)
        source = np.full(16, index + 1, np.float32)
        assert finish(gang, plan, source=source, out=out) == DONE
        return out[::16].tolist()

    found, _ = run_all(3, body, segment=192, shared=128)
    assert found == [[6.0, 1.0, 2.0, 3.0]] * 3


def test_a_broadcast_pulls_from_one_segment():
    def body(gang, segment, index):
        own = np.frombuffer(segment, np.uint8, 100)
        own[:] = index
        plan = Plan()
        plan.sync()
        if index != 2:
            plan.pull(2, 0, 100)
        plan.sync()
        assert finish(gang, plan) == DONE
        return set(own.tolist())

    assert run_all(4, body)[0] == [{2}] * 4


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["tiny", "stripe", "mean"]), st.integers(1, 40)), max_size=8
    ),
    st.integers(2, 4),
)
def test_any_order_of_operations_gives_what_numpy_gives(operations, size):
    rng = np.random.default_rng(len(operations))
    data = [rng.standard_normal((size, count)).astype(np.float32) for _, count in operations]

    def body(gang, segment, index):
        results = []
        for (kind, count), values in zip(operations, data, strict=True):
            own = np.frombuffer(segment, np.float32, count)
            own[:] = values[index]
            plan = Plan()
            if kind == "tiny":
                in_slot = 4 * count <= GANG_INLINE
                plan.post(0, 4 * count, 0, False, in_slot)
                plan.sync()
                plan.reduce_posted(F32, SUM, 1.0, 0, 0, count, OWN, in_slot)
            else:
                plan.sync()
                low, high = stripes(count, size)[index]
                if high > low:
                    op, divisor = (SUM, 1.0) if kind == "stripe" else (MEAN, float(size))
                    plan.reduce(F32, op, divisor, 4 * low, high - low, ALL)
                plan.sync()
            assert finish(gang, plan) == DONE
            results.append(own.copy())
        return results

    found, _ = run_all(size, body)
    for number, ((kind, _), values) in enumerate(zip(operations, data, strict=True)):
        expected = values[0].copy()
        for other in values[1:]:
            expected += other
        if kind == "mean":
            expected /= np.float32(size)
        for results in found:
            assert results[number].tobytes() == expected.tobytes()


def test_bad_arguments_are_named():
    memory = mmap.mmap(-1, gang_bytes(2, 512, 64, 0))
    with pytest.raises(ValueError, match=r"expected an index in 0\.\.1, got 2"):
        Gang(memory, 2, 2, 512, 64, 0, 0, 0, True)
    with pytest.raises(ValueError, match="bytes of memory, got"):
        Gang(memoryview(memory)[:64], 0, 2, 512, 64, 0, 0, 0, True)
    with pytest.raises(ValueError, match="no dtype has the code 14"):
        Plan().reduce(14, 0, 1.0, 0, 1, ALL)
    with pytest.raises(ValueError, match="no operation has the code 5"):
        Plan().reduce(0, 5, 1.0, 0, 1, ALL)
