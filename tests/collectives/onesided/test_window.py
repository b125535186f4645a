"""Window: put, get, accumulate and collect, the same in every place members live."""

import numpy as np
import pytest

from mpiml.collectives import Window
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.together import together

LIKE = {"w": np.zeros(33, "f4"), "t": np.zeros((4, 3))}
ways = pytest.mark.parametrize("way", ["windows", "messages"])


def everywhere(place, body, monkeypatch, way="auto"):
    monkeypatch.setenv("MPIML_ONESIDED", way)
    played(place, body, monkeypatch)


def meet(window):
    window._team.exchange(b"", "the test")


@ways
@places
def test_put_get_and_accumulate_around_a_ring(place, way, monkeypatch):
    def body(comm):
        with Window(comm, LIKE) as window:
            me, n = window.index, window.size
            following, before = (me + 1) % n, (me - 1) % n
            window.put(following, {"w": np.full(33, me), "t": np.full((4, 3), 10 + me)})
            window.accumulate(following, np.ones(33), scale=0.5, name="w")
            window.accumulate_at(following, "t", [1, 1], [[1, 2, 3], [1, 2, 3]])
            window.barrier()
            assert (window["w"] == before + 0.5).all()
            t = np.full((4, 3), 10.0 + before)
            t[1] += [2, 4, 6]
            assert (window["t"] == t).all()
            assert window.version == 3
            for member in range(n):
                got = window.get(member)
                assert (got["w"] == (member - 1) % n + 0.5).all()
                assert (window.get(member, "t")[0] == 10 + (member - 1) % n).all()
                tree, version = window.read(member)
                assert version == 3
                assert (tree["w"] == got["w"]).all()
            meet(window)
            window.put((me + 2) % n, np.full((4, 3), me), name="t")
            window.flush()
            meet(window)
            assert (window["t"] == (me - 2) % n).all()
            assert (window["w"] == before + 0.5).all()

    everywhere(place, body, monkeypatch, way)


@ways
@places
def test_what_is_collected_is_collected_once(place, way, monkeypatch):
    """All accumulate at member 0, which collects meanwhile: the parts make the whole."""

    def body(comm):
        with Window(comm, np.zeros(1000)) as window:
            total = np.zeros(1000)
            for _ in range(30):
                window.accumulate(0, np.ones(1000))
                if window.index == 0:
                    tree, _ = window.collect()
                    assert len({*tree.tolist()}) == 1  # no part of an update
                    total += tree
            window.barrier()
            if window.index == 0:
                total += window.collect()[0]
                assert (total == 30 * window.size).all()
                assert not window.tree.any()

    everywhere(place, body, monkeypatch, way)


@ways
@places
def test_reads_are_never_torn(place, way, monkeypatch):
    """Each writes its own arrays, all elements to one number; others read that number."""

    def body(comm):
        with Window(comm, {"a": np.zeros(4000), "b": np.zeros(3000, "f4")}) as window:
            meet(window)
            for k in range(1, 40):
                with window.writing() as tree:
                    tree["a"][...] = k
                    tree["b"][...] = k
                tree, version = window.read((window.index + k) % window.size)
                assert {*tree["a"].tolist(), *tree["b"].tolist()} == {float(version)}

    everywhere(place, body, monkeypatch, way)


@ways
@places
def test_a_read_waits_for_who_is_writing(place, way, monkeypatch):
    """However long that takes; meanwhile others add to the arrays of others."""

    def body(comm):
        with Window(comm, np.zeros(3)) as window:
            me, n = window.index, window.size
            if me == 0:
                with window.writing() as tree:
                    tree[0] = 1
                    meet(window)  # others begin to read
                    for _ in range(20):
                        window.accumulate(n - 1, np.ones(3)) if n > 1 else None
                    window.flush()
                    tree[1:] = 1
            else:
                meet(window)
                assert window.read(0)[0].tolist() == [1, 1, 1]
            window.barrier()
            if me == n - 1 and n > 1:
                assert window.tree.tolist() == [20, 20, 20]

    everywhere(place, body, monkeypatch, way)


def test_what_is_collected_counts_as_an_update():
    """Else a copy from afar, which compares versions, could be torn by it."""

    def body(team):
        with Window(team, np.zeros(3)) as window:
            window.accumulate(0, np.ones(3))
            assert window.collect()[1] == 1
            assert window.version == 2

    together(1, body)


@places
def test_push_sum_with_weights_beside_the_values(place, monkeypatch):
    """BlueFog's accumulate with an associated weight: x / w becomes the mean on a ring."""

    def body(comm):
        with Window(comm, {"x": np.zeros(5), "w": np.zeros(1)}) as window:
            me, n = window.index, window.size
            x, w = np.arange(5.0) + me, 1.0
            for _ in range(120):
                window.accumulate((me + 1) % n, {"x": x / 2, "w": np.array([w / 2])})
                window.accumulate(me, {"x": x / 2, "w": np.array([w / 2])})
                window.barrier()
                got, _ = window.collect()
                x, w = got["x"], got["w"][0]
                meet(window)
            assert np.allclose(x / w, np.arange(5) + (n - 1) / 2, atol=1e-9)

    everywhere(place, body, monkeypatch)


@pytest.mark.parametrize("member", [-1, 2, "1", 0.5])
@pytest.mark.parametrize("call", ["get", "read", "put", "accumulate"])
def test_members_that_are_not(member, call):
    def body(team):
        with Window(team, np.zeros(2)) as window:
            more = (np.zeros(2),) if call in ("put", "accumulate") else ()
            with pytest.raises(UsageError, match=f"Window.{call}: member: expected 0 to 1"):
                getattr(window, call)(member, *more)

    together(2, body)


def test_values_that_do_not_fit_change_nothing():
    def body(team):
        with Window(team, LIKE) as window:
            for call in (
                lambda: window.put(0, {"w": np.zeros(33)}),
                lambda: window.put(0, np.zeros(34), "w"),
                lambda: window.accumulate(0, np.zeros(33), name="x"),
                lambda: window.accumulate_at(0, "w", [33], [1]),
                lambda: window.get(0, "x"),
            ):
                with pytest.raises(UsageError):
                    call()
            assert window.version == 0

    together(1, body)


@pytest.mark.parametrize(
    "call", [lambda w: w.collect(), lambda w: w.read(0)], ids=["collect", "read"]
)
def test_own_arrays_are_not_read_while_they_are_written(call):
    """It would wait for itself."""

    def body(team):
        with Window(team, np.zeros(2)) as window:
            with (
                window.writing(),
                pytest.raises(UsageError, match=r"within `with window\.writing"),
            ):
                call(window)
            call(window)

    together(1, body)


def test_a_closed_window_says_so():
    def body(team):
        window = Window(team, np.zeros(2))
        window.close()
        for call in (
            lambda: window.get(0),
            lambda: window.put(0, np.zeros(2)),
            window.collect, window.flush, window.barrier, lambda: window.read(0),
        ):  # fmt: skip
            with pytest.raises(ServiceGoneError, match="is closed"):
                call()

    together(2, body)
