"""Notes survive their bytes, and the tree of ranks covers every rank once."""

from hypothesis import given
from hypothesis import strategies as st

from mpiml.control import (
    EXIT,
    FAILED,
    FANOUT,
    FINISHED,
    REQUESTED,
    SIGNALLED,
    STUCK,
    TIME,
    Note,
    children,
    parent,
)

NOTES = st.builds(
    Note,
    reason=st.sampled_from([FINISHED, REQUESTED, FAILED, SIGNALLED, TIME, EXIT, STUCK]),
    status=st.integers(-(2**31), 2**31 - 1),
    vertex=st.integers(0, 2**32 - 1),
    rank=st.integers(0, 2**32 - 1),
    text=st.text(),
    encoding=st.integers(0, 255),
    error=st.binary(),
)


@given(NOTES)
def test_a_note_comes_back_from_its_bytes(note):
    assert Note.unpack(note.pack()) == note


def test_text_that_utf8_cannot_hold_does_not_lose_the_note():
    note = Note(FAILED, 1, 2, 3, "file \udcff.py", 1, b"error")
    assert Note.unpack(note.pack()) == note._replace(text="file \\udcff.py")


def test_layout_is_fixed():
    note = Note(FAILED, 1, 2, 3, "ab", 4, b"xy")
    head = bytes([2, 4]) + b"".join(n.to_bytes(4, "little") for n in (1, 2, 3, 2))
    assert note.pack() == head + b"abxy"


def test_a_failure_is_not_benign_and_a_wish_is():
    benign = {r for r in range(7) if Note(r, 0, 0, 0, "").benign}
    assert benign == {FINISHED, REQUESTED, SIGNALLED, TIME}


@given(st.integers(1, 700))
def test_the_tree_reaches_every_rank_once(size):
    reached, todo = [], [0]
    while todo:
        rank = todo.pop()
        reached.append(rank)
        below = children(rank, size)
        assert len(below) <= FANOUT
        assert all(parent(child) == rank for child in below)
        todo.extend(below)
    assert sorted(reached) == list(range(size))
    assert parent(0) == -1
