"""Records of one-sided memory: what is packed comes out again."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.collectives.onesided.records import (
    ADD,
    MARK,
    Ask,
    Said,
    Sparse,
    pack_rows,
    unpack_rows,
)

NUMBER = st.integers(0, 2**62)
ROW = st.tuples(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(-9, 9)), max_size=5),
    st.integers(-4, 4),
)
BLOCK = st.tuples(st.lists(ROW, max_size=4), st.booleans(), st.booleans())


@given(NUMBER, NUMBER, st.integers(-1, 2**31 - 1), st.floats(allow_nan=False))
def test_heads(first, count, leaf, scale):
    ask = Ask(ADD, 1, 0, leaf, 7, 9, first, count, scale)
    assert Ask.unpack(ask.pack()) == ask
    said = Said(MARK, 1, 0, 3, first, count, 5)
    assert Said.unpack(said.pack()) == said


@given(st.lists(BLOCK, min_size=1, max_size=4), st.sampled_from(["f4", "f8"]))
def test_rows(blocks, dtype):
    adds, expected = [], []
    for rows, alone, wide in blocks:
        chosen = rows[:1] if alone and rows else rows
        cells = [cell for row, _ in chosen for cell in row]
        positions = np.array([at for at, _ in cells], "i8" if wide else "i4")
        values = np.array([value for _, value in cells], dtype)
        scales = np.array([scale for _, scale in chosen], dtype)
        starts = np.cumsum([0, *[len(row) for row, _ in chosen]])
        one = alone and rows
        adds.append(Sparse(positions, values, *((scales[0],) if one else (scales, starts))))
        expected += [([at for at, _ in r], [v for _, v in r], s) for r, s in chosen]
    body, count, wide = pack_rows(adds)
    starts, positions, values, scales = unpack_rows(body, count, wide, np.dtype(dtype))
    assert count == len(expected) == len(scales)
    assert values.dtype == scales.dtype == dtype
    got = [
        (positions[a:b].tolist(), values[a:b].tolist(), s)
        for a, b, s in zip(starts, starts[1:], scales, strict=False)
    ]
    assert got == expected


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_arrays_start_where_the_kernel_may_read_them(dtype):
    for n in range(5):
        add = Sparse(np.zeros(n, "i8"), np.zeros(n, dtype), 1.0)
        arrays = unpack_rows(*pack_rows([add, add]), np.dtype(dtype))
        assert all(a.ctypes.data % a.itemsize == 0 for a in arrays)
