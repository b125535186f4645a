"""Weights by hand, means reached, and what cannot average is refused with the reason."""

import pickle
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.errors import UsageError
from mpiml.topology import (
    ActivePassive,
    Cycle,
    RandomPairs,
    Topology,
    as_schedule,
    bipartite,
    complete,
    exponential,
    from_matrix,
    from_networkx,
    grid,
    metropolis,
    one_peer_exponential,
    push_sum,
    ring,
    star,
    uniform,
)

THIRD = 1 / 3
BUILDERS = {
    "ring": ring,
    "directed ring": lambda n: ring(n, directed=True),
    "exponential": exponential,
    "exponential of base 3": lambda n: exponential(n, 3),
    "grid": grid,
    "torus": lambda n: grid(n, wrap=True),
    "star": star,
    "star, last in the center": lambda n: star(n, n - 1),
    "complete": complete,
    "bipartite": bipartite,
}
every_builder = pytest.mark.parametrize("builder", BUILDERS)
sizes = st.integers(1, 17)


@st.composite
def graphs(draw, most=9):
    """A connected undirected graph: a path through all members, and more edges."""
    n = draw(st.integers(1, most))
    order = draw(st.permutations(range(n)))
    member = st.integers(0, n - 1)
    return n, list(pairwise(order)) + draw(st.lists(st.tuples(member, member), max_size=2 * n))


@st.composite
def digraphs(draw, most=9):
    """A strongly connected directed graph: a circle through all members, and more edges."""
    n = draw(st.integers(1, most))
    order = draw(st.permutations(range(n)))
    member = st.integers(0, n - 1)
    circle = [*pairwise(order), (order[-1], order[0])]
    return n, circle + draw(st.lists(st.tuples(member, member), max_size=2 * n))


def mean(n):
    return np.full((n, n), 1 / n)


def values(n, seed=0):
    return np.random.default_rng(seed).normal(size=n)


# -- the graphs, by hand ---------------------------------------------------------------------


def test_ring_by_hand():
    a, b = THIRD, 0
    np.testing.assert_array_equal(
        ring(4).matrix(), [[a, a, b, a], [a, a, a, b], [b, a, a, a], [a, b, a, a]]
    )


def test_directed_ring_hears_from_the_one_before():
    h = 0.5
    np.testing.assert_array_equal(
        ring(3, directed=True).matrix(), [[h, 0, h], [h, h, 0], [0, h, h]]
    )


def test_exponential_by_hand():
    topology = exponential(6)  # steps 1, 2, 4
    assert topology.sends(1) == {2: 0.25, 3: 0.25, 5: 0.25}
    assert topology.receives(1) == {0: 0.25, 3: 0.25, 5: 0.25}
    assert topology.own(1) == 0.25
    assert exponential(10, base=3).sends(0) == {1: 0.25, 3: 0.25, 9: 0.25}


def test_grid_by_hand():
    # 0 1 2    degrees 2 3 2
    # 3 4 5            2 3 2
    topology = grid(6)
    assert topology.receives(0) == {1: 1 / 4, 3: 1 / 3}
    assert topology.own(0) == pytest.approx(5 / 12)
    assert topology.receives(4) == {1: 1 / 4, 3: 1 / 4, 5: 1 / 4}
    assert topology.own(4) == pytest.approx(1 / 4)


def test_torus_by_hand():
    topology = grid(12, (3, 4), wrap=True)  # member 5 is in row 1, column 1
    assert topology.receives(5) == {1: 0.2, 4: 0.2, 6: 0.2, 9: 0.2}
    assert topology.receives(0) == {1: 0.2, 3: 0.2, 4: 0.2, 8: 0.2}


def test_a_grid_of_a_prime_is_a_line():
    assert [len(grid(5).receives(i)) for i in range(5)] == [1, 2, 2, 2, 1]


def test_star_by_hand():
    q = 0.25
    np.testing.assert_array_equal(
        star(4).matrix(), [[q, q, q, q], [q, 0.75, 0, 0], [q, 0, 0.75, 0], [q, 0, 0, 0.75]]
    )


@given(sizes)
def test_complete_is_the_mean(n):
    np.testing.assert_allclose(complete(n).matrix(), mean(n), atol=1e-15)


def test_bipartite_by_hand():
    assert bipartite(5).neighbors == ((1, 3), (0, 2, 4), (1, 3), (0, 2, 4), (1, 3))


@every_builder
@given(n=sizes)
def test_repeated_rounds_converge_to_the_mean(builder, n):
    topology = BUILDERS[builder](n)
    assert topology.n == n
    assert topology.doubly_stochastic
    assert topology.connected
    assert topology.spectral_gap > 0
    reached = np.linalg.matrix_power(topology.matrix(), 1 << 14)
    np.testing.assert_allclose(reached, mean(n), atol=1e-9)


@given(st.integers(2, 40))
def test_gap_of_the_exponential_graph(n):
    """Ying et al. 2021, proposition 1."""
    known = 2 / (1 + (n - 1).bit_length())
    gap = exponential(n).spectral_gap
    assert gap == pytest.approx(known) if n % 2 == 0 else gap > known


@given(st.integers(3, 20))
def test_gap_of_the_ring(n):
    largest = max(abs(1 + 2 * np.cos(2 * np.pi * k / n)) / 3 for k in range(1, n))
    assert ring(n).spectral_gap == pytest.approx(1 - largest)


# -- weights -----------------------------------------------------------------------------------


def test_metropolis_by_hand():
    # a path 0 - 1 - 2, and 1 - 3: degrees 1 3 1 1
    topology = metropolis(4, [(0, 1), (2, 1), (1, 3), (1, 0), (2, 2)])
    q = 0.25
    np.testing.assert_array_equal(
        topology.matrix(), [[0.75, q, 0, 0], [q, q, q, q], [0, q, 0.75, 0], [0, q, 0, 0.75]]
    )


@given(graphs())
def test_metropolis_weights_are_symmetric_doubly_stochastic_and_converge(graph):
    topology = metropolis(*graph)
    matrix = topology.matrix()
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-12)
    assert (np.diag(matrix) > 0).all()
    reached = np.linalg.matrix_power(matrix, 1 << 14)
    np.testing.assert_allclose(reached, mean(topology.n), atol=1e-9)


def test_push_sum_by_hand():
    topology = push_sum(3, [(0, 1), (0, 2), (1, 2), (2, 0)])
    h = 0.5
    np.testing.assert_array_equal(
        topology.matrix(), [[THIRD, 0, h], [THIRD, h, 0], [THIRD, h, h]]
    )
    assert topology.column_stochastic
    assert not topology.row_stochastic


@given(digraphs())
def test_push_sum_weights_give_the_mean_on_any_directed_graph(graph):
    topology = push_sum(*graph)
    matrix = np.linalg.matrix_power(topology.matrix(), 1 << 14)
    x, weight = values(topology.n), np.ones(topology.n)
    np.testing.assert_allclose(matrix.sum(0), 1, atol=1e-9)
    np.testing.assert_allclose((matrix @ x) / (matrix @ weight), x.mean(), atol=1e-9)


def test_uniform_refuses_what_is_not_regular():
    with pytest.raises(UsageError, match=r"member 0 hears from 1 and sends to 2\. Use `metro"):
        uniform(3, [(0, 1), (1, 2), (2, 0), (0, 2)])
    both = [(0, 1), (1, 0), (1, 2), (2, 1)]
    with pytest.raises(UsageError, match=r"member 1 hears from 2 and .* member 0 hears from 1"):
        uniform(3, both)


# -- the value ---------------------------------------------------------------------------------


@given(digraphs())
def test_what_is_sent_is_what_is_received(graph):
    topology = push_sum(*graph)
    matrix = topology.matrix()
    for i in range(topology.n):
        assert topology.own(i) == matrix[i, i]
        for j in range(topology.n):
            if i != j:
                assert topology.receives(i).get(j, 0.0) == matrix[i, j]
                assert topology.sends(j).get(i, 0.0) == matrix[i, j]
        assert list(topology.receives(i)) == sorted(topology.receives(i))
        assert list(topology.sends(i)) == sorted(topology.sends(i))
    assert from_matrix(matrix) == topology


def test_it_cannot_be_changed():
    topology = ring(4)
    with pytest.raises(AttributeError, match="cannot be changed"):
        topology.n = 5
    with pytest.raises(AttributeError, match="cannot be changed"):
        del topology.n
    topology.receives(0).clear()
    topology.matrix().fill(0)
    assert topology.receives(0) == {1: THIRD, 3: THIRD}
    assert topology == ring(4)


def test_equal_by_weights_and_pickled_alike():
    topology = ring(4)
    untouched = pickle.dumps(topology)
    assert topology.spectral_gap == pytest.approx(2 / 3)
    assert pickle.dumps(topology) == untouched  # ranks compare what they pickle
    copy = pickle.loads(untouched)
    assert copy == topology
    assert hash(copy) == hash(topology)
    assert copy.name == "ring(4)"
    assert topology != ring(4, directed=True)
    assert topology != 4


def test_repr():
    assert repr(ring(4)) == "<ring(4): n=4, each hears 2, doubly stochastic>"
    unequal = push_sum(3, [(0, 1), (1, 2), (2, 0), (0, 2)])
    assert repr(unequal) == "<topology: n=3, each hears 1 to 2, column-stochastic>"
    apart = from_matrix(np.eye(2), allow_disconnected=True)
    assert repr(apart) == "<topology: n=2, each hears 0, doubly stochastic, disconnected>"


def test_two_sides_of_a_graph():
    assert [n for n in range(1, 9) if ring(n).is_bipartite] == [1, 2, 4, 6, 8]
    assert grid(12).is_bipartite
    assert not complete(3).is_bipartite


def test_a_circle_without_own_weights_is_connected_but_does_not_converge():
    topology = from_matrix([[0, 0, 1], [1, 0, 0], [0, 1, 0]])
    assert topology.connected
    assert topology.spectral_gap == pytest.approx(0)


def test_members_are_checked():
    for bad in (-1, 4, 1.0, True, "1"):
        with pytest.raises(UsageError, match=r"receives of ring\(4\): expected .*member"):
            ring(4).receives(bad)
    assert ring(4).receives(np.int64(1)) == ring(4).receives(1)


# -- what is refused ---------------------------------------------------------------------------


@every_builder
@pytest.mark.parametrize("n", [0, -1, 2.0, True])
def test_there_must_be_a_member(builder, n):
    with pytest.raises(UsageError, match=r"n >= 1|integer as n"):
        BUILDERS[builder](n)


@pytest.mark.parametrize(
    ("matrix", "why"),
    [
        ([[0.5, 0.4], [0.5, 0.5]], "row 0 sums to 0.9, and column 1 sums to 0.9"),
        ([[0.5, 0.5 + 3e-9], [0.4, 0.6]], "row 0 sums to 1.000000003, and column 0"),
        (
            [[1.5, -0.5], [-0.5, 1.5]],
            r"got W\[0, 1\] = -0.5, what member 0 gives to what comes",
        ),
        ([[np.nan, 1], [0, 1]], r"got W\[0, 0\] = nan"),
        ([[np.inf, 1], [0, 1]], r"got W\[0, 0\] = inf"),
        ([[1, 0, 0], [0, 1, 0]], r"expected shape \(n, n\) with n >= 1, got \(2, 3\)"),
        ([0.5, 0.5], r"got \(2,\)"),
        (np.zeros((0, 0)), r"got \(0, 0\)"),
        ([[1], [0.5, 0.5]], r"expected a matrix of shape \(n, n\)"),
        ([[1j]], "expected real numbers, got dtype complex128"),
        ([["1"]], "expected real numbers, got dtype <U1"),
    ],
)
def test_matrices_that_do_not_average(matrix, why):
    with pytest.raises(UsageError, match=why):
        from_matrix(matrix)


def test_sums_may_miss_by_a_billionth():
    assert from_matrix([[0.5, 0.5 + 5e-10], [0.5, 0.5]]).doubly_stochastic


def test_weights_per_member():
    topology = Topology([{1: 0.5, 0: 0.5}, {1: 1, 0: 0}], allow_disconnected=True)
    assert topology.receives(0) == {1: 0.5}
    assert topology.own(1) == 1.0
    assert topology.receives(1) == {}
    with pytest.raises(UsageError, match=r"row 0: expected member 0 to 0, got 1"):
        Topology([{1: 1.0}])
    with pytest.raises(UsageError, match=r"got W\[0, 0\] = 'a'"):
        Topology([{0: "a"}])
    with pytest.raises(UsageError, match="number of members >= 1, got 0"):
        Topology([])


def test_disconnected_topologies():
    with pytest.raises(UsageError, match="nothing of member 0 ever reaches members 2, 3"):
        metropolis(4, [(0, 1), (2, 3)])
    with pytest.raises(UsageError, match="nothing of members 1, 2 ever reaches member 0"):
        push_sum(3, [(0, 1), (0, 2), (1, 2), (2, 1)])
    with pytest.raises(UsageError, match="1, 2, 3, 4, 5, 6, 7, 8 and 3 more"):
        from_matrix(np.eye(12))
    apart = metropolis(4, [(0, 1), (2, 3)], allow_disconnected=True)
    assert not apart.connected
    assert apart.spectral_gap == pytest.approx(0)
    assert pickle.loads(pickle.dumps(apart)) == apart
    with pytest.raises(UsageError, match="D-PSGD: expected all members to be connected"):
        as_schedule(apart, "D-PSGD")


def test_algorithms_ask_for_what_they_need():
    columns = push_sum(3, [(0, 1), (1, 2), (2, 0), (0, 2)])
    rows = from_matrix(columns.matrix().T)
    columns.require("column", "SGP")
    rows.require("row", "averaging")
    ring(4).require("doubly", "D-PSGD")
    with pytest.raises(UsageError, match=r"SGP: expected column-stoch.* column 0 sums to 0.8"):
        rows.require("column", "SGP")
    with pytest.raises(
        UsageError, match=r"D-PSGD: expected doubly stoch.* column 0 sums to 0.8"
    ):
        rows.require("doubly", "D-PSGD")
    with pytest.raises(UsageError, match=r"D-PSGD: expected doubly stoch.* row 0 sums to 0.8"):
        columns.require("doubly", "D-PSGD")


def test_graphs_that_cannot_be():
    with pytest.raises(UsageError, match="base >= 2, got 1"):
        exponential(4, 1)
    with pytest.raises(UsageError, match="two numbers with product 6"):
        grid(6, (4, 2))
    with pytest.raises(UsageError, match="center 0 to 3, got 4"):
        star(4, 4)
    with pytest.raises(UsageError, match="metropolis, edges: expected member 0 to 2, got 3"):
        metropolis(3, [(0, 3)])
    with pytest.raises(UsageError, match="pairs of members"):
        push_sum(3, [(0, 1, 2)])


# -- networkx ----------------------------------------------------------------------------------


def test_undirected_graphs_of_networkx_get_metropolis_weights():
    graph = nx.path_graph(4)
    graph.add_edge(2, 2)
    assert from_networkx(graph) == metropolis(4, [(0, 1), (1, 2), (2, 3)])
    assert from_networkx(nx.cycle_graph(5), "uniform") == ring(5)


def test_directed_graphs_of_networkx():
    circle = nx.cycle_graph(5, create_using=nx.DiGraph)
    assert from_networkx(circle) == ring(5, directed=True)
    circle.add_edge(0, 2)
    with pytest.raises(UsageError, match=r"regular graph.*member 0 .* sends to 2"):
        from_networkx(circle)
    assert from_networkx(circle, "push_sum").sends(0) == {1: THIRD, 2: THIRD}
    with pytest.raises(
        UsageError, match="expected an undirected graph for weights='metropolis'"
    ):
        from_networkx(circle, "metropolis")


def test_weights_of_edges_of_networkx():
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 0, 0.75), (1, 0, 0.25), (0, 1, 0.5), (1, 1, 0.5)])
    topology = from_networkx(graph, attribute="weight")
    np.testing.assert_array_equal(topology.matrix(), [[0.75, 0.25], [0.5, 0.5]])
    graph = nx.Graph()
    graph.add_weighted_edges_from([(0, 0, 0.75), (1, 0, 0.25), (1, 1, 0.75)])
    topology = from_networkx(graph, attribute="weight")
    np.testing.assert_array_equal(topology.matrix(), [[0.75, 0.25], [0.25, 0.75]])
    graph.remove_edge(0, 0)
    with pytest.raises(UsageError, match=r"row 0 sums to 0\.25"):
        from_networkx(graph, attribute="weight")
    with pytest.raises(
        UsageError, match=r"edge \(.*\) has no attribute 'w', only \['weight'\]"
    ):
        from_networkx(graph, attribute="w")
    with pytest.raises(UsageError, match="weights= or attribute=, got both"):
        from_networkx(graph, "uniform", attribute="weight")


def test_graphs_of_networkx_that_cannot_be():
    with pytest.raises(UsageError, match=r"2 nodes, one of them 'a'.*convert_node_labels"):
        from_networkx(nx.Graph([("a", "b")]))
    with pytest.raises(UsageError, match="got 0 nodes"):
        from_networkx(nx.Graph())
    with pytest.raises(UsageError, match="got a MultiGraph"):
        from_networkx(nx.MultiGraph([(0, 1)]))
    with pytest.raises(UsageError, match="got a list"):
        from_networkx([(0, 1)])
    with pytest.raises(UsageError, match="to be one of"):
        from_networkx(nx.path_graph(2), "equal")
    with pytest.raises(UsageError, match="ever reaches members 1, 2"):
        from_networkx(nx.empty_graph(3))


# -- schedules ---------------------------------------------------------------------------------


def test_one_peer_exponential_by_hand():
    schedule = one_peer_exponential(6)  # steps of 1, 2, 4, 1, ...
    assert schedule.period == 3
    for step, distance in enumerate([1, 2, 4, 1, 2]):
        for member in range(6):
            assert schedule[step].sends(member) == {(member + distance) % 6: 0.5}
            assert schedule[step].own(member) == 0.5


@given(st.integers(0, 6), st.integers(0, 7))
def test_one_peer_exponential_is_exact_after_log2_n_steps(power, start):
    n = 2**power
    schedule = one_peer_exponential(n)
    assert schedule.exact
    x = values(n)
    for step in range(start, start + power):
        x = schedule(step).matrix() @ x
    np.testing.assert_allclose(x, values(n).mean(), atol=1e-14)


@given(sizes)
def test_one_peer_exponential_converges_for_any_n(n):
    schedule = one_peer_exponential(n)
    assert schedule.n == n
    assert schedule.exact == (n & (n - 1) == 0)
    schedule.require("doubly", "D-PSGD")
    reached = np.linalg.matrix_power(schedule.product(), 1 << 10)
    np.testing.assert_allclose(reached, mean(n), atol=1e-9)


def test_the_product_puts_the_first_step_first():
    edges = [(0, 1)], [(1, 2)]
    first, second = (push_sum(3, e, allow_disconnected=True) for e in edges)
    third = push_sum(3, [(2, 0)], allow_disconnected=True)
    schedule = Cycle([first, second, third], "around")
    x = np.array([4.0, 0, 0])
    # 4 0 0 -> 2 2 0 -> 2 1 1 -> 2.5 1 0.5
    np.testing.assert_array_equal(schedule.product() @ x, [2.5, 1, 0.5])
    assert repr(schedule) == "<around: n=3, 3 steps>"
    assert schedule[4] is second


def test_schedules_are_values():
    schedule = one_peer_exponential(8)
    untouched = pickle.dumps(schedule)
    assert repr(schedule) == "<one_peer_exponential(8): n=8, 3 steps, then the mean>"
    assert pickle.dumps(schedule) == untouched
    assert pickle.loads(untouched) == schedule
    assert len({schedule, pickle.loads(untouched)}) == 1
    with pytest.raises(TypeError):
        list(schedule)  # it would not end
    for bad in (-1, 1.0):
        with pytest.raises(UsageError, match="step"):
            schedule[bad]


def test_what_can_be_a_schedule():
    schedule = one_peer_exponential(4)
    assert as_schedule(schedule) is schedule
    assert as_schedule(ring(4))[7] == ring(4)
    assert as_schedule([ring(4), star(4)])[3] == star(4)
    for bad in (4, "ring", [4], []):
        with pytest.raises(UsageError, match=r"expected (a|one) Topology"):
            as_schedule(bad)


def test_schedules_that_cannot_be():
    halves = [metropolis(4, e, allow_disconnected=True) for e in ([(0, 1)], [(2, 3)])]
    with pytest.raises(
        UsageError, match=r"2 steps to connect .* nothing of member 0 ever reaches members 2, 3"
    ):
        Cycle(halves)
    assert Cycle([*halves, metropolis(4, [(1, 2)], allow_disconnected=True)]).period == 3
    with pytest.raises(UsageError, match=r"one number of members, got steps of \[3, 4\]"):
        Cycle([ring(3), ring(4)])
    columns = push_sum(3, [(0, 1), (1, 2), (2, 0), (0, 2)])
    with pytest.raises(UsageError, match="all column-stochastic; got both"):
        Cycle([columns, from_matrix(columns.matrix().T)])
    with pytest.raises(UsageError, match=r"D-PSGD, step 1: expected doubly .* row 0 sums"):
        Cycle([ring(3), columns]).require("doubly", "D-PSGD")


# -- pairs -------------------------------------------------------------------------------------


@given(sizes, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_random_pairs_match_everybody(n, seed, step):
    draws = RandomPairs(n, seed)
    pairs = draws.pairs(step)
    met = [member for pair in pairs for member in pair]
    assert len(met) == len(set(met)) == n - n % 2
    for a, b in pairs:
        assert a < b
        assert draws.partner(a, step) == b
        assert draws.partner(b, step) == a
    resting = set(range(n)) - set(met)
    assert all(draws.partner(member, step) is None for member in resting)
    assert RandomPairs(n, seed).pairs(step) == pairs  # the same on every member


def test_random_pairs_stay_what_they_are():
    """Of the bits of Philox, which NumPy promises; a run can be repeated next year."""
    draws = RandomPairs(6, seed=7)
    assert [draws.pairs(step) for step in (0, 1, 2**40)] == [
        ((0, 5), (1, 4), (2, 3)),
        ((0, 1), (2, 4), (3, 5)),
        ((0, 1), (2, 5), (3, 4)),
    ]
    assert pickle.loads(pickle.dumps(draws)) == draws
    assert repr(draws) == "RandomPairs(6, seed=7)"


def test_random_pairs_average_two_by_two():
    draws = RandomPairs(5, 3)
    x = values(5)
    for step in range(200):
        old, x = x, draws[step].matrix() @ x
        for a, b in draws.pairs(step):
            assert x[a] == x[b] == pytest.approx((old[a] + old[b]) / 2)
    np.testing.assert_allclose(x, values(5).mean(), atol=1e-12)
    draws.require("doubly", "gossip")


def test_all_pairings_are_about_equally_likely():
    draws = RandomPairs(4, 1)
    counts = [0, 0, 0]
    for step in range(3000):
        counts[draws.partner(0, step) - 1] += 1
    assert min(counts) > 900  # 1000 each, standard deviation 26
    other = RandomPairs(4, 2)
    assert [draws.pairs(step) for step in range(9)] != [other.pairs(step) for step in range(9)]


def test_active_and_passive_by_hand():
    split = ActivePassive(grid(6))
    # 0 1 2
    # 3 4 5
    assert split.active == (0, 2, 4)
    assert split.passive == (1, 3, 5)
    assert split.neighbors(4) == (1, 3, 5)
    assert split.is_active(4)
    assert not split.is_active(3)
    assert repr(split) == "<ActivePassive of grid(2x3): 3 active, 3 passive>"


@given(graphs(), st.integers(0, 100))
def test_an_edge_joins_the_two_sides_or_the_graph_is_refused(graph, step):
    topology = metropolis(*graph)
    if not topology.is_bipartite:
        with pytest.raises(UsageError, match="would be on one side"):
            ActivePassive(topology)
        return
    split = ActivePassive(topology)
    assert sorted(split.active + split.passive) == list(range(topology.n))
    for member in range(topology.n):
        for other in split.neighbors(member):
            assert split.is_active(member) != split.is_active(other)
    for member in split.active:
        peer = split.peer(member, step)
        assert peer in topology.receives(member) or (topology.n == 1 and peer is None)
        assert peer == ActivePassive(topology).peer(member, step)


def test_peers_are_about_equally_likely_and_differ_by_member_and_seed():
    split = pickle.loads(pickle.dumps(ActivePassive(bipartite(6), seed=5)))
    asked = [split.peer(0, step) for step in range(600)]
    assert min(asked.count(peer) for peer in (1, 3, 5)) > 150  # 200 each, deviation 12
    assert asked != [split.peer(2, step) for step in range(600)]
    assert asked != [ActivePassive(bipartite(6), 6).peer(0, step) for step in range(600)]


def test_pairs_that_cannot_be():
    with pytest.raises(UsageError, match="members 1 and 2 are neighbours and would be on one"):
        ActivePassive(ring(5))
    with pytest.raises(UsageError, match="expected all members to be connected"):
        ActivePassive(from_matrix(np.eye(2), allow_disconnected=True))
    with pytest.raises(UsageError, match=r"expected a Topology .*bipartite\(n\), got 4"):
        ActivePassive(4)
    with pytest.raises(
        UsageError, match=r"member 1 is passive and answers only; active are \(0,"
    ):
        ActivePassive(ring(4)).peer(1, 0)
    with pytest.raises(UsageError, match="expected seed 0 to 18446744073709551615, got -1"):
        RandomPairs(4, -1)
    with pytest.raises(UsageError, match="n >= 1, got 0"):
        RandomPairs(0)
