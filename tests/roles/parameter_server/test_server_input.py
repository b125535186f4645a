"""What users get wrong: each error says where, what was expected, and what was there instead."""

import re

import numpy as np
import pytest

import mpiml
from mpiml.consistency import SSP, Async, Backup, BoundedDelay, DropStale
from mpiml.errors import UsageError
from mpiml.optim import SGD, Adam
from tests.playing import both
from tests.roles.parameter_server.serving import node, served

shards = pytest.mark.parametrize("shards", [1, 2])
INIT = {"w": np.zeros((40, 3), "f4"), "b": [np.zeros(17, "f4")]}


def good():
    return {"w": np.ones((40, 3), "f4"), "b": [np.ones(17, "f4")]}


def spoilt(value):
    gradient = good()
    gradient["w"][-1, -1] = value
    return gradient


def with_(**entries):
    return {**good(), **entries}


GRADIENTS = {
    "other name": ({"v": good()["w"], "b": good()["b"]}, r"\['w'\] missing; \['v'\] too much"),
    "one missing": ({"w": good()["w"]}, r"\['b'\].* missing"),
    "one too many": (with_(b=[np.ones(17, "f4")] * 2), r"\['b'\]"),
    "no tree": (np.ones(3, "f4"), "expected a tree like"),
    "shape": (
        with_(w=np.ones((3, 40), "f4")),
        r"\['w'\]: expected \(40, 3\) float32.*\(3, 40\)",
    ),
    "dtype": (with_(w=np.ones((40, 3))), r"\['w'\]: expected \(40, 3\) float32.*got.*float64"),
    "ints": (with_(w=np.ones((40, 3), "i4")), r"expected \(40, 3\) float32.*got.*int32"),
    "nan": (spoilt(np.nan), r"\['w'\].*expected finite numbers, got nan at 119"),
    "infinity": (spoilt(-np.inf), r"\['w'\].*expected finite numbers, got -inf at 119"),
    "no array": (with_(b=["x"]), "push: gradient"),
    "None": (None, "push: gradient"),
}

VERSIONS = {
    "future": (1, r"push: version: expected one that pull\(\) has returned, 0 to 0, got 1"),
    "negative": (-1, "0 to 0, got -1"),
    "float": (0.0, r"push: version: expected a whole number.*got 0\.0"),
    "text": ("0", "push: version: expected a whole number.*got '0'"),
    "none": (None, "push: version: expected a whole number.*got None"),
    "bool": (False, "push: version: expected a whole number.*got False"),
}


@both
@shards
def test_gradients_unlike_the_parameters(mode, shards):
    def body(client):
        client.pull()
        for gradient, text in GRADIENTS.values():
            for push in (client.push, client.futures.push):
                with pytest.raises(UsageError, match=text):
                    push(gradient, 0)
            with pytest.raises(UsageError, match=text.replace("push:", "push(_pull)?:")):
                client.push_pull(gradient, 0)
        assert client.push(good(), np.int64(0))
        found, version = client.pull()
        assert (version, float(found["w"][0, 0]), float(found["b"][0][16])) == (1, -1, -1)
        return client.statistics()["pushes"]

    assert all(n == 1 for n in served(mode, node(INIT, "async", shards), body))


@both
@shards
@pytest.mark.parametrize("kind", VERSIONS)
def test_versions_that_have_not_been(mode, shards, kind):
    """An error at the worker; the servers go on, and are alike."""
    version, text = VERSIONS[kind]

    def body(client):
        with pytest.raises(UsageError, match=text):
            client.push(good(), version)
        with pytest.raises(UsageError, match=text):
            client.futures.push(good(), version).result(30)
        with pytest.raises(UsageError, match=text):
            client.push_pull(good(), version)
        assert client.push(good(), 0)
        found, now = client.pull()
        assert (found["w"] == -1).all()
        assert (found["b"][0] == -1).all()
        return now

    assert all(n == 1 for n in served(mode, node(INIT, "async", shards), body))


@both
@shards
@pytest.mark.parametrize("consistency", ["async", "bsp", SSP(1)], ids=repr)
def test_gradients_that_are_not_finite_are_dropped_and_counted(mode, shards, consistency):
    def body(client):
        client.pull()
        used = [
            client.push(spoilt(np.nan), 0),
            client.futures.push(spoilt(np.inf), 0).result(30),
        ]
        if consistency == SSP(1):
            client.clock()
        found, version = client.push_pull(spoilt(np.nan), 0)
        assert not found["w"].any()
        used.append(client.push(good(), version))
        return used, client.pull()[1], client.statistics()["nonfinite"]

    params = node(INIT, consistency, shards, nonfinite="drop")
    for told in served(mode, params, body):
        assert told == ([False, False, True], 1, 3)


@both
@shards
def test_names_and_rows_that_are_not_there(mode, shards):
    wrong = [
        ((["v"], None), r"pull: expected names among 'b', 'w', got 'v'"),
        (("w", None), "names: expected a list of names, got 'w'"),
        ((3, None), "names: expected a list of names, got 3"),
        ((None, [1]), "indices: expected a dict of names to arrays of int.* got list"),
        ((None, {"w": [40]}), r"\['w'\]: indices: expected 0 to 39, got 40 at place 0"),
        ((None, {"w": [0, -1]}), "expected 0 to 39, got -1 at place 1"),
        ((None, {"w": [0.5]}), "expected whole numbers in one dimension, got float64"),
        ((None, {"w": [[1]]}), "expected whole numbers in one dimension, got int64"),
        ((None, {"v": [1]}), "expected names among 'b', 'w', got 'v'"),
        (([["w"]], None), r"names: expected a list of names, got \[\['w'\]\]"),
        ((None, {"b": [0, 1]}), None),  # the name of a list with one array
    ]

    def body(client):
        for (names, indices), text in wrong:
            if text is None:
                assert client.pull(names, indices)[0]["b"][0].shape == (2,)
                continue
            with pytest.raises(UsageError, match=text):
                client.pull(names, indices)
            with pytest.raises(UsageError, match=text.replace("pull:", "push:")):
                client.push({}, 0, names, indices)
        return True

    assert all(served(mode, node(INIT, "async", shards), body))


@both
def test_single_arrays_have_no_names_and_numbers_no_rows(mode):
    def body(client):
        with pytest.raises(UsageError, match=r"single array: expected indices=array, got"):
            client.pull(["w"])
        with pytest.raises(UsageError, match="it has no rows"):
            client.pull(indices=[0])
        return True

    assert all(served(mode, node(np.float64(1)), body))

    def listed(client):
        with pytest.raises(UsageError, match="for parameters that are a dict"):
            client.pull([0])
        return True

    assert all(served(mode, node([np.zeros(3)]), listed))


@both
def test_key_ranges_are_pulled_by_their_keys(mode):
    init = {"t": mpiml.Keys(10**12, width=2), "w": np.zeros(3, "f4")}

    def body(client):
        for call in (
            client.pull,
            lambda: client.push({"t": 0}, 0),
            lambda: client.push_pull({"t": 0}, 0),
        ):
            with pytest.raises(
                UsageError, match=r"expected to be told what is meant of a tree with Keys"
            ):
                call()
        with pytest.raises(UsageError, match=r"\['t'\].*expected keys in indices=, got none"):
            client.pull(["t"])
        with pytest.raises(UsageError, match=r"expected 0 to 999999999999, got 1000000000000"):
            client.pull(indices={"t": [10**12]})
        with pytest.raises(UsageError, match=r"\['t'\]: expected \(1, 2\) float32.*\(2,\)"):
            client.push({"t": np.ones(2, "f4")}, 0, indices={"t": [5]})
        return True

    assert all(served(mode, node(init), body))


@both
def test_readers_push_nothing(mode):
    def reader(client):
        client.pull()
        for call in (
            lambda: client.push(good(), 0),
            lambda: client.futures.push(good(), 0),
            lambda: client.push_pull(good(), 0),
            client.clock,
            client.futures.clock,
        ):
            with pytest.raises(UsageError, match=r"reader0/0 holds handle\.reader\(\)"):
                call()
        return True

    assert all(served(mode, node(INIT), lambda client: True, readers=[reader]))


@both
def test_a_clock_where_pushes_count_is_an_iteration_without_a_gradient(mode):
    def idle(client):
        for _ in range(3):
            client.clock()

    def works(client):
        for _ in range(3):
            _, version = client.pull()
            client.push(good(), version)
        return client.pull()[1]

    assert all(n in (None, 3) for n in served(mode, node(INIT, "bsp"), works, idle))


NODES = {
    "consistency": (dict(consistency="ssp"), "consistency: expected 'bsp', 'async', or SSP"),
    "class": (dict(consistency=SSP), "consistency: expected 'bsp'"),
    "base": (dict(consistency=mpiml.consistency.Consistency()), "consistency: expected 'bsp'"),
    "no shards": (dict(shards=0), "shards: expected a whole number >= 1, got 0"),
    "half a shard": (dict(shards=1.5), r"shards: expected a whole number >= 1, got 1\.5"),
    "optimizer class": (
        dict(optimizer=SGD),
        r"expected an object, as SGD\(0\.1\), got the class",
    ),
    "optimizer": (dict(optimizer=0.1), r"expected one of mpiml\.optim.*got 0\.1"),
    "no optimizer": (dict(optimizer=None), r"expected one of mpiml\.optim.*got None"),
    "nonfinite": (dict(nonfinite="ignore"), "expected 'raise' or 'drop', got 'ignore'"),
    "filter": (dict(push_filters=[3]), "push_filters"),
    "pull filter": (dict(pull_filters=[mpiml.filters.KKT(1.0)]), "pull_filters.*KKT"),
    "no list": (dict(push_filters=mpiml.filters.KeyCaching()), "push_filters: expected"),
    "codec": (dict(encode=len), "expected encode and decode together"),
}


@pytest.mark.parametrize("kind", NODES)
def test_nodes(kind):
    arguments, text = NODES[kind]
    with pytest.raises(UsageError, match=text):
        mpiml.ParameterServerNode(INIT, **{"optimizer": SGD(1.0), **arguments})


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: SSP(-1), "SSP: s: expected a whole number >= 0, got -1"),
        (lambda: BoundedDelay(-1), "BoundedDelay: tau: .*>= 0, got -1"),
        (lambda: BoundedDelay(0.5), r"BoundedDelay: tau: .*>= 0, got 0\.5"),
        (lambda: Backup(-1), "Backup: b: .*>= 0, got -1"),
        (lambda: DropStale("1"), "DropStale: n: .*>= 0, got '1'"),
        (
            lambda: Async(compensate=-1.0),
            r"Async: compensate: expected a number >= 0, got -1\.0",
        ),
    ],
)
def test_consistencies(make, text):
    with pytest.raises(UsageError, match=text):
        make()


INITS = {
    "ints": (np.arange(5), "expected arrays of float32 or float64, got the array .*int64"),
    "half": ({"w": np.ones(3, "f2")}, r"expected arrays of float32 or float64, got \['w'\]"),
    "no array": ({"w": "x"}, r"ParameterServerNode: init: .*\['w'\]"),
    "None": ({"w": None}, r"ParameterServerNode: init: .*\['w'\]"),
    "list": ([1.0, 2.0], "ParameterServerNode: init"),
}


@pytest.mark.parametrize("kind", INITS)
def test_trees_to_begin_with(kind):
    init, text = INITS[kind]
    with pytest.raises(UsageError, match=text):
        served("threads", node(init), lambda client: client.pull())


def test_more_servers_than_there_are_parts():
    with pytest.raises(UsageError, match=r"shards: expected at most as many.*got 3 for 20 num"):
        served("threads", node(np.zeros(20), "async", 3), lambda client: client.pull())


def test_more_backups_than_workers():
    with pytest.raises(UsageError, match=r"Backup\(b=1\): expected more workers .* got 1"):
        served("threads", node(INIT, Backup(1)), lambda client: client.pull())


def test_places_in_the_graph():
    program = mpiml.Program("places")
    for more, text in (
        (dict(replicas=2), r"its own shards=, got replicas=2 too"),
        (dict(concurrency=2), "its methods are its own: .*got concurrency=2"),
        (dict(allow=["pull"]), "its methods are its own: .*got .*allow="),
    ):
        with pytest.raises(UsageError, match=text):
            program.add_node(node(INIT, "async", 2), label="params", **more)
    with pytest.raises(UsageError, match="several ranks each: add them alone"):
        program.add_node(mpiml.Colocation([node(INIT, "async", 2)]), label="two")
    with program.group("group"), pytest.raises(UsageError, match="outside of 'group'"):
        program.add_node(node(INIT, "async", 2))
    with pytest.raises(UsageError, match="no arguments to configure"):
        node(INIT).configure(3)
    handle = program.add_node(node(INIT), label="good")
    assert "parameter server" in repr(handle)
    for name in ("pull", "push"):
        with pytest.raises(AttributeError, match="becomes a ParameterClient inside the node"):
            getattr(handle, name)


@both
def test_state_is_not_served(mode):
    """Nor is what servers say among themselves, to who holds the handle."""

    def body(client):
        shard = client._shards[0]
        for name in ("state_dict", "load_state_dict"):
            with pytest.raises(mpiml.UnknownMethodError, match=re.escape(f"'{name}'")):
                getattr(shard, name)()
        return True

    assert all(served(mode, node(INIT), body))


def test_the_state_of_two_servers_goes_round(monkeypatch):
    """Values, optimizer state and version; training goes on in the same bits."""
    from mpiml.roles.parameter_server.shard import Shard

    made = []
    construct = Shard.__init__

    def remember(self, settings):
        construct(self, settings)
        made.append(self)

    monkeypatch.setattr(Shard, "__init__", remember)

    def train(client):
        for _ in range(3):
            _, version = client.pull()
            client.push(good(), version)
        return client.pull()

    def make():
        return node(INIT, "bsp", 2, Adam(0.1))

    def of_two():
        first, second = sorted(made[-2:], key=lambda shard: shard._node.spec.index)
        return first, second

    def saves(client):
        found = train(client)
        states.extend(shard.state_dict() for shard in of_two())
        return found, train(client)

    def loads(client):
        client.pull()  # so that both are there
        for shard, state in zip(of_two(), states, strict=True):
            shard.load_state_dict(state)
        return client.pull(), train(client)

    states = []
    ((saved, after),) = served("threads", make(), saves)
    ((loaded, again),) = served("threads", make(), loads)
    assert saved[1] == loaded[1] == 3
    assert after[1] == again[1] == 6
    for one, two in ((saved[0], loaded[0]), (after[0], again[0])):
        assert one["w"].tobytes() == two["w"].tobytes()
        assert one["b"][0].tobytes() == two["b"][0].tobytes()
