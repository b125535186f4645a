"""HogWild++'s ring: its weights, whose turn it is, and what an update becomes on its way."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml._native import ring_sync
from mpiml.collectives.onesided.ring_rule import Due, RingRule, Turns, weights
from mpiml.errors import UsageError

NOTHING, LOOK, PASS = Due.NOTHING, Due.LOOK, Due.PASS

# --- weights --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "beta", "lam"),
    [
        (2, 0.6180, 0.3820),
        (3, 0.6823, 0.5344),
        (4, 0.7245, 0.6197),
        (8, 0.8117, 0.7679),
        (10, 0.8351, 0.8025),
        (40, 0.9342, 0.9296),
    ],
)
def test_weights_as_published(n, beta, lam):
    rule = RingRule(n, 1)
    assert rule.beta == pytest.approx(beta, abs=5e-5)
    assert rule.lam == pytest.approx(lam, abs=5e-5)
    assert rule.beta + rule.beta**n == pytest.approx(1, abs=1e-14)
    assert rule.lam == 1 - rule.beta ** (n - 1)
    assert rule.syncs


def test_two_clusters_share_by_the_golden_ratio():
    assert RingRule(2, 3).beta == pytest.approx((5**0.5 - 1) / 2, abs=1e-15)


def test_one_cluster_never_syncs():
    rule = RingRule(1, 3)
    assert not rule.syncs
    assert (rule.beta, rule.lam) == (1, 0)
    turns = Turns(rule, 0)
    assert {turns.count(1000) for _ in range(20)} == {NOTHING}
    with pytest.raises(UsageError, match="one cluster alone has no turns"):
        turns.synced()
    assert turns.statistics() == (0, 0)


@pytest.mark.parametrize(
    ("n", "delay"), [(2, 64), (4, 64), (5, 16), (10, 16), (11, 4), (40, 4)]
)
def test_delays_as_the_authors_ran_them(n, delay):
    rule = RingRule(n, 2)
    assert (rule.delay, rule.first_wait, rule.rest) == (delay, 8 * delay, delay * 2 * n)
    assert RingRule(n, 2, delay=7).delay == 7
    assert rule.tolerance == 1e-2


def test_step_size_shrinks_by_the_decay_in_so_many_epochs_as_there_are_clusters():
    rule = RingRule(4, 2, decay=0.5)
    assert rule.step(0.2, 0) == 0.2
    assert rule.step(0.2, 4) == pytest.approx(0.1)
    assert rule.step(0.2, 5) == pytest.approx(0.1 * 0.5**0.25)


# --- what an update becomes -----------------------------------------------------------


def one_ring(rule, start, u, tolerance):
    """Give cluster `start` the update, and each cluster from there on its turn: (w, s)."""
    n = rule.clusters
    models, snapshots = np.zeros((2, n, 1))
    models[start] = u
    branches = []
    for token in range(start, start + n):
        at = rule.cluster(token % rule.size)
        branches.append(
            ring_sync(
                models[at],
                snapshots[at],
                models[rule.following(at)],
                1.0,
                rule.beta,
                rule.lam,
                tolerance,
            )
        )
    order = [(start + i) % n for i in range(n)]  # the origin first
    return models[order, 0], snapshots[order, 0], branches


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_an_update_that_is_passed_on(n, start):
    """By hand, b for beta, l for lam, of an update u = 1 at the origin and 0 elsewhere.

    The origin, D = 1: its next gets b, it keeps l 0 + (1 - l) 1 + (b + l - 1) 1 = b.
    The j-th after it, D = b^j: its next gets b^(j+1), it keeps l 0 + (1 - l) b^j +
    (b + l - 1) b^j = b^(j+1).
    The last, j = n - 1: its next is the origin, which has b and gets b^n; it keeps
    l b + (1 - l) b^j + (b + l - 1) b^j = l b + b^n.
    """
    rule = RingRule(n, 1)
    # on its own: the root by Newton's method
    b = 0.75
    for _ in range(60):
        b -= (b**n + b - 1) / (n * b ** (n - 1) + 1)
    lam = 1 - b ** (n - 1)
    expected = {
        2: [b + b**2, lam * b + b**2],
        3: [b + b**3, b**2, lam * b + b**3],
        4: [b + b**4, b**2, b**3, lam * b + b**4],
    }[n]
    models, snapshots, branches = one_ring(rule, start, 1.0, 1e-3)
    np.testing.assert_allclose(models, expected, rtol=0, atol=1e-14)
    assert models[0] == pytest.approx(1, abs=1e-14)  # all of it, back where it began
    assert models[-1] == pytest.approx(b, abs=1e-14)
    # what came back is news to the origin: it goes round again, as b^n
    np.testing.assert_allclose(snapshots, [b, *expected[1:]], rtol=0, atol=1e-14)
    assert branches == [(1, 0)] * n
    assert models.sum() > 1.2  # the sum over the models is no invariant


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_an_update_that_is_too_small_to_be_passed_on(n, start):
    """By hand, of an update u = 1 that is below the tolerance.

    The origin, D = 1: it keeps l 0 + (1 - l) 1 + l 1 = 1, and its snapshot 1 - D = 0: it still
    has its delta. The others have none and see models of 0, until the last sees the origin's:
    it becomes l 1 + (1 - l) 0 + l 0 = l, and so does its snapshot. Nothing went forward.
    """
    rule = RingRule(n, 1)
    models, snapshots, branches = one_ring(rule, start, 1.0, 2.0)
    middle = [0.0] * (n - 2)
    np.testing.assert_allclose(models, [1, *middle, rule.lam], rtol=0, atol=1e-15)
    np.testing.assert_allclose(snapshots, [0, *middle, rule.lam], rtol=0, atol=1e-15)
    assert branches == [(0, 1)] * n


# --- whose turn it is -----------------------------------------------------------------


def test_order_of_eight_members_in_two_clusters():
    rule = RingRule(2, 4)
    assert rule.size == 8
    assert [rule.member(k) for k in range(8)] == [0, 4, 1, 5, 2, 6, 3, 7]
    assert [rule.cluster(k) for k in range(8)] == [0, 1] * 4
    assert [rule.token(rule.member(k)) for k in range(8)] == list(range(8))
    assert [rule.following(c) for c in range(2)] == [1, 0]
    assert [rule.after(k) for k in range(8)] == [1, 2, 3, 4, 5, 6, 7, 0]


def test_clusters_of_different_sizes_leave_out_turns():
    rule = RingRule(3, [2, 1, 3])  # members 0 1, 2, 3 4 5
    assert [rule.member(k) for k in range(rule.size)] == [0, 2, 3, 1, 4, 5]
    assert [rule.cluster(k) for k in range(rule.size)] == [0, 1, 2, 0, 2, 2]
    assert rule.following(0) == 1  # it meets its model even where it has no turn
    assert repr(rule) == "RingRule(3, (2, 1, 3))"


def test_members_that_have_ended_are_left_out():
    rule = RingRule(2, 4)  # 0 4 1 5 2 6 3 7
    assert rule.after(0, absent={4, 1}) == 3
    assert rule.after(7, absent=[0]) == 1
    assert rule.after(2, absent=set(range(8)) - {1}) == 2  # it is alone
    assert rule.after(2, absent=range(8)) is None


def test_clusters_that_have_ended_are_left_out():
    rule = RingRule(3, [2, 1, 3])  # members 0 1, 2, 3 4 5
    assert rule.following(0, absent={2}) == 2
    assert rule.following(0, absent={1, 3, 4}) == 1
    assert rule.following(2, absent={0, 1}) == 1
    assert rule.following(2, absent=range(3)) is None
    assert [rule.living(absent) for absent in ((), {2}, {0, 2, 4}, range(3))] == [3, 2, 2, 1]
    assert RingRule(1, 3).following(0) == 0
    assert weights(1) == (1, 0)
    assert weights(3) == (rule.beta, rule.lam)


def test_a_member_waits_looks_syncs_waits_and_passes():
    turns = Turns(RingRule(2, [2, 1], delay=3), 1)
    assert turns.token == 2
    assert [turns.count() for _ in range(24)] == [NOTHING] * 23 + [LOOK]
    assert [turns.count() for _ in range(5)] == [LOOK] * 5  # it is not held up
    turns.synced()
    assert turns.holds
    assert (turns.due, turns.left) == (NOTHING, 3)
    assert [turns.count() for _ in range(4)] == [NOTHING] * 2 + [PASS] * 2
    assert turns.passed() == 0
    assert not turns.holds
    assert [turns.count() for _ in range(9)] == [NOTHING] * 8 + [LOOK]
    assert turns.count(10) is LOOK
    turns.synced()
    assert turns.passed(absent={0, 1}) == 1  # earlier than due: it ends
    assert turns.count(8) is NOTHING
    assert turns.statistics() == (2, 15)


def test_calls_out_of_order():
    turns = Turns(RingRule(2, 2, delay=1), 3)
    where = r"^Turns\(RingRule\(2, 2\), 3\)"
    with pytest.raises(UsageError, match=where + r"\.synced: .*not for 8 updates.*is 3"):
        turns.synced()
    with pytest.raises(UsageError, match=where + r"\.passed: .*Call `synced` first"):
        turns.passed()
    turns.count(8)
    turns.synced()
    with pytest.raises(UsageError, match="it holds the token"):
        turns.synced()
    with pytest.raises(UsageError, match=where + r"\.count: expected updates >= 0, got -1"):
        turns.count(-1)
    assert turns.holds
    assert turns.statistics() == (1, 0)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    delay=st.integers(1, 3),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=60, deadline=None)
def test_everybody_has_one_turn_in_each_round(sizes, delay, seed):
    """Members that are up to ten times as fast as others; each update is one step of time."""
    rule = RingRule(len(sizes), sizes, delay=delay)
    members = [Turns(rule, m) for m in range(rule.size)]
    rng = random.Random(seed)
    speeds = [rng.uniform(0.1, 1) for _ in members]
    token, holders, since = 0, [], [0] * rule.size  # own updates since the last change
    updates = 0
    while len(holders) < 4 * rule.size:
        updates += 1
        assert updates < 10_000_000, "the token is lost"
        (turns,) = rng.choices(members, speeds)
        me, held = turns.member, turns.holds
        since[me] += 1
        due = turns.count()
        if due is PASS:
            assert held
            assert since[me] == delay
            token = turns.passed()
            since[me] = 0
        elif due is LOOK and token == turns.token:
            first = me not in holders
            assert since[me] >= (8 * delay if first else delay * rule.size)
            turns.synced()
            since[me] = 0
            holders.append(me)
        assert sum(t.holds for t in members) <= 1
        assert all(t.token == token for t in members if t.holds)
    order = [rule.member(k) for k in range(rule.size)]
    assert holders == order * 4
    assert sorted(order) == list(range(rule.size))


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_a_cluster_has_as_many_turns_as_members(sizes):
    rule = RingRule(len(sizes), sizes)
    turns = [rule.cluster(k) for k in range(rule.size)]
    assert [turns.count(c) for c in range(rule.clusters)] == sizes
    if len(set(sizes)) == 1:
        assert turns == [k % rule.clusters for k in range(rule.size)]
        assert [rule.member(k) for k in range(rule.size)] == [
            k % rule.clusters * sizes[0] + k // rule.clusters for k in range(rule.size)
        ]


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"clusters": 0}, "expected clusters >= 1, got 0"),
        ({"clusters": 2.0}, r"expected an integer as clusters, got 2\.0"),
        ({"members": 0}, "expected members of a cluster >= 1, got 0"),
        ({"members": [1, 2, 3]}, "members: expected 2 numbers, one for each cluster, got 3"),
        ({"members": [1, -2]}, "expected members of a cluster >= 1, got -2"),
        ({"delay": 0}, "expected delay >= 1, got 0"),
        ({"tolerance": -1e-3}, r"tolerance: expected 0 or more, finite, got -0\.001"),
        ({"tolerance": float("nan")}, "tolerance: expected 0 or more, finite, got nan"),
        ({"tolerance": None}, "tolerance: expected 0 or more, finite, got None"),
        ({"decay": 0}, "decay: expected above 0, at most 1, got 0"),
        ({"decay": 1.5}, r"decay: expected above 0, at most 1, got 1\.5"),
    ],
)
def test_bad_rules(arguments, text):
    with pytest.raises(UsageError, match=f"^RingRule: {text}"):
        RingRule(**{"clusters": 2, "members": 2, **arguments})


def test_bad_questions():
    rule = RingRule(2, 2)
    for ask in (rule.member, rule.cluster, rule.after):
        with pytest.raises(
            UsageError, match=r"RingRule\(2, 2\)\.\w+: expected token 0 to 3, got"
        ):
            ask(4)
    with pytest.raises(UsageError, match="expected member 0 to 3, got -1"):
        rule.token(-1)
    with pytest.raises(UsageError, match="expected cluster 0 to 1, got 2"):
        rule.following(2)
    with pytest.raises(UsageError, match="expected epoch >= 0, got -1"):
        rule.step(1.0, -1)
    with pytest.raises(UsageError, match="Turns: expected member 0 to 3, got 4"):
        Turns(rule, 4)
