"""Topics in programs: who hears whom, in which order, what is lost, and when it ends."""

import numpy as np
import pytest

import mpiml
from mpiml.wire import TOPIC, split
from tests.playing import both

LIMIT = 30.0


def run(mode, build):
    """Build a program, run it in threads or on the ranks of mpiexec; its results on rank 0."""
    program = mpiml.Program("topics")
    build(program)
    comm = None
    if mode == "mpi":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        if comm.size > sum(role.replicas for role in program.roles):
            program.add_node(mpiml.PyNode(lambda: None), label="spare", replicas=mpiml.FILL)
    return mpiml.launch(program, comm=comm)


def say(publisher, count, start=0, step=1):
    for i in range(start, start + count * step, step):
        publisher.put(i)


def hear(subscriber):
    return list(subscriber)


def result(mode, program_result, role):
    if mode == "mpi":
        from mpi4py import MPI

        if MPI.COMM_WORLD.rank:
            return None
    return program_result[role]


@both
@pytest.mark.parametrize("n", [1, 3, 64])
def test_every_subscriber_gets_every_message_in_order(mode, n):
    def build(program):
        topic = program.topic("numbers", policy=mpiml.Keep(n))
        program.add_node(mpiml.PyNode(say, topic.publisher(), 200), label="say")
        program.add_node(mpiml.PyNode(hear, topic.subscriber()), label="hear", replicas=2)

    heard = result(mode, run(mode, build), "hear")
    assert heard in (None, [list(range(200))] * 2)


@both
def test_order_of_each_publisher_holds_and_iteration_ends_with_the_last(mode):
    def build(program):
        topic = program.topic("numbers", policy=mpiml.Keep(4))
        for k in range(2):
            node = mpiml.PyNode(say, topic.publisher(), 50, k, 2)
            program.add_node(node, label=f"say{k}")
        program.add_node(mpiml.PyNode(hear, topic.subscriber()), label="hear")

    heard = result(mode, run(mode, build), "hear")
    if heard is not None:
        assert sorted(heard[0]) == list(range(100))
        for k in range(2):
            assert [x for x in heard[0] if x % 2 == k] == list(range(k, 100, 2))


@both
def test_latest_skips_what_is_old_and_never_the_newest(mode):
    def talk(publisher, begun, over):
        say(publisher, 1)
        begun.get(LIMIT)
        say(publisher, 2998, 1)
        over.put(True)
        begun.get(LIMIT)
        publisher.put(2999)

    def slow(subscriber, begun, over):
        got = [subscriber.get(LIMIT)]
        begun.put(True)
        over.get(LIMIT)  # nothing is taken while the rest is put
        begun.put(True)
        return got + list(subscriber), subscriber.dropped

    def build(program):
        topic, begun = program.topic("numbers"), program.topic("begun", mpiml.Keep(1))
        over = program.topic("over")
        node = mpiml.PyNode(talk, topic.publisher(), begun.subscriber(), over.publisher())
        program.add_node(node, label="say")
        node = mpiml.PyNode(slow, topic.subscriber(), begun.publisher(), over.subscriber())
        program.add_node(node, label="hear")

    heard = result(mode, run(mode, build), "hear")
    if heard is not None:
        got, dropped = heard[0]
        assert got == sorted(set(got))
        assert (got[0], got[-1]) == (0, 2999)
        assert len(got) <= 5  # the first, the last, and what waits on both sides and between
        assert dropped == {"say/0": 3000 - len(got)}


@both
def test_dropped_messages_are_counted_on_both_sides(mode):
    def flood(publisher, go):
        for i in range(500):
            publisher.put(i)
        go.put(True)
        return publisher.dropped

    def late(subscriber, go):
        assert go.get(LIMIT)
        got = list(subscriber)
        return got, subscriber.dropped["flood/0"]

    def build(program):
        topic = program.topic("numbers", policy=mpiml.Keep(8, on_full="drop_oldest"))
        go = program.topic("go", policy=mpiml.Keep(1))
        node = mpiml.PyNode(flood, topic.publisher(), go.publisher())
        program.add_node(node, label="flood")
        node = mpiml.PyNode(late, topic.subscriber(), go.subscriber())
        program.add_node(node, label="late")

    found = run(mode, build)
    if result(mode, found, "late") is not None:
        got, dropped = found["late"][0]
        assert got[-1] == 499
        assert len(got) <= 8 + 8
        assert len(got) + dropped == 500
        assert found["flood"][0] <= dropped


def exchange(publisher, subscriber, rounds):
    """Hand a sum around a ring."""
    me = mpiml.context()
    value = me.index
    for _ in range(rounds):
        publisher.put(value, to=(me.index + 1) % me.replicas)
        value = subscriber.get(LIMIT) + me.index
    return value


@both
def test_a_ring_of_single_publishers_and_subscribers(mode):
    def build(program):
        topic = program.topic("ring", policy=mpiml.Keep(1))
        before = topic.subscriber(source=lambda i, n: (i - 1) % n)
        node = mpiml.PyNode(exchange, topic.publisher(), before, 3)
        program.add_node(node, label="ring", replicas=3)

    assert result(mode, run(mode, build), "ring") in (None, [3, 4, 5])


class Watched:
    """The engine and the link of a publisher: notes for whom its messages are."""

    def __init__(self, behind, targets):
        self.behind, self.targets = behind, targets

    def __getattr__(self, name):
        value = getattr(self.behind, name)
        return Watched(value, self.targets) if name == "link" else value

    def transmit(self, rank, kind, source, target, *rest, **more):
        if kind == TOPIC:
            self.targets.append(target)
        self.behind.transmit(rank, kind, source, target, *rest, **more)

    def send(self, rank, message, *buffers):
        self.targets.append(split(message).target)
        self.behind.send(rank, message, *buffers)


@both
def test_no_byte_goes_to_who_did_not_choose(mode):
    def talk(publisher):
        targets = []
        publisher._outgoing.engine = Watched(publisher._outgoing.engine, targets)
        publisher.put(1, to="a")
        (a,) = targets
        for nobody in ("c", 1, -1, [], [3, 2], ["a", "c"], lambda i, n: 7):
            with pytest.raises(mpiml.UsageError, match=r"put\(\) of talk/0: to: "):
                publisher.put(2, to=nobody)
        with pytest.raises(mpiml.UsageError, match=r"expected one of a/0, b/0, got 'c'"):
            publisher.put(2, to="c")
        publisher.put(3, to="a")
        assert targets == [a, a]

    def build(program):
        topic = program.topic("numbers", policy=mpiml.Keep(2))
        program.add_node(mpiml.PyNode(talk, topic.publisher()), label="talk")
        for label in "ab":
            program.add_node(mpiml.PyNode(hear, topic.subscriber("talk")), label=label)

    found = run(mode, build)
    assert result(mode, found, "a") in (None, [[1, 3]])
    assert result(mode, found, "b") in (None, [[]])


@both
def test_round_robin_gives_each_message_to_one(mode):
    def build(program):
        topic = program.topic("jobs", policy=mpiml.Keep(2), deliver="round_robin")
        program.add_node(mpiml.PyNode(say, topic.publisher(), 60), label="say")
        program.add_node(mpiml.PyNode(hear, topic.subscriber()), label="hear", replicas=2)

    heard = result(mode, run(mode, build), "hear")
    if heard is not None:
        assert sorted(heard[0] + heard[1]) == list(range(60))
        assert all(heard)


@both
def test_a_subscriber_that_has_left_holds_nobody_up_and_is_counted(mode):
    def leave(subscriber):
        return subscriber.get(LIMIT)

    def talk(publisher):
        while not publisher.undelivered:
            publisher.put(0)
        return True

    def build(program):
        topic = program.topic("numbers", policy=mpiml.Keep(2))
        program.add_node(mpiml.PyNode(talk, topic.publisher()), label="talk")
        program.add_node(mpiml.PyNode(leave, topic.subscriber()), label="leave")

    assert result(mode, run(mode, build), "talk") in (None, [True])


@both
def test_get_waits_for_so_long_and_says_when_nobody_is_left(mode):
    def body(subscriber, done):
        with pytest.raises(mpiml.DeadlineError, match="expected one within 0 s"):
            subscriber.get(0)
        done.put(1)
        assert subscriber.get() == "last"
        with pytest.raises(mpiml.ServiceGoneError, match=r"publishers have returned: say/0"):
            subscriber.get()
        assert list(subscriber) == []

    def last(publisher, done):
        done.get(LIMIT)
        publisher.put("last")

    def build(program):
        topic, done = program.topic("text"), program.topic("done")
        node = mpiml.PyNode(last, topic.publisher(), done.subscriber())
        program.add_node(node, label="say")
        program.add_node(mpiml.PyNode(body, topic.subscriber(), done.publisher()), label="hear")

    run(mode, build)


@both
def test_arrays_are_the_receivers_own(mode):
    def send(publisher):
        x = np.arange(100_000.0)
        publisher.put({"x": x})
        x[:] = -1  # captured before

    def take(subscriber):
        x = subscriber.get(LIMIT)["x"]
        x += 1
        return float(x[-1])

    def build(program):
        topic = program.topic("arrays", policy=mpiml.Keep(2))
        program.add_node(mpiml.PyNode(send, topic.publisher()), label="send")
        program.add_node(mpiml.PyNode(take, topic.subscriber()), label="take", replicas=2)

    assert result(mode, run(mode, build), "take") in (None, [100_000.0] * 2)


@both
def test_coroutines_and_codecs(mode):
    async def listen(subscriber):
        return [x async for x in subscriber]

    def build(program):
        topic = program.topic(
            "numbers", mpiml.Keep(3), encode=lambda x: str(x), decode=lambda x: int(x) + 1
        )
        program.add_node(mpiml.PyNode(say, topic.publisher(), 20), label="say")
        program.add_node(mpiml.PyNode(listen, topic.subscriber()), label="hear")

    assert result(mode, run(mode, build), "hear") in (None, [list(range(1, 21))])


@both
def test_a_stop_ends_waits_for_room_and_for_messages(mode):
    def put(publisher):
        while True:
            publisher.put(0)

    def wait(subscriber):
        subscriber.get()
        subscriber.get()

    def stop(subscriber):
        subscriber.get()
        mpiml.context().stop()

    def never(publisher):
        mpiml.context().wait_for_stop()

    def build(program):
        full, silent = program.topic("full", mpiml.Keep(1)), program.topic("silent")
        program.add_node(mpiml.PyNode(put, full.publisher()), label="put")
        program.add_node(mpiml.PyNode(stop, full.subscriber()), label="stop")
        program.add_node(mpiml.PyNode(wait, silent.subscriber()), label="wait")
        program.add_node(mpiml.PyNode(never, silent.publisher()), label="never")

    run(mode, build)


def twice(name):
    program = mpiml.Program("twice")
    program.topic(name)
    program.topic(name)


def foreign():
    other, program = mpiml.Program("other"), mpiml.Program("program")
    own, topic = program.topic("x"), other.topic("y")
    node = mpiml.PyNode(print, own.publisher(), own.subscriber(), topic.publisher())
    program.add_node(node, label="use")
    mpiml.launch(program)


def whole():
    program = mpiml.Program("whole")
    program.add_node(mpiml.PyNode(print, program.topic("x")), label="use")
    mpiml.launch(program)


def sourced(source):
    program = mpiml.Program("sourced")
    topic = program.topic("x")
    program.add_node(mpiml.PyNode(say, topic.publisher(), 1), label="say")
    program.add_node(mpiml.PyNode(hear, topic.subscriber(source)), label="hear")
    mpiml.launch(program)


def broken(what):
    program = mpiml.Program("broken")
    topic = program.topic("x")
    both = {"publisher": topic.publisher, "subscriber": topic.subscriber}
    for end in what:
        program.add_node(mpiml.PyNode(print, both[end]()), label=end)
    mpiml.launch(program)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: broken(["publisher"]),
            r"topic 'x': publisher/0 has its publisher\(\), and no node its subscriber\(\). Pass",
        ),
        (
            lambda: broken(["subscriber"]),
            r"topic 'x': subscriber/0 has its subscriber\(\), and no node its publisher\(\). Pass",
        ),
        (lambda: twice("x"), "topic 'x': expected a name of its own, got 'x'"),
        (lambda: twice(3), "topic 3: expected a name of its own, got 3"),
        (lambda: mpiml.Keep(0), "Keep: n: expected a whole number >= 1, got 0"),
        (lambda: mpiml.Keep(-2), "Keep: n: expected a whole number >= 1, got -2"),
        (lambda: mpiml.Keep(2.5), "Keep: n: expected a whole number >= 1, got 2.5"),
        (
            lambda: mpiml.Keep(2, on_full="drop"),
            "on_full: expected 'block' or 'drop_oldest', got 'drop'",
        ),
        (
            lambda: foreign(),
            r"use/0: topic 'y'.publisher\(\): expected a topic of the same program",
        ),
        (
            lambda: whole(),
            r"PyNode\(print\): argument 0: expected an end of topic 'x', got the topic",
        ),
        (
            lambda: sourced(lambda i, n: None),
            "expected a label, an index, or several, got None",
        ),
        (lambda: sourced(lambda i, n: np.int64(1)), r"of hear/0: hears nobody .* say/0"),
        (lambda: sourced(np.int64(-2)), r"of hear/0: hears nobody \(-2\).* say/0"),
        (lambda: sourced(lambda i, n: True), "expected a label, an index, or several, got T"),
        (lambda: sourced(lambda i, n: n), r"of hear/0: hears nobody \(1\).* say/0"),
        (lambda: sourced(lambda i, n: []), r"of hear/0: hears nobody \(\[\]\).* say/0"),
        (lambda: sourced(lambda i, n: ["say", "no"]), "'no' is none of say/0"),
        (lambda: sourced("sya"), r"of hear/0: hears nobody \('sya'\).* say/0"),
        (lambda: sourced(-1), r"of hear/0: hears nobody \(-1\).* say/0"),
        (lambda: mpiml.Program("p").topic("x", "newest"), "policy: expected 'latest' or"),
        (lambda: mpiml.Program("p").topic("x", deliver="one"), "deliver: expected 'all' or"),
        (lambda: mpiml.Program("p").topic("x", encode=3), "encode: expected a function, got 3"),
        (lambda: mpiml.Program("p").topic(""), "expected a name of its own"),
        (
            lambda: mpiml.Program("p").topic("x").subscriber(source=2.5),
            "source: expected a label",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(make, text):
    with pytest.raises(mpiml.UsageError, match=text):
        make()


@pytest.mark.parametrize(
    "source",
    [
        np.int64(0),
        lambda i, n: np.int32(i),
        lambda i, n: np.arange(n),
        lambda i, n: [np.int64(i), i + 1],
    ],
    ids=["index", "function", "array", "list"],
)
def test_indices_of_numpy_choose_as_others_do(source):
    sourced(source)
