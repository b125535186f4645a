"""Where numbers are: cut into parts and joined, whole or some rows, they are what they were."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mpiml.errors import UsageError
from mpiml.roles.parameter_server.plan import LeafSpec, Plan

shapes = st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple)
leaves = st.lists(
    st.tuples(shapes, st.sampled_from(["float32", "float64"])), min_size=1, max_size=5
)


def planned(drawn, shards):
    specs = [LeafSpec(f"[{i}]", shape, dtype) for i, (shape, dtype) in enumerate(drawn)]
    arrays = [
        np.arange(1, 1 + spec.size).reshape(spec.shape).astype(spec.dtype) for spec in specs
    ]
    try:
        return Plan(specs, shards), arrays
    except UsageError:
        assume(False)


@given(leaves, st.integers(1, 4))
def test_parts_of_servers_are_the_whole(drawn, shards):
    plan, arrays = planned(drawn, shards)
    block = np.zeros(plan.nbytes, np.uint8)
    memories = []
    for shard, parts in enumerate(plan.parts(arrays)):
        begin, end = plan.spans[shard]
        memory = block[begin:end]
        for own, part in zip(plan.arrays(shard, memory), parts, strict=True):
            own[:] = part
        memories.append(memory.copy())
    for found in (plan.whole(block), plan.joined(memories)):
        for array, expected in zip(found, arrays, strict=True):
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(array, expected)


@given(leaves, st.integers(1, 4), st.data())
def test_rows_are_found_on_their_servers(drawn, shards, data):
    plan, arrays = planned(drawn, shards)
    number = data.draw(st.integers(0, len(arrays) - 1))
    array = arrays[number]
    parts = plan.parts(arrays)
    some = None
    if array.ndim and len(array):
        some = np.array(
            data.draw(st.lists(st.integers(0, len(array) - 1), max_size=20)), np.int64
        )
    for rows in (None, some):
        expected = (array if rows is None else array[rows]).reshape(-1)
        found = np.zeros_like(expected)
        for shard, (piece, indices, places) in plan.select(number, rows):
            values = parts[shard][piece]
            found[places] = values if indices is None else values[indices]
        np.testing.assert_array_equal(found, expected)


def test_only_floats():
    with pytest.raises(UsageError, match=r"float32 or float64, got \['n'\] \(3,\) int64"):
        Plan([LeafSpec("['n']", (3,), "int64")], 1)
