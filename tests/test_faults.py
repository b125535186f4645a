"""Signals while the main thread is deaf, forked children, and launchers that die."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from mpiml import ancestors, faults, forking
from mpiml.ancestors import Process, launcher_chain, look_up
from mpiml.config import Config
from mpiml.errors import Stopped
from mpiml.faults import LauncherWatch, Signals, install_excepthooks
from mpiml.forking import guard_fork

LIMIT = 20  # s; only a hang takes so long
ROOT = Path(__file__).resolve().parents[1]
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


class Calls:
    """Collects what the callbacks are given, and waits for it."""

    def __init__(self):
        self.seen = []
        self._changed = threading.Condition()

    def __call__(self, *args):
        with self._changed:
            self.seen.append(args)
            self._changed.notify_all()

    def wait(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= count, LIMIT), self.seen
        return self.seen


def send(number):
    os.kill(os.getpid(), number)


def run_child(code, *args):
    """Run a program to its end, and return its status and what it printed."""
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True, text=True, timeout=LIMIT, check=False, cwd=ROOT,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


@pytest.fixture
def hooks():
    """Callbacks, and the check that handlers and the wake-up descriptor are put back."""
    before = [signal.getsignal(number) for number in NUMBERS]
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    yield Calls(), Calls(), Calls()
    assert [signal.getsignal(number) for number in NUMBERS] == before
    now = signal.set_wakeup_fd(wakeup)
    assert now == wakeup


# -- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_signals_that_stop(hooks, number):
    stop, again, quit_ = hooks
    with Signals(*hooks) as signals:
        assert signals.installed
        send(number)
        assert stop.wait(1) == [(number,)]
        send(number)
        assert stop.wait(2) == [(number,)] * 2
    assert not signals.installed
    assert again.seen == quit_.seen == []


def test_second_interrupt_gets_through_while_the_stop_hangs(hooks):
    stop, again, _ = hooks
    let_go = threading.Event()

    def hang(number):
        stop(number)
        let_go.wait(LIMIT)

    with Signals(hang, again, lambda: None):
        send(signal.SIGINT)
        assert stop.wait(1) == [(signal.SIGINT,)]
        send(signal.SIGINT)
        assert again.wait(1) == [()]
        let_go.set()


def test_quit_reports_and_goes_on(hooks):
    stop, _, quit_ = hooks
    with Signals(*hooks):
        send(signal.SIGQUIT)
        quit_.wait(1)
        send(signal.SIGQUIT)
        quit_.wait(2)
    assert stop.seen == []


def test_an_error_in_a_callback_does_not_end_the_listening(hooks, capsys):
    stop, again, quit_ = hooks

    def fails():
        quit_()
        raise ValueError("boom")

    with Signals(stop, again, fails):
        send(signal.SIGQUIT)
        quit_.wait(1)
        send(signal.SIGTERM)
        stop.wait(1)
    assert "boom" in capsys.readouterr().err


def test_nested_launches(hooks):
    outer, inner = Calls(), Calls()
    nothing = Calls()
    with Signals(outer, nothing, nothing):
        with Signals(inner, nothing, nothing):
            send(signal.SIGTERM)
            inner.wait(1)
        send(signal.SIGUSR1)
        outer.wait(1)
    assert inner.seen == [(signal.SIGTERM,)]
    assert outer.seen == [(signal.SIGUSR1,)]


def test_in_another_thread_nothing_is_installed(hooks):
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def enter():
        with Signals(*hooks) as signals:
            seen.append((signals.installed, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(LIMIT)
    assert seen == [(False, before)]


def test_what_is_ignored_stays_ignored(hooks):
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals(*hooks):
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_handler_of_the_user_keeps_its_signal(hooks):
    stop, _, _ = hooks
    mine = Calls()
    with Signals(*hooks):
        previous = signal.signal(signal.SIGUSR1, mine)
        send(signal.SIGUSR1)
        mine.wait(1)
        send(signal.SIGTERM)
        stop.wait(1)
    assert signal.getsignal(signal.SIGUSR1) == mine
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    assert previous is not mine
    assert stop.seen == [(signal.SIGTERM,)]


@pytest.mark.parametrize("displaced_by", ["nothing", "a loop"])
def test_a_displaced_wakeup_descriptor(hooks, displaced_by):
    stop, _, _ = hooks
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        with Signals(*hooks):
            other = write if displaced_by == "a loop" else -1
            signal.set_wakeup_fd(other)
            send(signal.SIGTERM)
            stop.wait(1)
            now = signal.set_wakeup_fd(other)
            # nobody's: taken back; an event loop of asyncio keeps its own
            assert (now == write) == (displaced_by == "a loop")
            assert now != -1
            signal.set_wakeup_fd(-1)
        assert stop.seen == [(signal.SIGTERM,)]
    finally:
        os.close(read)
        os.close(write)


def test_a_wakeup_descriptor_of_somebody_else_stays(hooks):
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    with Signals(*hooks):
        signal.set_wakeup_fd(write)
    assert signal.set_wakeup_fd(before) == write
    os.close(read)
    os.close(write)


def test_what_came_before_the_end_is_handed_on(hooks):
    stop, _, _ = hooks
    for count in range(1, 30):
        with Signals(*hooks):
            send(signal.SIGUSR2)
        assert len(stop.seen) == count


def test_what_comes_while_the_hooks_are_removed_goes_to_the_handlers_before(hooks):
    stop, _, _ = hooks
    mine = Calls()
    previous = signal.signal(signal.SIGUSR2, mine)
    try:
        signals = Signals(*hooks)
        with signals:
            os.write(signals._write, bytes([0, signal.SIGUSR2]))
            signals._listener.join(LIMIT)
        mine.wait(1)
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert stop.seen == []


def test_signals_that_are_not_ours_go_to_the_descriptor_before(hooks):
    read, write = os.pipe()
    os.set_blocking(write, False)
    wakeup = signal.set_wakeup_fd(write)
    seen = Calls()
    previous = signal.signal(signal.SIGCHLD, seen)
    try:
        with Signals(*hooks):
            send(signal.SIGCHLD)
            seen.wait(1)
            ready, _, _ = select.select([read], [], [], LIMIT)
            assert ready
            assert os.read(read, 10) == bytes([signal.SIGCHLD])
    finally:
        signal.signal(signal.SIGCHLD, previous)
        signal.set_wakeup_fd(wakeup)
        os.close(read)
        os.close(write)


@pytest.mark.parametrize("before", ["callable", "default"])
def test_a_handler_that_keeps_ours_may_call_it_after_the_end(before):
    """It does what the one before did, and touches no descriptor, whose number others have."""
    status, out, err = run_child(
        """
        import os, signal, sys
        from mpiml.faults import Signals
        if sys.argv[1] == "callable":
            signal.signal(signal.SIGTERM, lambda number, frame: print("before", flush=True))
        with Signals(print, print, print) as signals:
            ours = signal.getsignal(signal.SIGTERM)
            def chained(number, frame):
                print("user's", flush=True)
                ours(number, frame)
            signal.signal(signal.SIGTERM, chained)
        pipe = os.pipe()
        assert signals._write in pipe
        for fd in pipe:
            os.set_blocking(fd, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.set_wakeup_fd(-1) == -1
        os.close(pipe[1])
        assert os.read(pipe[0], 10) == b""
        print("goes on")
        """,
        before,
    )
    assert err == ""
    if before == "callable":
        assert (status, out) == (0, "user's\nbefore\ngoes on\n")
    else:
        assert (status, out) == (-signal.SIGTERM, "user's\n")


def test_main_thread_inside_c_code_that_never_returns():
    # a mutex that is locked already: no signal interrupts the wait, as inside MPI_Recv
    status, out, err = run_child("""
        import ctypes, os, signal, threading
        from mpiml.faults import Signals
        libc = ctypes.CDLL(None)
        mutex = ctypes.create_string_buffer(64)
        def stop(number):
            print("stop", number, flush=True)
            os._exit(7)
        with Signals(stop, print, print):
            libc.pthread_mutex_lock(mutex)
            threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1)).start()
            libc.pthread_mutex_lock(mutex)
    """)
    assert (status, out, err) == (7, f"stop {int(signal.SIGUSR1)}\n", "")


def test_a_forked_child_has_the_handlers_from_before_and_the_parent_is_left_alone():
    status, out, err = run_child("""
        import os, signal, sys
        from mpiml.faults import Signals
        def stop(number):
            print("the parent got", number, flush=True)
        with Signals(stop, print, print):
            read, write = os.pipe()
            child = os.fork()
            if not child:
                os.write(write, b"x")
                while True:
                    signal.pause()
            os.read(read, 1)
            os.kill(child, signal.SIGTERM)
            print(os.WTERMSIG(os.waitpid(child, 0)[1]))
            child = os.fork()
            if not child:
                sys.exit(3)  # leaves the block, in the child
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            os.kill(os.getpid(), signal.SIGUSR2)
    """)
    assert err == ""
    assert out == f"{int(signal.SIGTERM)}\n3\nthe parent got {int(signal.SIGUSR2)}\n"
    assert status == 0


# -- the launcher --------------------------------------------------------------------------------


def table(*names):
    """Processes 10, 11, ... from the parent of the rank upwards."""
    pids = range(10, 10 + len(names))
    found = {pid: Process(pid, name, pid + 1, 1) for pid, name in zip(pids, names, strict=True)}
    return found.get


@pytest.mark.parametrize(
    ("names", "length"),
    [
        (["bash", "sshd"], 0),
        (["prterun", "bash"], 1),
        (["time", "mpirun", "bash"], 2),
        (["hydra_pmi_proxy", "mpiexec.hydra", "bash"], 2),
        (["mpirun", "bash", "slurmstepd", "systemd"], 3),
        (["a", "b", "c", "d", "e", "f", "mpirun"], 0),
        ([], 0),
    ],
)
def test_whom_to_watch(names, length):
    chain = launcher_chain(10, table(*names))
    assert [process.name for process in chain] == names[:length]


def test_names_are_known_by_the_15_characters_that_the_kernel_keeps():
    assert len(launcher_chain(10, table("hydra_bstrap_pr"))) == 1


def test_look_up_reads_names_with_blanks_and_brackets(tmp_path):
    link = tmp_path / "a) b (c"
    link.symlink_to("/bin/sleep")
    child = subprocess.Popen([link, str(LIMIT)])
    try:
        found = look_up(child.pid)
        assert found is not None
        assert (found.name, found.parent) == ("a) b (c", os.getpid())
    finally:
        child.kill()
        child.wait(LIMIT)
    assert look_up(child.pid) is None


def test_without_a_launcher_nothing_is_watched(monkeypatch):
    monkeypatch.setattr(faults, "launcher_chain", lambda pid: [])
    before = threading.active_count()
    deaths = Calls()
    with LauncherWatch(deaths, Config()) as watch:
        assert watch.watched == []
        assert threading.active_count() == before
    assert deaths.seen == []


@pytest.fixture
def starter():
    child = subprocess.Popen(["sleep", str(LIMIT)])
    yield child
    child.kill()
    child.wait(LIMIT)


def here(pid):
    return Config(launcher_pid=pid, launcher_host=os.uname().nodename)


@pytest.mark.parametrize("pidfd", [True, False])
def test_death_of_the_starter(monkeypatch, starter, pidfd):
    monkeypatch.setattr(faults, "launcher_chain", lambda pid: [])
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    deaths = Calls()
    with LauncherWatch(deaths, here(starter.pid)) as watch:
        assert [process.pid for process in watch.watched] == [starter.pid]
        starter.kill()
        ((text,),) = deaths.wait(1)
    assert f"sleep (process {starter.pid})" in text


@pytest.mark.parametrize("pidfd", [True, False])
def test_leaving_ends_the_watch(monkeypatch, starter, pidfd):
    monkeypatch.setattr(faults, "launcher_chain", lambda pid: [])
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    descriptors = set(os.listdir("/proc/self/fd"))
    before = threading.active_count()
    deaths = Calls()
    with LauncherWatch(deaths, here(starter.pid)):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert set(os.listdir("/proc/self/fd")) == descriptors
    assert deaths.seen == []


def test_a_starter_on_another_host_is_not_watched(monkeypatch, starter):
    monkeypatch.setattr(faults, "launcher_chain", lambda pid: [])
    config = Config(launcher_pid=starter.pid, launcher_host="elsewhere.invalid")
    with LauncherWatch(Calls(), config) as watch:
        assert watch.watched == []


def test_a_starter_that_is_dead_already(monkeypatch, starter):
    monkeypatch.setattr(faults, "launcher_chain", lambda pid: [])
    starter.kill()
    starter.wait(LIMIT)
    deaths = Calls()
    with LauncherWatch(deaths, here(starter.pid)):
        ((text,),) = deaths.wait(1)
    assert str(starter.pid) in text


def test_a_number_that_another_process_has_by_now(monkeypatch, starter):
    found = look_up(starter.pid)
    monkeypatch.setattr(faults, "launcher_chain", lambda pid: [found._replace(start=1)])
    deaths = Calls()
    with LauncherWatch(deaths, Config()):
        deaths.wait(1)


def test_a_launcher_that_was_gone_before_we_looked(monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(faults, "launcher_chain", lambda pid: [])
    monkeypatch.setattr(ancestors, "_BORN_UNDER", 77)
    deaths = Calls()
    with LauncherWatch(deaths, Config(launcher="openmpi")):
        deaths.wait(1)


@pytest.mark.parametrize(
    ("born", "container", "gone"),
    [(1, True, False), (77, True, True), (1, False, True), (77, False, True)],
)
def test_process_1_of_a_container_may_be_who_runs_the_rank(monkeypatch, born, container, gone):
    monkeypatch.setattr(ancestors, "_BORN_UNDER", born)
    monkeypatch.setattr(ancestors, "_own_numbers", lambda: container)
    assert ancestors.orphaned(1) is gone
    assert not ancestors.orphaned(12)


def test_last_words_do_not_wait_for_who_does_not_read():
    status, out, err = run_child("""
        import os
        from mpiml.faults import last_words
        last_words("heard")
        read, write = os.pipe()
        os.dup2(write, 2)
        os.set_blocking(2, False)
        while True:
            try:
                os.write(2, bytes(4096))
            except BlockingIOError:
                break
        os.set_blocking(2, True)
        last_words("full")
        os.close(read)
        os.close(write)
        last_words("nobody there")
        print("over")
    """)
    assert (status, out, err) == (0, "over\n", "heard\n")


# A parent with the name of a launcher, over a wrapper, over the rank.
LAUNCHER = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(15, b"prterun", 0, 0, 0)  # PR_SET_NAME
subprocess.run(["sh", "-c", '"$0" -c "$1"; :', sys.executable, sys.argv[1]])
"""
RANK = """
import os, signal
from mpiml.config import Config
from mpiml.faults import LauncherWatch
def dies(text):
    print(text, flush=True)
    os._exit(5)
with LauncherWatch(dies, Config()) as watch:
    print(*(process.pid for process in watch.watched), flush=True)
    while True:
        signal.pause()
"""


def read_line(file):
    ready, _, _ = select.select([file], [], [], LIMIT)
    assert ready, "nothing was printed"
    return file.readline()


@pytest.mark.parametrize("victim", ["launcher", "wrapper"])
def test_death_of_the_launcher_ends_the_rank(victim):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, RANK], stdout=subprocess.PIPE, bufsize=0, cwd=ROOT
    )
    try:
        watched = [int(word) for word in read_line(launcher.stdout).split()]
        assert len(watched) == 2  # the wrapper and the launcher above it
        assert watched[1] == launcher.pid
        os.kill(watched[victim == "launcher"], signal.SIGKILL)
        text = read_line(launcher.stdout).decode()
        assert "has died" in text
        assert ("prterun" in text) == (victim == "launcher")
        assert read_line(launcher.stdout) == b""  # and nobody holds the pipe any more
    finally:
        launcher.kill()
        launcher.wait(LIMIT)
        launcher.stdout.close()


def test_a_forked_child_does_not_end_the_watch_of_its_parent():
    status, out, err = run_child("""
        import os, signal, subprocess, sys
        from mpiml.config import Config
        from mpiml.faults import LauncherWatch
        starter = subprocess.Popen(["sleep", "20"])
        def dies(text):
            print("sleep" in text, flush=True)
            os._exit(5)
        config = Config(launcher_pid=starter.pid, launcher_host=os.uname().nodename)
        with LauncherWatch(dies, config) as watch:
            child = os.fork()
            if not child:
                sys.exit(3)  # leaves the block, in the child
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
            assert watch._thread.is_alive()
            starter.kill()
            watch._thread.join(20)
    """)
    assert (status, out, err) == (5, "3\nTrue\n", "")


# -- threads and forks ---------------------------------------------------------------------------


def fail_in_thread(error):
    def body():
        raise error

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(LIMIT)
    return thread


def test_errors_of_threads_reach_the_runtime():
    seen = Calls()
    before = threading.excepthook
    error = ValueError("boom")
    with install_excepthooks(seen):
        thread = fail_in_thread(error)
    assert seen.seen == [(error, thread)]
    assert threading.excepthook is before


@pytest.mark.parametrize(
    ("error", "fails"),
    [
        (Stopped("the program is stopping"), False),
        (SystemExit(), False),
        (SystemExit(0), False),
        (SystemExit(3), True),
    ],
)
def test_returns_are_not_errors(error, fails):
    seen = Calls()
    with install_excepthooks(seen):
        fail_in_thread(error)
    assert len(seen.seen) == fails


def test_the_hook_before_runs_where_ours_fails(monkeypatch, capsys):
    seen = Calls()
    monkeypatch.setattr(threading, "excepthook", lambda args: seen(args.exc_value))

    def fail(error, thread):
        raise RuntimeError("in the hook")

    error = ValueError("boom")
    with install_excepthooks(fail):
        fail_in_thread(error)
    assert seen.seen == [(error,)]
    assert "in the hook" in capsys.readouterr().err


def test_a_hook_set_meanwhile_stays(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)

    def other(args):
        pass

    with install_excepthooks(Calls()):
        threading.excepthook = other
    assert threading.excepthook is other


def test_guard_fork():
    status, out, err = run_child("""
        import os
        from mpiml.forking import guard_fork
        def poison():
            os.write(1, b"poisoned\\n")
        def fork(name):
            child = os.fork()
            if not child:
                os.write(1, name.encode() + b"\\n")
                os._exit(0)
            os.waitpid(child, 0)
        def breaks():
            raise ValueError("boom")
        remove = guard_fork(breaks)
        remove()
        remove = guard_fork(poison)
        guard_fork(poison)
        fork("first")
        remove()
        fork("second")
    """)
    assert (status, out, err) == (0, "poisoned\nfirst\nsecond\n", "")


def test_guard_fork_returns_a_remover():
    remove = guard_fork(print)
    assert print in forking._in_child
    remove()
    remove()
    assert print not in forking._in_child
