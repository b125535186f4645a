"""Which hosts count as silent: the rule, with a clock of the test's own."""

from mpiml.silence import Quiet, Silence, Turns

HOSTS = [(0, 1), (2, 3, 4), (5,)]


def silence(patience=2.0):
    return Silence(HOSTS, 0, patience)


def test_those_awaited_on_other_hosts_are_asked_once():
    rule = silence()
    assert rule.asks({1, 3, 5}, 10.0) == [3, 5]
    assert rule.asks({1, 3, 5}, 10.4) == []
    assert rule.heard(3, 10.6) is None
    assert rule.asks({3, 5}, 10.9) == [3]
    assert rule.asks({6}, 10.9) == []  # of a guest, which is on no list of hosts


def test_a_host_is_told_once_it_has_been_silent_for_long():
    rule = silence()
    rule.asks({3}, 10.0)
    assert rule.news({3}, 11.9) == []
    assert rule.news({3}, 12.0) == [Quiet(1, (3,), (), 2.0)]
    assert rule.news({3}, 13.0) == []
    assert rule.silent(13.0) == [Quiet(1, (3,), (), 3.0)]


def test_others_of_a_slow_host_are_asked_and_tell_it_from_a_busy_rank():
    rule = silence()
    rule.asks({3}, 10.0)
    assert rule.asks({3}, 10.4) == []
    assert rule.asks({3}, 11.0) == [2, 4]
    assert rule.asks({3}, 11.5) == []
    rule.heard(4, 11.6)
    assert rule.news({3}, 12.0) == [Quiet(1, (2, 3), (4,), 2.0)]


def test_it_is_told_only_while_somebody_waits():
    rule = silence()
    rule.asks({3, 5}, 10.0)
    assert rule.news({5}, 12.5) == [Quiet(2, (5,), (), 2.5)]
    assert rule.news(set(), 13.0) == []
    assert [quiet.host for quiet in rule.silent(13.0)] == [1, 2]


def test_a_host_is_heard_again_once_all_of_its_ranks_are():
    rule = silence()
    rule.asks({2, 3}, 10.0)
    rule.asks({2, 3}, 11.0)
    assert len(rule.news({2, 3}, 12.0)) == 1
    assert rule.heard(2, 14.0) is None
    assert rule.heard(4, 14.0) is None
    assert rule.heard(3, 15.0) == (1, 5.0)
    assert rule.heard(3, 15.0) is None
    assert rule.silent(99.0) == []
    rule.asks({3}, 100.0)
    assert rule.news({3}, 102.0) == [Quiet(1, (3,), (), 2.0)]  # told anew


def test_who_answered_before_the_question_is_no_sign_of_life():
    """Also where the clock stands, which it does while nobody is asked."""
    rule = silence()
    rule.asks({2}, 10.0)
    rule.heard(2, 10.0)
    rule.asks({3}, 10.0)
    assert rule.news({3}, 12.0) == [Quiet(1, (3,), (), 2.0)]


def test_who_is_asked_again_and_again_and_answers_is_there():
    rule = silence()
    rule.asks({3}, 10.0)
    for now in (10.5, 11.0, 11.5):
        assert rule.asks({3}, now) == ([2, 4] if now == 10.5 else [2])
        rule.heard(2, now)
    rule.asks({3}, 12.0)  # asks 2 again, just now
    assert rule.news({3}, 12.0) == [Quiet(1, (3, 4), (2,), 2.0)]


def test_time_counts_only_while_this_rank_takes_messages_in():
    clock = Turns(1.5)
    assert clock.look(10.0, True)
    clock.back()
    assert clock.look(11.0, True)
    assert clock.time == 1.0
    assert not clock.look(12.0, True)  # it computes, and lets no thread of ours run
    assert not clock.look(13.0, True)
    clock.back()
    assert clock.look(14.0, True)  # that one was late
    assert clock.time == 1.0
    clock.back()
    assert clock.look(19.0, True)  # the look was late
    assert clock.time == 2.5


def test_time_does_not_count_while_nobody_is_asked():
    clock = Turns(1.5)
    assert not clock.look(10.0, False)
    assert clock.look(11.0, True)
    clock.back()
    assert not clock.look(12.0, False)
    assert clock.look(13.0, True)
    assert clock.time == 1.0
