"""Tracebacks show the user's frames; mpiml's own only where nobody else's tell what is wrong."""

import contextlib
import linecache
import re
import sys
import threading
from pathlib import Path

import pytest

import mpiml
from mpiml.errors import UsageError
from mpiml.tracebacks import error_text, is_ours, is_users, remote_text
from tests.mpi import child, mpiexec

HERE = Path(__file__).name
OURS = str(Path(mpiml.__file__).parent / "made_up.py")
SOURCE = """\
def calls(function, *args):
    return function(*args)
def opens(function):
    function()
    yield
def refuses(error):
    raise error
def fails():
    return None.absent
def chains(error):
    try:
        fails()
    except AttributeError as cause:
        raise error from cause
"""


@pytest.fixture
def mpiml_code(monkeypatch):
    """Functions of a file that would be mpiml's."""
    monkeypatch.setitem(
        linecache.cache, OURS, (len(SOURCE), None, SOURCE.splitlines(True), OURS)
    )
    found = {"UsageError": UsageError}
    exec(compile(SOURCE, OURS, "exec"), found)
    return found


def text_of(function, *args):
    """The text of the error that `function` raises, without this function's frame."""
    try:
        function(*args)
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next
        return error_text(error)
    raise AssertionError("expected an error")


def frames(text):
    """File and function of each frame in a text."""
    found = re.findall(r'File "(.*)", line \d+, in (\S+)', text)
    return [(Path(file).name, function) for file, function in found]


def boom():
    raise ValueError("boom")


def test_whose_a_file_is():
    package = Path(mpiml.__file__).parent
    assert is_ours(OURS)
    assert not is_users(OURS)
    for file in (f"{package}_of_mine.py", f"{package}s/train.py", __file__):
        assert is_users(file)
        assert not is_ours(file)
    for file in (threading.__file__, "<frozen importlib._bootstrap>"):
        assert not is_users(file)
        assert not is_ours(file)
    assert is_users(pytest.__file__)  # an installed package


def test_our_frames_above_and_between_are_hidden(mpiml_code):
    calls = mpiml_code["calls"]

    def user():
        calls(calls, boom)

    assert frames(text_of(calls, user)) == [(HERE, "user"), (HERE, "boom")]


def test_a_file_that_is_no_python_needs_no_frames(mpiml_code):
    text = text_of(mpiml_code["calls"], compile, "x = = 1", "/home/me/train.py", "exec")
    assert 'File "/home/me/train.py", line 1' in text
    assert OURS not in text


def test_frames_of_the_library_that_are_there_for_us_are_hidden(mpiml_code):
    opens = contextlib.contextmanager(mpiml_code["opens"])

    def user():
        with opens(boom):
            pass

    assert frames(text_of(user)) == [(HERE, "user"), (HERE, "boom")]
    assert frames(text_of(mpiml_code["calls"], opens(boom).__enter__)) == [(HERE, "boom")]


def test_frames_of_the_library_that_the_user_called_stay(mpiml_code):
    text = text_of(mpiml_code["calls"], lambda: contextlib.ExitStack().enter_context(3))
    assert frames(text) == [(HERE, "<lambda>"), ("contextlib.py", "enter_context")]


def test_an_error_that_we_raise_on_purpose_ends_at_the_users_line(mpiml_code):
    for error in (UsageError("no"), KeyError("no")):
        text = text_of(lambda error=error: mpiml_code["refuses"](error))
        assert frames(text) == [(HERE, "<lambda>")]
        assert "no" in text.splitlines()[-1]


def test_a_fault_of_ours_keeps_all_frames(mpiml_code):
    calls = mpiml_code["calls"]
    text = text_of(calls, lambda: mpiml_code["fails"]())
    ours = Path(OURS).name
    assert frames(text) == [(ours, "calls"), (HERE, "<lambda>"), (ours, "fails")]
    assert "return None.absent" in text


def test_what_is_ours_alone_keeps_all_frames(mpiml_code):
    text = text_of(mpiml_code["calls"], mpiml_code["refuses"], UsageError("no"))
    ours = Path(OURS).name
    assert frames(text) == [(ours, "calls"), (ours, "refuses")]


def test_causes_are_judged_by_themselves(mpiml_code):
    text = text_of(lambda: mpiml_code["chains"](UsageError("no")))
    ours = Path(OURS).name
    assert frames(text) == [(ours, "chains"), (ours, "fails"), (HERE, "<lambda>")]

    def again():
        try:
            mpiml_code["calls"](boom)
        except ValueError:
            mpiml_code["refuses"](UsageError("no"))

    assert frames(text_of(again)) == [(HERE, "again"), (HERE, "boom"), (HERE, "again")]


def test_members_of_a_group_too(mpiml_code):
    def user():
        errors = []
        for _ in range(2):
            try:
                mpiml_code["calls"](boom)
            except ValueError as error:
                error.__traceback__ = error.__traceback__.tb_next
                errors.append(error)
        raise ExceptionGroup("both", errors)

    assert frames(text_of(user)) == [(HERE, "user"), (HERE, "boom"), (HERE, "boom")]


def test_a_remote_text_says_where(mpiml_code):
    try:
        mpiml_code["calls"](boom)
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next
        text = remote_text(error, "svc/1", 3)
    assert re.match(r"\n\[svc/1, rank 3, host \S+\]\nTraceback ", text)
    assert text.endswith("ValueError: boom\n")
    assert frames(text) == [(HERE, "boom")]


# -- as a user sees them ------------------------------------------------------------------------

PROGRAM = """\
import sys
import mpiml


def boom():
    raise ValueError("boom")


class Service:
    def fail(self):
        boom()


def body(service, way):
    if way == "callback":
        future = service.futures.fail()
        future.exception()
        future.add_done_callback(lambda future: boom())
    if way == "unseen":
        service.futures.fail()
    if way == "on_stop":
        mpiml.context().on_stop(boom)
        mpiml.context().stop()


def build(way: str):
    if way == "build":
        boom()
    program = mpiml.Program("p")
    service = program.add_node(mpiml.ServiceNode(Service), label="service")
    program.add_node(mpiml.PyNode(body, service, way), label="body")
    return program


if "import" in sys.argv:
    boom()
"""


@pytest.mark.parametrize(
    ("way", "functions"),
    [
        ("build", ["build", "boom"]),
        ("import", ["<module>", "boom"]),
        ("callback", ["<lambda>", "boom"]),
        ("unseen", ["fail", "boom"]),
        ("on_stop", ["boom"]),
    ],
)
def test_a_program_shows_its_own_frames(tmp_path, way, functions):
    file = tmp_path / "mine.py"
    file.write_text(PROGRAM)
    ended = child(sys.executable, "-m", "mpiml.run", file, "--way", way)
    assert frames(ended.stderr) == [("mine.py", name) for name in functions], ended
    assert "ValueError: boom" in ended.stderr
    assert (ended.rc != 0) == (way in ("build", "import", "on_stop")), ended


def test_a_build_that_fails_on_ranks_does_too(tmp_path, mpi_launcher):
    file = tmp_path / "mine.py"
    file.write_text(PROGRAM)
    ended = mpiexec(2, "-m", "mpiml.run", file, "--way", "build")
    assert frames(ended.stderr) == [("mine.py", "build"), ("mine.py", "boom")], ended
    assert not ended.leftovers
