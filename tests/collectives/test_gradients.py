from hypothesis import given
from hypothesis import strategies as st

from mpiml.collectives.gradients import assign


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=30),
    st.integers(1, 100),
    st.integers(1, 100),
)
def test_buckets_hold_all_parameters_from_the_last_to_the_first(sizes, limit, first):
    buckets = assign(sizes, limit, first)
    assert [n for bucket in buckets for n in bucket] == list(reversed(range(len(sizes))))
    for number, bucket in enumerate(buckets):
        room = first if number == 0 else limit
        assert len(bucket) == 1 or sum(sizes[n] for n in bucket) <= room
        if number:  # the next one had no room in the bucket before
            before = first if number == 1 else limit
            used = sum(sizes[n] for n in buckets[number - 1])
            assert used + sizes[bucket[0]] > before
