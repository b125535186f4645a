"""Lists of places: the fewest bytes, and caches that agree."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.errors import UsageError
from mpiml.roles.parameter_server.filtering import wire
from mpiml.roles.parameter_server.filtering.wire import Lists, places_nbytes, read, write


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 300), st.sets(st.integers(0, 299)), st.sampled_from([0, 1 << 16, 1 << 20])
)
def test_places_arrive_in_as_many_bytes_as_were_said(size, chosen, more):
    size += more
    indices = np.array(sorted(i + more // 2 for i in chosen if i < size - more // 2), np.int64)
    places = write(indices, size)
    assert places.nbytes == places_nbytes(size, len(indices)) <= -(-size // 8)
    back = read(places, size)
    assert back.dtype == np.int64
    assert (back == indices).all()
    assert len(back) == len(indices)


def test_few_places_are_indices_and_many_are_bits():
    assert write(np.arange(2), 100).dtype == np.uint16
    assert write(np.arange(2), 1 << 17).dtype == np.uint32
    assert write(np.arange(50), 100).dtype == np.uint8
    assert places_nbytes(100, 50) == 13


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 6), max_size=60))
def test_both_ends_keep_the_same_lists(most, sequence):
    sender, receiver = Lists(most), Lists(most)
    last = []  # the lists used last, the newest at the end
    for number in sequence:
        places = np.arange(number, number + 9, dtype=np.uint16)
        name, known = sender.find(places)
        assert known == (number in last)
        last = [*[n for n in last if n != number], number][-most:]
        got = receiver.take(name if known else places)
        assert (got == places).all()
        assert len(sender) == len(receiver) == len(last)


def test_lists_of_one_hash_are_told_apart(monkeypatch):
    monkeypatch.setattr(wire, "_hash", lambda places: 7)
    sender, receiver = Lists(2), Lists(2)
    one, other = np.arange(3, dtype=np.uint16), np.arange(1, 4, dtype=np.uint16)
    for places, expected in [
        (one, False),
        (one, True),
        (other, False),
        (other, True),
        (one, False),
    ]:
        name, known = sender.find(places)
        assert known is expected
        assert (receiver.take(name if known else places) == places).all()


def test_indices_and_bits_of_the_same_bytes_are_told_apart():
    lists = Lists(4)
    indices = np.arange(4, dtype=np.uint16)
    lists.find(indices)
    assert not lists.find(indices.view(np.uint8))[1]


def test_a_lost_list_is_noticed():
    with pytest.raises(UsageError, match=r"got its hash 2a.*new encoders and decoders"):
        Lists(1).take(42)


def test_a_kept_list_is_no_memory_of_a_message():
    lists, places = Lists(1), np.arange(3, dtype=np.uint16)
    name, _ = Lists(1).find(places)
    lists.take(places)
    places[:] = 9
    assert lists.take(name).tolist() == [0, 1, 2]
