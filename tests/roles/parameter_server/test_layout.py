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
