"""copy, checksum and writable: the right bytes, and clear refusals."""

import gc
import mmap
import pickle
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml._native import checksum, copy, writable

STREAM = 32 << 20  # from here on copy() may write past the caches


@given(st.binary(max_size=300), st.integers(0, 40))
def test_copy_moves_all_bytes_and_no_others(data, offset):
    dst = bytearray(b"\xaa" * (len(data) + 2 * offset))
    view = memoryview(dst)
    copy(view[offset : offset + len(data)], data)
    assert dst == b"\xaa" * offset + data + b"\xaa" * offset


@pytest.mark.parametrize("nbytes", [(64 << 10) + 1, STREAM - 1, STREAM, STREAM + 12345])
@pytest.mark.parametrize(("to", "off"), [(0, 0), (1, 0), (0, 3), (31, 17)])
def test_copy_of_large_memory_at_any_alignment(nbytes, to, off):
    words = np.arange((nbytes + 64) // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    src = words.view(np.uint8)[off : off + nbytes]
    dst = np.full(nbytes + 64, 7, np.uint8)
    copy(dst[to : to + nbytes], src)
    assert np.array_equal(dst[to : to + nbytes], src)
    assert (dst[:to] == 7).all()
    assert (dst[to + nbytes :] == 7).all()


@pytest.mark.parametrize("nbytes", [100, STREAM + 100])
@pytest.mark.parametrize("shift", [-5, 5])
def test_copy_between_views_that_overlap(nbytes, shift):
    a = np.resize(np.arange(251, dtype=np.uint8), nbytes + 10)
    want = a[5 : 5 + nbytes].copy()
    copy(a[5 + shift : 5 + shift + nbytes], a[5 : 5 + nbytes])
    assert np.array_equal(a[5 + shift : 5 + shift + nbytes], want)


@pytest.mark.parametrize(
    "dtype", ["<M8[us]", "V3", "?", ">c16", "S5", [("a", "<i2"), ("b", "O")]]
)
def test_copy_looks_at_bytes_not_at_dtypes(dtype):
    src = np.zeros(4, dtype)
    dst = np.empty(src.nbytes, np.uint8)
    copy(dst, src)
    assert dst.tobytes() == src.tobytes()
    copy(np.zeros((), "<M8[s]"), np.int64(3))


def test_copy_refuses():
    with pytest.raises(ValueError, match="got dst of 3 bytes and src of 4 bytes"):
        copy(bytearray(3), b"1234")
    frozen = np.zeros(4, np.uint8)
    frozen.flags.writeable = False
    for dst in (b"1234", memoryview(b"1234"), frozen):
        with pytest.raises(BufferError, match="copy: dst: expected writable memory"):
            copy(dst, b"abcd")
    with pytest.raises(BufferError, match="copy: src: expected C-contiguous"):
        copy(bytearray(4), np.zeros(8, np.uint8)[::2])
    with pytest.raises(BufferError, match="copy: dst: expected C-contiguous"):
        copy(np.zeros((2, 2), order="F"), bytes(32))
    closed = mmap.mmap(-1, 4)
    closed.close()
    with pytest.raises(BufferError, match="closed"):
        copy(bytearray(4), closed)
    for bad in (None, 3, "text"):
        with pytest.raises(TypeError, match=r"bytes-like|incompatible"):
            copy(bytearray(4), bad)
    assert frozen.tobytes() == bytes(4)


def test_copy_of_nothing():
    copy(bytearray(), b"")
    copy(np.empty((0, 3)), np.empty((5, 0)))


# Made by the reference implementation, xxHash 0.8.
@pytest.mark.parametrize(
    ("nbytes", "seed", "want"),
    [
        (1, 0, 0xA96C7F0CE858BBB7),
        (1, 18446744073709551615, 0xD7F46261BA7C5B95),
        (3, 0, 0xBED43740EE6332BB),
        (3, 18446744073709551615, 0x50127E93A7B8310D),
        (4, 0, 0xFA212AE44B3BB23D),
        (4, 20141025, 0x88CF5DD20036FCA1),
        (7, 0, 0x2744460DD675D2C0),
        (7, 18446744073709551615, 0x6F0993BD5D623D42),
        (8, 0, 0x994B676B71CE94DD),
        (8, 20141025, 0x9F5EA7852BE3D477),
        (15, 0, 0x09E6451ED2FF8B1D),
        (15, 18446744073709551615, 0xF4E3F407FEF30B4C),
        (31, 0, 0x6711D55E306B5D8F),
        (31, 18446744073709551615, 0x0559625F4E0AFE08),
        (32, 0, 0x07F7B8E3BC5D6E25),
        (32, 20141025, 0x6C99F4B24D5902FF),
        (33, 0, 0x09F85EEB4E1CBE9F),
        (33, 18446744073709551615, 0x303C4A232C3BD093),
        (63, 0, 0xB7C9968C066CB6A5),
        (63, 18446744073709551615, 0x5B30F335733619AB),
        (100, 0, 0x9DDADA11D3DC2D8F),
        (100, 20141025, 0xD36A2CF5E7814DC4),
        (70000, 0, 0x941FA297AF10B341),
        (70000, 20141025, 0x8221656A5FFECC83),
    ],
)
def test_checksum_is_xxh64(nbytes, seed, want):
    data = bytes((k * 131 + 7) % 256 for k in range(nbytes))
    assert checksum(data, seed) == want
    shifted = memoryview(b"x" + data)[1:]  # alignment does not matter
    assert checksum(shifted, seed=seed) == want


def test_checksum_of_known_words():
    assert checksum(b"") == 0xEF46DB3751D8E999
    assert checksum(b"abc") == 0x44BC2CF5AD770999


@given(st.binary(min_size=1, max_size=200), st.data())
def test_checksum_sees_every_byte(data, draw):
    k = draw.draw(st.integers(0, len(data) - 1))
    other = bytearray(data)
    other[k] ^= draw.draw(st.integers(1, 255))
    assert checksum(other) != checksum(data)


def test_checksum_refuses():
    with pytest.raises(BufferError, match="checksum: buffer: expected C-contiguous"):
        checksum(np.zeros((4, 4))[:, 0])
    with pytest.raises(TypeError):
        checksum(b"", -1)


def test_writable_is_the_same_memory():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    a.flags.writeable = False
    view = writable(a)
    assert (view.readonly, view.format, view.shape) == (False, "B", (24,))
    assert np.frombuffer(view, np.uint8).ctypes.data == a.ctypes.data
    assert view.tobytes() == a.tobytes()
    assert not a.flags.writeable


def test_writable_keeps_the_owner():
    class Owner(np.ndarray):
        pass

    owner = np.zeros(8, np.uint8).view(Owner)
    alive = weakref.ref(owner)
    part = writable(owner)[2:4]
    del owner
    gc.collect()
    assert alive() is not None
    del part
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("nbytes", [0, 10])
def test_writable_of_bytes_and_pickle_buffers(nbytes):
    data = bytes(range(nbytes))
    assert writable(data).tobytes() == data
    assert writable(pickle.PickleBuffer(data)).tobytes() == data


def test_writable_refuses():
    with pytest.raises(BufferError, match="writable: buffer: expected C-contiguous"):
        writable(np.zeros((3, 3)).T[1:])
    with pytest.raises(TypeError, match="bytes-like"):
        writable([1])
