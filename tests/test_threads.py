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


def test_nothing_is_forbidden_with_full_support():
    threads.settle(MULTIPLE, False, "MPI")
    threads.come_home()
    assert not threads.funneled()
    assert HOME == []
    assert elsewhere(lambda: threads.check("x")) is None
    threads.need_multiple("x", "y.")
    threads.leave_home()


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
    threads.come_home()
    threads.leave_home()
    threads.leave_home()  # once too often: the main thread stays the one
    threads.check("x")
    text = elsewhere(lambda: threads.check("a collective"))
    assert text.startswith("a collective: expected the main thread, got thread 'another'")
    assert "MPI_THREAD_FUNNELED" in text
    assert "mpiml.poll()" in text


def test_under_serialized_who_launches_calls_mpi_while_the_program_runs():
    threads.settle(SERIALIZED, False, "MPI")
    assert elsewhere(lambda: threads.check("x")) is None
    threads.come_home()
    assert "MPI_THREAD_SERIALIZED" in elsewhere(lambda: threads.check("x"))
    threads.leave_home()
    assert elsewhere(lambda: threads.check("x")) is None


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
