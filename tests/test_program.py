from collections import namedtuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.errors import PlacementError, UsageError
from mpiml.handles import Handle, HandleSequence
from mpiml.nodes import Colocation, PyClassNode, PyNode, ServiceNode
from mpiml.program import FILL, Placement, Program
from mpiml.settings import Fill


class Counter:
    def __init__(self, start=0):
        self.total = start

    def add(self, n):
        self.total += n


class Runner:
    def run(self):
        pass


def work(*args, **kwargs):
    pass


def node(*args, **kwargs):
    return PyNode(work, *args, **kwargs)


@pytest.fixture
def program():
    return Program("hello")


# add_node


def test_a_handle_or_a_sequence(program):
    counter = program.add_node(ServiceNode(Counter), label="counter")
    one = program.add_node(node(), label="one", replicas=1)
    filled = program.add_node(node(counter), label="worker", replicas=FILL)
    assert counter == Handle(program, "counter", 0, 0)
    assert isinstance(one, HandleSequence)
    assert len(one) == 1
    assert one[0] == Handle(program, "one", 1, 0)
    assert filled.indices(3) == [0, 1, 2]
    assert [role.replicas for role in program.roles] == [1, 1, FILL]
    assert program.roles[2].replicas is FILL


def test_a_group_shares_its_label_and_counts_up(program):
    with program.group("worker"):
        first = program.add_node(node())
        rest = program.add_node(PyClassNode(Runner), replicas=2, label="worker")
        last = program.add_node(node())
    assert (first.index, [handle.index for handle in rest], last.index) == (0, [1, 2], 3)
    assert [role.label for role in program.roles] == ["worker"]
    assert [vertex.node.kind for vertex in program.expand([4])] == [
        "PyNode",
        "PyClassNode",
        "PyClassNode",
        "PyNode",
    ]


def test_a_colocation_is_one_unit_with_a_role_for_each_node(program):
    program.add_node(node(), label="first")
    inner = Colocation([node(), Colocation([node(), ServiceNode(Counter)])])
    a, (b, c) = program.add_node(inner, label="pair", replicas=2, concurrency=3)
    assert [handles.role for handles in (a, b, c)] == ["pair.0", "pair.1.0", "pair.1.1"]
    assert [(unit.label, unit.replicas, unit.roles) for unit in program.units] == [
        ("first", 1, (0,)),
        ("pair", 2, (1, 2, 3)),
    ]
    units = [vertex.unit for vertex in program.expand([1, 2])]
    assert units == [(0, 0), (1, 0), (1, 0), (1, 0), (1, 1), (1, 1), (1, 1)]


def test_a_colocation_without_replicas_gives_handles(program):
    first, second = program.add_node(Colocation([node(), node()]), label="pair")
    assert (first, second) == (
        Handle(program, "pair.0", 0, 0),
        Handle(program, "pair.1", 1, 0),
    )


def test_settings_reach_the_vertices(program):
    program.add_node(
        ServiceNode(Counter), label="c", concurrency=4, allow=["add"], daemon=True, replicas=2
    )
    for vertex in program.expand([2]):
        assert vertex[7:] == (4, ("add",), True, "abort")


def test_placement_may_be_a_dict(program):
    program.add_node(node(), label="a", placement={"num_gpus": 1, "with": "b"})
    program.add_node(node(), label="b", placement=Placement(host="h"))
    assert [unit.placement for unit in program.units] == [
        Placement(num_gpus=1, with_="b"),
        Placement(host="h"),
    ]
    assert repr(program.units[0].placement) == "Placement(num_gpus=1, with_='b')"
    with pytest.raises(AttributeError, match="cannot be changed"):
        program.units[0].placement.host = "x"


BAD_SETTINGS = [
    ({"label": None}, "label= is missing"),
    ({"label": "a b"}, "white space or a '/'"),
    ({"label": "a/b"}, "white space or a '/'"),
    ({"label": ""}, "label= expected a name"),
    ({"label": 3}, "label= expected a name, got 3"),
    ({"replicas": 0}, "replicas= expected an integer of at least 1 or mpiml.FILL, got 0"),
    ({"replicas": -1}, "replicas= expected an integer"),
    ({"replicas": True}, "replicas= expected an integer"),
    ({"replicas": 2.0}, "replicas= expected an integer"),
    ({"concurrency": 0}, "concurrency= expected an integer of at least 1, got 0"),
    ({"concurrency": FILL}, "concurrency= expected an integer of at least 1, got FILL"),
    ({"allow": "add"}, "allow= expected a list of method names"),
    ({"allow": [1]}, "allow= expected method names"),
    ({"allow": ["run"]}, "allow= names 'run'"),
    ({"on_failure": 1}, "on_failure= expected 'abort', got 1"),
    ({"on_failure": "explode"}, "on_failure= expected 'abort', got 'explode'"),
    ({"on_failure": "restart"}, "on_failure='restart' comes with the fault release"),
    ({"durable": True}, "durable=True comes with the fault release"),
    ({"daemon": 1}, "daemon= expected a bool"),
    ({"placement": "host1"}, "placement= expected a dict or mpiml.Placement, got str"),
    ({"placement": {"gpus": 1}}, "placement= has no setting 'gpus'"),
    ({"placement": {"num_cpus": 0}}, "num_cpus= expected an integer of at least 1"),
    ({"placement": {"spread": 1}}, "spread=: expected a bool"),
    ({"placement": {"spread": True, "host": "a"}}, "contradict each other"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=str)
def test_bad_settings_are_refused_and_change_nothing(program, settings, message):
    service = ServiceNode(Counter)
    with pytest.raises(UsageError, match=message) as caught:
        program.add_node(service, **{"label": "counter", **settings})
    assert "Program 'hello'" in str(caught.value)
    assert program.roles == []
    program.add_node(service, label="counter")  # it is still free


@pytest.mark.parametrize("settings", [{"concurrency": 2}, {"allow": ["x"]}])
def test_settings_of_services_are_refused_elsewhere(program, settings):
    with pytest.raises(UsageError, match=r"is for services, got PyNode\(work\)"):
        program.add_node(node(), label="a", **settings)


@pytest.mark.parametrize("given_", [work, Counter, Counter(), None])
def test_what_is_no_node_is_refused(program, given_):
    with pytest.raises(UsageError, match="expected a node, got"):
        program.add_node(given_, label="a")


def test_a_label_is_used_once(program):
    program.add_node(Colocation([node(), node()]), label="a")
    for label in ("a", "a.1"):
        with pytest.raises(UsageError, match=f"the label '{label}' is taken"):
            program.add_node(node(), label=label)
        with pytest.raises(UsageError, match="is taken"), program.group(label):
            pass


def test_a_node_is_added_once(program):
    work_node = node()
    program.add_node(work_node, label="a")
    with pytest.raises(UsageError, match=r"was added before \(Program 'hello', node 'a'\)"):
        program.add_node(work_node, label="b")
    with pytest.raises(UsageError, match="was added before"):
        Program("other").add_node(work_node, label="a")
    twice = node()
    with pytest.raises(UsageError, match="in this Colocation"):
        program.add_node(Colocation([twice, twice]), label="c")


def test_one_role_fills(program):
    program.add_node(node(), label="a", replicas=FILL)
    with pytest.raises(UsageError, match="'a' takes the ranks left over already"):
        program.add_node(node(), label="b", replicas=FILL)


@pytest.mark.parametrize("counts", [(FILL, 1), (1, FILL)])
def test_fill_stands_alone_in_a_group(program, counts):
    with program.group("g"):
        program.add_node(node(), replicas=counts[0])
        with pytest.raises(UsageError, match="a label of their own"):
            program.add_node(node(), replicas=counts[1])


def test_groups(program):
    with program.group("g"):
        with pytest.raises(UsageError, match="label='x' inside the group 'g'"):
            program.add_node(node(), label="x")
        with pytest.raises(UsageError, match="groups do not nest"), program.group("h"):
            pass
        with pytest.raises(UsageError, match="a Colocation is a group of its own"):
            program.add_node(Colocation([node()]))
        program.add_node(node())
        with pytest.raises(UsageError, match="placed alike"):
            program.add_node(node(), placement={"spread": True})
    program.add_node(node(), label="x")  # the group is closed


def test_a_topic_has_a_name_of_its_own(program):
    assert program.topic("params").number == 0
    with pytest.raises(UsageError, match=r"expected a name of its own, got 'params'"):
        program.topic("params")


@pytest.mark.parametrize("name", ["", 3, None])
def test_a_program_has_a_name(name):
    with pytest.raises(UsageError, match="expected a name"):
        Program(name)


def test_fill_is_one_int(program):
    import copy
    import pickle

    assert isinstance(FILL, int)
    assert FILL == -1
    assert f"{FILL}" == repr(FILL) == str(FILL) == "FILL"
    for other in (Fill(), copy.deepcopy(FILL), pickle.loads(pickle.dumps(FILL))):
        assert other is FILL


# check


def test_an_empty_program(program):
    with pytest.raises(UsageError, match="Program 'hello' has no nodes"):
        program.check()


def test_arguments_must_fit(program):
    program.add_node(PyNode(lambda a, b: None, 1), label="w")
    with pytest.raises(UsageError, match=r"^Program 'hello', node 'w': .*missing.*'b'"):
        program.check()


def test_a_handle_of_another_program_names_both(program):
    foreign = Program("other").add_node(node(), label="x")
    program.add_node(node([foreign]), label="w")
    with pytest.raises(UsageError, match=r"node 'w': argument 0\[0\] .*'other'.*'hello'"):
        program.check()


def test_a_handle_of_a_program_built_twice(program):
    foreign = Program("hello").add_node(node(), label="x")
    program.add_node(node(key=foreign), label="w")
    with pytest.raises(UsageError, match="another program, also named 'hello'"):
        program.check()


def test_a_hidden_handle_names_node_and_container(program):
    counter = program.add_node(ServiceNode(Counter), label="counter")
    program.add_node(PyNode(lambda: counter.add(1)), label="w")
    with pytest.raises(
        UsageError, match=r"node 'w': <handle counter/0 .* the closure of .*'counter'"
    ):
        program.check()


def test_a_handle_in_a_set_is_hidden(program):
    counter = program.add_node(ServiceNode(Counter), label="counter")
    program.add_node(node(x={counter}), label="w")
    with pytest.raises(
        UsageError, match=r"a set \(argument x= member\).*Pass it as an argument"
    ):
        program.check()


def test_a_node_may_hold_another_program(program):
    inner = Program("inner")
    handle = inner.add_node(node(), label="x")
    inner.add_node(node(handle), label="y")
    program.add_node(node(inner), label="w")
    program.check()


@pytest.mark.parametrize("label", ["a", "missing"])
def test_with_names_another_label(program, label):
    program.add_node(node(), label="a", placement={"with_": label})
    with pytest.raises(UsageError, match=f"with_='{label}' names no other label"):
        program.check()


def test_a_cyclic_graph(program):
    first, second = node(), node()
    a = program.add_node(first, label="a")
    b = program.add_node(second, label="b")
    first.configure(b)
    second.configure([a])
    program.check()
    assert "a -> b" in str(program)
    assert "b -> a" in str(program)


def test_after_check_the_program_is_closed(program):
    work_node = node()
    program.add_node(work_node, label="a")
    program.check()
    with pytest.raises(UsageError, match="launched already"):
        work_node.configure(1)
    with pytest.raises(UsageError, match="was launched"):
        program.add_node(node(), label="b")
    program.check()  # it may be launched again


# expand


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), min_size=1, max_size=4))
def test_expand_numbers_every_node_once(shape):
    program = Program("p")
    for i, (width, count) in enumerate(shape):
        inner = node() if width == 1 else Colocation([node() for _ in range(width)])
        program.add_node(inner, label=f"r{i}", replicas=count)
    vertices = program.expand([count for _, count in shape])
    assert [vertex.id for vertex in vertices] == list(range(len(vertices)))
    assert len(vertices) == sum(width * count for width, count in shape)
    keys = [(vertex.role_index, vertex.index) for vertex in vertices]
    assert len(set(keys)) == len(keys)
    assert list(vertices) == sorted(vertices, key=lambda v: (v.unit, v.role_index))
    assert [vertices[i] for i in range(len(vertices))] == list(vertices)
    assert vertices[-1] == vertices[len(vertices) - 1] == vertices[-1:][0]
    for role in range(len(program.roles)):
        ids = vertices.ids_of(role)
        assert [(vertices[i].role_index, vertices[i].index) for i in ids] == [
            (role, index) for index in range(len(ids))
        ]
        assert list(vertices.of_role(role)) == [vertices[i] for i in ids]
        assert list(vertices.of_role(role)[1:]) == [vertices[i] for i in ids[1:]]
    for vertex in vertices:
        assert vertex.role == program.roles[vertex.role_index].label
        assert vertex.replicas == program.roles[vertex.role_index].replicas
        assert vertex.index == vertex.unit[1]


@pytest.mark.parametrize("numbers", [[1], [1, 2, 3], [2, 2], [1, 0]])
def test_expand_wants_a_number_for_each_unit(program, numbers):
    program.add_node(node(), label="a")
    program.add_node(node(), label="b", replicas=FILL)
    with pytest.raises(UsageError):
        program.expand(numbers)


def test_expand_checks_handles_into_a_filled_role(program):
    workers = program.add_node(node(), label="worker", replicas=FILL)
    program.add_node(node(workers[2]), label="x")
    assert len(program.expand([3, 1])) == 4
    with pytest.raises(PlacementError, match=r"argument 0 is worker/2, but 'worker' got 2"):
        program.expand([2, 1])


# drawings

Pair = namedtuple("Pair", "left right")


def test_drawings(program):
    counter = program.add_node(ServiceNode(Counter), label="counter", concurrency=2)
    workers = program.add_node(node(counter, Pair(counter, 1)), label="worker", replicas=FILL)
    pair = Colocation([node(workers[1:]), PyClassNode(Runner)])
    program.add_node(pair, label="pair", placement={"spread": True})
    assert str(program) == (
        "Program 'hello'\n"
        "  counter  ServiceNode(Counter)  concurrency=2\n"
        "  worker x FILL  PyNode(work)\n"
        "    worker -> counter\n"
        "  pair  Colocation  Placement(spread=True)\n"
        "    pair.0  PyNode(work)\n"
        "      pair.0 -> worker[1:]\n"
        "    pair.1  PyClassNode(Runner)"
    )
    assert program.to_mermaid().splitlines() == [
        "flowchart LR",
        '    r0["counter<br/>ServiceNode(Counter)  concurrency=2"]',
        '    r1["worker x FILL<br/>PyNode(work)"]',
        '    subgraph u2["pair"]',
        '        r2["pair.0<br/>PyNode(work)"]',
        '        r3["pair.1<br/>PyClassNode(Runner)"]',
        "    end",
        "    r1 --> r0",
        "    r2 -->|some| r1",
    ]


def test_drawing_a_part_of_a_group(program):
    with program.group("g"):
        first = program.add_node(node(), replicas=2)
        program.add_node(node())
    program.add_node(node(first, first[1]), label="x")
    assert "x -> g[0:2]\n" in str(program) + "\n"
    assert "x -> g[1]\n" in str(program) + "\n"


def test_drawing_escapes_markup(program):
    program.add_node(PyNode(lambda: None), label='a"b')
    assert '["a#quot;b<br/>PyNode(#lt;lambda#gt;)"]' in program.to_mermaid()
