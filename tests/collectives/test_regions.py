"""Leaves do not overlap, start on cache lines, and stripes cover everything once."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.collectives.ops import DTYPES, numpy_dtype
from mpiml.collectives.regions import (
    LINE,
    Leaf,
    Regions,
    first_difference,
    members,
    specs_of,
    stripe,
)
from mpiml.errors import UsageError

LEAVES = st.lists(
    st.builds(
        Leaf,
        st.text("ab", max_size=2),
        st.lists(st.integers(0, 7), max_size=3).map(tuple),
        st.sampled_from(list(DTYPES)),
    ),
    min_size=1,
    max_size=8,
)


@given(LEAVES)
def test_layout(leaves):
    regions = Regions(leaves)
    assert regions.nbytes % LINE == 0
    assert [r.dtype_name for r in regions.regions] == list(
        dict.fromkeys(leaf.dtype_name for leaf in leaves)
    )
    end = 0
    for region in regions.regions:  # one after the other, nothing between them
        assert region.offset == end
        assert region.code == DTYPES[region.dtype_name]
        end += region.nbytes
    assert end == regions.nbytes
    ends = {r.dtype_name: r.offset for r in regions.regions}
    for number, leaf in enumerate(leaves):
        offset, shape, name = regions.leaf(number)
        assert (shape, name) == (leaf.shape, leaf.dtype_name)
        assert offset % LINE == 0
        assert offset == ends[name]
        used = math.prod(shape) * numpy_dtype(name).itemsize
        ends[name] = offset + -(-used // LINE) * LINE
    for region in regions.regions:
        assert ends[region.dtype_name] == region.offset + region.nbytes


@given(LEAVES)
def test_views_are_the_memory_and_nobody_elses(leaves):
    regions = Regions(leaves)
    memory = bytearray(regions.nbytes)
    views = regions.views(memory)
    for number, view in enumerate(views):
        assert (view.shape, view.dtype) == (
            leaves[number].shape,
            numpy_dtype(leaves[number].dtype_name),
        )
        np.ndarray((view.nbytes,), np.uint8, memory, regions.leaf(number)[0])[:] = number + 1
    for number, view in enumerate(views):
        assert set(view.tobytes()) <= {number + 1}
    flat = regions.flat(memory)
    assert [len(f) for f in flat] == [r.count for r in regions.regions]
    assert b"".join(f.tobytes() for f in flat) == bytes(memory)


def test_views_of_read_only_memory_are_read_only():
    regions = Regions([Leaf("", (3,), "float32")])
    assert not regions.views(bytes(64))[0].flags.writeable
    assert not regions.flat(bytes(64))[0].flags.writeable
    with pytest.raises(TypeError):  # too small
        regions.views(bytes(8))


def test_two_dtypes_by_hand():
    regions = Regions(
        [
            Leaf("['a']", (3, 4), "float64"),
            Leaf("['b']", (17,), "float32"),
            Leaf("['c']", (), "float64"),
        ]
    )
    assert [tuple(r) for r in regions.regions] == [
        ("float64", 1, 0, 24),
        ("float32", 0, 192, 32),
    ]
    assert [regions.leaf(i)[0] for i in range(3)] == [0, 192, 128]
    assert regions.nbytes == 320
    assert regions.digest_text() == (
        "['a'] (3, 4) float64\n['b'] (17,) float32\n['c'] () float64"
    )


def test_specs_of_arrays():
    leaves = [np.zeros((2, 3), "f4"), np.float64(1)]
    assert specs_of(leaves, ["[0]", "[1]"]) == [
        Leaf("[0]", (2, 3), "float32"),
        Leaf("[1]", (), "float64"),
    ]


def test_a_single_array_has_a_name_in_the_text():
    assert Regions([Leaf("", (2,), "int8")]).digest_text() == "the array (2,) int8"


@given(
    st.integers(0, 10**6) | st.just(2**40),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 70),
)
def test_stripes_cover_once_and_start_on_lines(count, itemsize, size):
    stripes = [stripe(count, itemsize, i, size) for i in range(size)]
    assert stripes[0][0] == 0
    assert stripes[-1][1] == count
    for (low, high), (after, _) in itertools.pairwise(stripes):
        assert low <= high == after
        assert high == count or high * itemsize % LINE == 0
    lengths = [high - low for low, high in stripes]
    assert max(lengths) - min(lengths) < 2 * LINE // itemsize + 1


def test_the_first_difference_names_both_and_who():
    a, b = "x (1,) f\ny (2,) f", "x (1,) f\ny (3,) f"
    assert first_difference([a, a]) == ""
    assert first_difference([]) == ""
    assert first_difference([a, b, a, a]) == (
        "leaf 1: y (2,) f (members 0, 2-3), y (3,) f (member 1)"
    )
    assert first_difference([a, "x (1,) f"]) == (
        "leaf 1: y (2,) f (member 0), no such leaf (member 1)"
    )


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([4], "member 4"), ([0, 1], "members 0-1"), ([0, 2, 3, 5], "members 0, 2-3, 5")],
)
def test_numbers_of_members(numbers, text):
    assert members(numbers) == text


@pytest.mark.parametrize("count", [1 << 47, 1 << 63, 1 << 80])
def test_more_than_any_memory(count):
    with pytest.raises(UsageError, match="at most 140,737,488,355,328 bytes"):
        Regions([Leaf("", (count,), "int8"), Leaf("['x']", (1,), "int8")])
