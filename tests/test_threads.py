"""Thread levels: what each allows, and on which thread."""

import threading

import pytest

from mpiml import threads
from mpiml.errors import UsageError
from mpiml.threads import FUNNELED, HOME, MULTIPLE, SERIALIZED, SINGLE


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """Leave the level, and who is home, as they were."""
    monkeypatch.setattr(threads, "_level", MULTIPLE)
    before = HOME.copy()
    HOME.clear()
    yield
    HOME[:] = before


def elsewhere(call):
    """Call on another thread; return what it raised."""
    box = [None]

    def work():
        try:
            call()
        except UsageError as error:
            box[0] = str(error)

    thread = threading.Thread(target=work, name="another")
    thread.start()
    thread.join()
    return box[0]


def at_home(level):
    """Begin and end a program."""
    with threads.at_home(level):
        threads.check("x")


def test_nothing_is_forbidden_with_full_support():
    threads.settle(MULTIPLE, False, "MPI")
    with threads.at_home(MULTIPLE):
        assert not threads.funneled()
        assert HOME == []
        assert elsewhere(lambda: threads.check("x")) is None
        assert elsewhere(lambda: at_home(MULTIPLE)) is None
        threads.need_multiple("x", "y.")


def test_a_single_thread_is_too_few():
    with pytest.raises(UsageError, match=r"got MPI_THREAD_SINGLE from MPI 9.*FUNNELED"):
        threads.settle(SINGLE, True, "MPI 9")
    assert not threads.funneled()


def test_under_funneled_only_the_main_thread_calls_mpi():
    with pytest.raises(
        UsageError, match="the thread that has initialised MPI, got thread 'Main"
    ):
        threads.settle(FUNNELED, False, "MPI")
    threads.settle(FUNNELED, True, "MPI")
    threads.settle(FUNNELED, True, "MPI")
    assert [threading.get_ident()] == HOME
    with threads.at_home(FUNNELED):
        pass
    assert [threading.get_ident()] == HOME  # outside of programs too
    threads.check("x")
    text = elsewhere(lambda: threads.check("a collective"))
    assert text.startswith("a collective: expected thread 'MainThread', got thread 'another'")
    assert "MPI_THREAD_FUNNELED" in text
    assert "mpiml.poll()" in text


def test_under_serialized_who_launches_calls_mpi_while_the_program_runs():
    threads.settle(SERIALIZED, False, "MPI")
    assert elsewhere(lambda: threads.check("x")) is None
    with threads.at_home(SERIALIZED):
        with threads.at_home(SERIALIZED):  # a program inside
            threads.check("x")
        assert "MPI_THREAD_SERIALIZED" in elsewhere(lambda: threads.check("x"))
    assert elsewhere(lambda: threads.check("x")) is None


def test_under_serialized_programs_of_two_threads_do_not_overlap():
    with threads.at_home(SERIALIZED):  # which is before the level is noted
        text = elsewhere(lambda: at_home(SERIALIZED))
        assert "expected to be called on thread 'MainThread', a program of which runs" in text
        assert "got thread 'another': under MPI_THREAD_SERIALIZED two threads" in text
        assert [threading.get_ident()] == HOME
    assert elsewhere(lambda: at_home(SERIALIZED)) is None  # one after the other
    with pytest.raises(ZeroDivisionError), threads.at_home(SERIALIZED):
        raise ZeroDivisionError
    assert HOME == []


@pytest.mark.parametrize("level", [FUNNELED, SERIALIZED])
def test_what_needs_a_thread_is_refused_with_what_does_without(level):
    threads.settle(level, True, "MPI")
    with pytest.raises(UsageError, match=r"^pairs: expected MPI_THREAD_MULTIPLE.*Use rings\."):
        threads.need_multiple("pairs", "Use rings.")


def test_names_are_those_of_the_standard():
    assert [threads.name(i) for i in (SINGLE, SERIALIZED, 7)] == [
        "MPI_THREAD_SINGLE",
        "MPI_THREAD_SERIALIZED",
        "MPI_THREAD_7",
    ]
