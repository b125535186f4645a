"""`launch` and `attach` on ranks. Every test holds for any number of ranks from its minimum."""

import os
import textwrap
import threading

import pytest

import mpiml
from tests.mpi import environment, mpiexec


class Counter:
    def __init__(self, start=0):
        self.total = start

    def add(self, n=1):
        self.total += n
        return self.total


def count(counter, n):
    return [counter.add() for _ in range(n)]


def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def hello(workers=mpiml.FILL, steps=3, work=count):
    program = mpiml.Program("hello")
    counter = program.add_node(mpiml.ServiceNode(Counter, start=5), label="counter")
    program.add_node(mpiml.PyNode(work, counter, steps), label="worker", replicas=workers)
    return program


def filled(function, *args, **settings):
    program = mpiml.Program("filled")
    program.add_node(
        mpiml.PyNode(function, *args), label="node", replicas=mpiml.FILL, **settings
    )
    return program


def raised(call, kind=BaseException):
    """Return what `call` raises on each rank, for comparison on all of them."""
    try:
        call()
    except kind as error:
        return error
    pytest.fail("nothing was raised")


def index():
    return mpiml.context().index


@pytest.mark.mpi(min_size=2)
def test_values_are_on_rank_0_and_elsewhere_a_usage_error():
    comm = world()
    result = mpiml.launch(filled(index), comm)
    assert result.stopped_by == "finished"
    if comm.rank == 0:
        assert result["node"] == list(range(comm.size))
    else:
        error = raised(lambda: result["node"], mpiml.UsageError)
        assert f"got rank {comm.rank}" in str(error)


@pytest.mark.mpi(min_size=2)
def test_many_in_a_row_leave_mpi_usable():
    comm = world()
    for n in range(20):
        result = mpiml.launch(hello(steps=n % 3), comm)
        if comm.rank == 0:
            values = sorted(v for part in result["worker"] for v in part)
            assert values == list(range(6, 6 + (n % 3) * (comm.size - 1)))
        assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_without_a_communicator_all_ranks_take_part():
    result = mpiml.launch(filled(lambda: mpiml.context().world_size))
    if world().rank == 0:
        assert result["node"] == [world().size] * world().size


@pytest.mark.mpi(min_size=3)
def test_a_sub_communicator_while_the_other_ranks_do_something_else():
    comm = world()
    part = comm.Split(comm.rank % 2)
    if comm.rank % 2 == 0:  # ranks 0, 2, ...; the others never hear of it
        result = mpiml.launch(hello(), part)
        if part.rank == 0:
            assert sum(map(len, result["worker"])) == 3 * (part.size - 1)
    else:
        assert part.allreduce(part.rank) == part.size * (part.size - 1) // 2
    comm.barrier()
    part.Free()


@pytest.mark.mpi(min_size=3)
def test_two_programs_on_two_communicators_at_once():
    comm = world()
    part = comm.Split(comm.rank == 0)
    result = mpiml.launch(filled(lambda: mpiml.context().world_size), part)
    if part.rank == 0:
        assert result["node"] == [part.size] * part.size
    comm.barrier()
    part.Free()


@pytest.mark.mpi(min_size=3)
def test_a_node_launches_a_smaller_program_on_the_communicator_of_its_role():
    def outer(counter, n):
        counter.add()
        inner = mpiml.launch(filled(index), mpiml.context().comm)
        counter.add()  # the outer program is as it was
        return inner["node"] if mpiml.context().index == 0 else None

    comm = world()
    result = mpiml.launch(hello(work=outer), comm)
    if comm.rank == 0:
        assert result["worker"] == [list(range(comm.size - 1))] + [None] * (comm.size - 2)


@pytest.mark.mpi(min_size=2)
def test_a_second_program_on_the_same_communicator_is_refused():
    comm = world()

    def again():
        with pytest.raises(mpiml.UsageError, match="runs on this communicator already"):
            mpiml.launch(filled(index), comm)
        with pytest.raises(
            mpiml.UsageError, match=r"expected a communicator.*context\(\)\.comm"
        ):
            mpiml.launch(filled(index))

    mpiml.launch(filled(again), comm)


@pytest.mark.mpi(min_size=2)
def test_an_intercommunicator_and_no_communicator_are_refused():
    from mpi4py import MPI

    comm = world()
    part = comm.Split(comm.rank == 0)
    inter = part.Create_intercomm(0, comm, 1 if comm.rank == 0 else 0)
    with pytest.raises(mpiml.UsageError, match="intercommunicator"):
        mpiml.launch(filled(index), inter)
    with pytest.raises(mpiml.UsageError, match="COMM_NULL"):
        mpiml.launch(filled(index), MPI.COMM_NULL)
    inter.Free()
    part.Free()
    comm.barrier()


class Mine(Exception):
    def __init__(self, text, code):
        super().__init__(text, code)
        self.code = code


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("last", [False, True])
def test_an_error_is_raised_on_every_rank_with_its_class_and_the_remote_traceback(last):
    comm = world()
    odd = comm.size - 1 if last else 0

    def crash_here():
        if mpiml.context().index == odd:
            raise Mine("boom", 7)
        mpiml.context().wait_for_stop()

    error = raised(lambda: mpiml.launch(filled(crash_here), comm))
    assert type(error) is Mine
    assert (str(error), error.code) == ("('boom', 7)", 7)
    if comm.rank != odd:
        cause = str(error.__cause__)
        assert f"node/{odd}, rank {odd}" in cause
        assert "in crash_here" in cause
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_sys_exit_is_system_exit_on_every_rank():
    comm = world()

    def leave():
        if mpiml.context().index == comm.size - 1:
            raise SystemExit(3)
        mpiml.context().wait_for_stop()

    error = raised(lambda: mpiml.launch(filled(leave), comm))
    assert isinstance(error, SystemExit)
    assert error.code == 3


@pytest.mark.mpi(min_size=2)
def test_a_stop_is_told_to_all():
    comm = world()

    def body():
        if mpiml.context().index == comm.size - 1:
            mpiml.context().stop()
        return mpiml.context().wait_for_stop()

    result = mpiml.launch(filled(body), comm)
    assert f"node/{comm.size - 1}" in result.stopped_by
    if comm.rank == 0:
        assert result["node"] == [True] * comm.size


@pytest.mark.mpi(min_size=2)
def test_max_time_with_a_communicator():
    result = mpiml.launch(
        filled(lambda: mpiml.context().wait_for_stop(), daemon=True), world(), max_time=0.05
    )
    assert (result.stopped_by, result.status) == ("--max-time", 143)


@pytest.mark.mpi(min_size=2)
def test_a_value_that_cannot_be_sent_is_an_error_for_whoever_reads_it():
    comm = world()
    result = mpiml.launch(filled(threading.Lock), comm)
    if comm.rank == 0:
        with pytest.raises(mpiml.RemoteError, match=r"node/1.*(?s:.*)lock"):
            result["node"]


# -- the handshake -------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("last", [False, True])
def test_a_graph_that_differs_on_one_rank(last):
    comm = world()
    odd = comm.size - 1 if last else 0
    steps = 4 if comm.rank == odd else 3
    error = raised(lambda: mpiml.launch(hello(steps=steps), comm))
    assert type(error) is mpiml.GraphMismatchError
    assert "argument 1 of worker" in str(error)
    if comm.size > 2:
        assert f"rank {odd}" in str(error)
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_code_that_differs_on_one_rank():
    comm = world()
    work = [lambda counter, n: 1, lambda counter, n: 2][comm.rank == 1]
    error = raised(lambda: mpiml.launch(hello(work=work), comm))
    assert type(error) is mpiml.GraphMismatchError
    assert "code of worker" in str(error)


@pytest.mark.mpi(min_size=2)
def test_a_graph_that_is_wrong_on_one_rank_is_an_error_on_all():
    comm = world()
    other = mpiml.Program("other").add_node(mpiml.ServiceNode(Counter), label="c")
    program = mpiml.Program("mine")
    here = program.add_node(mpiml.ServiceNode(Counter), label="c")
    handle = other if comm.rank == comm.size - 1 else here
    program.add_node(mpiml.PyNode(count, handle, 1), label="w", replicas=mpiml.FILL)
    error = raised(lambda: mpiml.launch(program, comm))
    assert type(error) is mpiml.UsageError
    assert error.mpiml_rank == comm.size - 1
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=3)
def test_more_ranks_than_nodes_is_refused_on_all_with_both_numbers():
    comm = world()
    error = raised(lambda: mpiml.launch(hello(workers=1), comm))
    assert type(error) is mpiml.PlacementError
    assert "2" in str(error)
    assert str(comm.size) in str(error)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("given", [True, False])
def test_a_bad_variable_on_one_rank_is_an_error_on_all(monkeypatch, given):
    comm = world()
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("MPIML_SPIN_US", "many")
    error = raised(lambda: mpiml.launch(filled(index), comm if given else None))
    assert type(error) is mpiml.UsageError
    assert "MPIML_SPIN_US" in str(error)
    assert error.mpiml_rank == comm.size - 1
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_a_bad_setting_on_one_rank_is_an_error_on_all():
    comm = world()
    error = raised(lambda: mpiml.launch(filled(index), comm, grace=-1 if comm.rank else 1))
    assert "mpiml.launch: grace: expected" in str(error)
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_log_that_one_rank_cannot_write_is_an_error_on_all(tmp_path, kind):
    from mpiml.runtime import Settings
    from mpiml.session import Job, run_session

    comm = world()
    odd = comm.size - 1
    if comm.rank == odd and kind == "folder":
        (tmp_path / "logs").write_text("")
    elif comm.rank == odd:
        (tmp_path / "logs" / f"node-{odd}.log").mkdir(parents=True)
    program = filled(index)
    job = Job(lambda: program, None, comm, Settings(), log_dir=tmp_path / "logs")

    def run():
        with run_session(job) as runtime:
            runtime.run()

    error = raised(run)
    assert type(error) is mpiml.UsageError
    assert "--log-dir" in str(error)
    assert error.mpiml_rank == odd
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", ["Survey", "reporting", "Engine"])
def test_a_rank_that_cannot_set_itself_up_is_an_error_on_all(monkeypatch, what):
    from mpiml import session

    comm = world()

    def fail(*args):
        raise Mine("no memory", 3)

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(session, what, fail)
    error = raised(lambda: mpiml.launch(filled(index), comm))
    assert type(error) is Mine
    assert error.mpiml_rank == comm.size - 1
    if comm.rank == 0:
        assert "while the program was started" in str(error.__cause__)
    monkeypatch.undo()
    mpiml.launch(filled(index), comm)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("last", [False, True])
def test_an_error_of_mpiml_itself_on_one_rank_is_raised_on_all(monkeypatch, last):
    from mpiml.runtime import Runtime

    comm = world()

    def fail(self):
        raise Mine("a bug", 5)

    if comm.rank == (comm.size - 1 if last else 0):
        monkeypatch.setattr(Runtime, "_serve_until_stop", fail)
    error = raised(lambda: mpiml.launch(filled(index), comm.Dup()))
    assert type(error) is Mine
    assert error.code == 5
    assert comm.allreduce(1) == comm.size


# -- folding and the context ----------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_folded_replicas_share_ranks_and_have_no_communicator(capfd):
    comm = world()

    def body():
        context = mpiml.context()
        with pytest.raises(mpiml.PlacementError, match=f"Start {comm.size} more ranks"):
            context.comm  # noqa: B018
        return context.index, context.world_rank

    program = mpiml.Program("folded")
    program.add_node(mpiml.PyNode(body), label="node", replicas=2 * comm.size)
    result = mpiml.launch(program, comm)
    said = capfd.readouterr().err
    if comm.rank == 0:
        assert [i for i, _ in result["node"]] == list(range(2 * comm.size))
        assert sorted(r for _, r in result["node"]) == sorted([*range(comm.size)] * 2)
        assert said.count("\n") == 1
        assert "node" in said
    else:
        assert said == ""


@pytest.mark.mpi(min_size=3)
def test_the_communicator_of_a_role_has_its_replicas_in_order():
    comm = world()

    def body(counter, n):
        context = mpiml.context()
        role = context.comm
        assert (role.rank, role.size) == (context.index, context.replicas)
        assert context.world.size == context.world_size == comm.size
        assert context.world.rank == context.world_rank == comm.rank
        return role.allgather(context.index)

    result = mpiml.launch(hello(work=body), comm)
    if comm.rank == 0:
        assert result["worker"] == [list(range(comm.size - 1))] * (comm.size - 1)


@pytest.mark.mpi(min_size=2)
def test_what_the_context_says_of_the_place():
    comm = world()

    def body():
        c = mpiml.context()
        return c.role, c.index, c.replicas, c.host, c.local_rank, c.local_size

    result = mpiml.launch(filled(body), comm)
    names = comm.gather(os.uname().nodename)
    if comm.rank == 0:
        for i, value in enumerate(result["node"]):
            assert value[:3] == ("node", i, comm.size)
            assert value[3] == names[i]
        assert max(v[4] for v in result["node"]) < max(v[5] for v in result["node"]) + 1


@pytest.mark.mpi(min_size=2)
def test_seeds_are_the_same_whatever_the_number_of_ranks():
    from mpi4py import MPI

    comm = world()

    def body():
        c = mpiml.context()
        return c.seed, float(c.rng.random())

    def seeds(comm, seed):
        program = mpiml.Program("seeds")
        program.add_node(mpiml.PyNode(body), label="node", replicas=2 * world().size)
        return mpiml.launch(program, comm, seed=seed)

    wide = seeds(comm, 1)
    narrow = seeds(MPI.COMM_SELF, 1)["node"]
    other = seeds(MPI.COMM_SELF, 2)["node"]
    assert len(set(narrow) | set(other)) == 4 * comm.size
    if comm.rank == 0:
        assert wide["node"] == narrow


# -- attach ------------------------------------------------------------------------------------


def solver(comm, replicas=1):
    """Return a program for `comm` with a solver to attach to."""
    program = mpiml.Program("attached")
    counter = program.add_node(mpiml.ServiceNode(Counter), label="counter")
    program.add_node(mpiml.PyNode(count, counter, 2), label="solver", replicas=replicas)
    rest = comm.size - 1 - replicas
    if rest > 0:
        program.add_node(mpiml.PyNode(count, counter, 1), label="more", replicas=rest)
    return program


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("last", [False, True])
def test_attach_on_one_rank_while_the_others_launch(last):
    comm = world()
    place = comm.size - 1 if last else 0
    for _ in range(2):
        if comm.rank == place:
            with mpiml.attach(solver(comm), comm=comm, label="solver") as me:
                assert (me.role, me.index, me.comm.size) == ("solver", 0, 1)
                assert me.world_rank == place
                assert me.clients["counter"].add() >= 1
                assert not me.stopping
        else:
            mpiml.launch(solver(comm), comm)
        assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=3)
def test_attach_on_several_ranks_with_their_communicator():
    comm = world()
    if comm.rank == 0:
        mpiml.launch(solver(comm, comm.size - 1), comm)
    else:
        with mpiml.attach(solver(comm, comm.size - 1), comm=comm, label="solver") as me:
            assert me.comm.allgather(me.index) == list(range(comm.size - 1))


@pytest.mark.mpi(min_size=2)
def test_an_exception_in_an_attached_block_is_raised_on_all():
    comm = world()

    def attached():
        with mpiml.attach(solver(comm), comm=comm, label="solver"):
            raise Mine("mine", 1)

    error = raised(attached if comm.rank == 0 else lambda: mpiml.launch(solver(comm), comm))
    assert type(error) is Mine
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_the_stop_of_another_node_ends_an_attached_block():
    comm = world()

    def build():
        program = mpiml.Program("stopped")
        counter = program.add_node(mpiml.ServiceNode(Counter), label="counter")
        program.add_node(mpiml.PyNode(stopper, counter), label="stopper", replicas=mpiml.FILL)
        return program

    def stopper(counter):
        mpiml.context().stop()

    def service():
        with mpiml.attach(build(), comm=comm, label="counter") as me:
            me.wait_for_stop(20)
            assert me.stopping

    if comm.rank == 0:
        service()
    else:
        mpiml.launch(build(), comm)
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("label", ["solver", "nobody"])
def test_attaching_wrongly_is_a_usage_error_on_all(label):
    comm = world()

    def attached():  # on two ranks, for one replica
        with mpiml.attach(solver(comm), comm=comm, label=label):
            pytest.fail("entered")

    call = attached if comm.rank < 2 else lambda: mpiml.launch(solver(comm), comm)
    error = raised(call)
    assert type(error) is mpiml.UsageError
    wanted = "expected 1 ranks to attach" if label == "solver" else "no role 'nobody'"
    assert wanted in str(error)
    assert comm.allreduce(1) == comm.size


# -- whole runs ------------------------------------------------------------------------------------

PROGRAM = """
import os, sys
import mpiml
{top}

def work(counter):
    {body}
    return counter.add()

class Counter:
    total = 0
    def add(self):
        self.total += 1
        return self.total

def build() -> mpiml.Program:
    program = mpiml.Program("whole")
    counter = program.add_node(mpiml.ServiceNode(Counter), label="counter")
    program.add_node(mpiml.PyNode(work, counter), label="worker", replicas=mpiml.FILL)
    return program
"""


def run(tmp_path, top="", body="pass", n=3, **env):
    file = tmp_path / "whole.py"
    file.write_text(textwrap.dedent(PROGRAM).format(top=top, body=body))
    return mpiexec(n, "-m", "mpiml.run", file, env=environment(**env), timeout=60)


RANK = 'int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)'


def test_an_error_while_one_rank_loads_the_file_ends_all_with_one_traceback(
    mpi_launcher, tmp_path
):
    ended = run(tmp_path, top=f"if {RANK} == 1:\n    import not_there_at_all")
    assert ended.rc == 1
    assert ended.stderr.count("Traceback") == 1, ended
    assert "not_there_at_all" in ended.stderr
    assert not ended.leftovers


def test_a_clean_run_says_nothing(mpi_launcher, tmp_path):
    ended = run(tmp_path, body='print("here")').check()
    assert ended.stderr == ""
    assert sorted(ended.stdout.split("\n")) == ["", "[worker/0] here", "[worker/1] here"]


def test_pretended_hosts(mpi_launcher, tmp_path):
    body = "c = mpiml.context(); print(c.host, c.local_rank, c.local_size)"
    ended = run(tmp_path, body=body, n=4, MPIML_HOST_SIZE="2").check()
    places = sorted(line.split("/", 2)[-1] for line in ended.stdout.splitlines())
    assert places == ["0 1 2", "1 0 2", "1 1 2"], ended


def test_a_forked_child_that_ends_by_itself_leaves_mpi_alone(mpi_launcher, tmp_path):
    body = (
        "pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            counter.add()\n"
        "        except mpiml.UsageError as error:\n"
        "            os._exit(7 if 'forked' in str(error) else 8)\n"
        "        os._exit(9)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        sys.exit(5)  # through launch, atexit and all\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0)"
    )
    ended = run(tmp_path, body=body).check()
    for worker in range(2):
        assert f"[worker/{worker}] 7" in ended.stdout, ended
        assert f"[worker/{worker}] True" in ended.stdout, ended


SCRIPT = """
import sys, time
import mpiml

def work(seconds):
    if mpiml.context().index:
        mpiml.context().stop()
    else:
        time.sleep(seconds)

def build() -> mpiml.Program:
    program = mpiml.Program("stuck")
    program.add_node(mpiml.PyNode(work, {seconds}), label="node", replicas=4)
    return program

if __name__ == "__main__":
    try:
        mpiml.launch({given}, grace=0.2, on_stuck="raise")
    except mpiml.MpimlError as error:
        print("caught", flush=True)
"""


@pytest.mark.parametrize(("given", "caught"), [("build", 0), ("build()", 1)])
def test_after_a_program_was_given_up_the_job_ends_with_a_status(
    mpi_launcher, tmp_path, given, caught
):
    file = tmp_path / "stuck.py"
    file.write_text(textwrap.dedent(SCRIPT).format(given=given, seconds=1))
    ended = mpiexec(2, file, env=environment(), timeout=40)
    assert ended.rc != 0, ended
    assert "still ran after the grace" in ended.stderr or caught
    assert "MPI cannot be finalised" in ended.stderr, ended
    assert not ended.leftovers


@pytest.mark.parametrize("n", [2, 3])
def test_a_script_that_ends_well_says_nothing(mpi_launcher, tmp_path, n):
    file = tmp_path / "script.py"
    launched = "\nif __name__ == '__main__':\n    mpiml.launch(build)\n"
    file.write_text(textwrap.dedent(PROGRAM).format(top="", body="pass") + launched)
    ended = mpiexec(n, file, env=environment(), timeout=60).check()
    assert ended.stderr == ""
    assert not ended.leftovers
