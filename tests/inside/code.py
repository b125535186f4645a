"""An MPI code that uses mpiml at a thread level it has chosen; started by the tests beside it.

mpiexec -n 3 python code.py funneled loops      # scenarios, one after the other
"""

import asyncio
import concurrent.futures
import os
import sys
import threading
import traceback

import mpi4py

mpi4py.rc.thread_level = sys.argv[1]

import numpy as np  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpiml  # noqa: E402
from mpiml.collectives import Bucket, SharedModel, allreduce  # noqa: E402
from mpiml.collectives.neighbors import ADPSGD  # noqa: E402
from mpiml.collectives.office import Office  # noqa: E402
from mpiml.transport import MpiLink  # noqa: E402

COMM = MPI.COMM_WORLD
RANK, SIZE = COMM.rank, COMM.size
FULL = sys.argv[1] == "multiple"
DONE = "done"
MAIN = threading.get_ident()


def watched(function):
    """Return what calls `function`, which calls MPI, on the main thread only."""

    def call(*args, **kwargs):
        assert threading.get_ident() == MAIN, f"{function.__name__} on another thread"
        return function(*args, **kwargs)

    return call


if not FULL:  # most libraries would let a fault of ours pass
    for made, name in ((MpiLink, "send"), (MpiLink, "poll"), (Office, "progress")):
        setattr(made, name, watched(getattr(made, name)))


def raised(call, error=mpiml.UsageError):
    """Return the text of the error that `call` raises."""
    try:
        call()
    except error as found:
        return str(found)
    raise AssertionError(f"no {error.__name__}")


def beside(function):
    """Run `function` on another thread that belongs to the node; poll until it is over."""
    box = []

    def work():
        try:
            box.append(function())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=mpiml.context().bind(work))
    thread.start()
    while thread.is_alive():
        mpiml.poll()
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]


class Echo:
    def __init__(self, other=None):
        self.other = other
        self.seen = []
        self.threads = set()

    def say(self, value):
        self.seen.append(value)
        self.threads.add(threading.get_ident())
        return value

    def ask(self, value):
        """Call on, from a method, to a service elsewhere."""
        return self.other.say(value)

    def where(self):
        return sorted(self.threads)

    def count(self):
        return len(self.seen)


def body(*clients, **others):
    raise AssertionError("an attached node's own function is not called")


def small(replicas):
    """Return a program with a service on one rank, and a solver to attach to on the others."""
    program = mpiml.Program("small")
    echo = program.add_node(mpiml.ServiceNode(Echo), label="echo")
    program.add_node(mpiml.PyNode(body, echo), label="solver", replicas=replicas)
    return program


def solve(comm, block, first=0, **settings):
    """Attach on all ranks of `comm` but `first`, and run `block` there."""
    program = small(comm.size - 1)
    if comm.rank == first:
        return mpiml.launch(program, comm, **settings)
    with mpiml.attach(program, comm, label="solver", **settings) as me:
        return block(me, me.clients["echo"])


def calls():
    """Calls, futures, arrays and batches of them, from the code's own loop; twice."""

    def block(me, echo):
        assert [echo.say(i) for i in range(20)] == list(range(20))
        futures = [echo.futures.say(np.full(50_000, float(i))) for i in range(4)]
        while not all(future.done() for future in futures):
            mpiml.poll()
        assert [f.result()[-1] for f in futures] == [0.0, 1.0, 2.0, 3.0]
        large = mpiml.gather([echo.futures.say(np.ones(1 << 20)) for _ in range(2)])
        assert sum(a.sum() for a in large) == 2 << 20
        assert beside(lambda: [echo.say(i) for i in range(5)]) == list(range(5))
        return DONE

    for first in (0, SIZE - 1):
        assert solve(COMM, block, first) in (DONE, None) or first == RANK


def hear(fields, answers):
    """Hear every field, and answer with its sum, until all who publish have left."""
    heard = 0
    for field in fields:
        answers.put(float(field.sum()))
        heard += 1
    return heard


def topics():
    """Attached code publishes and hears: what its node was given reaches the block."""
    program = mpiml.Program("topics")
    fields = program.topic("fields", mpiml.Keep(4))
    answers = program.topic("answers", mpiml.Keep(100))
    hears = mpiml.PyNode(hear, fields.subscriber(), answers.publisher())
    both = mpiml.Colocation([mpiml.ServiceNode(Echo), hears])
    echo, _ = program.add_node(both, label="rest")
    solver = mpiml.PyNode(body, [echo], fields.publisher(), answers=answers.subscriber(), n=3)
    program.add_node(solver, label="solver", replicas=SIZE - 1)
    if RANK == 0:
        assert mpiml.launch(program, COMM)["rest.1"] == [20 * (SIZE - 1)]
        return
    with mpiml.attach(program, COMM, label="solver") as me:
        (there,), publisher = me.args
        assert there.say(RANK) == RANK
        for step in range(20):
            publisher.put(np.full(5, float(step)))
            mpiml.poll()
        answers = me.kwargs["answers"]
        assert me.kwargs["n"] == 3
        assert me.args[1] is publisher
        assert me.kwargs["answers"] is answers
        got = [answer for _, answer in zip(range(20 * me.replicas), answers, strict=False)]
        assert sorted(got) == [5.0 * (i // me.replicas) for i in range(20 * me.replicas)]


def polled():
    """A service beside the code's loop is called, and calls on, while the code only polls."""
    program = mpiml.Program("polled")
    echo = program.add_node(mpiml.ServiceNode(Echo), label="echo")
    nodes = [mpiml.PyNode(body), mpiml.ServiceNode(Echo, echo)]
    _, monitor = program.add_node(mpiml.Colocation(nodes), label="solver")
    program.add_node(mpiml.PyNode(watch, monitor), label="watcher")
    if RANK != 1:
        mpiml.launch(program, COMM)
        return
    with mpiml.attach(program, COMM, label="solver.0") as me:
        monitor = me.clients["solver.1"]
        moved = 0
        while not me.stopping and COMM.Iprobe(2, 77) is False:
            moved += mpiml.poll()
        COMM.recv(source=2, tag=77)
        assert moved > 0 or FULL
        assert monitor.count() == 30
        assert threading.get_ident() not in monitor.where()  # it may compute, or call MPI


def watch(monitor):
    for i in range(30):
        assert monitor.say(i) == i
        assert monitor.ask(i) == i
    COMM.send(None, 1, 77)


async def awaited(future):
    return await future


def refused():
    """What needs threads that call MPI is refused by name."""

    def block(me, echo):
        if FULL:
            assert beside(lambda: mpiml.poll() in (True, False))
            return
        text = beside(lambda: raised(mpiml.poll))
        assert "mpiml.poll(): expected thread 'MainThread', got thread" in text
        assert f"MPI_THREAD_{sys.argv[1].upper()}" in text
        assert "MPI_THREAD_MULTIPLE" in text  # the cure
        text = beside(lambda: raised(lambda: allreduce(1.0)))
        assert "a collective of role 'solver': expected thread 'MainThread'" in text
        assert allreduce(1.0) == me.replicas
        text = beside(lambda: raised(lambda: allreduce(1.0)))
        assert "a collective of role 'solver': expected thread 'MainThread'" in text
        text = raised(lambda: concurrent.futures.wait([echo.futures.say(1)]))
        assert "Use mpiml.wait" in text
        text = raised(lambda: asyncio.run(awaited(echo.futures.say(2))))
        assert "await on the future of echo/0.say()" in text
        assert beside(lambda: concurrent.futures.wait([echo.futures.say(3)]).done)
        model = SharedModel(like=np.zeros(3))  # of one host: no messages
        model.add(np.ones(3))
        model.close()
        sides = mpiml.topology.bipartite(me.replicas)
        text = raised(lambda: ADPSGD(np.zeros(2), mpiml.optim.SGD(0.1), sides))
        assert "AD-PSGD of role 'solver': expected MPI_THREAD_MULTIPLE, got MPI_THREAD_" in text

    solve(COMM, block)
    assert "outside of any" in raised(mpiml.poll)


def far():
    """One-sided memory of other hosts needs a thread that serves it."""

    def block(me, echo):
        text = raised(lambda: SharedModel(like=np.zeros(3)))
        assert "one-sided memory of several hosts of role 'solver': expected MPI_THREAD" in text
        assert allreduce(1.0) == me.replicas
        assert echo.say(1) == 1

    solve(COMM, block)


def reduced():
    """Collectives of the role and of any communicator, beside the code's own traffic."""

    def block(me, echo):
        bucket = Bucket(like={"w": np.zeros(1000, np.float32)})
        for step in range(20):
            bucket["w"][:] = me.index + step
            request = bucket.iallreduce("mean")
            assert FULL or request.test()
            request.wait()
            assert bucket["w"][7] == np.float32(step + (me.replicas - 1) / 2)
            assert echo.say(step) == step
            mpiml.poll()
        bucket.close()

    got = np.zeros(4)
    waiting = COMM.Irecv(got, MPI.ANY_SOURCE, MPI.ANY_TAG)  # takes whatever comes on COMM_WORLD
    pair = COMM.Split(RANK % 2, -RANK)
    for step in range(20):
        out = allreduce(np.full(3, RANK + step), comm=pair)
        mine = [r for r in range(SIZE) if r % 2 == RANK % 2]
        assert out.tolist() == [sum(mine) + len(mine) * step] * 3
    solve(COMM, block)
    solve(COMM, block, SIZE - 1)
    assert not waiting.Test()
    COMM.Barrier()
    COMM.Send(np.full(4, RANK + 1.0), (RANK + 1) % SIZE, 12345)
    waiting.Wait()
    assert got.tolist() == [(RANK - 1) % SIZE + 1.0] * 4
    pair.Free()


def parts():
    """A program on some ranks, while the others go on with their own."""
    part = COMM.Split(0 if RANK < 2 else MPI.UNDEFINED, RANK)
    if part != MPI.COMM_NULL:
        solve(part, lambda me, echo: echo.say(3))
        assert not COMM.Iprobe(MPI.ANY_SOURCE, 5) or RANK == 0
        part.Free()
    else:
        COMM.send(RANK, 0, 5)
    if RANK == 0:
        assert sorted(COMM.recv(source=r, tag=5) for r in range(2, SIZE)) == [*range(2, SIZE)]


def nested():
    """A program inside an attached block, on the solver's ranks and on one; the outer goes on."""

    def block(me, echo):
        inner = mpiml.Program("inner")
        there = inner.add_node(mpiml.ServiceNode(Echo), label="echo")
        inner.add_node(
            mpiml.PyNode(lambda c: c.say(7), there), label="user", replicas=me.comm.size
        )
        result = mpiml.launch(inner, me.comm)
        assert echo.say(1) == 1
        if me.index == 0:
            assert result["user"] == [7] * me.replicas
        alone = mpiml.launch(inner, MPI.COMM_SELF)
        assert alone["user"] == [7] * me.replicas
        mpiml.poll()
        assert beside(lambda: echo.say(2)) == 2

    solve(COMM, block)


class Relay:
    """Calls what its rank has put here."""

    onward = None

    def go(self, value):
        return Relay.onward(value)


def around():
    """A wait in the outer program is over only if the same rank serves in the inner one."""
    outer, inner = mpiml.Program("outer"), mpiml.Program("inner")
    _, relay = outer.add_node(
        mpiml.Colocation([mpiml.PyNode(body), mpiml.ServiceNode(Relay)]), label="relays"
    )
    outer.add_node(mpiml.PyNode(body, relay), label="asks")
    _, echo = inner.add_node(
        mpiml.Colocation([mpiml.PyNode(body), mpiml.ServiceNode(Echo)]), label="serves"
    )
    inner.add_node(mpiml.PyNode(body, echo), label="calls")
    pair = COMM.Split(0 if RANK < 2 else MPI.UNDEFINED, RANK)
    if pair == MPI.COMM_NULL:
        return
    turned = pair.Split(0, -RANK)
    labels = ("asks", "serves.0") if RANK else ("relays.0", "calls")
    with (
        mpiml.attach(outer, pair, label=labels[0]) as me,
        mpiml.attach(inner, turned, label=labels[1]) as there,
    ):
        if RANK:
            pair.Barrier()
            assert me.clients["relays.1"].go(5) == 5
            pair.send(None, 0, 9)
        else:
            Relay.onward = mpiml.context().bind(there.clients["serves.1"].say)
            pair.Barrier()
            while not there.stopping and not pair.Iprobe(1, 9):
                mpiml.poll()
            pair.recv(source=1, tag=9)
    turned.Free()
    pair.Free()


def two():
    """A second thread launches while a program runs: only with full support."""
    program = mpiml.Program("second")
    there = program.add_node(mpiml.ServiceNode(Echo), label="echo")
    program.add_node(mpiml.PyNode(lambda c: c.say(8), there), label="user")
    own = COMM.Split(RANK, 0)

    def block(me, echo):
        for _ in range(2):  # what was refused has left nothing behind
            if FULL:
                assert beside(lambda: mpiml.launch(program, own))["user"] == [8]
            else:
                text = beside(lambda: raised(lambda: mpiml.launch(program, own)))
                assert "expected to be called on" in text
                assert f"MPI_THREAD_{sys.argv[1].upper()}" in text
            assert allreduce(1.0) == me.replicas
            assert echo.say(1) == 1
        assert mpiml.launch(program, own)["user"] == [8]

    solve(COMM, block)
    own.Free()


def early():
    """One rank's block ends at once; what it serves is there until all have ended."""
    program = mpiml.Program("early")
    nodes = [mpiml.PyNode(body), mpiml.ServiceNode(Echo)]
    _, echo = program.add_node(mpiml.Colocation(nodes), label="solver")
    program.add_node(mpiml.PyNode(many, echo), label="many", replicas=SIZE - 1)
    if RANK:
        mpiml.launch(program, COMM)
        return
    with mpiml.attach(program, COMM, label="solver.0"):
        pass


def many(echo):
    for i in range(50):
        assert echo.say(i) == i


def failing():
    """An exception in the attached block is raised on all ranks; the next program runs."""

    def block(me, echo):
        echo.say(1)
        if me.index == 0:
            raise ZeroDivisionError("mine")
        while True:
            echo.say(2)

    assert raised(lambda: solve(COMM, block), ZeroDivisionError) == "mine"
    assert COMM.allreduce(1) == SIZE
    solve(COMM, lambda me, echo: echo.say(1))


def stopped():
    """The stop of one rank reaches a loop that only polls."""

    def block(me, echo):
        if me.index == me.replicas - 1:
            me.stop()
        while not me.stopping:
            mpiml.poll()

    solve(COMM, block)


def steps(comm, echo, me):
    """Count steps that wait for the neighbours in calls of MPI, until the role stops."""
    step, got = 0, np.zeros(1)
    while not me.agree_stop():
        ahead, behind = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        comm.Sendrecv(np.full(1, float(step)), ahead, 0, got, behind)
        assert got[0] == step
        step += 1
        if step == 50 and me.index == 0:
            me.stop()
        mpiml.poll()
    return step


def body_of_steps(echo):
    me = mpiml.context()
    return steps(me.comm, echo, me)


def agreed():
    """A stop that is agreed on reaches all in the same step, however they wait for each other."""

    def block(me, echo):
        count = steps(me.comm, echo, me)
        assert me.comm.allgather(count) == [count] * me.replicas
        assert count >= 50

    for _ in range(3):
        solve(COMM, block)
    program = mpiml.Program("agreed")
    echo = program.add_node(mpiml.ServiceNode(Echo), label="echo")
    program.add_node(mpiml.PyNode(body_of_steps, echo), label="steps", replicas=SIZE - 1)
    result = mpiml.launch(program, COMM)
    if RANK == 0:
        assert len(set(result["steps"])) == 1


async def waits(echo):
    values = [echo.futures.say(i) for i in range(3)]
    return sum([await value for value in values])


def async_bodies():
    """Coroutines run on a thread of their own, and the main one drives for them."""
    program = mpiml.Program("async")
    echo = program.add_node(mpiml.ServiceNode(Echo), label="echo")
    program.add_node(mpiml.PyNode(waits, echo), label="waits", replicas=SIZE - 1)
    result = mpiml.launch(program, COMM)
    if RANK == 0:
        assert result["waits"] == [3] * (SIZE - 1)


def handlers():
    """Error handlers are as the code has set them, before and after; so are attributes."""
    key = MPI.Comm.Create_keyval(nopython=True)
    COMM.Set_errhandler(MPI.ERRORS_ARE_FATAL)
    COMM.Set_attr(key, RANK)
    solve(COMM, lambda me, echo: echo.say(1))
    assert COMM.Get_errhandler() == MPI.ERRORS_ARE_FATAL
    assert COMM.Get_attr(key) == RANK
    COMM.Set_errhandler(MPI.ERRORS_RETURN)
    COMM.Delete_attr(key)


def petsc():
    """PETSc's pattern: an inner communicator as an attribute, its own traffic and Finalize."""
    own = COMM.Dup()
    key = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, inner: inner.Free())
    COMM.Set_attr(key, own)

    def block(me, echo):
        vector = me.comm.Dup()
        for step in range(10):
            assert vector.allreduce(step) == step * me.replicas
            assert echo.say(step) == step
        vector.Free()

    request = own.Ibarrier()
    solve(COMM, block)
    request.Wait()
    COMM.Delete_attr(key)


def finalised():
    """MPI_Finalize inside a program: an error that says so, on all ranks, and no hang."""

    def block(me, echo):
        echo.say(1)
        if me.index:
            while True:
                echo.say(2)
        MPI.Finalize()
        assert "MPI was finalised while the program 'small' runs" in raised(lambda: echo.say(1))
        assert "been finalised" in raised(lambda: mpiml.launch(small(SIZE - 1), COMM))
        assert "been finalised" in raised(lambda: allreduce(1.0, comm=COMM))
        assert mpiml.poll() is False

    text = raised(lambda: solve(COMM, block))
    assert "solver/0 (rank 1): MPI was finalised while the program 'small' runs" in text


def deserted(leave):
    """Solver 0 leaves while solver 1 waits for a message of its own from it."""

    def block(me, echo):
        echo.say(1)
        me.comm.Barrier()  # no call of mpiml from here on
        if me.index:
            me.comm.Recv(bytearray(1), source=0)
        leave()

    solve(COMM, block, grace=0.5)


def raises():
    """A rank fails, and another one waits for it in MPI."""

    def leave():
        raise ValueError("nan in the solver")

    deserted(leave)


def finalises():
    """A rank finalises MPI, and another one waits for it in MPI."""
    raised(lambda: deserted(MPI.Finalize))
    MPI.Finalize()  # waits for all


def last():
    """The code finalises MPI itself, once its programs are over."""
    solve(COMM, lambda me, echo: echo.say(1))
    allreduce(np.ones(2), comm=COMM)
    MPI.Finalize()


def elsewhere():
    """Under FUNNELED a thread other than MPI's own may not launch."""
    box = []
    call = lambda: solve(COMM, lambda me, echo: None)  # noqa: E731
    if RANK == 1:  # the others are not told: that would be a call of MPI
        thread = threading.Thread(target=lambda: box.append(raised(call)))
        thread.start()
        thread.join()
        assert "expected to be called on the thread that has initialised MPI" in box[0]
    solve(COMM, lambda me, echo: echo.say(1))


def mixed():
    """Roles may run at different levels, the ranks of one may not: rank 0 has less here."""
    assert solve(COMM, lambda me, echo: echo.say(RANK)) in (RANK, None) or RANK == 0
    text = raised(lambda: solve(COMM, lambda me, echo: None, SIZE - 1))
    assert "role 'solver': expected MPI_THREAD_MULTIPLE on all its ranks or on none" in text
    assert "MPI_THREAD_FUNNELED on rank 0 (" in text
    assert "MPI_THREAD_MULTIPLE on rank 1 (" in text
    solve(COMM, lambda me, echo: echo.say(1))


def single():
    """MPI_THREAD_SINGLE is refused on all ranks, with the cure."""
    text = raised(lambda: solve(COMM, lambda me, echo: None))
    assert "expected MPI_THREAD_FUNNELED or more, got MPI_THREAD_SINGLE" in text
    text = raised(lambda: allreduce(1.0, comm=COMM))
    assert "MPI_Init_thread(MPI_THREAD_FUNNELED)" in text


if __name__ == "__main__":
    try:
        for name in sys.argv[2:]:
            globals()[name]()
            os.write(1, f"{name} ok on {RANK}\n".encode())
    except BaseException:
        os.write(2, f"rank {RANK}:\n{traceback.format_exc()}".encode())
        os._exit(1) if MPI.Is_finalized() else COMM.Abort(1)
