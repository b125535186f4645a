"""One node fails: everything ends, everywhere, with one error, whatever the others do.

Programs of tests/failing.py, run as a user runs them: under mpiexec and as threads.
"""

import re
import sys

import pytest

from tests.mpi import ROOT, child, mpiexec

LIMIT = 20  # s; a program that hangs fails here


def run(n, build, *args, timeout=LIMIT, env=None):
    """Run a program of tests/failing.py on n ranks, or as threads if n is 0."""
    command = ["-m", "mpiml.run", f"tests/failing.py:{build}", *args]
    if n:
        ended = mpiexec(n, *command, timeout=timeout, cwd=ROOT, env=env)
    else:
        ended = child(sys.executable, *command, timeout=timeout, cwd=ROOT, env=env)
    assert not ended.leftovers, str(ended)
    return ended


EXITED = r"mpiml: (?:bad|service)/0 \(rank \d\) ended the program by sys\.exit"


def ours(ended):
    """What stands on stderr, without the launcher's own words."""
    lines, skip = [], False
    for line in ended.stderr.splitlines():
        if len(line) > 40 and set(line) in ({"-"}, {"="}):
            skip = not skip
        elif not skip and not line.startswith(("Primary job", "mpiexec", "Abort(")):
            lines.append(line)
    return "\n".join(lines)


def check(ended, text, title, status=1):
    """One failure is shown, with its node, and nothing else looks like one."""
    assert ended.rc == status, str(ended)
    assert ended.stderr.count("mpiml: a node failed") == 1, str(ended)
    assert ended.stderr.count(text) >= 1, str(ended)
    assert f"[{title}, rank " in ended.stderr, str(ended)
    assert "host " in ended.stderr, str(ended)
    assert not re.search(r'File "[^"]*/mpiml/', ended.stderr), str(
        ended
    )  # the user's frames only


@pytest.fixture(params=[3, 0], ids=["ranks", "threads"])
def ranks(request):
    """Run under mpiexec on three ranks, and as threads of one process."""
    if request.param:
        request.getfixturevalue("mpi_launcher")
    return request.param


@pytest.mark.parametrize("way", ["raise", "unpicklable", "large", "thread", "bound", "async"])
def test_an_error_in_a_body_ends_the_program_with_one_traceback(ranks, way):
    ended = run(ranks, "build", "--way", way)
    title = "bad/0"
    if way == "thread" and not ranks:
        title = "service/0"  # it belongs to no node of this process
    check(ended, "boom", title)
    assert ended.stderr.count("Traceback (most recent call last)") == 1, str(ended)


@pytest.mark.parametrize("other", ["future", "gather", "stream", "stop", "await", "big"])
def test_whatever_the_others_wait_for_they_end(ranks, other):
    ended = run(ranks, "build", "--other", other)
    check(ended, "ValueError: boom", "bad/0")
    assert ended.stderr.count("Traceback (most recent call last)") == 1, str(ended)
    assert "still running" not in ended.stderr, str(ended)


def test_a_node_that_sleeps_is_listed_and_ended(ranks):
    ended = run(ranks, "build", "--other", "sleep")
    check(ended, "ValueError: boom", "bad/0")
    assert "still running 1.5 s after the stop" in ended.stderr, str(ended)
    assert "in in_sleep" in ended.stderr, str(ended)
    assert "/threading.py" not in ended.stderr, str(ended)  # user code only
    assert ended.stderr.count("Traceback (most recent call last)") == 1, str(ended)


def test_the_failing_node_may_be_on_rank_0(ranks):
    check(run(ranks, "build", "--first"), "ValueError: boom", "bad/0")


def test_exit_with_a_status(ranks):
    ended = run(ranks, "build", "--way", "exit")
    assert ended.rc == 7, str(ended)
    assert re.fullmatch(rf"{EXITED}\(7\)", ours(ended)), str(ended)


def test_exit_with_a_text_prints_it(ranks):
    ended = run(ranks, "build", "--way", "text")
    assert ended.rc == 1, str(ended)
    assert re.fullmatch(rf"{EXITED}:\nboom, says the node", ours(ended)), str(ended)


def test_exit_in_a_method_ends_the_program_too(ranks):
    ended = run(ranks, "build", "--way", "method exit")
    assert ended.rc == 7, str(ended)
    assert re.fullmatch(rf"{EXITED}\(7\)", ours(ended)), str(ended)


def test_a_remote_error_that_is_let_through_has_both_tracebacks(ranks):
    ended = run(ranks, "build", "--way", "through")
    check(ended, "ValueError: only for the caller", "bad/0")
    assert "[service/0, rank 0" in ended.stderr, str(ended)
    assert ended.stderr.index("in fail") < ended.stderr.index("in lets_through"), str(ended)


def test_an_error_after_the_stop_began_is_not_lost(ranks):
    check(run(ranks, "build", "--way", "late", "--other", "stop"), "ValueError: boom", "bad/0")


def test_an_error_in_a_callback_is_not_lost(ranks):
    ended = run(ranks, "build", "--way", "callback", "--other", "stop")
    check(ended, "ValueError: boom", "bad/0")


def test_the_error_of_a_constructor_is_not_hidden_by_its_consequences(mpi_launcher):
    for wait in ("0.0", "0.3"):  # before and after the clients have called
        ended = run(4, "build_constructor", "--wait", wait)
        check(ended, "ValueError: boom in the constructor", "bad/0")
        assert "confused" not in ended.stderr, str(ended)
        assert "still running" not in ended.stderr, str(ended)


def test_the_error_of_a_constructor_is_shown_in_one_process():
    ended = run(0, "build_constructor")
    check(ended, "ValueError: boom in the constructor", "bad/0")
    assert "confused" not in ended.stderr, str(ended)
    assert "still running" not in ended.stderr, str(ended)


def test_run_of_a_service_fails(ranks):
    check(run(ranks, "build_run"), "ValueError: boom", "bad/0")


def test_what_a_failed_service_has_queued_is_refused_and_no_traceback_but_one(ranks):
    ended = run(ranks, "build_batches")
    check(ended, "ValueError: boom", "bad/0")
    assert ended.stderr.count("Traceback (most recent call last)") == 1, str(ended)
    assert "still running" not in ended.stderr, str(ended)
    assert "nobody looked" not in ended.stderr, str(ended)


def test_two_nodes_raise_at_once_and_one_is_shown(ranks):
    ended = run(ranks, "build_two")
    assert ended.rc == 1, str(ended)
    assert ended.stderr.count("Traceback (most recent call last)") == 1, str(ended)
    assert ended.stderr.count("ValueError: boom") == 1, str(ended)


@pytest.mark.parametrize("n", [2, 0])
def test_an_error_of_a_method_goes_to_its_caller_only(n, mpi_launcher):
    ended = run(n, "build_copes")
    assert (ended.rc, ended.stderr) == (0, ""), str(ended)
    assert "coped with only for the caller" in ended.stdout, str(ended)
    assert "[service/0, rank 0, host " in ended.stdout, str(ended)


def test_an_error_while_the_program_is_built_on_one_rank_ends_all(mpi_launcher):
    ended = run(3, "build_import")
    assert ended.rc == 1, str(ended)
    assert ended.stderr.count("ImportError: boom while loading") == 1, str(ended)
    assert ended.stderr.count("Traceback (most recent call last)") == 1, str(ended)


@pytest.mark.parametrize("n", [1, 2])
def test_nodes_that_share_a_rank_fail_as_others_do(mpi_launcher, n):
    ended = run(n, "build", "--others", "2")
    check(ended, "ValueError: boom", "bad/0")
    assert ended.stderr.count("Traceback (most recent call last)") == 1, str(ended)


def test_a_method_that_waits_for_one_that_exits_does_not_hold_up_the_end(ranks):
    ended = run(ranks, "build_nested_exit")
    assert ended.rc == 7, str(ended)
    assert re.fullmatch(rf"{EXITED}\(7\)", ours(ended)), str(ended)


def test_a_node_that_failed_has_no_value(ranks):
    ended = run(ranks, "build_result")
    check(ended, "ValueError: boom 1", "bad/0")
    assert "result" not in ended.stdout, str(ended)
