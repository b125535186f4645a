"""Guests beside Python ranks, on ranks of mpiexec: each test with rank 0, or another, as a guest."""

import numpy as np
import pytest

import mpiml
from mpiml import Array, ExternalNode, Keep, Program, PyNode, ServiceNode
from tests.external.guest import Guest, GuestError
from tests.external.together import caught, together

two = pytest.mark.mpi(min_size=2)
three = pytest.mark.mpi(min_size=3)


class Model:
    def __init__(self):
        self.calls = 0

    def double(self, x):
        self.calls += 1
        return 2 * x

    def parts(self, x, n):
        return x.sum(), x.T, int(n)

    def order(self, x):
        return bool(x.flags.f_contiguous), bool(x.flags.writeable)

    def nothing(self, *arrays):
        return None

    def boom(self):
        raise ValueError("no good")

    def text(self):
        return "text"

    def walk(self):
        yield 1


def comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def first():
    """Rank 0 is a guest."""
    return {0: "solver"}


def last():
    """The last rank is a guest."""
    return {comm().size - 1: "solver"}


def outer():
    """All are guests but rank 1, in the middle where there is one."""
    return {rank: "solver" for rank in range(comm().size) if rank != 1}


places = pytest.mark.parametrize("guests", [first, last, outer])


def filled(program, **given):
    """Add guests, and nodes that do nothing on ranks that are left over."""
    program.add_node(ExternalNode(**given), label="solver", replicas=mpiml.FILL)
    return program


def spare(program, guests, used):
    left = comm().size - len(guests) - used
    if left > 0:
        program.add_node(PyNode(print, end=""), label="spare", replicas=left)
    return program


def calling(guests):
    program = Program("calling")
    model = program.add_node(ServiceNode(Model), label="model")
    return spare(filled(program, calls=model), guests, 1)


@two
@places
def test_a_guest_calls_a_service_with_arrays_in_and_out(guests):
    def solver(guest):
        x = np.arange(6.0).reshape(2, 3)
        assert (guest.call("model", "double", x) == 2 * x).all()
        big = np.asfortranarray(np.random.default_rng(0).random((300, 200)))
        total, turned, n = guest.call("model", "parts", big, 3)
        assert total == pytest.approx(big.sum())
        assert n == 3
        assert n.dtype == np.int64
        assert (turned == big.T).all()
        assert turned.flags.c_contiguous
        in_order, writeable = guest.call("model", "order", big)
        assert in_order
        assert writeable
        assert guest.call("model", "nothing") is None
        assert guest.call("model", "nothing", x, x[:, ::2]) is None
        return "done"

    found = together(lambda: calling(guests()), solver, guests())
    assert found == "done" or found.stopped_by == "finished"


@two
def test_what_a_method_does_wrong_is_a_code_and_a_text(capfd):
    def solver(guest):
        codes = {}
        for method in ("boom", "text", "missing", "walk"):
            error = caught(guest.call, "model", method)
            codes[method] = (error.code, error.text)
        assert codes["boom"] == (13, "model/0.boom: ValueError: no good")
        assert codes["text"][0] == 11
        assert "got str" in codes["text"][1]
        assert codes["missing"][0] == 10
        assert "served are: boom, double" in codes["missing"][1]
        assert codes["walk"][0] == 13
        assert "stream" in codes["walk"][1]
        caught(guest.call, "model", "boom")
        assert (guest.call("model", "double", 4) == 8).all()  # it goes on

    together(lambda: calling(first()), solver, first())
    told = capfd.readouterr().err
    if comm().rank == 1:
        assert told.count("ValueError: no good") == 1, told  # the second time nothing is shown


def streaming(guests, policy, spec=None):
    def gather(fields):
        return [(float(x.sum()), x.flags.writeable, x.shape) for x in fields]

    program = Program("streaming")
    fields = program.topic("fields", policy=policy)
    program.add_node(PyNode(gather, fields.subscriber()), label="trainer")
    published = fields if spec is None else {fields: spec}
    return spare(filled(program, publishes=published), guests, 1)


@two
@places
def test_what_guests_publish_arrives_whole_and_in_order(guests):
    count = 20

    def solver(guest):
        for n in range(count):
            guest.publish("fields", np.full((10, 500), float(n)))  # apart
            guest.publish("fields", np.float32([n]))  # inside

    found = together(lambda: streaming(guests(), Keep(3)), solver, guests())
    if found is not None and comm().rank == min(set(range(comm().size)) - set(guests())):
        got = found["trainer"][0]
        assert len(got) == 2 * count * len(guests())
        assert all(writeable for _, writeable, _ in got)
        assert sorted(s for s, _, shape in got if shape == (1,)) == sorted(
            [float(n) for n in range(count)] * len(guests())
        )


@two
def test_of_a_latest_topic_the_last_message_arrives():
    def solver(guest):
        for n in range(200):
            guest.publish("fields", np.full(4, float(n)))

    found = together(lambda: streaming(first(), "latest"), solver, first())
    if comm().rank == 1:
        got = [total for total, _, _ in found["trainer"][0]]
        assert got[-1] == 4 * 199
        assert got == sorted(got)


@two
def test_guests_hear_arrays_and_what_is_none_is_refused_at_the_putter():
    def steer(topic):
        topic.put(np.eye(3))
        topic.put(7)
        topic.put(np.asfortranarray(np.ones((200, 100), np.float32)))
        return [str(caught(topic.put, wrong)) for wrong in ("text", {"a": 1}, np.array(["x"]))]

    def build():
        program = Program("steering")
        topic = program.topic("steer", policy=Keep(8))
        program.add_node(PyNode(steer, topic.publisher()), label="trainer")
        return spare(filled(program, subscribes=topic), first(), 1)

    def solver(guest):
        publisher, number, x = guest.take("steer")
        assert number == 1
        assert (x == np.eye(3)).all()
        assert guest.take("steer")[2] == 7
        x = guest.take("steer")[2]
        assert x.flags.f_contiguous
        assert x.dtype == np.float32
        assert x.sum() == 20000
        assert publisher == guest.topics["steer"]["hears"][0][1]

    found = together(build, solver, first())
    if comm().rank == 1:
        texts = found["trainer"][0]
        assert all("expected an array of bool" in text for text in texts)
        assert "got dict" in texts[1]


@two
def test_a_description_of_a_topic_reaches_guests_and_holds_for_python_too():
    def steer(topic):
        topic.put(np.zeros((2, 3), np.float32))
        return str(caught(topic.put, np.zeros((2, 3)))), str(
            caught(topic.put, np.zeros(3, "f4"))
        )

    def build():
        program = Program("steering")
        topic = program.topic("steer", policy=Keep(8))
        program.add_node(PyNode(steer, topic.publisher()), label="trainer")
        spec = {topic: Array("f4", (None, 3))}
        return spare(filled(program, subscribes=spec), first(), 1)

    def solver(guest):
        assert guest.topics["steer"]["dtype"] == 11
        assert guest.topics["steer"]["shape"] == [-1, 3]
        assert guest.take("steer")[2].shape == (2, 3)

    found = together(build, solver, first())
    if comm().rank == 1:
        for text in found["trainer"][0]:
            assert "expected Array('float32', (None, 3)), got an array of" in text


def serving(guests, **given):
    program = Program("serving")
    tree = {"w": np.zeros(4), "layers": [{"b": np.ones((3, 2), np.float32)}]}
    params = program.add_node(
        mpiml.ParameterServerNode(tree, mpiml.optim.SGD(0.5), **given), label="params"
    )
    return spare(filled(program, calls=params), guests, 1)


@two
@places
@pytest.mark.parametrize("consistency", ["async", "bsp"])
def test_guests_are_workers_of_a_parameter_server(guests, consistency):
    def solver(guest):
        found, version = guest.pull("params", "w", "layers/0/b")
        assert version == 0
        assert (found["w"] == 0).all()
        assert found["layers/0/b"].shape == (3, 2)
        for _ in range(3):
            found, version = guest.pull("params", "w")
            assert guest.push("params", version, w=np.ones(4))
        error = caught(guest.pull, "params", "v")
        assert error.code == 10, error
        error = caught(guest.pull, "params", "layers")
        assert "a part of the tree" in error.text
        error = caught(guest.push, "params", version, w=np.ones(5))
        assert error.code == 12
        error = caught(guest.push, "params", version, w=np.ones(4, np.float32))
        assert error.code == 11
        assert "expected (4,) float64, as pull() returns, got (4,) float32" in error.text
        error = caught(guest.push, "params", version, w=np.full(4, np.nan))
        assert error.code == 13
        error = caught(guest.push, "params", version, layers=np.ones(5))
        assert "as 'layers/0/b', got 'layers', which is a part of the tree" in error.text
        return "done"

    found = together(lambda: serving(guests(), consistency=consistency), solver, guests())
    assert found == "done" or found.stopped_by == "finished"


TREES = {
    "entry of several": {"layers": [{"w": np.zeros(3), "b": np.ones(2)}], "bias": np.ones(1)},
    "digits as keys": {"net": {"0": np.zeros(3), "1": np.ones(2)}, "bias": np.ones(1)},
    "whole numbers as keys": {0: np.zeros(3), 1: {2: np.ones(2)}, "bias": np.ones(1)},
    "list at the top": [np.zeros(3), (np.ones(2), np.ones(1))],
}
PATHS = {
    "entry of several": ("layers/0/w", "layers/0/b", "bias"),
    "digits as keys": ("net/0", "net/1", "bias"),
    "whole numbers as keys": ("0", "1/2", "bias"),
    "list at the top": ("0", "1/0", "1/1"),
}


@two
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("servers", [1, 2])
def test_one_array_of_any_tree_is_pushed_by_its_path_and_others_stay(name, servers, capfd):
    guests = {0: "solver"}
    moved, kept, last = PATHS[name]

    def build():
        program = Program("trees")
        # each step of it goes on where it went, so a gradient of zero would be seen
        optimizer = mpiml.optim.Momentum(1.0, 0.5)
        params = program.add_node(
            mpiml.ParameterServerNode(TREES[name], optimizer, shards=servers), label="params"
        )
        filled(program, calls=params)
        return program

    def solver(guest):
        for path, shape in ((kept, 2), (moved, 3), (moved, 3)):
            _, version = guest.pull("params", path)
            assert guest.push("params", version, **{path: np.ones(shape)})
        until = version + 1
        while version < until:
            found, version = guest.pull("params", moved, kept, last)
        assert (found[moved] == -2.5).all()  # 1, then 1 and half of the one before
        assert (found[kept] == 0).all()
        assert (found[last] == 1).all()
        guest.push("params", version, **{moved: np.ones(3), last: np.ones(1)})
        error = caught(guest.push, "params", version, **{moved + "/no": np.ones(3)})
        assert "expected the path of an array in the tree of parameters" in error.text

    comm_ = comm().Split(int(comm().rank >= 2), comm().rank)
    if comm().rank < 2:
        together(build, solver, guests, comm_)
    comm_.Free()
    assert "Traceback" not in capfd.readouterr().err  # of a wrong path: who asked is told


# -- the end -----------------------------------------------------------------------------------


def waiting(guests, body):
    program = Program("waiting")
    program.add_node(PyNode(body), label="node")
    return spare(filled(program), guests, 1)


@two
@places
def test_a_stop_reaches_guests_whoever_asks(guests):
    def body():
        mpiml.context().stop()

    def solver(guest):
        reason, status, text = guest.wait_for_stop()
        assert reason == 1
        assert status == 0
        assert "called stop()" in text

    found = together(lambda: waiting(guests(), body), solver, guests())
    assert found is None or "called stop()" in found.stopped_by

    def patient():
        mpiml.context().wait_for_stop()

    def asking(guest):
        if guest.index == 0:
            guest.stop()
        assert "mpiml_stop" in guest.wait_for_stop()[2]

    found = together(lambda: waiting(guests(), patient), asking, guests())
    assert found is None or "mpiml_stop" in found.stopped_by


@two
@places
def test_a_failure_in_python_reaches_guests_as_a_text(guests):
    def body():
        raise ValueError("the node is broken")

    def solver(guest):
        reason, status, text = guest.wait_for_stop()
        assert reason == 2
        assert status == 1
        assert "ValueError: the node is broken" in text
        assert "node/0" in text

    if comm().rank in guests():
        together(None, solver, guests())
    else:
        error = caught(together, lambda: waiting(guests(), body), None, guests())
        assert type(error) is ValueError


@two
@pytest.mark.parametrize("letter", ["x", "\u9519", "\U0001f600"])
def test_a_failure_with_a_long_text_reaches_guests_whole_at_both_ends(letter):
    def body():
        raise ValueError(f"the beginning {letter * 15_000} the reason")

    def solver(guest):
        reason, _, text = guest.wait_for_stop()
        assert reason == 2
        assert "node/0" in text
        assert text.rstrip().endswith(f"{letter} the reason")

    if comm().rank == 0:
        together(None, solver, first())
    else:
        error = caught(together, lambda: waiting(first(), body), None, first())
        assert str(error).count(letter) > 14_000


@two
def test_an_error_with_a_long_text_keeps_its_code_and_both_ends():
    class Long:
        def boom(self):
            raise ValueError("\u9519" * 40_000 + " the reason")

    def build():
        program = Program("long")
        model = program.add_node(ServiceNode(Long), label="model")
        return spare(filled(program, calls=model), first(), 1)

    def solver(guest):
        error = caught(guest.call, "model", "boom")
        assert error.code == 13
        assert error.text.startswith("model/0.boom: ValueError: \u9519")
        assert error.text.endswith("\u9519 the reason")

    together(build, solver, first())


@two
def test_a_guest_that_fails_ends_the_program_with_its_text():
    def body():
        mpiml.context().wait_for_stop()

    def solver(guest):
        guest.stop(2, "diverged at step 7", 1)
        assert guest.wait_for_stop()[0] == 2

    if comm().rank == 0:
        together(None, solver, first())
    else:
        error = caught(together, lambda: waiting(first(), body), None, first())
        assert type(error) is mpiml.RemoteError
        assert "diverged at step 7" in str(error)
        assert "solver/0" in str(error)


@two
def test_a_guest_that_leaves_early_is_no_end():
    def gather(fields):
        got = list(fields)
        return len(got)

    def build():
        program = Program("early")
        fields = program.topic("fields", policy=Keep(2))
        program.add_node(PyNode(gather, fields.subscriber()), label="trainer")
        return spare(filled(program, publishes=fields), outer(), 1)

    def solver(guest):
        for n in range(guest.index + 1):
            guest.publish("fields", np.float64(n))

    found = together(build, solver, outer())
    if comm().rank == 1:
        guests = len(outer())
        assert found["trainer"] == [guests * (guests + 1) // 2]
        assert found["solver"] == [None] * guests


@two
def test_guests_are_as_many_as_attach_beside_nodes_that_fill_python():
    def build():
        program = Program("filling")
        program.add_node(PyNode(lambda: 1), label="py", replicas=mpiml.FILL)
        program.add_node(ExternalNode(), label="solver", replicas=mpiml.FILL)
        return program

    found = together(build, lambda guest: None, first())
    if comm().rank == 1:
        assert found["py"] == [1] * (comm().size - 1)
        assert found["solver"] == [None]


@two
def test_a_python_node_waits_for_guests_as_for_others():
    def body(solver):
        return solver[0].result()

    def build():
        program = Program("result")
        handles = program.add_node(ExternalNode(), label="solver", replicas=mpiml.FILL)
        program.add_node(PyNode(body, handles), label="node")
        return spare(program, first(), 1)

    found = together(build, lambda guest: None, first())
    if comm().rank == 1:
        assert found["node"] == [None]


# -- what keeps a program from starting ------------------------------------------------------------


def refused(build, guests, label="solver", **record):
    """Return code and text at a guest, and the error on Python ranks."""
    if comm().rank in guests:
        error = caught(Guest, comm(), label, **record)
        assert isinstance(error, GuestError), error
        return error.code, error.text
    error = caught(mpiml.launch, build(), comm())
    return type(error), str(error)


@two
@places
def test_guests_that_do_not_fit_are_told_on_both_sides(guests):
    def build(replicas):
        program = Program("placed")
        program.add_node(PyNode(print, end=""), label="node", replicas=mpiml.FILL)
        program.add_node(ExternalNode(), label="solver", replicas=replicas)
        return program

    count = len(guests()) + 1
    kind, text = refused(lambda: build(count), guests())
    assert kind in (7, mpiml.PlacementError)
    assert f"expected {count} ranks that call mpiml_attach with this label" in text

    kind, text = refused(lambda: build(1), guests(), "other")
    assert kind in (7, mpiml.PlacementError)
    assert "ranks attach as 'other', but the program has no ExternalNode of this label" in text
    assert f"it has 'solver' (there attach {len(guests())} as 'other'). Attach with" in text

    def without():
        program = Program("placed")
        program.add_node(PyNode(print, end=""), label="node", replicas=mpiml.FILL)
        return program

    kind, text = refused(without, guests())
    assert kind in (7, mpiml.PlacementError)
    assert "no ExternalNode of this label" in text


@two
def test_without_guests_an_external_node_is_refused():
    program = filled(Program("alone"))
    program.add_node(PyNode(print), label="node", replicas=comm().size)
    error = caught(mpiml.launch, program, comm())
    assert type(error) is mpiml.PlacementError
    assert "got 0. Start both programs together: mpirun" in str(error)


@two
def test_an_error_of_the_file_reaches_guests():
    def build():
        program = Program("wrong")
        node = PyNode(lambda: None)
        node.configure(1, 2, 3)  # not what the function takes
        program.add_node(node, label="node", replicas=mpiml.FILL)
        return filled_once(program)

    def filled_once(program):
        program.add_node(ExternalNode(), label="solver", replicas=1)
        return program

    kind, text = refused(build, first())
    assert kind in (7, 14, mpiml.UsageError)
    assert "lambda" in text


@two
@pytest.mark.parametrize(
    ("record", "code", "text"),
    [
        ({"version": "0.0.9"}, 5, "expected one version of mpiml on all ranks, got"),
        ({"library": "Other MPI v1"}, 6, "expected one MPI library on all ranks, got"),
    ],
)
def test_another_version_or_mpi_is_refused_before_anything_else(record, code, text):
    kind, said = refused(lambda: calling(first()), first(), **record)
    if comm().rank == 0:
        assert kind == code
    else:
        assert kind is mpiml.UsageError
        assert text in said
        assert "mpiml_attach, 'solver'" in said


@three
def test_a_topic_between_guests_is_refused():
    guests = {0: "a", 2: "b"}

    def build():
        program = Program("guests")
        topic = program.topic("t")
        program.add_node(ExternalNode(publishes=topic), label="a")
        program.add_node(ExternalNode(subscribes=topic), label="b")
        program.add_node(PyNode(print, end=""), label="node", replicas=mpiml.FILL)
        return program

    kind, text = refused(build, guests, guests.get(comm().rank))
    assert kind in (7, mpiml.UsageError)
    assert "expected a Python node in between" in text
