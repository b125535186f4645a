"""The graph as guests get it, and where nodes go beside them; read back by the stand-in of the library."""

import types

import numpy as np
import pytest

import mpiml
from mpiml import Array, ExternalNode, Keep, PlacementError, Program, PyNode, ServiceNode
from mpiml.errors import UsageError
from mpiml.external.crowd import Crowd, keepers, ranges
from mpiml.external.manifest import check_topics, manifest
from mpiml.external.reception import Reception
from mpiml.handshake import Record, alone
from mpiml.hosts import Facts
from mpiml.layout import lay_out, split_layers
from tests.external.guest import Guest, Reader

CROWD = Crowd(("solver",) * 4, (0, 1, 4, 5), (2, 3))


class Model:
    def predict(self, x):
        return x

    def items(self):
        yield 1


def body(*args):
    pass


def build(replicas=4, source=None):
    program = Program("heat")
    fields = program.topic("fields", policy=Keep(3))
    steer = program.topic("steer")
    model = program.add_node(ServiceNode(Model), label="model", replicas=2)
    tree = {"w": np.zeros(2)}
    params = program.add_node(
        mpiml.ParameterServerNode(tree, mpiml.optim.SGD(1.0)), label="params"
    )
    program.add_node(
        ExternalNode(
            publishes={fields: Array("f8", (None, 2))}, subscribes=steer, calls=[model, params]
        ),
        label="solver",
        replicas=replicas,
    )
    program.add_node(
        PyNode(body, fields.subscriber(source), steer.publisher()), label="trainer", replicas=2
    )
    return program


def placed(program, crowd):
    pythons = len(crowd.pythons)
    program.check()
    facts = [Facts("here", frozenset({0, 1}))] * pythons
    plan, _ = lay_out(program, facts, [None] * pythons, crowd=crowd)
    vertices = program.expand(plan.replicas)
    ranks = list(vertices.owners(plan.ranks))
    ways = list(ranks)
    for label, guests in crowd.by_label.items():
        role = next(i for i, r in enumerate(program.roles) if r.label == label)
        for index, guest in enumerate(guests):
            ways[vertices.ids_of(role)[index]] = pythons + guest
    return vertices, ranks, ways


def read(data, label, index):
    """Return what the guest `index` of a label makes of a manifest."""
    guest = Guest.__new__(Guest)
    guest.own = types.SimpleNamespace(rank=index)
    guest._read(Reader(data), label)
    return guest


def told(program, crowd=CROWD, index=0, bells=()):
    vertices, _, ways = placed(program, crowd)
    check_topics(vertices)
    return vertices, read(manifest("heat", vertices, ways, crowd, bells), "solver", index)


def test_guests_stand_with_the_python_rank_that_keeps_them():
    vertices, ranks, _ = placed(build(), CROWD)
    assert [(v.title, ranks[v.id]) for v in vertices if v.role == "solver"] == [
        ("solver/0", 0), ("solver/1", 0), ("solver/2", 1), ("solver/3", 1),
    ]  # fmt: skip
    held = {v.role: set() for v in vertices}
    for v in vertices:
        held[v.role].add(ranks[v.id])
    assert held["trainer"] | held["model"] | held["params"] == {0, 1}
    # no communicator is made for them
    solver = next(v.role_index for v in vertices if v.role == "solver")
    assert all(
        role != solver for me in (0, 1) for role, *_ in split_layers(vertices, ranks, me)
    )


def test_as_many_guests_as_there_are_where_replicas_fill():
    program = build(mpiml.FILL)
    assert keepers(program, CROWD) == {2: (0, 0, 1, 1)}


def test_guests_fill_nothing_in_python():
    program = Program("filling")
    program.add_node(ExternalNode(), label="solver", replicas=mpiml.FILL)
    program.add_node(PyNode(body), label="trainer", replicas=mpiml.FILL)
    program.add_node(ExternalNode(), label="other", replicas=mpiml.FILL)
    with pytest.raises(UsageError, match="'trainer' takes the ranks left over"):
        program.add_node(PyNode(body), label="more", replicas=mpiml.FILL)
    crowd = Crowd(("solver", "other", "solver"), (0, 1, 4), (2, 3))
    vertices, _, _ = placed(program, crowd)
    assert [v.title for v in vertices] == [
        "solver/0", "solver/1", "trainer/0", "trainer/1", "other/0",
    ]  # fmt: skip


def test_guests_of_other_labels_are_named():
    program = Program("named")
    program.add_node(ExternalNode(), label="solver", replicas=2)
    with pytest.raises(
        PlacementError, match=r"it has 'solver' \(there attach 1 as 'solver', 2 as 'sovler'"
    ):
        keepers(program, Crowd(("solver", "sovler", "sovler"), (0, 1, 2), (3,)))


def test_labels_that_are_no_utf8_stay_different():
    ready = alone(None)._replace(state=3)
    told = [ready._replace(guest=label).pack() for label in ("caf\udce9", "caf\udce8")]
    assert b"caf\xe9\0" in told[0]
    labels = [Record.unpack(data).guest for data in told]
    program = Program("labels")
    program.add_node(ExternalNode(), label="caf\u00e9")
    with pytest.raises(PlacementError) as caught:
        keepers(program, Crowd(labels, (0, 1), (2,)))
    assert "there attach 1 as 'caf\\udce9', 1 as 'caf\\udce8'" in str(caught.value)
    str(caught.value).encode()


def test_labels_are_looked_at_once_however_many_guests():
    looked = []

    class Labels(list):
        def __iter__(self):
            looked.append(1)
            return super().__iter__()

    crowd = Crowd(Labels(["a", "b"] * 5000), range(10_000), range(10_000, 10_016))
    program = Program("many")
    for label in "ab":
        program.add_node(ExternalNode(), label=label, replicas=mpiml.FILL)
    program.add_node(PyNode(body), label="py", replicas=16)
    vertices, ranks, _ = placed(program, crowd)
    runtime = types.SimpleNamespace(
        engine=types.SimpleNamespace(size=16, rank=3), ranks=ranks, vertices=vertices, present=[],
        router=types.SimpleNamespace(servers={}),
    )  # fmt: skip
    seated = Reception(runtime, crowd)
    assert len(looked) == 1
    assert seated.ranks[:3].tolist() == [16, 18, 20]
    assert {crowd.keeper(node.rank - 16) for node in seated.nodes} == {3}


@pytest.mark.parametrize("pythons", [1, 2, 3, 7])
@pytest.mark.parametrize("guests", [1, 2, 5, 64])
def test_every_guest_has_one_keeper_and_they_share_evenly(pythons, guests):
    ranks = tuple(range(guests + pythons))
    crowd = Crowd(("a",) * guests, ranks[:guests], ranks[guests:])
    keeping = [crowd.keeper(guest) for guest in range(guests)]
    assert keeping == sorted(keeping)
    assert max(keeping) < pythons
    most = max(keeping.count(p) for p in range(pythons))
    assert most <= -(-guests // pythons)


@pytest.mark.parametrize(
    ("labels", "replicas", "text"),
    [
        ((), 4, "expected 4 ranks that call mpiml_attach with this label, got 0"),
        (("solver",) * 3, 4, "expected 4 ranks that call mpiml_attach with this label, got 3"),
        (
            (),
            mpiml.FILL,
            "expected ranks that call mpiml_attach.* Start both programs together",
        ),
        (
            ("solver",) * 3,
            4,
            "attach 3 as 'solver'.*mpirun -n 4 ./solver : ..., or .*mpiml.FILL",
        ),
        (
            ("other",),
            4,
            "as 'other', but .* it has 'solver' .there attach 1 as 'other'.. Attach",
        ),
        (("solver", "other"), mpiml.FILL, "ranks attach as 'other', but the program has no"),
    ],
)
def test_guests_that_do_not_fit_are_refused(labels, replicas, text):
    crowd = Crowd(labels, tuple(range(len(labels))), (90, 91)) if labels else None
    with pytest.raises(PlacementError, match=text):
        keepers(build(replicas), crowd)


def test_an_external_node_stands_alone():
    program = Program("mixed")
    with program.group("solver"):
        program.add_node(ExternalNode())
        program.add_node(PyNode(body))
    with pytest.raises(UsageError, match="stands alone under its label"):
        keepers(program, CROWD)
    program = Program("placed")
    program.add_node(ExternalNode(), label="solver", placement={"host": "a"})
    with pytest.raises(UsageError, match="no placement="):
        keepers(program, CROWD)


def test_a_guest_reads_what_it_publishes_hears_and_calls():
    vertices, guest = told(build(), index=2)
    by_title = {v.title: v.id for v in vertices}
    assert guest.vertex == by_title["solver/2"]
    assert guest.title == "heat"
    fields = guest.topics["fields"]
    assert (fields["policy"], fields["n"], fields["dtype"], fields["shape"]) == (
        1,
        3,
        12,
        [-1, 2],
    )
    assert fields["publishes"]
    assert not fields["hears"]
    heard = {(link.vertex, link.aux) for link in fields["links"]}
    assert heard == {(by_title[f"trainer/{i}"], 0) for i in (0, 1)}
    assert {link.rank for link in fields["links"]} <= {2, 3}
    steer = guest.topics["steer"]
    assert (steer["policy"], steer["n"], steer["dtype"], steer["shape"]) == (0, 1, 0, None)
    assert not steer["publishes"]
    assert not steer["links"]
    assert {vertex for _, vertex, _ in steer["hears"]} == {
        by_title[f"trainer/{i}"] for i in (0, 1)
    }
    callers, places, methods = guest.services["model"]
    assert callers == [(by_title["solver/0"], by_title["solver/3"])]
    assert [vertex for vertex, _ in places] == [by_title["model/0"], by_title["model/1"]]
    assert methods == {"predict": 0, "items": 1}
    assert list(guest.servers) == ["params"]


def test_subscribers_may_hear_some_guests_only():
    program = build(source=lambda index, replicas: [index, index + 2])
    vertices, guest = told(program, index=1)
    by_title = {v.title: v.id for v in vertices}
    assert [link.vertex for link in guest.topics["fields"]["links"]] == [by_title["trainer/1"]]


def test_bells_are_passed_on():
    bells = [("here", "/dev/shm/x", [(2, 0), (3, 1)])]
    assert told(build(), bells=bells)[1].bells == [("here", "/dev/shm/x", [(2, 0), (3, 1)])]


def test_the_manifest_does_not_grow_with_the_number_of_guests():
    def length(guests):
        ranks = tuple(range(guests + 2))
        crowd = Crowd(("solver",) * guests, ranks[:guests], ranks[guests:])
        vertices, _, ways = placed(build(mpiml.FILL), crowd)
        return len(manifest("heat", vertices, ways, crowd))

    assert length(400) == length(4)


def test_ranges_are_as_few_as_can_be():
    assert ranges([]) == []
    assert ranges([3]) == [(3, 3)]
    assert ranges([0, 1, 2, 5, 7, 8]) == [(0, 2), (5, 5), (7, 8)]


# -- what an ExternalNode may be given ---------------------------------------------------------------


def test_a_topic_is_described_once():
    program = Program("p")
    topic = program.topic("t")
    ExternalNode(publishes={topic: Array("f8")})
    ExternalNode(subscribes={topic: Array("f8")})
    with pytest.raises(UsageError, match="Describe a topic once"):
        ExternalNode(publishes={topic: Array("f4")})


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"publishes": "fields"}, "publishes: expected topics"),
        ({"subscribes": 3}, "subscribes: expected topics"),
        ({"calls": "model"}, "calls: expected handles"),
        ({"calls": [None]}, "calls: expected handles"),
    ],
)
def test_anything_else_is_refused(given, text):
    with pytest.raises(UsageError, match=text):
        ExternalNode(**given)


def test_the_other_end_of_a_topic_is_refused():
    topic = Program("p").topic("t")
    with pytest.raises(UsageError, match="subscribes: expected topics"):
        ExternalNode(subscribes=topic.publisher())
    with pytest.raises(UsageError, match=r"expected mpiml.Array\(dtype, shape\)"):
        ExternalNode(publishes={topic: "f8"})


def test_nodes_without_methods_are_not_called():
    program = Program("p")
    node = program.add_node(PyNode(body), label="node")
    program.add_node(ExternalNode(calls=node), label="solver")
    crowd = Crowd(("solver",), (0,), (1,))
    vertices, _, _ = placed(program, crowd)
    with pytest.raises(UsageError, match="calls: expected services, got node/0"):
        check_topics(vertices)


def test_an_external_node_is_drawn_with_its_edges():
    text = str(build())
    assert "ranks of another program" in text
    assert "solver -> model" in text
    assert "solver -> params" in text
    assert "topic 'fields'" in build().to_mermaid() or "fields" in build().to_mermaid()
