"""The cache of a `CacherNode`, with a clock of its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.roles.cache import Asked, Cache


def ask(cache, key, now, renews=False):
    asked = Asked(key, now, renews)
    cache.begin(asked)
    return asked


def test_the_age_counts_from_the_question():
    cache = Cache(stale=2.0)
    assert cache.read(b"k", 0.0) is None
    asked = ask(cache, b"k", 0.0)
    cache.finish(asked, True)  # at 1.5, say
    assert cache.read(b"k", 2.0) is asked
    assert cache.read(b"k", 2.1) is None
    assert not len(cache)


def test_readers_share_a_question_that_is_young_enough():
    cache = Cache(stale=1.0)
    first = ask(cache, b"k", 0.0)
    assert cache.read(b"k", 1.0) is first
    assert cache.read(b"other", 1.0) is None
    assert cache.read(b"k", 1.5) is None  # the target is slow: asked for again
    second = ask(cache, b"k", 1.5)
    assert cache.read(b"k", 1.6) is second
    cache.finish(second, True)
    cache.finish(first, True)  # the answer to the older question comes later: not kept
    assert cache.read(b"k", 2.5) is second


@pytest.mark.parametrize("refresh", [None, 0.5])
def test_stale_answers_go_though_nobody_reads_them_again(refresh):
    cache = Cache(stale=1.0, refresh=refresh)
    for n in range(1000):
        key, now = b"%d" % n, 10.0 * n
        assert cache.read(key, now) is None
        cache.finish(ask(cache, key, now), True)
        assert len(cache) == 1
    assert cache.read(b"of something else", 1e6) is None
    assert len(cache) == 0


def test_an_answer_that_took_long_goes_with_those_before_it():
    cache = Cache(stale=2.0)
    slow, quick = ask(cache, b"slow", 0.0), ask(cache, b"quick", 1.0)
    cache.finish(quick, True)
    cache.finish(slow, True)
    assert cache.read(b"slow", 2.5) is None
    again = ask(cache, b"slow", 2.5)
    cache.finish(again, True)
    assert cache.read(b"other", 3.5) is None
    assert len(cache) == 1  # quick has gone
    assert cache.read(b"slow", 4.5) is again


def test_errors_are_not_kept():
    cache = Cache(stale=5.0)
    cache.finish(ask(cache, b"k", 0.0), False)
    assert cache.read(b"k", 0.1) is None


def test_what_was_not_read_for_longest_goes():
    cache = Cache(stale=9.0, most=2)
    for key in (b"a", b"b"):
        cache.finish(ask(cache, key, 0.0), True)
    assert cache.read(b"a", 1.0)
    cache.finish(ask(cache, b"c", 1.0), True)
    assert cache.read(b"b", 2.0) is None
    assert cache.read(b"a", 2.0)
    assert cache.read(b"c", 2.0)


def test_only_what_is_read_again_is_renewed():
    cache = Cache(stale=2.0, refresh=1.0)
    first = ask(cache, b"k", 0.0)
    cache.finish(first, True)
    assert cache.next_due() is None
    assert cache.read(b"k", 0.5) is first
    assert cache.next_due() == 1.0
    assert cache.due(0.9) == []
    assert cache.due(1.0) == [first]
    second = ask(cache, b"k", 1.0, renews=True)
    assert cache.due(1.0) == []  # under way
    assert cache.read(b"k", 1.2) is first  # nobody waits for it
    cache.finish(second, True)
    assert cache.read(b"k", 1.3) is second
    assert cache.next_due() == 2.0


def test_a_renewal_that_fails_is_not_tried_again_at_once():
    cache = Cache(stale=3.0, refresh=1.0)
    first = ask(cache, b"k", 0.0)
    cache.finish(first, True)
    cache.read(b"k", 0.5)
    cache.finish(ask(cache, b"k", 1.0, renews=True), False)
    assert cache.read(b"k", 1.5) is first
    assert cache.due(1.9) == []
    assert cache.due(2.0) == [first]
    assert cache.read(b"k", 3.1) is None


def test_a_renewal_does_not_bring_back_what_has_gone():
    cache = Cache(stale=9.0, refresh=1.0, most=1)
    cache.finish(ask(cache, b"a", 0.0), True)
    cache.read(b"a", 0.5)
    renewal = ask(cache, b"a", 1.0, renews=True)
    cache.finish(ask(cache, b"b", 1.1), True)  # "a" goes
    cache.finish(renewal, True)
    assert cache.read(b"b", 1.2)
    again = ask(cache, b"c", 2.0, renews=True)
    assert cache.read(b"c", 2.1) is again  # a reader waits for it
    cache.finish(again, True)
    assert cache.read(b"c", 2.2) is again


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["read", "good", "bad", "renew", "wait"]),
        st.integers(0, 3),
        st.sampled_from([0.25, 0.5, 1.0, 3.0]),
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 3), st.sampled_from([None, 0.5, 1.0]))
def test_no_reader_gets_what_is_stale_or_no_answer(steps, most, refresh):
    cache = Cache(stale=2.0, refresh=refresh, most=most)
    now, under_way, failed = 0.0, [], set()
    for what, number, seconds in steps:
        key = b"%d" % number
        if what == "wait":
            now += seconds
        elif what == "read":
            found = cache.read(key, now)
            if found is None:
                under_way.append(ask(cache, key, now))
            else:
                assert found.key == key
                assert now - found.made <= 2.0
                assert found not in failed
        elif what == "renew":
            for asked in cache.due(now):
                assert asked.reads
                assert now - asked.made <= 2.0
                under_way.append(ask(cache, asked.key, now, renews=True))
            assert cache.due(now) == []
        elif under_way:
            asked = under_way.pop(number % len(under_way))
            cache.finish(asked, what == "good")
            failed |= {asked} if what == "bad" else set()
        assert len(cache) <= most
        due = cache.next_due()
        assert due is None or refresh is not None


@pytest.mark.parametrize("good", [True, False])
def test_what_cannot_be_read_is_dropped(good):
    cache = Cache(stale=2.0)
    asked = ask(cache, b"k", 0.0)
    cache.finish(asked, good)
    cache.drop(asked)
    assert cache.read(b"k", 0.0) is None
