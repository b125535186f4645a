"""What a node knows of itself, in threads of one process."""

import io
import logging
import sys
import threading

import pytest

import mpiml
from mpiml.context import _seed, missing_ranks
from tests.mpi import child


def run(body, replicas=1, **settings):
    program = mpiml.Program("context")
    program.add_node(mpiml.PyNode(body), label="node", replicas=replicas)
    return mpiml.launch(program, **settings)["node"]


def test_role_index_and_replicas():
    def body():
        c = mpiml.context()
        assert mpiml.context() is c
        return c.role, c.index, c.replicas, c.world_rank, c.world_size, c.local_rank, c.gpus

    assert run(body, 3) == [("node", i, 3, 0, 1, 0, ()) for i in range(3)]


def test_seeds_differ_by_node_and_by_seed_and_not_by_anything_else():
    def body():
        c = mpiml.context()
        return c.seed, c.rng.integers(1 << 30)

    three, five = run(body, 3, seed=1), run(body, 5, seed=1)
    assert three == five[:3]
    assert len(set(five)) == 5
    assert not set(five) & set(run(body, 5, seed=2))


def test_the_seed_of_a_node_is_fixed_for_ever():
    assert (
        _seed(0, "worker", 0) == 7006956099290457956
    )  # runs stay repeatable from release to release
    some = {_seed(s, r, i) for s in (0, 1, 11) for r in ("a", "b", "a1") for i in (0, 1, 11)}
    assert len(some) == 27
    assert all(0 <= _seed(s, "x", 0) < 1 << 63 for s in (0, 2**70))


def test_outside_of_a_program():
    with pytest.raises(mpiml.UsageError, match="outside of any"):
        mpiml.context()


def in_thread(function):
    """Run `function` on a thread and return what it returned or raised."""
    box = []

    def work():
        try:
            box.append(function())
        except BaseException as error:
            box.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    return box[0]


def test_a_thread_belongs_to_the_only_node_of_a_process():
    assert run(lambda: in_thread(lambda: mpiml.context().role)) == ["node"]


def test_a_thread_that_belongs_to_none_is_told_so_and_bind_carries_the_node():
    def body():
        lost = in_thread(lambda: mpiml.context().index)
        found = in_thread(mpiml.context().bind(lambda: mpiml.context().index))
        return type(lost), str(lost), found

    for index, (kind, text, found) in enumerate(run(body, 2)):
        assert kind is mpiml.UsageError
        assert "2 nodes share this process (node/0, node/1, ...)" in text
        assert "bind" in text
        assert found == index


def test_bind_passes_arguments_results_and_errors():
    def body():
        bound = mpiml.context().bind(lambda a, b=0: a // b)
        return in_thread(lambda: bound(6, b=3)), type(in_thread(lambda: bound(1)))

    assert run(body, 2) == [(2, ZeroDivisionError)] * 2


def test_the_communicator_of_folded_replicas_names_what_is_missing():
    def body():
        with pytest.raises(mpiml.PlacementError, match="Start 2 more ranks") as caught:
            mpiml.context().comm  # noqa: B018
        return str(caught.value)

    assert all("3 replicas, got 1" in text for text in run(body, 3))
    assert "role 'w'" in str(missing_ranks("w", 4, 3))


def test_callbacks_run_once_in_order_after_the_body():
    seen = []

    def body():
        mpiml.context().on_stop(lambda: seen.append("a"))
        mpiml.context().on_stop(lambda: seen.append("b"))
        with pytest.raises(mpiml.UsageError, match="on_stop"):
            mpiml.context().on_stop(3)
        seen.append("body")

    run(body)
    assert seen == ["body", "a", "b"]


def test_wait_for_stop_gives_up_while_another_body_computes():
    over = threading.Event()

    def body():
        if mpiml.context().index:
            return over.wait(20)
        waited = mpiml.context().wait_for_stop(0.01)
        over.set()
        return waited

    assert run(body, 2) == [False, True]


def test_the_log_is_a_logger_of_the_node(capsys):
    def body():
        log = mpiml.context().log
        assert log is mpiml.context().log
        assert isinstance(log, logging.Logger)
        log.info("here I am")

    run(body, 2)
    lines = sorted(capsys.readouterr().err.splitlines())
    assert lines == ["[node/0] INFO here I am", "[node/1] INFO here I am"]


def test_the_log_follows_standard_error(monkeypatch):
    def body():
        mpiml.context().log.info("here I am")

    for _ in range(2):  # the logger outlives the program
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        run(body, 1)
        assert sys.stderr.getvalue() == "[node/0] INFO here I am\n"


ALONE = """
import mpiml

def body():
    me = mpiml.context()
    assert [me.comm.size for _ in range(2)] == [1, 1]
    assert me.world.size == me.comm.size == 1

for _ in range(2):
    program = mpiml.Program("alone")
    program.add_node(mpiml.PyNode(body), label="a")
    program.add_node(mpiml.PyNode(body), label="b")
    mpiml.launch(program)
"""


def test_communicators_without_a_launcher_may_be_asked_for_again(mpi_launcher):
    child(sys.executable, "-c", ALONE).check()  # which may start MPI
