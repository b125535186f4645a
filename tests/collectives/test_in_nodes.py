"""Collectives of a role: the same in threads, on a rank for each replica, and folded."""

import os
import re
import threading
import time

import numpy as np
import pytest

import mpiml
from mpiml import Stopped
from mpiml.collectives import Bucket

MODES = [
    "threads",
    pytest.param("ranks", marks=pytest.mark.mpi(min_size=2)),
    pytest.param("folded", marks=pytest.mark.mpi(min_size=2)),
]
LIMIT = 20.0  # seconds after which something hangs


class Runner:
    """Runs programs in one mode; a role of `replicas` nodes then fills the ranks."""

    def __init__(self, mode, comm=None):
        self.mode = mode
        self.comm = comm
        self.replicas = {"threads": 3, "folded": 5}.get(mode) or comm.size

    def __call__(self, program, **settings):
        """Return the result on rank 0, else None; raises on every rank."""
        if self.comm is None:
            return mpiml.launch(program, **settings)
        result = mpiml.launch(program, self.comm, **settings)
        return result if self.comm.rank == 0 else None


@pytest.fixture(params=MODES)
def run(request):
    if request.param == "threads":
        yield Runner("threads")
        return
    from mpi4py import MPI

    size = 2 if request.param == "folded" else min(MPI.COMM_WORLD.size, 4)
    rank = MPI.COMM_WORLD.rank
    comm = MPI.COMM_WORLD.Split(0 if rank < size else MPI.UNDEFINED, rank)
    if comm == MPI.COMM_NULL:
        pytest.skip("a rank that is left over")
    yield Runner(request.param, comm)
    assert comm.allreduce(1) == size  # MPI is as usable as before
    comm.Free()


def of_role(body, replicas, *args, **settings):
    program = mpiml.Program("collective")
    program.add_node(mpiml.PyNode(body, *args), label="learner", replicas=replicas)
    return program


# -- results ------------------------------------------------------------------------------------


def values(index, size=1000):
    """Numbers whose sum depends on the order."""
    return np.random.default_rng(index).standard_normal(size).astype(np.float32)


def sums(sizes):
    context = mpiml.context()
    found = []
    for size in sizes:
        with Bucket(like=np.zeros(size, np.float32)) as bucket:
            assert (bucket.index, bucket.size) == (context.index, context.replicas)
            for round_ in range(3):
                bucket.tree[:] = values(context.index + round_, size)
                bucket.allreduce("sum")
                found.append(bucket.tree.tobytes())
            bucket.tree[:] = context.index
            bucket.broadcast(root=context.replicas - 1)
            assert (bucket.tree == context.replicas - 1).all()
            hosts = bucket.statistics()["hosts"]
    return hosts, found


def test_sums_are_the_same_bits_on_every_member_and_in_order(run):
    sizes = [1, 20, 1000, 300_001]
    result = run(of_role(sums, run.replicas, sizes))
    if result is None:
        return
    hosts, first = result["learner"][0]
    assert all(found == first for _, found in result["learner"])
    for i, given in enumerate(first):
        size, round_ = sizes[i // 3], i % 3
        total = values(round_, size)
        for index in range(1, run.replicas):
            total = total + values(index + round_, size)
        if hosts == 1:
            assert given == total.tobytes()
        else:
            got = np.frombuffer(given, np.float32)
            assert np.allclose(got, total, rtol=1e-5, atol=1e-5)


def alone():
    bucket = Bucket(like={"w": np.zeros(3)})
    bucket["w"][:] = 5
    bucket.allreduce("mean")
    return bucket["w"].tolist()


def test_a_role_of_one_needs_nobody(run):
    program = mpiml.Program("alone")
    program.add_node(mpiml.PyNode(alone), label="one")
    program.add_node(mpiml.PyNode(len, "x"), label="others", replicas=mpiml.FILL)
    result = run(program)
    if result is not None:
        assert result["one"] == [[5.0, 5.0, 5.0]]


def two_roles(factor):
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(3000))
    for round_ in range(30):
        bucket.tree[:] = factor * (context.index + round_)
        bucket.allreduce()
    return bucket.tree[0]


def test_two_roles_reduce_at_the_same_time(run):
    for _ in range(3):
        program = mpiml.Program("two")
        n = run.replicas
        for label, factor in (("a", 1), ("b", 10)):
            program.add_node(mpiml.PyNode(two_roles, factor), label=label, replicas=n)
        result = run(program)
        if result is not None:
            total = sum(range(n)) + n * 29
            assert result["a"] == [total] * n
            assert result["b"] == [10 * total] * n


@pytest.mark.parametrize(
    "mode", ["threads", pytest.param("mpi", marks=pytest.mark.mpi(min_size=2))]
)
def test_colocated_roles_reduce_at_the_same_time(mode):
    comm, n = None, 3
    if mode == "mpi":
        from mpi4py import MPI

        comm, n = MPI.COMM_WORLD, MPI.COMM_WORLD.size
    for _ in range(3):
        program = mpiml.Program("colocated")
        pair = mpiml.Colocation([mpiml.PyNode(two_roles, factor) for factor in (1, 10)])
        program.add_node(pair, label="pair", replicas=n)
        result = mpiml.launch(program, comm)
        if comm is None or comm.rank == 0:
            total = sum(range(n)) + n * 29
            assert result["pair.0"] == [total] * n
            assert result["pair.1"] == [10 * total] * n


# -- the agreed stop ----------------------------------------------------------------------------


def asks_after(seconds):
    mpiml.context().wait_for_stop(seconds)
    mpiml.context().stop()


def with_stopper(runner, body, seconds, *args):
    """A role of learners and, on a rank or thread of its own, one who stops the program."""
    program = mpiml.Program("stopped")
    n = runner.replicas - (runner.mode == "ranks")
    program.add_node(mpiml.PyNode(body, *args), label="learner", replicas=max(n, 1))
    program.add_node(mpiml.PyNode(asks_after, seconds), label="asks")
    return program


def loops(yields):
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))
    rounds = 0
    while not context.stopping:
        bucket.tree[:] = 1
        bucket.allreduce()
        assert (bucket.tree == context.replicas).all()
        rounds += 1
        for _ in range(yields * context.index):  # no two members are equally fast
            os.sched_yield()
    if context.replicas == 1:  # it is told at once, and may still have one to make
        bucket.allreduce()
    with pytest.raises(Stopped):
        bucket.allreduce()
    return rounds


@pytest.mark.parametrize("yields", [0, 300])
def test_stopping_turns_true_after_the_same_collective(run, yields):
    for i in range(15):
        result = run(with_stopper(run, loops, 0.002 * i, yields))
        if result is not None:
            assert len(set(result["learner"])) == 1, result["learner"]
            assert result.stopped_by == "asks/0 called stop()"


def mixes(seconds):
    """Collectives of three kinds between two rounds of agree_stop: none is the last one."""
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))
    if context.index == 0:  # all have begun: an earlier stop would end them in the line above
        threading.Thread(target=context.bind(asks_after), args=(seconds,), daemon=True).start()
    count = 0
    while not context.agree_stop():
        request = bucket.iallreduce()
        bucket.broadcast()
        request.wait()
        with Bucket(like=np.zeros(2)) as another:
            another.allreduce()
        assert not context.stopping or context.replicas == 1
        count += 1
    return count


def test_a_loop_that_asks_is_left_where_it_asks(run):
    for i in range(10):
        result = run(of_role(mixes, run.replicas, 0.003 * i))
        if result is not None:
            assert len(set(result["learner"])) == 1, result["learner"]
            assert None not in result["learner"]


def asks_only_at_first():
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))
    for _ in range(5):
        if not context.agree_stop():
            bucket.allreduce()
    count = 0
    while not context.stopping:
        bucket.allreduce()
        count += 1
    return count


def test_a_loop_that_asks_no_more_is_left_after_a_collective(run):
    for i in range(5):
        result = run(with_stopper(run, asks_only_at_first, 0.02 * i))
        if result is not None:
            assert len(set(result["learner"])) == 1, result["learner"]


def never_looks(seen):
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))
    while True:
        try:
            bucket.allreduce()
        except Stopped:
            seen.append((context.role, context.index))
            raise


def test_a_new_collective_raises_stopped_in_a_body_that_does_not_look(run):
    seen = []
    result = run(with_stopper(run, never_looks, 0.02, seen))
    if result is not None:
        assert set(result["learner"]) == {None}
        assert result.stopped_by == "asks/0 called stop()"


def only_at_first(kind):
    """First values by a collective, and none afterwards."""
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))
    bucket.broadcast()
    if context.index == 0:
        context.stop()
    if kind == "polls":
        while not context.stopping:
            os.sched_yield()
    elif kind == "pauses":
        while not context.wait_for_stop(0.01):
            pass
    elif kind == "agrees":
        context.agree_stop()
        context.wait_for_stop(LIMIT)
    elif context.index % 2:
        context.wait_for_stop()
    else:
        context.wait_for_stop(LIMIT)
    return context.stopping


@pytest.mark.parametrize("kind", ["polls", "pauses", "agrees", "waits"])
def test_a_role_whose_collectives_are_over_stops_all_the_same(run, kind):
    result = run(of_role(only_at_first, run.replicas, kind))
    if result is not None:
        assert set(result["learner"]) == {True}


def looks_often(folder):
    """All but one are idle for a while, but another round comes."""
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))
    rounds = 0
    while not context.stopping:
        bucket.allreduce()
        rounds += 1
        if rounds == 20 and context.index == 0:
            context.stop()
        if rounds == 20 and context.index < context.replicas - 1:
            while not (context._node.idle or context.stopping):
                os.sched_yield()
            (folder / str(context.index)).touch()
        elif rounds == 20:
            while len(list(folder.iterdir())) < context.replicas - 1:
                os.sched_yield()
    return rounds


def test_idle_members_go_on_while_one_is_not(run, tmp_path):
    shared = tmp_path if run.comm is None else run.comm.bcast(tmp_path)
    for i in range(3):
        folder = shared / str(i)
        folder.mkdir(exist_ok=True)
        result = run(of_role(looks_often, run.replicas, folder))
        if result is not None:
            assert len(set(result["learner"])) == 1, result["learner"]


def finishes(sums):
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))

    def last():
        bucket.tree[:] = 1
        bucket.allreduce()
        sums.append((context.replicas, bucket.tree[0]))

    context.on_stop(last)  # all bodies have ended then
    if context.index == 0:
        context.stop()
    context.wait_for_stop()


def test_callbacks_of_the_stop_may_reduce(run):
    sums = []
    run(of_role(finishes, run.replicas, sums))
    assert all(replicas == total for replicas, total in sums)
    if run.mode == "threads":
        assert len(sums) == run.replicas


# -- members that do not come -------------------------------------------------------------------


def fails(index):
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))
    for round_ in range(1000):
        if context.index == index and round_ == 3:
            raise KeyError("mine")
        bucket.allreduce()


@pytest.mark.parametrize("last", [False, True])
def test_a_member_that_fails_ends_the_others(run, last):
    index = run.replicas - 1 if last else 0
    with pytest.raises(KeyError, match="mine"):
        run(of_role(fails, run.replicas, index))


def fails_before(index):
    if mpiml.context().index == index:
        raise KeyError("mine")
    Bucket(like=np.zeros(50))


@pytest.mark.parametrize("last", [False, True])
def test_a_member_that_fails_before_the_bucket_is_made_ends_the_others(run, last):
    with pytest.raises(KeyError, match="mine"):
        run(of_role(fails_before, run.replicas, run.replicas - 1 if last else 0))


def returns(index, rounds):
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))
    for _ in range(rounds + (context.index != index)):
        bucket.allreduce()
    return context.index


@pytest.mark.parametrize("rounds", [0, 3])
def test_a_member_that_has_returned_is_named(run, rounds):
    last = run.replicas - 1
    with pytest.raises(
        mpiml.UsageError,
        match=rf"(?s)Bucket.allreduce.*test_in_nodes.*learner/{last} \(rank \d\) has returned and",
    ):
        run(of_role(returns, run.replicas, last, rounds))


def returns_before(index):
    context = mpiml.context()
    if context.index != index:
        Bucket(like=np.zeros(50))


def test_a_member_that_returns_before_the_bucket_is_made_is_named(run):
    with pytest.raises(mpiml.UsageError, match=r"learner/0 \(rank \d\) has returned and will"):
        run(of_role(returns_before, run.replicas, 0))


def once_more(index, pause):
    """The first one's part is over at once; another comes late, but comes."""
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))
    if context.index == index:
        time.sleep(pause)
    bucket.broadcast()
    return True


def test_a_late_member_is_waited_for_whoever_has_left(run):
    last = run.replicas - 1
    result = run(of_role(once_more, run.replicas, last, 1.5))
    if result is not None:
        assert result["learner"] == [True] * run.replicas


# -- what is shown ------------------------------------------------------------------------------


def late(pause):
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))
    bucket.allreduce()
    if context.index == context.replicas - 1:
        time.sleep(pause)
    bucket.allreduce("max")


def test_who_is_missing_is_said_once_in_one_line(run, capsys):
    run(of_role(late, run.replicas, 1.0), stall_warning=0.3)
    said = capsys.readouterr().err
    said = said if run.comm is None else "".join(run.comm.allgather(said))
    # "max": on a loaded machine the collectives before it may have been late, too
    lines = [line for line in said.splitlines() if "has waited" in line and "max" in line]
    assert len(lines) == 1, said
    assert re.search(
        rf"collective: learner/0 \(rank 0\) has waited \d+ s for learner/{run.replicas - 1} "
        r"\(rank \d\) in Bucket.allreduce\(op='max'\) at tests/collectives/test_in_nodes\.py:\d+$",
        lines[0],
    )


def others_wait(context):
    """Return the graph of waits once all other members stand in it, in a collective."""
    survey, text = context._node.runtime.survey, ""
    while text.count("in collective") < context.replicas - 1:
        text = survey.report(survey.ask(), "who waits")
    return text


def asks_the_survey(background):
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(50))
    text = others_wait(context) if context.index == context.replicas - 1 else ""
    if background:
        bucket.iallreduce().wait()
    else:
        bucket.allreduce()
    return text


@pytest.mark.parametrize("background", [False, True])
def test_the_graph_of_waits_shows_collectives(run, background):
    result = run(of_role(asks_the_survey, run.replicas, background))
    if result is None:
        return
    n = run.replicas
    text = result["learner"][-1]
    who = f"learner/{n - 1}"
    if "MPIML_HOST_SIZE" in os.environ:  # between hosts a message is late, nobody says whose
        who += r"|learner/\d|other members"
    for index in range(n - 1):
        assert re.search(
            rf"learner/{index} \(rank \d\) has waited \d+ s for ({who}) in collective "
            r"Bucket\.allreduce\(op='sum'\) at test_in_nodes\.py:\d+ in asks_the_survey\n",
            text,
        ), text
        assert not re.search(rf"learner/{index} \(rank \d\) computes", text)


# -- services -----------------------------------------------------------------------------------


class Busy:
    """Its run() sits in a collective until the others, which call it meanwhile, come."""

    def __init__(self, first=None):
        self.first = first
        self.calls = 0

    def ping(self, x):
        self.calls += 1
        return x

    def run(self):
        context = mpiml.context()
        bucket = Bucket(like=np.zeros(50))
        if context.index:
            for i in range(100):
                assert self.first.ping(i) == i
        bucket.tree[:] = context.index
        bucket.allreduce()
        return bucket.tree[0], self.calls


def test_services_answer_while_their_run_waits_in_a_collective(run):
    program = mpiml.Program("busy")
    node = mpiml.ServiceNode(Busy)
    services = program.add_node(node, label="busy", replicas=run.replicas)
    node.configure(services[0])
    result = run(program)
    if result is not None:
        n = run.replicas
        total = n * (n - 1) / 2
        assert result["busy"] == [(total, 100 * (n - 1))] + [(total, 0)] * (n - 1)


class Methods:
    """Collectives inside of methods, which all of a group are asked for at once."""

    def __init__(self, others=()):
        self.bucket = Bucket(like=np.zeros(50))
        self.others = others

    def reduce(self, x, ask):
        context = mpiml.context()
        if ask and context.index == context.replicas - 1:
            others_wait(context)  # and give their turns up
            for other in self.others:
                assert other.echo(x) == x
        self.bucket.tree[:] = x + context.index
        self.bucket.allreduce("max")
        return self.bucket.tree[0]

    def echo(self, x):
        return x


def asks_methods(services):
    found = []
    for x in range(4):
        futures = [service.futures.reduce(x, x == 2) for service in services]
        found.append(mpiml.gather(futures))
    return found


def test_methods_may_reduce_and_let_others_run_while_they_wait(run):
    n = run.replicas
    program = mpiml.Program("methods")
    node = mpiml.ServiceNode(Methods)
    services = program.add_node(node, label="service", replicas=max(1, n - 1))
    node.configure(list(services[:-1]))
    program.add_node(mpiml.PyNode(asks_methods, services), label="asks")
    result = run(program)
    if result is not None:
        m = max(1, n - 1)
        assert result["asks"][0] == [[x + m - 1] * m for x in range(4)]


# -- programs within programs, and by hand ------------------------------------------------------


def inner(comm):
    bucket = Bucket(like=np.zeros(3))
    bucket.tree[:] = mpiml.context().index + 1
    bucket.allreduce()
    return bucket.tree[0]


def outer():
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(3))
    program = mpiml.Program("inner")
    program.add_node(mpiml.PyNode(inner, None), label="inner", replicas=2)
    comm = None
    if context._node.runtime.world is not None:
        from mpi4py import MPI

        comm = MPI.COMM_SELF
    result = mpiml.launch(program, comm)
    bucket.tree[:] = result["inner"][0]
    bucket.allreduce()
    return bucket.tree[0]


def test_a_program_inside_of_a_node_has_teams_of_its_own(run):
    if run.mode == "folded":
        pytest.skip("two launches at once on COMM_SELF")
    for _ in range(3):
        result = run(of_role(outer, run.replicas))
        if result is not None:
            assert result["learner"] == [3.0 * run.replicas] * run.replicas


def never(): ...


@pytest.mark.mpi(min_size=2)
def test_code_that_attaches_reduces_with_its_role():
    from mpi4py import MPI

    program = mpiml.Program("attached")
    n = MPI.COMM_WORLD.size
    program.add_node(mpiml.PyNode(never), label="solver", replicas=n)
    with mpiml.attach(program, MPI.COMM_WORLD, label="solver") as me:
        bucket = Bucket(like=np.zeros(3))
        bucket.tree[:] = me.index
        bucket.allreduce()
        assert bucket.tree[0] == n * (n - 1) / 2
    with pytest.raises(mpiml.UsageError, match="comm=None"):
        Bucket(like=np.zeros(3))


def in_threads():
    """One round in a thread bound to the node, one in the body."""
    context = mpiml.context()
    bucket = Bucket(like=np.zeros(3))
    found = []

    def work():
        bucket.tree[:] = context.index
        bucket.allreduce()
        found.append(bucket.tree[0])

    thread = threading.Thread(target=context.bind(work))
    thread.start()
    thread.join()
    work()
    return found


def test_bound_threads_belong_to_the_role(run):
    result = run(of_role(in_threads, run.replicas))
    if result is not None:
        n = run.replicas
        assert result["learner"] == [[n * (n - 1) / 2] * 2] * n


def test_a_thread_of_no_node_is_told_so():
    def body():
        errors = []

        def work():
            try:
                Bucket(like=np.zeros(3))
            except mpiml.UsageError as error:
                errors.append(str(error))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return errors

    result = mpiml.launch(of_role(body, 2))
    assert "bind" in result["learner"][0][0]


def test_nodes_that_a_test_steps_reduce():
    program = mpiml.Program("stepped")
    program.add_node(mpiml.PyNode(inner, None), label="learner", replicas=2)
    with mpiml.testing.running(program, manual=["learner"]) as run:
        with pytest.raises(mpiml.UsageError, match=r"run\.inside"):
            Bucket(like=np.zeros(3))
        steps = run["learner"]
        found = []
        threads = [threading.Thread(target=lambda s=s: found.append(s())) for s in steps]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
    assert found == [3, 3]
