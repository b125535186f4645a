"""`launch` and `attach` in one process: nodes are threads."""

import os
import signal
import sys
import textwrap
import threading
import traceback

import pytest

import mpiml
from mpiml.session import run_session
from tests.mpi import child


class Counter:
    def __init__(self, start=0):
        self.total = start

    def add(self, n=1):
        self.total += n
        return self.total


def count(counter, n):
    return [counter.add() for _ in range(n)]


def hello(workers=1, steps=3, work=count):
    program = mpiml.Program("hello")
    counter = program.add_node(mpiml.ServiceNode(Counter, start=5), label="counter")
    program.add_node(mpiml.PyNode(work, counter, steps), label="worker", replicas=workers)
    return program


def one(function, *args, **settings):
    program = mpiml.Program("one")
    program.add_node(mpiml.PyNode(function, *args), label="node", **settings)
    return program


def test_a_program_returns_its_values_in_index_order():
    program = one(lambda: mpiml.context().index * 10, replicas=4)
    result = mpiml.launch(program)
    assert result["node"] == [0, 10, 20, 30]
    assert result.stopped_by == "finished"
    assert result.status == 0
    assert result.keys() == ["node"]
    with pytest.raises(KeyError, match="the program has node"):
        result["other"]


def test_services_have_no_value():
    result = mpiml.launch(hello())
    assert result["counter"] == [None]
    assert result["worker"] == [[6, 7, 8]]


@pytest.mark.parametrize(("threads", "replicas"), [(None, 1), (3, 3)])
def test_fill_without_mpi(threads, replicas):
    result = mpiml.launch(hello(mpiml.FILL), threads=threads)
    assert len(result["worker"]) == replicas


def test_a_process_may_launch_many_programs_one_inside_another():
    def outer():
        return [mpiml.launch(hello(steps=n))["worker"][0][-1] for n in (1, 2)]

    assert mpiml.launch(one(outer, replicas=2))["node"] == [[6, 7], [6, 7]]
    assert mpiml.launch(one(outer))["node"] == [[6, 7]]


def test_two_programs_at_once_in_two_threads():
    results = [None, None]
    both = threading.Barrier(2)

    def run(i):
        def body():
            both.wait(20)
            return mpiml.context().role, i

        results[i] = mpiml.launch(one(body, replicas=2))["node"]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    # four bodies meet in pairs, so both programs run at the same time or this never ends
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [[("node", 0)] * 2, [("node", 1)] * 2]


def test_no_digest_is_made_without_other_ranks(monkeypatch):
    import mpiml.digest

    monkeypatch.setattr(mpiml.digest, "describe", lambda *_: pytest.fail("described"))
    mpiml.launch(hello())


def test_an_error_is_raised_as_it_is_with_its_traceback():
    class Mine(Exception):
        def __init__(self, a, b):
            super().__init__(a)
            self.b = b

    def crash():
        raise Mine("boom", 7)

    with pytest.raises(Mine, match="boom") as caught:
        mpiml.launch(one(crash))
    assert caught.value.b == 7
    assert "in crash" in "".join(traceback.format_exception(caught.value))


def test_a_failing_constructor_is_raised():
    class Broken(Counter):
        def __init__(self):
            raise OSError("no file")

    program = mpiml.Program("broken")
    counter = program.add_node(mpiml.ServiceNode(Broken), label="counter")
    program.add_node(mpiml.PyNode(count, counter, 1), label="worker")
    with pytest.raises(OSError, match="no file"):
        mpiml.launch(program)


def test_stop_says_who_stopped_it():
    def body():
        mpiml.context().stop()
        mpiml.context().wait_for_stop()
        return "stopped"

    result = mpiml.launch(one(body))
    assert "node/0" in result.stopped_by
    assert result["node"] == ["stopped"]


def test_max_time_stops_a_program():
    result = mpiml.launch(
        one(lambda: mpiml.context().wait_for_stop(), daemon=True), max_time=0.05
    )
    assert result.stopped_by == "--max-time"
    assert result.status == 143


def test_sys_exit_raises_system_exit_and_zero_is_a_return():
    with pytest.raises(SystemExit) as caught:
        mpiml.launch(one(lambda: sys.exit(3)))
    assert caught.value.code == 3
    assert mpiml.launch(one(lambda: sys.exit()))["node"] == [None]


def test_a_value_that_cannot_be_pickled_is_handed_over_in_one_process():
    lock = threading.Lock()
    assert mpiml.launch(one(lambda: lock))["node"] == [lock]


def test_launch_off_the_main_thread_leaves_signals_alone():
    before = signal.getsignal(signal.SIGTERM)
    during = []
    results = []

    def run():
        results.append(
            mpiml.launch(one(lambda: during.append(signal.getsignal(signal.SIGTERM))))
        )

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert results
    assert during == [before]


def test_handlers_are_installed_while_it_runs_and_put_back():
    before = signal.getsignal(signal.SIGTERM), threading.excepthook
    during = mpiml.launch(
        one(lambda: (signal.getsignal(signal.SIGTERM), threading.excepthook))
    )["node"][0]
    assert during[0] != before[0]
    assert during[1] != before[1]
    assert (signal.getsignal(signal.SIGTERM), threading.excepthook) == before


def test_a_signal_stops_the_program():
    def body():
        os.kill(os.getpid(), signal.SIGTERM)
        while not mpiml.context().stopping:  # in wait_for_stop it might finish first
            pass

    result = mpiml.launch(one(body))
    assert (result.stopped_by, result.status) == ("SIGTERM", 143)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: mpiml.launch("hello.py"), "expected a Program or a function"),
        (lambda: mpiml.launch(hello(), on_stuck="no"), "on_stuck"),
        (lambda: mpiml.launch(hello(), comm=3), "an mpi4py communicator, got int"),
        (lambda: mpiml.launch(mpiml.Program("empty")), "empty"),
        (lambda: mpiml.attach("hello.py", label="x").__enter__(), "attach: expected a Program"),
        (lambda: mpiml.launch(hello(), grace=-1), "mpiml.launch: grace: expected .*got -1"),
        (
            lambda: mpiml.attach(hello(), label="counter", stall_warning="1").__enter__(),
            "mpiml.attach: stall_warning: expected .*got '1'",
        ),
        (lambda: mpiml.launch(hello(), threads=0), "threads: expected .*got 0"),
    ],
)
def test_a_wrong_call_is_a_usage_error(call, text):
    with pytest.raises(mpiml.UsageError, match=text):
        call()


def test_a_program_can_be_launched_again():
    program = hello()
    assert mpiml.launch(program)["worker"] == mpiml.launch(program)["worker"] == [[6, 7, 8]]


def test_nothing_is_left_running(tmp_path):
    before = set(threading.enumerate())
    mpiml.launch(hello(workers=3))
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("mpiml")]
    for thread in left:
        thread.join(5)
        assert not thread.is_alive(), left


# -- attach ------------------------------------------------------------------------------------


def solver_graph():
    program = mpiml.Program("attached")
    counter = program.add_node(mpiml.ServiceNode(Counter, 1), label="counter")
    program.add_node(mpiml.PyNode(count, counter, 2), label="solver")
    return program


def test_attach_makes_the_block_the_body():
    with mpiml.attach(solver_graph(), label="solver") as me:
        assert (me.role, me.index) == ("solver", 0)
        assert mpiml.context() is me
        assert me.clients["counter"].add() == 2
        assert not me.stopping
        with pytest.raises(KeyError, match="the program has counter, solver"):
            me.clients["nobody"]
    with pytest.raises(mpiml.UsageError, match="outside of any"):
        mpiml.context()


def test_attach_twice_in_a_row():
    for _ in range(2):
        with mpiml.attach(solver_graph(), label="solver") as me:
            assert me.clients["counter"].add() == 2


def test_an_exception_in_the_block_ends_the_program_and_goes_on():
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught:
        with mpiml.attach(solver_graph(), label="solver"):
            raise error
    assert caught.value is error


def test_leaving_the_block_by_stopped_is_returning():
    reached = []
    with mpiml.attach(solver_graph(), label="solver") as me:
        me.stop()
        while True:
            me.clients["counter"].add()
        reached.append("not reached")
    assert not reached


def test_an_error_of_another_node_is_raised_when_the_block_is_left():
    program = mpiml.Program("attached")
    counter = program.add_node(mpiml.ServiceNode(Counter), label="counter")
    program.add_node(mpiml.PyNode(count, counter, 2), label="solver")
    program.add_node(mpiml.PyNode(lambda: 1 / 0), label="bad")
    with pytest.raises(ZeroDivisionError):
        with mpiml.attach(program, label="solver") as me:
            me.wait_for_stop(20)


def test_attaching_to_a_role_that_is_not_there():
    with pytest.raises(mpiml.UsageError, match=r"no role 'x'; it has counter, solver"):
        with mpiml.attach(solver_graph(), label="x"):
            pytest.fail("entered")


def test_attaching_to_a_role_of_two_needs_two_ranks():
    with pytest.raises(mpiml.UsageError, match="expected 2 ranks to attach"):
        with mpiml.attach(hello(workers=2), label="worker"):
            pytest.fail("entered")


# -- forked children -----------------------------------------------------------------------------


def test_a_forked_child_is_refused_and_the_parent_goes_on():
    def body(counter, n):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            texts = []
            for touch in (counter.add, mpiml.context, counter.futures.add):
                try:
                    touch()
                    texts.append("worked")
                except mpiml.UsageError as error:
                    texts.append(str(error))
            os.write(write, "\n".join(texts).encode())
            os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
        with os.fdopen(read) as stream:
            return stream.read().split("\n"), counter.add()

    ((texts, total),) = mpiml.launch(hello(work=body))["worker"]
    assert len(texts) == 3
    assert all("was forked from rank 0" in text for text in texts), texts
    assert total == 6


# -- launch(build) in a script ---------------------------------------------------------------------

SCRIPT = """
import sys
import mpiml

def work(code: int):
    if code == -1:
        raise ValueError("boom")
    if code:
        sys.exit(code)
    return 42

def build(code: int = 0) -> mpiml.Program:
    program = mpiml.Program("script")
    program.add_node(mpiml.PyNode(work, code), label="worker")
    return program

if __name__ == "__main__":
    print("value", mpiml.launch(build)["worker"])
    print("after")
"""


@pytest.mark.parametrize(
    ("args", "status", "out", "err"),
    [
        ([], 0, "value [42]\nafter\n", ""),
        (["--code", "3"], 3, "", "ended the program by sys.exit(3)"),
        (["--code", "-1"], 1, "", "boom"),
        (["--code", "x"], 2, "", "usage:"),
        (["--help"], 0, "--code", ""),
    ],
)
def test_a_script_ends_as_a_command_does(tmp_path, args, status, out, err):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ended = child(sys.executable, script, *args)
    assert ended.rc == status, ended
    assert out in ended.stdout
    assert err in ended.stderr
    assert ended.stderr.count("Traceback") == (err == "boom")
    if not err:
        assert ended.stderr == ""
    if status:
        assert "after" not in ended.stdout


def test_a_session_that_is_refused_leaves_nothing_behind():
    from mpiml.claims import _busy
    from mpiml.scope import owners
    from mpiml.session import Job

    def load():
        raise RuntimeError("while loading")

    with pytest.raises(RuntimeError, match="while loading"):
        with run_session(Job(load, None, None, mpiml.launch.__globals__["Settings"]())):
            pass
    assert not owners
    assert not _busy


def test_a_start_that_fails_after_a_stop_leaves_no_clock_behind(monkeypatch):
    """One would end the process, which may do something else by then."""
    from mpiml import session
    from mpiml.control import TIME

    def fails(runtime):
        runtime.request(TIME, 143, "--max-time")
        raise OSError("no report")

    monkeypatch.setattr(session, "reporting", fails)
    program = mpiml.Program("fails")
    program.add_node(mpiml.PyNode(print), label="node")
    before = set(threading.enumerate())
    with pytest.raises(OSError, match="no report"):
        mpiml.launch(program, grace=60.0)
    clocks = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    assert not [t for t in clocks if t not in before and not t.finished.is_set()]


def test_a_process_that_a_second_interrupt_ends_says_so(tmp_path):
    file = tmp_path / "busy.py"
    file.write_text(
        textwrap.dedent("""
        import os, signal, time
        import mpiml
        def body():
            os.kill(os.getpid(), signal.SIGINT)
            while not mpiml.context().stopping:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(60)
        program = mpiml.Program("busy")
        program.add_node(mpiml.PyNode(body), label="node")
        mpiml.launch(program)
        """)
    )
    ended = child(sys.executable, file)
    assert ended.rc == 130, str(ended)
    assert "SIGINT came again" in ended.stderr, str(ended)


def test_a_process_of_its_own_does_not_end_with_a_launcher_it_has_heard_of(monkeypatch):
    """What a rank has started may outlive the job, and has its environment."""
    monkeypatch.setenv("MPIML_LAUNCHER_PID", str(os.getppid()))
    monkeypatch.setenv("MPIML_LAUNCHER_HOST", os.uname().nodename)
    [names] = mpiml.launch(one(lambda: [t.name for t in threading.enumerate()]))["node"]
    assert "mpiml signals" in names
    assert "mpiml launcher watch" not in names


@pytest.mark.mpi
def test_a_communicator_is_claimed_under_a_lock(monkeypatch):
    from mpi4py import MPI

    from mpiml import claims

    held = []

    class Busy(list):
        def append(self, item):
            held.append(claims._claiming.locked())
            super().append(item)

        def remove(self, item):
            held.append(claims._claiming.locked())
            super().remove(item)

    monkeypatch.setattr(claims, "_busy", Busy())
    with claims.claimed(MPI.COMM_SELF):
        assert not claims._claiming.locked()
    assert held == [True, True]


@pytest.mark.parametrize("name", ["failure_grace", "prints", "nonsense"])
def test_attach_takes_the_settings_of_launch_and_no_others(name):
    with pytest.raises(TypeError, match=name):
        mpiml.attach(hello(), label="counter", **{name: 1})


def test_a_thread_that_a_body_leaves_behind_is_listed_and_ended(tmp_path):
    """Python itself would wait for it for ever."""
    file = tmp_path / "leaves.py"
    file.write_text(
        "import threading, mpiml\n"
        "def forever():\n"
        "    threading.Event().wait()\n"
        "def body():\n"
        "    threading.Thread(target=forever, name='stray').start()\n"
        "def build():\n"
        "    program = mpiml.Program('leaves')\n"
        "    program.add_node(mpiml.PyNode(body), label='node')\n"
        "    return program\n"
    )
    ended = child(sys.executable, "-m", "mpiml.run", "--grace", "0.2", str(file), timeout=30)
    assert ended.rc == 1
    assert "[stray]" in ended.stderr
    assert "in forever" in ended.stderr
