"""Ranges of servers: everything once, in order, about as much for each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.errors import UsageError
from mpiml.roles.parameter_server.layout import GRAIN, split

trees = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from([4, 8])), min_size=1, max_size=6
)


@given(trees, st.integers(1, 5))
def test_every_element_is_held_once_in_order_and_evenly(tree, servers):
    sizes, itemsizes = zip(*tree, strict=True)
    try:
        found = split(sizes, itemsizes, servers)
    except UsageError:
        total = sum(n * b for n, b in tree)
        assert total < servers * 3 * GRAIN * 8
        return
    at = (0, 0)
    for pieces in found:
        for leaf, start, stop in pieces:
            while at[1] == sizes[at[0]] if at[0] < len(sizes) else False:
                at = (at[0] + 1, 0)
            assert (leaf, start) == at
            assert start < stop <= sizes[leaf]
            at = (leaf, stop)
    assert sum(stop - start for pieces in found for _, start, stop in pieces) == sum(sizes)
    bytes_ = [sum((p.stop - p.start) * itemsizes[p.leaf] for p in pieces) for pieces in found]
    assert max(bytes_) - min(bytes_) <= 2 * GRAIN * 8


def test_a_large_array_is_split_and_small_ones_are_not_torn_at_odd_places():
    assert split([100, 1_000_000], [4, 4], 2) == [
        [(0, 0, 100), (1, 0, 499_952)],
        [(1, 499_952, 1_000_000)],
    ]


def test_more_servers_than_there_is_to_hold():
    with pytest.raises(UsageError, match="got 3 for 20 numbers in 1 arrays"):
        split([20], [4], 3)


@given(st.lists(st.integers(1, 2**62), min_size=1, max_size=3), trees, st.integers(1, 5))
def test_each_server_has_an_equal_part_of_each_key_range(ranges, tree, servers):
    sizes, itemsizes = zip(*tree, strict=True)
    tables = [i + len(tree) for i in range(len(ranges))]
    if max(ranges) < servers:
        return
    found = split([*sizes, *ranges], [*itemsizes, *(4 for _ in ranges)], servers, tables)
    for leaf, n in zip(tables, ranges, strict=True):
        parts = [p for pieces in found for p in pieces if p.leaf == leaf]
        everyone = [(leaf, n * i // servers, n * (i + 1) // servers) for i in range(servers)]
        assert parts == [p for p in everyone if p[1] < p[2]]
    dense = [[p for p in pieces if p.leaf < len(tree)] for pieces in found]
    if all(dense):
        assert dense == split(sizes, itemsizes, servers)
    assert sum(p.stop - p.start for pieces in dense for p in pieces) == sum(sizes)


def test_key_ranges_stand_where_they_are_in_the_tree():
    assert split([64, 10, 64], [4] * 3, 2, [1]) == [
        [(0, 0, 64), (1, 0, 5)],
        [(1, 5, 10), (2, 0, 64)],
    ]
    with pytest.raises(UsageError, match=r"got 6 for 0 numbers in 0 arrays, .*, and 5 keys"):
        split([5], [4], 6, [0])
