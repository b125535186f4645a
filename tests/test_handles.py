import copy
import pickle
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.errors import UsageError
from mpiml.handles import Deferred, Handle, HandleSequence, bind, find


class Graph:
    name = "g"


GRAPH = Graph()
COUNTER = Handle(GRAPH, "counter", 0, 0)
WORKERS = HandleSequence(GRAPH, "worker", 1, None)
THREE = HandleSequence(GRAPH, "three", 2, 3)
Pair = namedtuple("Pair", "left right")


@dataclass
class Plain:
    a: Any
    b: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    a: Any
    b: Any = None


@dataclass
class Odd:
    a: Any
    total: Any = field(init=False, default=None)
    shared: ClassVar[list] = [COUNTER]

    def __post_init__(self):
        self.runs = getattr(self, "runs", 0) + 1


class Tags(list):
    pass


def client(handle):
    return ("client", handle)


# Handles


def test_handle_says_what_it_is():
    assert (COUNTER.program, COUNTER.role, COUNTER.role_index, COUNTER.index) == (
        GRAPH,
        "counter",
        0,
        0,
    )
    assert repr(COUNTER) == "<handle counter/0 of program 'g'>"


def test_handles_are_values():
    same = Handle(GRAPH, "counter", 0, 0)
    assert same == COUNTER
    assert hash(COUNTER) == hash(same)
    assert len({COUNTER, same, Handle(GRAPH, "counter", 0, 1)}) == 2
    assert Handle(Graph(), "counter", 0, 0) != COUNTER
    assert copy.deepcopy([COUNTER])[0] is COUNTER


@pytest.mark.parametrize("handle", [COUNTER, WORKERS, THREE])
def test_attributes_of_a_handle_tell_to_pass_it(handle):
    with pytest.raises(AttributeError, match="becomes a client inside the node that holds it"):
        handle.add(1)
    with pytest.raises(AttributeError, match="cannot be changed"):
        handle.role = "other"


@pytest.mark.parametrize("handle", [COUNTER, WORKERS])
@pytest.mark.parametrize("protocol", [2, 5])
def test_pickling_a_handle_names_the_node(handle, protocol):
    with pytest.raises(
        UsageError, match=rf"{handle.role}.*cannot be pickled.*PyNode\(function"
    ):
        pickle.dumps({"x": [handle]}, protocol)


# Sequences


def test_a_sequence_of_known_length():
    assert len(THREE) == 3
    assert [handle.index for handle in THREE] == [0, 1, 2]
    assert THREE[-1] == Handle(GRAPH, "three", 2, 2)
    assert [handle.index for handle in THREE[::-1]] == [2, 1, 0]
    assert THREE[1:].indices(3) == [1, 2]
    with pytest.raises(IndexError, match="it has 3 replicas"):
        THREE[3]


@given(
    st.integers(1, 9),
    st.lists(st.slices(9), max_size=3),
)
def test_slices_of_a_filled_role_resolve_like_those_of_a_list(number, slices):
    sequence = WORKERS
    expected = list(range(number))
    for piece in slices:
        sequence = sequence[piece]
        expected = expected[piece]
    assert sequence.indices(number) == expected


def test_a_filled_role_has_no_length_yet():
    with pytest.raises(UsageError, match="has no length while the graph is built"):
        len(WORKERS)
    with pytest.raises(UsageError, match="cannot be iterated while the graph is built"):
        list(WORKERS)
    assert WORKERS  # asking for its truth is no question for its length


def test_indices_of_a_filled_role_count_from_the_front():
    assert WORKERS[2].index == 2
    assert WORKERS[2:][1].index == 3
    for sequence, index in ((WORKERS, -1), (WORKERS[-2:], 0), (WORKERS[::-1], 0)):
        with pytest.raises(UsageError, match="must count from the front"):
            sequence[index]


def test_a_slice_with_a_step_of_0_is_refused_at_once():
    with pytest.raises(ValueError, match="step"):
        WORKERS[::0]


def test_the_part_of_a_group_that_a_sequence_means():
    part = HandleSequence(GRAPH, "g", 0, 2, start=3)
    assert part.indices(9) == [3, 4]
    assert part.text() == "g[3:5]"
    assert WORKERS[1:].text() == "worker[1:]"


# find and bind


def test_find_tells_the_path():
    tree = {"a": [1, (COUNTER, "x")], "b": Pair(1, Plain(Deferred(dict, x=WORKERS)))}
    assert list(find(tree, "argument 0")) == [
        ("argument 0['a'][1][0]", COUNTER),
        ("argument 0['b'].right.a.kwargs['x']", WORKERS),
    ]


def test_find_in_keys():
    assert [handle for _, handle in find({COUNTER: 1, (THREE, 2): 2})] == [COUNTER, THREE]


@pytest.mark.parametrize(
    "value",
    [
        [COUNTER, 1],
        (COUNTER, 1),
        Pair(COUNTER, 1),
        Plain(COUNTER),
        Frozen(COUNTER),
        Tags([COUNTER]),
        OrderedDict(x=COUNTER),
        {COUNTER: 1},
    ],
    ids=repr,
)
def test_bind_keeps_the_type(value):
    bound = bind(value, client)
    assert type(bound) is type(value)
    assert bound is not value
    assert not list(find(bound, "")) or "client" in repr(bound)
    assert list(find(value))  # the original still holds its handle


def test_bind_keeps_what_subclasses_have():
    counts = defaultdict(list, x=[COUNTER])
    bound = bind(counts, client)
    assert bound["new"] == []
    assert bound["x"] == [client(COUNTER)]
    assert "new" not in counts
    tags = Tags([COUNTER])
    tags.name = "t"
    assert bind(tags, client).name == "t"
    assert bind(Counter({COUNTER: 2}), client) == {client(COUNTER): 2}


def test_bind_does_not_run_post_init_again():
    bound = bind(Odd(COUNTER), client)
    assert (bound.a, bound.runs, bound.total) == (client(COUNTER), 1, None)
    assert Odd.shared == [COUNTER]


def test_bind_does_not_copy_what_holds_no_handle():
    untouched = [1, {"x": (2, 3)}]
    holder = {"a": untouched, "b": COUNTER}
    assert bind(untouched, client) is untouched
    assert bind(holder, client)["a"] is untouched


def test_bind_of_a_bare_handle():
    assert bind(COUNTER, client) == client(COUNTER)


def test_shared_containers_stay_shared():
    shared = [COUNTER]
    first, second = bind((shared, {"x": shared}), client)
    assert first is second["x"]


def test_cyclic_containers_stay_cyclic():
    cycle = [COUNTER]
    pair = (cycle, cycle)
    cycle.append(pair)
    cycle.append({"me": cycle})
    bound = bind(cycle, client)
    assert bound[0] == client(COUNTER)
    assert bound[1][0] is bound
    assert bound[2]["me"] is bound
    assert [handle for _, handle in find(cycle)] == [COUNTER]


def test_a_cycle_without_handles_is_left_alone():
    cycle = []
    cycle.append(cycle)
    assert bind(cycle, client) is cycle


def test_deferred_is_built_once_with_clients():
    calls = []

    def build(*args, **kwargs):
        calls.append((args, kwargs))
        return object()

    deferred = Deferred(build, [COUNTER], x=THREE)
    first, second = bind([deferred, deferred], client)
    assert first is second
    assert calls == [(([client(COUNTER)],), {"x": client(THREE)})]
    assert bind([deferred], client)[0] is not first  # every node builds its own


def test_deferred_without_handles_is_built_too():
    assert bind({"x": Deferred(int, "7")}, client) == {"x": 7}
    assert bind(Deferred(list, Deferred(range, 2)), client) == [0, 1]


def test_deferred_that_holds_itself():
    items = []
    deferred = Deferred(list, items)
    items.append(deferred)
    with pytest.raises(UsageError, match="its own arguments hold it"):
        bind(deferred, client)


def test_deferred_wants_something_to_call():
    with pytest.raises(UsageError, match=r"not Deferred\(cls\(\*args\)\)"):
        Deferred([1])


class Point(NamedTuple):
    x: Any
    y: Any


LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.builds(Handle, st.just(GRAPH), st.just("r"), st.integers(0, 3), st.integers(0, 3)),
    st.just(WORKERS),
)


def _containers(inner):
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=4).map(OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Plain, inner, inner),
        st.builds(Frozen, inner, inner),
    )


TREES = st.recursive(LEAVES, _containers, max_leaves=25)


def _model(tree, resolve):
    """What bind must return, written the plain way."""
    if isinstance(tree, (Handle, HandleSequence)):
        return resolve(tree)
    if isinstance(tree, dict):
        return type(tree)((key, _model(item, resolve)) for key, item in tree.items())
    if isinstance(tree, Point):
        return Point(*(_model(item, resolve) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_model(item, resolve) for item in tree)
    if isinstance(tree, (Plain, Frozen)):
        return type(tree)(_model(tree.a, resolve), _model(tree.b, resolve))
    return tree


@given(TREES)
def test_bind_of_any_tree_equals_the_plain_recursion(tree):
    seen = []

    def resolve(handle):
        seen.append(handle)
        return f"client {handle!r}"

    before = _model(tree, lambda handle: handle)
    bound = bind(tree, resolve)
    assert bound == _model(tree, lambda handle: f"client {handle!r}")
    assert repr(bound) == repr(_model(tree, lambda handle: f"client {handle!r}"))  # types too
    assert tree == before  # the original was not changed
    assert not list(find(bound))
    assert {repr(handle) for _, handle in find(tree)} == {repr(handle) for handle in seen}
    if not seen:
        assert bound is tree


@given(TREES)
def test_paths_lead_to_the_handles(tree):
    for path, handle in find(tree, "tree"):
        assert eval(path, {"tree": tree}) == handle
