"""Packing: what is unpacked is what was packed, in as few bytes as there are bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.collectives.compression.bits import pack, pack_signs, packed_size, signs, unpack

WIDTHS = range(1, 9)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_unpack_undoes_pack(width, count, seed):
    codes = np.random.default_rng(seed).integers(0, 2**width, count, dtype=np.uint8)
    packed = pack(codes, width)
    assert packed.dtype == np.uint8
    assert packed.shape == (packed_size(count, width),) == (-(-count * width // 8),)
    np.testing.assert_array_equal(unpack(packed, width, count), codes)


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_the_bits_stand_where_the_module_says(width, count, seed):
    codes = np.random.default_rng(seed).integers(0, 2**width, count, dtype=np.uint8)
    number = sum(int(code) << (i * width) for i, code in enumerate(codes))
    assert pack(codes, width).tobytes() == number.to_bytes(packed_size(count, width), "little")


@pytest.mark.parametrize("width", WIDTHS)
def test_what_follows_does_not_matter(width):
    codes = (np.arange(13) % 2**width).astype(np.uint8)
    longer = np.concatenate([pack(codes, width), np.full(20, 255, np.uint8)])
    np.testing.assert_array_equal(unpack(longer, width, 13), codes)


@settings(deadline=None)
@given(st.lists(st.floats(-2, 2, width=32), max_size=50))
def test_signs(values):
    array = np.array(values, np.float32)
    packed = pack_signs(array)
    assert packed.size == -(-len(values) // 8)
    got = signs(packed, array.size, 0.5, np.float32)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.where(array >= 0, 0.5, -0.5))
