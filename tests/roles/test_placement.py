from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.errors import PlacementError
from mpiml.hosts import Facts, Hosts
from mpiml.roles.placement import Ask, place, render


def hosts_of(*sizes, cores=8, gpus=0):
    return Hosts.of_sizes(sizes, cores=cores, gpus=gpus)


def dealt(hosts, ranks):
    """Hosts whose ranks go round by turns, as ``--map-by node`` deals them."""
    return Hosts([Facts(f"host{rank % hosts}", frozenset(range(8))) for rank in range(ranks)])


def hosts_used(hosts, ranks):
    return {hosts.host_of(rank) for rank in ranks}


def refusal(*args, **kwargs):
    with pytest.raises(PlacementError) as caught:
        place(*args, **kwargs)
    return str(caught.value)


# ---- plain programs -------------------------------------------------------------------


def test_one_rank_each_in_order():
    plan = place([Ask("a"), Ask("b", 2), Ask("c")], hosts_of(4))
    assert plan == ((1, 2, 1), ((0,), (1, 2), (3,)), (), {}, ())
    assert plan.units(2) == [(1, 1)]


def test_fill_takes_what_is_left_beside_the_spares():
    plan = place([Ask("a"), Ask("w", None)], hosts_of(6), spares=2)
    assert plan.replicas == (1, 3)
    assert plan.ranks == ((0,), (1, 2, 3))
    assert plan.spares == (4, 5)


def test_fill_is_at_least_one():
    plan = place([Ask("a", 2), Ask("w", None)], hosts_of(2))
    assert plan.replicas == (2, 1)
    assert plan.ranks == ((0, 0), (1,))


def test_units_that_are_apart_never_share_a_rank_but_where_there_is_one():
    asks = [Ask("shards", 3, apart=True), Ask("worker", 4)]
    assert place(asks, hosts_of(5)).ranks == ((0, 1, 2), (3, 3, 4, 4))
    assert place(asks, hosts_of(1)).ranks == ((0, 0, 0), (0, 0, 0, 0))
    assert "needs at least 4 ranks, got 3" in refusal(asks, hosts_of(3))
    assert "wanted 3 (shards 3), got 2" in refusal(asks[:1], hosts_of(2))


@pytest.mark.parametrize(("threads", "replicas"), [(None, 1), (5, 5)])
def test_one_rank_holds_everything(threads, replicas):
    asks = [Ask("a"), Ask("g", 2, {"num_gpus": 1}), Ask("w", None), Ask("b", 2, {"with_": "g"})]
    plan = place(asks, hosts_of(1, gpus=2), threads=threads)
    assert plan.replicas == (1, 2, replicas, 2)
    assert {rank for ranks in plan.ranks for rank in ranks} == {0}
    assert plan.gpus == {(1, 0): (0,), (1, 1): (1,)}
    assert plan.notes == (f"1 rank for {5 + replicas} nodes: all are threads of it",)


def test_one_node_on_one_rank_says_nothing():
    assert place([Ask("a")], hosts_of(1)).notes == ()


# ---- errors with their numbers --------------------------------------------------------


def test_ranks_without_a_node():
    text = refusal([Ask("a"), Ask("b", 2)], hosts_of(6), spares=1)
    assert "needs 3 ranks, but there are 5 beside 1 spares" in text
    assert "Start 4 ranks" in text
    assert "FILL" in text


def test_no_rank_left_by_spares():
    assert "3 spares of 3 ranks" in refusal([Ask("a")], hosts_of(3), spares=3)
    refusal([Ask("a")], hosts_of(3), spares=-1)


def test_no_nodes_two_fills_and_no_replicas():
    assert "no nodes" in refusal([], hosts_of(1))
    assert "v, w" in refusal([Ask("v", None), Ask("w", None)], hosts_of(4))
    assert "'a'" in refusal([Ask("a", 0)], hosts_of(1))


@pytest.mark.parametrize(
    ("wish", "parts"),
    [
        ({"host": "gpu*"}, ["host='gpu*'", "0: host0", "1: host1"]),
        ({"host": 7}, ["host=7", "0: host0"]),
        ({"with_": "nobody"}, ["with_='nobody'", "b"]),
        ({"num_gpus": 1}, ["num_gpus=1", "host0: 0"]),
        ({"num_gpus": 0.5}, ["num_gpus", "0.5", "not shared"]),
        ({"num_cpus": 9}, ["num_cpus=9", "host0: 8", "host1: 8"]),
        ({"num_cpus": "2"}, ["num_cpus", "'2'"]),
        ({"hots": "n1"}, ["'hots'", "host"]),
    ],
)
def test_a_wish_that_cannot_be(wish, parts):
    text = refusal([Ask("lone", 1, wish), Ask("b", 3)], hosts_of(2, 2))
    assert "'lone'" in text
    assert not [part for part in parts if part not in text]


def test_more_ranks_than_a_host_has():
    text = refusal([Ask("a", 3, {"host": "host1"}), Ask("b", None)], hosts_of(2, 2))
    assert "'a': wanted 3 ranks with host='host1'; got room for 2 on host1" in text


def test_two_roles_want_the_same_host():
    wish = {"host": "host1"}
    text = refusal([Ask("a", 1, wish), Ask("b", 2, wish), Ask("c", 1)], hosts_of(2, 2))
    assert "a, b" in text
    assert "wanted 3 ranks on host1; got 2 ranks there" in text


def test_ranks_that_no_role_may_use():
    wish = {"host": "host0"}
    text = refusal([Ask("a", 4, wish), Ask("b", 4, wish)], hosts_of(2, 2))
    assert "4 ranks" in text
    assert "only 2" in text


def test_too_few_gpus_in_all():
    text = refusal([Ask("g", 3, {"num_gpus": 1}), Ask("w", None)], hosts_of(4, gpus=2))
    assert "'g': wanted 3 ranks with num_gpus=1" in text
    assert "2 GPUs" in text


def test_too_few_cores_in_all():
    text = refusal([Ask("c", 3, {"num_cpus": 3}), Ask("w", None)], hosts_of(4))
    assert "num_cpus=3" in text
    assert "8 cores" in text


def test_gpu_roles_keep_their_ranks():
    gpu = {"num_gpus": 1}
    hosts = hosts_of(3, gpus=8)
    text = refusal([Ask("g", 3, gpu), Ask("a")], hosts)
    assert "at least 4 ranks, got 3" in text
    assert "g 3" in text
    text = refusal([Ask("g", 5, gpu)], hosts)
    assert "wanted 5 (g 5), got 3 ranks" in text


# ---- folding --------------------------------------------------------------------------


def test_folding_is_even_and_within_a_role():
    plan = place([Ask("s"), Ask("w", 7)], hosts_of(4))
    assert plan.ranks == ((0,), (1, 1, 1, 2, 2, 3, 3))
    assert plan.notes == ("4 ranks for 8 nodes, as threads: w (7) on 3 ranks",)


def test_the_heavier_role_keeps_more_ranks():
    plan = place([Ask("light", 4), Ask("heavy", 4, None, 3)], hosts_of(4))
    assert [len(set(ranks)) for ranks in plan.ranks] == [1, 3]


def test_a_gpu_role_is_not_folded():
    plan = place([Ask("g", 2, {"num_gpus": 1}), Ask("w", 5)], hosts_of(3, gpus=2))
    assert plan.ranks == ((0, 1), (2,) * 5)


def test_small_later_roles_share_first():
    asks = [Ask("big", 5), Ask("a"), Ask("b"), Ask("c"), Ask("g", 1, {"num_gpus": 1})]
    plan = place(asks, hosts_of(4, gpus=1))
    assert plan.ranks == ((0,) * 5, (1,), (2,), (2,), (3,))
    assert "b and c share rank 2" in plan.notes[0]
    assert len(plan.notes) == 1


def test_roles_of_different_hosts_do_not_share():
    asks = [Ask("a"), Ask("b", 1, {"host": "host0"}), Ask("c", 1, {"host": "host1"})]
    hosts = hosts_of(1, 1)
    plan = place(asks, hosts)
    assert plan.ranks[1:] == ((0,), (1,))


@pytest.mark.parametrize(
    ("sizes", "actors"), [((2, 2), 3), ((3, 3), 4), ((3,), 1), ((2, 1), 2)]
)
def test_pairs_fold_together(sizes, actors):
    asks = [Ask("learner", 2), Ask("replay", 2, {"with_": "learner"}), Ask("actor", actors)]
    hosts = hosts_of(*sizes)
    plan = place(asks, hosts)
    for mine, theirs in zip(plan.ranks[0], plan.ranks[1], strict=True):
        assert hosts.host_of(mine) == hosts.host_of(theirs)


def test_pairs_that_folding_would_part():
    asks = [Ask("learner", 2), Ask("replay", 2, {"with_": "learner"}), Ask("actor")]
    text = refusal(asks, hosts_of(2, 2))
    assert "'replay': wanted replica 1 with_='learner' on one host" in text


# ---- hosts ----------------------------------------------------------------------------


def test_roles_stay_together_where_they_can():
    hosts = hosts_of(4, 4)
    plan = place([Ask("a", 3), Ask("b", 3), Ask("c", 2)], hosts)
    # every role fits on one host, but not all three: one is cut, no more
    assert sorted(len(hosts_used(hosts, ranks)) for ranks in plan.ranks) == [1, 1, 2]
    plan = place([Ask("a", 3), Ask("b", 4), Ask("c", 1)], hosts)
    assert [len(hosts_used(hosts, ranks)) for ranks in plan.ranks] == [1, 1, 1]
    assert plan.ranks == ((0, 1, 2), (4, 5, 6, 7), (3,))


def test_a_role_larger_than_a_host_stays_in_order():
    plan = place([Ask("s"), Ask("w", 7)], hosts_of(4, 4))
    assert plan.ranks == ((0,), tuple(range(1, 8)))


def test_ranks_dealt_by_turns():
    hosts = dealt(2, 6)
    plan = place([Ask("a", 3), Ask("b", 3)], hosts)
    assert plan.ranks == ((0, 2, 4), (1, 3, 5))


def test_best_fit_is_not_enough():
    # sizes for which the largest-first rule alone cuts a role, but a perfect layout exists
    hosts = hosts_of(10, 10)
    plan = place([Ask(f"r{i}", n) for i, n in enumerate((6, 4, 4, 2, 2, 2))], hosts)
    assert all(len(hosts_used(hosts, ranks)) == 1 for ranks in plan.ranks)


@pytest.mark.parametrize("host", ["host1", "*1", 1])
def test_host(host):
    plan = place([Ask("a", 2, SimpleNamespace(host=host)), Ask("b", None)], hosts_of(2, 3))
    assert plan.ranks == ((2, 3), (0, 1, 4))


def test_spread():
    hosts = hosts_of(3, 3, 3)
    plan = place([Ask("a", 2), Ask("s", 4, {"spread": True}), Ask("b", None)], hosts)
    counts = Counter(hosts.host_of(rank) for rank in plan.ranks[1])
    assert sorted(counts.values()) == [1, 1, 2]
    assert len(hosts_used(hosts, plan.ranks[0])) == 1


def test_spread_that_does_not_fit():
    text = refusal([Ask("s", 5, {"spread": True}), Ask("b", None)], hosts_of(1, 6))
    assert "'s': wanted 5 ranks with spread=True" in text


def test_spread_is_not_folded_below_one_a_host():
    plan = place([Ask("s", 4, {"spread": True}), Ask("a"), Ask("b")], hosts_of(2, 1))
    assert len(set(plan.ranks[0])) == 2
    assert plan.ranks[1] == plan.ranks[2]


def test_gpus_of_two_hosts():
    hosts = hosts_of(3, 3, gpus=2)
    plan = place([Ask("a", 2), Ask("g", 4, {"num_gpus": 1})], hosts)
    assert Counter(hosts.host_of(rank) for rank in plan.ranks[1]) == {0: 2, 1: 2}
    assert [plan.gpus[1, i] for i in range(4)] == [(0,), (1,), (0,), (1,)]


def test_a_gpu_host_is_kept_for_the_role_that_needs_it():
    fact = Facts("plain", frozenset({0}))
    hosts = Hosts([fact] * 2 + [fact._replace(name="gpu", gpus=(3, 5))] * 2)
    plan = place([Ask("a", 2), Ask("g", 1, {"num_gpus": 2}), Ask("b")], hosts)
    assert plan.ranks[1] == (2,)
    assert plan.gpus == {(1, 0): (3, 5)}


def test_gpus_that_only_one_rank_sees():
    fact = Facts("n", frozenset({0}), gpus=(0,), gpus_private=True)
    plan = place([Ask("g", 2, {"num_gpus": 1}), Ask("a")], Hosts([fact] * 3))
    assert plan.gpus == {(0, 0): (0,), (0, 1): (0,)}
    text = refusal([Ask("g", 1, {"num_gpus": 2}), Ask("a", 2)], Hosts([fact] * 3))
    assert "n: 1" in text


def test_num_cpus_moves_a_role():
    hosts = Hosts(
        [Facts("small", frozenset({0}))] * 2 + [Facts("large", frozenset(range(4)))] * 2
    )
    plan = place([Ask("c", 2, {"num_cpus": 2}), Ask("a", 2)], hosts)
    assert plan.ranks == ((2, 3), (0, 1))


def test_with_sits_beside():
    hosts = hosts_of(3, 3)
    asks = [Ask("a", 2), Ask("b", 2), Ask("c", 1, {"with_": "a"}), Ask("d")]
    plan = place(asks, hosts)
    assert hosts_used(hosts, plan.ranks[2]) == hosts_used(hosts, plan.ranks[0]) == {0}
    # a chain that is too long for one host: a is cut rather than the wish refused
    plan = place([*asks[:3], Ask("d", 1, {"with_": "c"})], hosts)
    assert hosts_used(hosts, plan.ranks[3]) == hosts_used(hosts, plan.ranks[2])
    assert hosts_used(hosts, plan.ranks[2]) <= hosts_used(hosts, plan.ranks[0])


def test_with_that_does_not_fit():
    text = refusal([Ask("a"), Ask("b", 2, {"with_": "a"})], hosts_of(2, 1))
    assert "wanted 2 ranks with with_='a'" in text


def test_with_a_role_inside_a_colocation():
    both = Ask("both", 2, {"with_": "right"}, 2, ("left", "right"))
    hosts = hosts_of(2, 2)
    plan = place([both, Ask("b", 1, {"with_": "left"}), Ask("c")], hosts_of(3, 1))
    assert plan.ranks == ((0, 1), (2,), (3,))
    assert "'b'" in refusal([both, Ask("b", 1, {"with_": "middle"}), Ask("c")], hosts)


def test_with_both_ways_and_pairwise():
    hosts = hosts_of(2, 2)
    asks = [
        Ask("a", 2, {"spread": True, "with_": "b"}),
        Ask("b", 2, {"with_": "a"}),
    ]
    plan = place(asks, hosts)
    for i in range(2):
        assert hosts.host_of(plan.ranks[0][i]) == hosts.host_of(plan.ranks[1][i])


def test_spares_are_no_room():
    text = refusal([Ask("a", 1, {"host": "host1"})], hosts_of(1, 2), spares=2)
    assert "host='host1'" in text


def test_a_large_program_is_quick_and_complete():
    hosts = hosts_of(*[16] * 64)
    asks = [Ask(f"r{i}", 3) for i in range(300)] + [Ask("w", None)]
    plan = place(asks, hosts)
    assert sum(len(hosts_used(hosts, r)) > 1 for r in plan.ranks[:-1]) == 0
    assert sorted(r for ranks in plan.ranks for r in ranks) == list(range(1024))


# ---- properties -----------------------------------------------------------------------

wishes = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {},
        optional={
            "host": st.sampled_from(["host0", "host*", 0, 1]),
            "spread": st.booleans(),
            "num_gpus": st.integers(0, 2),
            "num_cpus": st.integers(0, 3),
            "with_": st.sampled_from(["r0", "r1"]),
        },
    ),
)


@st.composite
def programs(draw, wish=wishes):
    roles = draw(st.integers(1, 5))
    fill = draw(st.none() | st.integers(0, roles - 1))
    asks = [
        Ask(
            f"r{i}",
            None if i == fill else draw(st.integers(1, 5)),
            draw(wish),
            draw(st.integers(1, 3)),
        )
        for i in range(roles)
    ]
    names = draw(st.lists(st.integers(0, 2), min_size=1, max_size=12))
    if draw(st.booleans()):
        names.sort()
    hosts = Hosts(
        [Facts(f"host{n}", frozenset(range(6)), gpus=(0, 1, 2)[: n + 1]) for n in names]
    )
    return asks, hosts, draw(st.integers(0, 2))


def attempt(asks, hosts, spares):
    try:
        return place(asks, hosts, spares=spares), ""
    except PlacementError as error:
        return None, str(error)


def wish_of(ask, key):
    return (ask.placement or {}).get(key)


def check(asks, hosts, spares, plan):
    usable = hosts.size - spares
    assert plan.spares == tuple(range(usable, hosts.size))
    assert plan.replicas == tuple(len(ranks) for ranks in plan.ranks)
    used = {rank for ranks in plan.ranks for rank in ranks}
    assert used == set(range(usable))  # no rank is empty, no spare is used
    for ask, ranks in zip(asks, plan.ranks, strict=True):
        assert list(ranks) == sorted(ranks)
        assert len(ranks) == (ask.replicas or len(ranks)) >= 1
    units = sum(plan.replicas)
    assert len(plan.notes) == (units > usable)
    owners = [{i for i, _ in plan.units(rank)} for rank in range(usable)]
    if units <= usable:
        assert all(len(plan.units(rank)) == 1 for rank in range(usable))
    elif usable >= max(2, len(asks)) and all(not ask.placement for ask in asks):
        assert all(len(owner) == 1 for owner in owners)  # folded within a role, never across
    check_gpus(asks, hosts, plan, usable)


def check_gpus(asks, hosts, plan, usable):
    seen = set()
    for (index, replica), numbers in plan.gpus.items():
        rank = plan.ranks[index][replica]
        assert len(numbers) == asks[index].placement["num_gpus"]
        assert usable == 1 or plan.units(rank) == [(index, replica)]
        for number in numbers:
            assert number in [n for _, n in hosts.devices(rank)]
            assert (hosts.host_of(rank), number) not in seen
            seen.add((hosts.host_of(rank), number))
    asked = {
        (i, k)
        for i, ask in enumerate(asks)
        if wish_of(ask, "num_gpus")
        for k in range(plan.replicas[i])
    }
    assert set(plan.gpus) == asked


def check_wishes(asks, hosts, plan):
    cores = Counter()
    for index, ask in enumerate(asks):
        mine = [hosts.host_of(rank) for rank in plan.ranks[index]]
        for host in mine:
            cores[host] += wish_of(ask, "num_cpus") or 0
        host = wish_of(ask, "host")
        if host in (0, 1):
            assert set(mine) == {host}
        if host == "host0":
            assert {hosts.rows[h].name for h in mine} == {"host0"}
        beside = wish_of(ask, "with_")
        if beside:
            theirs = plan.ranks[int(beside[1])]
            assert set(mine) <= hosts_used(hosts, theirs)
            if len(theirs) == len(mine):
                assert mine == [hosts.host_of(rank) for rank in theirs]
        if wish_of(ask, "spread") and len(set(plan.ranks[index])) == len(mine):
            counts = Counter(mine)
            assert max(counts.values()) - min(counts.values()) <= 1
    assert all(count <= hosts.rows[host].cores for host, count in cores.items())


@settings(max_examples=300, deadline=None)
@given(programs())
def test_a_plan_keeps_the_rules_or_is_refused_with_a_reason(program):
    asks, hosts, spares = program
    asks = [
        a._replace(placement={k: v for k, v in (a.placement or {}).items() if v != a.label})
        for a in asks
    ]
    plan, reason = attempt(asks, hosts, spares)
    if plan is None:
        assert reason.startswith("placement")
        return
    assert place(asks, hosts, spares=spares) == plan
    check(asks, hosts, spares, plan)
    check_wishes(asks, hosts, plan)
    assert len(render(asks, plan, hosts).splitlines()) == 1 + hosts.size + len(plan.notes)


@settings(max_examples=200, deadline=None)
@given(programs(wish=st.none()))
def test_a_program_without_wishes_is_refused_only_by_numbers(program):
    asks, hosts, spares = program
    fixed = sum(ask.replicas or 0 for ask in asks)
    fill = any(ask.replicas is None for ask in asks)
    usable = hosts.size - spares
    if usable < 1 or (not fill and fixed < usable):
        text = refusal(asks, hosts, spares=spares)
        assert str(hosts.size if usable < 1 else usable) in text
        assert str(spares if usable < 1 else fixed) in text
        return
    plan = place(asks, hosts, spares=spares)
    check(asks, hosts, spares, plan)
    if fill and usable > 1:
        assert sum(plan.replicas) == max(usable, fixed + 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3),
       st.randoms(use_true_random=False))  # fmt: skip
def test_no_role_is_cut_where_none_need_be(packed, random):
    hosts = hosts_of(*[sum(sizes) for sizes in packed])
    sizes = [size for part in packed for size in part]
    random.shuffle(sizes)
    plan = place([Ask(f"r{i}", size) for i, size in enumerate(sizes)], hosts)
    if hosts.size > 1:
        assert all(len(hosts_used(hosts, ranks)) == 1 for ranks in plan.ranks)


# ---- the table of --dry-run -----------------------------------------------------------


def test_render():
    asks = [Ask("learner", 1, {"num_gpus": 1}), Ask("actor", 5)]
    hosts = hosts_of(2, 2, gpus=1)
    text = render(asks, place(asks, hosts, spares=1), hosts)
    assert text == (
        "rank  host   nodes      gpus\n"
        "0     host0  actor/0-2  -\n"
        "1     host0  actor/3-4  -\n"
        "2     host1  learner/0  0\n"
        "3     host1  (spare)    -\n"
        "3 ranks for 6 nodes, as threads: actor (5) on 2 ranks\n"
    )
