"""Frames: what is joined is split again, and no bytes at all do harm."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml import _native, wire
from mpiml.errors import MpimlError

u8, u32, u64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 32, 64))
frames = st.fixed_dictionaries(
    {
        "kind": u8,
        "source": u32,
        "target": u32,
        "id": u64,
        "aux": u32,
        "encoding": u8,
        "flags": u8,
        "name": st.binary(max_size=40),
        "body": st.one_of(st.binary(max_size=200), st.just(bytes(10_000))),
        "lengths": st.lists(u64, max_size=5).map(tuple),
    }
)


def take_apart(message):
    """Split as the link does it, from any kind of buffer."""
    return [wire.split(kind(message)) for kind in (bytes, bytearray)]


@given(frames)
@settings(deadline=None)
def test_a_frame_comes_back_as_it_was(fields):
    message = wire.join(**fields)
    assert len(message) == 40 + len(fields["name"]) + len(fields["body"]) + 8 * len(
        fields["lengths"]
    )
    for frame in take_apart(message):
        for field, value in fields.items():
            got = getattr(frame, field)
            assert (bytes(got) if isinstance(value, bytes) else got) == value


@given(frames, st.data())
@settings(deadline=None)
def test_a_frame_cut_or_lengthened_is_refused(fields, data):
    message = wire.join(**fields)
    cut = data.draw(st.integers(0, len(message) - 1))
    for broken in (message[:cut], message + b"x" * (1 + cut % 17)):
        for kind in (bytes, bytearray):
            with pytest.raises(wire.FrameError, match="wire: expected a frame"):
                wire.split(kind(broken))


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_garbage_is_refused_or_read_and_never_worse(garbage):
    for message in (garbage, b"\x01" + garbage):
        for kind in (bytes, bytearray):
            try:
                frame = wire.split(kind(message))
            except wire.FrameError:
                continue
            assert len(frame.name) + len(frame.body) + 8 * len(frame.lengths) + 40 == len(
                message
            )


@given(st.integers(40, 80), st.sampled_from([12, 24, 32]), u64)
@settings(deadline=None)
def test_lengths_that_overflow_are_refused(size, field, value):
    width = 8 if field == 24 else 4
    message = bytearray(size)
    message[0] = wire.WIRE_VERSION
    message[field : field + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    count, body, name = (
        int.from_bytes(message[a:b], "little") for a, b in ((12, 16), (24, 32), (32, 36))
    )
    if 40 + name + body + 8 * count != size:
        with pytest.raises(wire.FrameError):
            wire.split(message)
    else:
        wire.split(message)


def test_another_version_is_named():
    message = bytearray(wire.join(1, 2, 3))
    message[0] = 9
    with pytest.raises(wire.FrameError, match=r"(?s)version 1.*version 9.*same mpiml"):
        wire.split(message)
    assert issubclass(wire.FrameError, MpimlError)


def test_the_layout_is_what_the_module_says():
    message = wire.join(
        1, 0x01020304, 0x05060708, 0x1112131415161718, 0x21222324,
        encoding=3, flags=2, name=b"add", body=b"xy", lengths=(7,),
    )  # fmt: skip
    assert message.hex() == (
        "01010302"
        "04030201"
        "08070605"
        "01000000"
        "1817161514131211"
        "0200000000000000"
        "03000000"
        "24232221" + b"addxy".hex() + "0700000000000000"
    )


@given(st.integers(0, 10 * wire.CHUNK))
def test_chunks_cover_a_buffer_once(length):
    pieces = wire.chunks(length)
    assert all(0 < stop - start <= wire.CHUNK for start, stop in pieces)
    edges = [0, *(stop for _, stop in pieces)]
    assert [start for start, _ in pieces] == edges[:-1]
    assert edges[-1] == length


def test_kinds_are_distinct():
    flags = {"FLAG_BODY_APART", "FLAG_NESTED", "FLAG_STREAM", "WIRE_VERSION", "CHUNK"}
    kinds = {n: getattr(wire, n) for n in wire.__all__ if n.isupper() and n not in flags}
    del kinds["HEADER"]
    assert len(kinds) == len(set(kinds.values()))
    assert all(0 < kind < 256 for kind in kinds.values())


def test_what_is_built_natively_is_the_same_frame():
    """One layout, written in Python and in C++: they may not drift apart."""
    for value in [(1, "a"), (None,), 2.5, "text", b"x", (1 << 70, -1)]:
        import pickle

        native = _native.join_plain(wire.REQUEST, 3, 7, 9, 1 << 40, 5, b"name", value)
        plain = wire.join(
            wire.REQUEST, 7, 9, 1 << 40, 5,
            encoding=1, flags=3, name=b"name", body=pickle.dumps(value, 5),
        )  # fmt: skip
        assert native == plain
    assert wire.HEADER.size == 40
