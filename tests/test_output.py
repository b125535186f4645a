"""Whole lines with the node that wrote them, on every kind of stream."""

import contextlib
import errno
import io
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml import output as module
from mpiml.errors import UsageError
from mpiml.output import Output, check_folder
from mpiml.scope import BodyScope, enter, leave

LIMIT = 20  # s; only a hang takes so long
ROOT = Path(__file__).resolve().parents[1]


class Node:
    """What a scope needs to know of a node."""

    vertex = 0

    def __init__(self, title):
        self.title = title


class Inside:
    """The block belongs to a node."""

    def __init__(self, title):
        self._scope = BodyScope(Node(title))

    def __enter__(self):
        self._token = enter(self._scope)

    def __exit__(self, *exc):
        leave(self._token)


def run_child(code, *args):
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *args],
        capture_output=True, text=True, timeout=LIMIT, check=False, cwd=ROOT,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


@contextlib.contextmanager
def stdout_on(target):
    """``sys.stdout`` on a file or descriptor; not a fixture, as pytest sets it after those."""
    before = sys.stdout
    with open(target, "w") as sys.stdout:
        try:
            yield
        finally:
            sys.stdout = before


@contextlib.contextmanager
def piped():
    """``sys.stdout`` on a pipe, as under a launcher; gives a function that reads it."""
    read, write = os.pipe()
    os.set_blocking(read, False)

    def taken():
        sys.stdout.flush()
        try:
            return os.read(read, 1 << 16).decode()
        except BlockingIOError:
            return ""

    with stdout_on(write):
        yield taken
    os.close(read)


def test_lines_of_nodes_are_prefixed(capsys):
    stdout, stderr = sys.stdout, sys.stderr
    with Output(None):
        print("nobody's")
        with Inside("worker/3"):
            print("one\ntwo")
            print()
            print("three", file=sys.stderr)
        with Inside("learner/0"):
            print("four")
    out, err = capsys.readouterr()
    assert out == "nobody's\n[worker/3] one\n[worker/3] two\n[worker/3] \n[learner/0] four\n"
    assert err == "[worker/3] three\n"
    assert sys.stdout is stdout
    assert sys.stderr is stderr


def test_a_single_node_has_all_threads(capsys):
    with Output("worker/3"):
        thread = threading.Thread(target=print, args=("hello",))
        thread.start()
        thread.join(LIMIT)
    assert capsys.readouterr().out == "[worker/3] hello\n"


def test_without_prefix_lines_are_whole_all_the_same(capsys):
    with Output("worker/3", prefix=False):
        print("a", end="")
        print("b", file=sys.stderr)
        assert capsys.readouterr() == ("", "b\n")
        print("c")
    assert capsys.readouterr().out == "ac\n"


def test_a_line_is_kept_until_its_end():
    with piped() as pipe:
        with Output("worker/3"):
            print("loss:", end=" ", flush=True)
            assert pipe() == ""
            print(0.5)
            assert pipe() == "[worker/3] loss: 0.5\n"
            print("bye", end="")
        assert pipe() == "[worker/3] bye\n"


def test_lines_appear_without_a_flush():
    with piped() as pipe:
        with Output("worker/3"):
            print("hello")
            assert pipe() == "[worker/3] hello\n"
            sys.stdout.writelines(["a\n", "b\n"])
            assert pipe() == "[worker/3] a\n[worker/3] b\n"


def test_an_incomplete_line_of_nobody_is_shown_by_a_flush():
    with piped() as pipe:
        with Output(None):
            print("continue? ", end="", flush=True)
            assert pipe() == "continue? "
            print("yes")
        assert pipe() == "yes\n"


def test_nodes_of_one_thread_do_not_share_a_line(capsys):
    with Output(None):
        with Inside("a/0"):
            print("x", end="")
        with Inside("a/1"):
            print("y")
        with Inside("a/0"):
            print("z")
    assert capsys.readouterr().out == "[a/1] y\n[a/0] xz\n"


def test_threads_do_not_share_a_line(capsys):
    turn = threading.Barrier(4)

    def write(name):
        for number in range(50):
            for part in (name, "-", str(number), "\n"):
                print(part, end="")
                if number < 3:
                    turn.wait(LIMIT)

    with Output("w/0"):
        threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"[w/0] {n}-{i}" for n in "abcd" for i in range(50))


def test_carriage_returns_stay_in_their_line(capsys):
    with Output("w/0"):
        for percent in (10, 20):
            print(f"\r{percent}%", end="", flush=True)
        print()
    assert capsys.readouterr().out == "[w/0] \r10%\r20%\n"


def test_a_progress_bar_does_not_grow_for_ever(capsys):
    with Output("w/0"):
        for step in range(20000):
            print(f"\r{step:9}", end="")
        print()
    out = capsys.readouterr().out
    assert len(out) <= module._LONG + 20
    assert out.endswith("\r    19999\n")


def test_a_long_line_without_carriage_returns_stays_whole(capsys):
    text = "x" * (3 * module._LONG)
    with Output("w/0"):
        print(text)
    assert capsys.readouterr().out == f"[w/0] {text}\n"


def test_everything_else_is_that_of_the_stream_below():
    with piped():
        below = sys.stdout
        with Output("w/0"):
            assert sys.stdout is not below
            assert sys.stdout.fileno() == below.fileno()
            assert sys.stdout.isatty() is False
            assert sys.stdout.encoding == below.encoding
            assert sys.stdout.buffer is below.buffer
            with pytest.raises(AttributeError):
                sys.stdout.nonsense  # noqa: B018
            with pytest.raises(TypeError, match="must be str, not bytes"):
                sys.stdout.write(b"bytes")
            assert sys.stdout.write("four") == 4


def test_text_of_the_stream_below_comes_first():
    with piped() as pipe:
        sys.stdout.write("before\n")
        with Output("w/0"):
            print("within")
        print("after")
        assert pipe() == "before\n[w/0] within\nafter\n"


def test_memory_streams(monkeypatch):
    memory = io.StringIO()
    monkeypatch.setattr(sys, "stdout", memory)
    with Output("w/0"):
        print("hello")
        print("partly", end="")
    assert memory.getvalue() == "[w/0] hello\n[w/0] partly\n"


def test_a_closed_stream():
    with stdout_on(os.devnull), Output("w/0"):
        print("partly", end="")
        sys.stdout.close()
        with pytest.raises(ValueError, match="closed"):
            print("as without mpiml")
        print("more", end="")


def test_no_streams_at_all(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    with Output("w/0") as output:
        print("into nothing")
        output.raw_stderr.write("into nothing\n")
        output.raw_stderr.flush()
    assert sys.stdout is None
    with Output("w/0", tmp_path):
        print("hello", flush=True)
    assert (tmp_path / "w-0.log").read_text() == "hello\n"


def test_a_broken_pipe_is_an_error():
    read, write = os.pipe()
    os.close(read)
    with stdout_on(write), Output("w/0"), pytest.raises(BrokenPipeError):
        print("hello")


def test_a_full_pipe_that_does_not_block():
    read, write = os.pipe()
    os.set_blocking(write, False)
    text = "x" * 99
    got = []

    def drain():
        while len(b"".join(got)) < 3000 * 106:
            got.append(os.read(read, 1 << 16))

    reader = threading.Thread(target=drain, daemon=True)
    with stdout_on(write), Output("w/0"):
        reader.start()
        print("\n".join([text] * 3000))
        reader.join(LIMIT)
    os.close(read)
    assert b"".join(got).decode() == f"[w/0] {text}\n" * 3000


def test_a_stream_set_meanwhile_stays(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    other = io.StringIO()
    with Output("w/0"):
        print("partly", end="")
        sys.stdout = other
    assert sys.stdout is other
    assert capsys.readouterr().out == "[w/0] partly\n"


def test_a_kept_reference_goes_on_working_afterwards(capsys):
    with Output("w/0"):
        kept = sys.stdout
    print("later", end="", file=kept)
    assert capsys.readouterr().out == "later"


def test_nested_outputs_prefix_once(capsys, tmp_path):
    with Output("outer/0", tmp_path):
        with Output("inner/0"):
            print("one")
        print("two")
    assert capsys.readouterr().out == "[inner/0] one\n[outer/0] two\n"
    assert (tmp_path / "inner-0.log").read_text() == "one\n"
    assert (tmp_path / "outer-0.log").read_text() == "two\n"


def test_raw_stderr(capsys, tmp_path):
    with Output("w/0", tmp_path) as output:
        print("partly", end="", file=sys.stderr)
        output.raw_stderr.write("mpiml: a node failed\n")
        output.raw_stderr.flush()
        assert capsys.readouterr().err == "mpiml: a node failed\n"
    assert capsys.readouterr().err == "[w/0] partly\n"
    assert (tmp_path / "w-0.log").read_text() == "mpiml: a node failed\npartly\n"


# -- log files -------------------------------------------------------------------------------


def test_one_file_for_each_node(capsys, tmp_path):
    folder = tmp_path / "new" / "logs"
    for run in (1, 2):
        with Output(None, folder):
            with Inside("worker/3"):
                print("out", run)
                print("err", run, file=sys.stderr)
            with Inside("group/learner/0"):
                print("größer")
            print("nobody's")
    assert sorted(path.name for path in folder.iterdir()) == [
        "group-learner-0.log",
        "worker-3.log",
    ]
    assert (folder / "worker-3.log").read_text() == "out 1\nerr 1\nout 2\nerr 2\n"
    assert (folder / "group-learner-0.log").read_text(encoding="utf-8") == "größer\n" * 2
    assert "[worker/3] out 1\n" in capsys.readouterr().out


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    stdout = sys.stdout
    with pytest.raises(UsageError, match=r"--log-dir .*file.*expected a folder"):
        Output("w/0", tmp_path / "file").__enter__()
    assert sys.stdout is stdout


def test_a_folder_is_tried_without_leaving_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    check_folder(tmp_path / "new" / "logs")
    assert list((tmp_path / "new" / "logs").iterdir()) == []
    with pytest.raises(UsageError, match=r"--log-dir .*file.*expected a folder"):
        check_folder(tmp_path / "file")


def test_a_full_disk_ends_the_log_but_not_the_program(capsys, monkeypatch, tmp_path):
    with Output("w/0", tmp_path):

        def full(fd, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(module, "_write", full)
        print("one")
        print("two")
        monkeypatch.undo()
    out, err = capsys.readouterr()
    assert out == "[w/0] one\n[w/0] two\n"
    assert err.count("No space left on device") == 1
    assert err.startswith("mpiml: --log-dir")


# -- pieces ----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6000).map(lambda size: b"x" * size + b"\n")))
def test_chunks_are_whole_lines(lines):
    data = b"".join(lines)
    chunks = list(module._chunks(data))
    assert b"".join(chunks) == data
    for chunk in chunks:
        assert chunk.endswith(b"\n")
        assert len(chunk) <= module._ATOMIC or chunk.count(b"\n") == 1


@given(st.lists(st.text("ab\n\r", max_size=8)))
def test_however_a_text_is_cut_its_lines_are_the_same(pieces):
    memory = io.StringIO()
    stdout, sys.stdout = sys.stdout, memory
    try:
        with Output("w/0"):
            for piece in pieces:
                print(piece, end="")
    finally:
        sys.stdout = stdout
    text = "".join(pieces)
    if text and not text.endswith("\n"):
        text += "\n"
    assert memory.getvalue() == "".join(f"[w/0] {line}\n" for line in text.split("\n")[:-1])


# -- processes -------------------------------------------------------------------------------


def test_processes_that_share_a_pipe_do_not_tear_lines():
    status, out, err = run_child("""
        import os, sys
        from mpiml.output import Output
        children = []
        for rank in range(4):
            child = os.fork()
            if not child:
                with Output(f"w/{rank}"):
                    for i in range(300):
                        print(str(rank) * 40, end=" ")
                        print("\\n".join([str(rank) * 60] * 9))
                os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    """)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 4 * 300 * 9
    for line in lines:
        assert line.startswith("[w/")
        rank = line[3]
        assert set(line[6:]) <= {rank, " "}
        assert len(line) in (66, 107)


def test_a_forked_child_prints_but_not_what_the_parent_has_begun():
    status, out, err = run_child("""
        import os, threading
        from mpiml import output
        with output.Output("w/0"):
            print("parent ", end="")
            holding, done = threading.Event(), threading.Event()
            def hold():
                with output._state.lock:
                    holding.set()
                    done.wait()
            thread = threading.Thread(target=hold)
            thread.start()
            holding.wait()
            child = os.fork()
            if not child:
                print("child")
                os._exit(0)
            os.waitpid(child, 0)
            done.set()
            thread.join()
            print("goes on")
    """)
    assert (status, err) == (0, "")
    assert out == "[w/0] child\n[w/0] parent goes on\n"
