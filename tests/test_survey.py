"""Deadlocks of waits are reported, once, with lines of user code; nothing else is."""

import re
import sys
import threading
import types

import pytest

import mpiml
from mpiml.aio import Loop
from mpiml.engine import Engine
from mpiml.survey import Survey, stack_of, where
from tests.mpi import ROOT, child, mpiexec
from tests.waiting import cycle, lively

HEAD = "mpiml: cycle: every node has waited for 0.3 s or more. Who waits for whom:"
LINES = (
    r"first/0 \(rank \d\) has waited \d+ s for service/0\.ask\(\) at waiting\.py:\d+ in first",
    r"service/0 \(rank \d\) has waited \d+ s for second/0\.result\(\) at waiting\.py:\d+ in ask",
    r"second/0 \(rank \d\) has waited \d+ s for first/0\.result\(\) at waiting\.py:\d+ in second",
)


def check(text):
    assert text.count(HEAD) == 1, text  # once, though the program waits on
    for line in LINES:
        assert len(re.findall(line, text)) == 1, (line, text)


def test_where_finds_the_line_of_user_code():
    assert where(sys._getframe()) == f"test_survey.py:{sys._getframe().f_lineno} in " + (
        "test_where_finds_the_line_of_user_code"
    )
    assert where(None) == "no user code"
    assert where(types.CellType(1)) == "no user code"  # seen as the caller of a frame


@pytest.mark.parametrize("folder", ["site-packages/torch/utils", "dist-packages/torch"])
def test_frames_of_installed_packages_are_passed_over(folder):
    """Unless there are no others: the user's program may be installed."""
    names = {"sys": sys}
    path = f"/usr/lib/python3/{folder}/_contextlib.py"
    code = "def decorate_context():\n    return sys._getframe()\n"
    exec(compile(code, path, "exec"), names)
    frame = names["decorate_context"]()
    alone = types.SimpleNamespace(f_code=frame.f_code, f_lineno=2, f_back=None)
    mine = sys._getframe()
    below = types.SimpleNamespace(f_code=frame.f_code, f_lineno=2, f_back=mine)
    assert where(below).startswith(f"test_survey.py:{mine.f_lineno} in test_frames")
    assert where(alone) == "_contextlib.py:2 in decorate_context"


class Straggler:
    """What `stack_of` needs to know of a node, for the thread that calls it."""

    def __init__(self):
        self.title = "node/0"
        self.thread = threading.get_ident()
        self.calling_back = False
        self.loop = Loop("node/0")
        self.runtime = types.SimpleNamespace(nodes=[self, self])


def test_a_stack_shows_user_code_only():
    text = stack_of(Straggler())
    assert "in test_a_stack_shows_user_code_only" in text
    assert "in stack_of" not in text


def test_a_stack_leaves_out_the_library_and_idle_threads():
    def wait():
        ready.set()
        gate.wait()

    gate, ready = threading.Event(), threading.Event()
    idle = threading.Thread(target=gate.wait, name="mpiml node/0")
    busy = threading.Thread(target=wait, name="mpiml loop node/0")
    node = Straggler()
    node.thread = 0
    idle.start()
    try:
        assert "threading.py" not in stack_of(node)
        assert "runs user code" in stack_of(node)
        busy.start()
        assert ready.wait(30)
        assert "in wait" in stack_of(node)
        assert "threading.py" not in stack_of(node)
    finally:
        gate.set()


def test_a_long_answer_is_read():
    runtime = types.SimpleNamespace(nodes=[], name="x", stopping=False)
    runtime.engine = Engine(0, 1, (128, 1 << 24), print)
    survey = Survey(runtime, 0)
    text = "! line\n" * 6000
    survey.local = lambda: (99.0, text)
    assert survey.ask() == {0: (99.0, text)}


def test_a_deadlock_of_threads_is_reported_once_and_the_program_goes_on(capfd):
    result = mpiml.launch(cycle(), stall_warning=0.3, max_time=1.5)
    assert result.stopped_by == "--max-time"
    check(capfd.readouterr().err)


def test_a_deadlock_of_ranks_is_reported_once_and_the_program_goes_on(mpi_launcher):
    options = ("--stall-warning", "0.3", "--max-time", "2.5")
    ended = mpiexec(3, "-m", "mpiml.run", *options, "tests/waiting.py:cycle", cwd=ROOT)
    assert ended.rc == 143, str(ended)
    check(ended.stderr)


def test_a_coroutine_that_waits_is_part_of_the_report(capfd):
    mpiml.launch(cycle(True), stall_warning=0.3, max_time=2.0)
    text = capfd.readouterr().err
    assert text.count(HEAD) == 1, text
    assert re.search(LINES[0], text), text
    assert re.search(r"second/0 \(rank 0\) awaits calls .* in second_async", text), text


@pytest.mark.parametrize("what", ["computes", "deadline", "idle", "naps"])
def test_waits_that_end_by_themselves_are_not_reported(capfd, what):
    mpiml.launch(lively(what), stall_warning=0.5)
    assert capfd.readouterr().err == ""


def test_idle_services_are_not_reported(capfd):
    mpiml.launch(lively("services"), stall_warning=0.2, max_time=0.8)
    assert capfd.readouterr().err == ""


def test_nothing_is_watched_when_it_is_turned_off(capfd):
    mpiml.launch(cycle(), stall_warning=0.0, max_time=0.8)
    assert capfd.readouterr().err == ""


def test_ranks_that_compute_are_not_reported(mpi_launcher):
    options = ("--stall-warning", "0.5")
    what = ("tests/waiting.py:lively", "--what", "computes")
    ended = mpiexec(3, "-m", "mpiml.run", *options, *what, cwd=ROOT)
    assert (ended.rc, ended.stderr) == (0, ""), str(ended)


def test_the_command_in_one_process_reports_too():
    options = ("--stall-warning", "0.3", "--max-time", "1.5")
    ended = child(
        sys.executable, "-m", "mpiml.run", *options, "tests/waiting.py:cycle", cwd=ROOT
    )
    assert ended.rc == 143, str(ended)
    check(ended.stderr)
