"""SharedModel: no lost update, no torn snapshot, the same in every place members live."""

import threading

import numpy as np
import pytest

from mpiml.collectives import SharedModel
from mpiml.collectives.members import team_of
from mpiml.datasets import CSR
from mpiml.errors import RankFailedError, ServiceGoneError, UsageError
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.together import outcomes, together

# in the order of its keys: "in" of 8 bytes, "o" of 20, "t" of 168, "w" of 404
LIKE = {
    "w": np.zeros(101, "f4"), "t": np.zeros((7, 3)), "in": [np.zeros(())], "o": np.zeros(5, "f4"),
}  # fmt: skip
ways = pytest.mark.parametrize("way", ["windows", "messages"])


def everywhere(place, body, monkeypatch, way="auto"):
    monkeypatch.setenv("MPIML_ONESIDED", way)
    played(place, body, monkeypatch)


def csr(indptr, indices, values, columns):
    labels = np.ones(len(indptr) - 1, values.dtype)
    shape = (len(indptr) - 1, columns)
    return CSR(np.array(indptr, "i8"), np.array(indices, "i4"), values, labels, shape)


# -- additions -------------------------------------------------------------------------------


@ways
@places
def test_what_all_add_is_there(place, way, monkeypatch):
    def body(comm):
        with SharedModel(comm, LIKE) as model:
            n, me = model.size, model.index
            model.add(
                {
                    "w": np.ones(101),
                    "t": np.full((7, 3), me),
                    "in": [np.float64(1)],
                    "o": np.arange(5),
                },
                scale=2,
            )
            model.add_at("w", [3, 3, -1], [1, 1, 1], scale=0.5)
            model.add_at("t", [me % 7], 1.0)
            model.add_at("t", ([0, 0], [1, 1]), [1, 2])
            model.add_at(("in", 0), (), 1.0)
            rows = csr([0, 2, 2, 3], [0, 1, 0], np.array([1, 2, 3], "f4"), 101)
            model.add_rows("w", rows, [1, 1, 2])
            model.barrier()
            w = np.full(101, 2.0 * n)
            w[[3, -1]] += n, 0.5 * n
            w[:2] += 7 * n, 2 * n
            t = np.full((7, 3), float(n * (n - 1)))
            for member in range(n):
                t[member % 7] += 1
            t[0, 1] += 3 * n
            assert (model["w"] == w).all()
            assert (model["t"] == t).all()
            assert model["in"][0] == 3 * n
            assert (model["o"] == 2 * n * np.arange(5)).all()
            tree, version = model.snapshot()
            assert version == model.version == n * (1 + 4 + 3)
            assert (tree["w"] == w).all()
            assert (tree["t"] == t).all()
            assert tree["in"][0].shape == ()

    everywhere(place, body, monkeypatch, way)


@places
def test_no_update_is_lost_in_a_race(place, monkeypatch):
    """10^6 racing adds to three components, by all members together."""

    def body(comm):
        with SharedModel(comm, np.zeros(3)) as model:
            calls = 1_000_000 // model.size // 1000
            rows = csr(range(0, 3001, 3), [0, 1, 2] * 1000, np.ones(3000), 3)
            model.barrier()
            for _ in range(calls):
                model.add_rows(None, rows)
            model.barrier()
            assert (model.tree == calls * 1000 * model.size).all()
            assert model.version == calls * 1000 * model.size

    everywhere(place, body, monkeypatch)


@places
def test_single_adds_race_too(place, monkeypatch):
    def body(comm):
        with SharedModel(comm, {"w": np.zeros(2, "f4")}) as model:
            at, one = np.array([1]), np.ones(1, "f4")
            model.barrier()
            for _ in range(2000):
                model.add_at("w", at, one)
            model.flush()
            model.barrier()
            assert model["w"].tolist() == [0, 2000 * model.size]

    everywhere(place, body, monkeypatch)


@ways
@places
def test_a_member_sees_its_own_adds_in_a_snapshot(place, way, monkeypatch):
    def body(comm):
        with SharedModel(comm, np.zeros(100)) as model:
            for k in range(1, 20):
                model.add_at(None, np.array([model.index]), np.ones(1))
                tree, version = model.snapshot()
                assert tree[model.index] == k
                assert version >= k

    everywhere(place, body, monkeypatch, way)


@ways
@places
def test_assign_and_pull(place, way, monkeypatch):
    def body(comm):
        with SharedModel(comm, LIKE) as model:
            if model.index == model.size - 1:
                tree = {
                    "w": np.arange(101),
                    "t": np.arange(21).reshape(7, 3),
                    "in": [np.float64(5)],
                    "o": np.ones(5),
                }
                model.assign(tree)
            model.barrier()
            assert (model["w"] == np.arange(101)).all()
            assert model["in"][0] == 5
            model.barrier()
            if model.index == 0:  # it is at home
                model.add_at("w", np.arange(101), np.ones(101, "f4"))
                model.add_at("t", np.arange(7), 1)
                model.add_at(("in", 0), (), 1)
            model._team.exchange(b"", "they stay away, and do not pull")
            model.pull("w", 7)
            model.pull("t", 2)
            assert model["w"][7] == 8
            assert (model["t"][2] == [7, 8, 9]).all()
            model.pull("w", [3, 4, 5, 50, 3])
            assert (model["w"][[3, 4, 5, 50]] == [4, 5, 6, 51]).all()
            model.pull("t", ([4, 6], [0, 2]))
            assert model["t"][4, 0] == 13
            model.pull(("in", 0))
            assert model["in"][0] == 6
            model.pull()
            assert (model["w"] == np.arange(101) + 1).all()
            model.pull("w", np.zeros(0, int))

    everywhere(place, body, monkeypatch, way)


@ways
@places
def test_snapshots_are_never_torn(place, way, monkeypatch):
    """Each update adds 1 to all components, so a snapshot has one value, its version."""

    def body(comm):
        with SharedModel(comm, {"a": np.zeros(5000, "f4"), "b": np.zeros(3000)}) as model:
            ones = {"a": np.ones(5000, "f4"), "b": np.ones(3000)}
            model.barrier()
            for k in range(40):
                if model.index % 2 or model.size == 1:
                    model.add(ones)
                if k % 3 == 0 or model.index % 2 == 0:
                    tree, version = model.snapshot()
                    values = {*tree["a"].tolist(), *tree["b"].tolist()}
                    assert values == {version}

    everywhere(place, body, monkeypatch, way)


@places
def test_large_models_in_pieces(place, monkeypatch):
    count = 700_001  # 2.8 MB: three pieces of a window

    def body(comm):
        with SharedModel(comm, np.zeros(count, "f4")) as model:
            if model.index == model.size - 1:
                model.add(np.arange(count, dtype="f4"))
            model.barrier()
            tree, _ = model.snapshot()
            assert (tree == np.arange(count)).all()
            assert (model.tree == np.arange(count)).all()

    everywhere(place, body, monkeypatch)


@ways
@places
@pytest.mark.parametrize("make", [np.asarray, list], ids=["arrays", "lists"])
def test_indices_mean_rows_whatever_they_are(place, way, make, monkeypatch):
    """Where as many rows are named as there are values, too, and with axes of their own."""

    def body(comm):
        with SharedModel(comm, {"t": np.zeros((10, 2)), "v": np.zeros(8)}) as model:
            n = model.size
            model.add_at("t", make([1, 2]), np.ones(2))
            model.add_at("t", make([[1], [2]]), np.ones((2, 1, 2)))
            model.add_at("v", make([[0, 1], [2, 3]]), np.array([[1.0, 2], [3, 4]]))
            model.add_at("v", make([4]), np.ones((1,)), 2.0)
            model.add_at("v", np.array(5), np.array(3.0))
            model.barrier()
            t = np.zeros((10, 2))
            t[[1, 2]] = 2 * n
            assert (model["t"] == t).all()
            assert model["v"].tolist() == [n, 2 * n, 3 * n, 4 * n, 2 * n, 3 * n, 0, 0]

    everywhere(place, body, monkeypatch, way)


# -- staleness -------------------------------------------------------------------------------


def test_staleness_counts_the_updates_of_others():
    turn = [threading.Event() for _ in range(4)]

    def body(team):
        model = SharedModel(team, np.zeros(1))
        one = np.ones(1), np.array([0])
        if team.index == 0:
            model.mark()
            turn[0].set()
            assert turn[1].wait(20)
            model.add_at(None, one[1], one[0])
            assert model.staleness() == (1, 3.0, 3)
            model.mark()
            model.add_at(None, one[1], one[0])
            assert model.staleness() == (2, 1.5, 3)
        else:
            assert turn[0].wait(20)
            for _ in range(3):
                model.add_at(None, one[1], one[0])
            turn[1].set()
        model.close()

    together(2, body)


def test_staleness_is_sampled_without_marks():
    def body(team):
        with SharedModel(team, np.zeros(1)) as model:
            for _ in range(160):
                model.add_at(None, np.array([0]), np.ones(1))
            assert model.staleness() == (9, 0.0, 0)

    together(1, body)


@pytest.mark.mpi(min_size=2)
@ways
def test_staleness_of_a_member_away_from_home(way, monkeypatch):
    def body(comm):
        with SharedModel(comm, np.zeros(1)) as model:
            one = np.array([0]), np.ones(1)
            last = model.index == model.size - 1
            if last:
                model.add_at(None, *one)
                model.add_at(None, *one)
                model.flush()
                model.mark()
            model._team.exchange(b"", "marked")
            if model.index == 0:
                for _ in range(5):
                    model.add_at(None, *one)
            model._team.exchange(b"", "added")
            if last:
                model.add_at(None, *one)
                model.flush()
                assert model.staleness() == (1, 5.0, 5)

    everywhere("hosts of one rank", body, monkeypatch, way)


@pytest.mark.mpi(min_size=2)
def test_staleness_counts_from_the_last_pull(monkeypatch):
    """The 16th pull is marked; one that comes later makes the mark void."""

    def body(comm):
        with SharedModel(comm, np.zeros(1)) as model:
            last = model.index == model.size - 1
            for _ in range(16 if last else 0):
                model.pull()
            model._team.exchange(b"", "marked")
            if model.index == 0:
                model.add(np.ones(1))
            model._team.exchange(b"", "added")
            if last:
                model.pull()
                model.add(np.ones(1))
                model.flush()
                assert model.staleness() == (0, 0.0, 0)

    everywhere("hosts of one rank", body, monkeypatch)


# -- refusals --------------------------------------------------------------------------------

WRONG = {
    "float16": (lambda m: np.zeros(3, "f2"), "float32 or float64, got float16"),
    "integers": (lambda m: {"a": np.zeros(3, "i4")}, r"leaf \['a'\].*got int32"),
    "nothing": (lambda m: {}, "at least one array"),
    "another shape": (lambda m: np.zeros(3 + m), "expected the same arguments and arrays"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("place", [2, pytest.param("ranks", marks=pytest.mark.mpi(min_size=2))])
def test_trees_that_cannot_be(place, case, monkeypatch):
    make, text = WRONG[case]

    def body(comm):
        index = team_of(comm, "test").index
        for _ in range(2):
            with pytest.raises(UsageError, match=text):
                SharedModel(comm, make(index))

    everywhere(place, body, monkeypatch)


CALLS = {
    "no such array": (lambda m: m.add_at("x", [0], [1]), r"one of .*'w'.*got 'x'"),
    "outside": (lambda m: m.add_at("w", [101], [1]), "-101 to 100 for axis 0, got 101"),
    "far below": (lambda m: m.add_at("w", np.array([-102]), np.ones(1, "f4")), "got -102"),
    "float indices": (lambda m: m.add_at("w", [0.5], [1]), "expected integers, got float64"),
    "values do not fit": (lambda m: m.add_at("w", [0, 1], [1, 2, 3]), r"shape \(2,\)"),
    "too many axes": (lambda m: m.add_at("w", ([0], [0]), [1]), "at most 1"),
    "another tree": (
        lambda m: m.add({"w": np.zeros(101)}), r"a tree like \{.*\}, got \{'w': \*\}: .* missing$",
    ),
    "a scale that is none": (
        lambda m: m.add(m.snapshot()[0], scale="x"), r"SharedModel\.add: scale: .* got 'x'",
    ),
    "a scale that is none, of elements": (
        lambda m: m.add_at("w", np.array([0]), np.ones(1, "f4"), scale="1"),
        r"SharedModel\.add_at: scale: expected a real number, .* got '1'",
    ),
    "a scale of arrays": (lambda m: m.add_at("w", [0], [1], scale=np.ones(2)), "scale: expected"),
    "another shape": (
        lambda m: m.add({"w": np.zeros(100), "t": np.zeros((7, 3)), "in": [np.float64(0)], "o": np.zeros(5)}),
        r"leaf \['w'\]",
    ),
    "no CSR": (lambda m: m.add_rows("w", np.zeros(3)), "expected a CSR block"),
    "columns outside": (
        lambda m: m.add_rows("w", csr([0, 1], [101], np.ones(1, "f4"), 200)), "101",
    ),
    "complex": (lambda m: m.add_at("w", [0], [1j]), "real numbers"),
    "pull of what is not": (lambda m: m.pull("x"), "got 'x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_are_refused_change_nothing(case, monkeypatch):
    call, text = CALLS[case]

    def body(comm):
        with SharedModel(comm, LIKE) as model:
            with pytest.raises(UsageError, match=text):
                call(model)
            assert model.version == 0
            assert not model["w"].any()

    everywhere(2, body, monkeypatch)


@pytest.mark.parametrize("dtype", ["u1", "i2", "u4", "u8", "i4", "i8"])
def test_rows_with_indices_of_any_integers(dtype):
    class Block:
        indptr = np.array([0, 2, 3], dtype)
        indices = np.array([0, 1, 0], dtype)
        data = np.array([1, 2, 3])

    def body(team):
        with SharedModel(team, {"w": np.zeros(3, "f4")}) as model:
            model.add_rows("w", Block)
            assert model["w"].tolist() == [4, 2, 0]

    together(1, body)


@pytest.mark.parametrize(
    "block",
    [
        {"indptr": np.zeros(0, "i8"), "indices": np.zeros(0, "i8"), "data": np.zeros(0)},
        {"indptr": np.zeros((1, 2), "i8"), "indices": np.zeros(0, "i8"), "data": np.zeros(0)},
        {"indptr": np.array([0, 1]), "indices": np.array([0]), "data": np.ones(1, complex)},
        {"indptr": np.array([0, 1]), "indices": np.array([0]), "data": np.array(["a"], object)},
    ],
    ids=["no rows", "a matrix", "complex", "objects"],
)
def test_rows_that_are_none(block):
    def body(team):
        with SharedModel(team, {"w": np.zeros(3, "f4")}) as model:
            with pytest.raises(UsageError, match="expected indptr of shape"):
                model.add_rows("w", type("Block", (), block))
            assert model.version == 0

    together(1, body)


def test_more_memory_than_there_is_leaves_the_members_usable():
    from mpiml.errors import SharedMemoryError

    def body(team):
        with pytest.raises(SharedMemoryError, match="bytes"):
            SharedModel(team, np.broadcast_to(np.zeros(1), (1 << 43,)))
        with SharedModel(team, np.zeros(3)) as model:
            model.add(np.ones(3))

    together(2, body)


def test_views_are_read_only():
    def body(team):
        with SharedModel(team, {"w": np.zeros(3)}) as model:
            with pytest.raises(ValueError, match="read-only"):
                model["w"] += 1
            model.raw["w"][:] = 2
            assert (model["w"] == 2).all()

    together(1, body)


def test_a_closed_model_says_so():
    def body(team):
        model = SharedModel(team, {"w": np.zeros(3)})
        view = model["w"]
        model.close()
        model.close()
        for call in (
            lambda: model.add_at("w", np.array([0]), np.ones(1)),
            lambda: model.add({"w": np.zeros(3)}),
            model.snapshot, model.barrier, model.flush, model.pull, model.mark,
        ):  # fmt: skip
            with pytest.raises(ServiceGoneError, match="is closed"):
                call()
        assert (view == 0).all()

    together(2, body)


@pytest.mark.mpi(min_size=2)
def test_a_closed_model_of_several_hosts_asks_nobody(monkeypatch):
    def body(comm):
        with SharedModel(comm, np.zeros(3)) as model:
            model.add(np.ones(3))
            model.barrier()
            version = model.version
        assert model.statistics()["version"] == version == comm.size
        if model.index:
            with pytest.raises(ServiceGoneError, match="version: the model is closed"):
                _ = model.version

    everywhere("hosts of one rank", body, monkeypatch)


# -- failure ---------------------------------------------------------------------------------


def test_a_member_that_stays_within_an_update_is_named(monkeypatch):
    from mpiml.collectives.onesided import memory

    monkeypatch.setattr(memory, "_SLICE_US", 1000)

    def body(team):
        model = SharedModel(team, np.zeros(3))
        if team.index == 1:
            model._block.gate.enter()
            team.exchange(b"", "inside")
            team.exchange(b"", "seen")
            model._block.gate.leave()
        else:
            team.exchange(b"", "inside")
            assert model._block.holders() == [1]
            with pytest.raises(RankFailedError, match=r"member 1 .*add_at|add_at.*member 1"):
                raise model._block.stuck(TimeoutError("late"), "SharedModel.add_at")
            team.exchange(b"", "seen")
        model.close()

    together(2, body)


def test_a_snapshot_waits_for_whoever_is_within_an_update(monkeypatch):
    from mpiml.collectives.onesided import memory

    monkeypatch.setattr(memory, "_SLICE_US", 1000)
    looked = threading.Event()

    class Hooks:
        def begin(self, label): ...
        def end(self): ...
        def waiting(self, seconds, missing, label):
            if list(missing) == [1] and "snapshot" in str(label):
                looked.set()

    def body(team):
        model = SharedModel(team, np.zeros(3))
        if team.index == 1:
            model._block.gate.enter()
            model.raw[0] = 1
            team.exchange(b"", "inside")
            assert looked.wait(20)
            model.raw[1:] = 1
            model._block.gate.leave()
        else:
            team.exchange(b"", "inside")
            tree, version = model.snapshot()
            assert tree.tolist() == [1, 1, 1]
            assert version == 1
        model.close()

    assert not [o for o in outcomes(2, body, Hooks()) if isinstance(o, BaseException)]


def test_a_snapshot_ends_when_a_wait_is_to_end(monkeypatch):
    from mpiml.collectives.onesided import memory

    monkeypatch.setattr(memory, "_SLICE_US", 1000)

    class Hooks:
        def begin(self, label): ...
        def end(self): ...
        def waiting(self, seconds, missing, label):
            if "snapshot" in str(label):
                raise RankFailedError("member 1 is dead", tuple(missing))

    def body(team):
        model = SharedModel(team, np.zeros(3))
        if team.index == 1:
            model._block.gate.enter()
        team.exchange(b"", "inside")
        if team.index == 0:
            with pytest.raises(RankFailedError, match="is dead"):
                model.snapshot()

    assert not [o for o in outcomes(2, body, Hooks()) if isinstance(o, BaseException)]


# -- memory ----------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_without_shared_memory(monkeypatch):
    from mpiml.collectives import arena
    from mpiml.errors import SharedMemoryError

    monkeypatch.setattr(arena, "_room", lambda total: f"needs {total} bytes, has none")

    def body(comm):
        with pytest.raises(SharedMemoryError, match=r"/dev/shm|needs"):
            SharedModel(comm, np.zeros(1000))
        with SharedModel(comm, np.zeros(1000), fallback=True) as model:
            assert model.statistics()["hosts"] == comm.size
            model.add(np.ones(1000))
            model.barrier()
            assert (model.tree == comm.size).all()
            assert (model.snapshot()[0] == comm.size).all()

    everywhere("ranks", body, monkeypatch)


@pytest.mark.mpi(min_size=2)
def test_a_window_that_fails_its_self_test_is_not_used(monkeypatch):
    from mpiml.collectives.onesided import windows

    real = windows._reads

    def wrong(window, out, target):
        real(window, out, target)
        if len(out) == 10_000:
            out[77] += 1
        return True

    monkeypatch.setattr(windows, "_reads", wrong)

    def body(comm):
        with SharedModel(comm, np.zeros(10)) as model:
            way = model.statistics()["way"]
            assert way.startswith("messages: windows failed their self-test on rank 0: 10000")
            model.add(np.ones(10))
            model.barrier()
            assert (model.tree == comm.size).all()
            model.pull()
            model.barrier()

    everywhere("hosts of one rank", body, monkeypatch)


@pytest.mark.mpi(min_size=2)
def test_a_window_that_one_rank_cannot_make_is_not_used(monkeypatch):
    from mpi4py import MPI

    from mpiml.collectives.onesided import windows

    def create(memory, comm, real=windows._create):
        window = real(memory, comm)
        if comm.rank == 1:
            raise MPI.Exception(MPI.ERR_WIN)
        return window

    monkeypatch.setattr(windows, "_create", create)

    def body(comm):
        with SharedModel(comm, np.zeros(10)) as model:
            assert model.statistics()["way"].startswith(
                "messages: windows failed their self-test"
            )
            model.add(np.ones(10))
            model.barrier()
            assert (model.tree == comm.size).all()

    everywhere("hosts of one rank", body, monkeypatch)


@pytest.mark.mpi(min_size=2)
def test_windows_work_here(monkeypatch):
    def body(comm):
        with SharedModel(comm, np.zeros(10)) as model:
            assert model.statistics()["way"] == "MPI windows"

    everywhere("hosts of one rank", body, monkeypatch)


@pytest.mark.mpi(min_size=2)
def test_a_member_that_raises_does_not_hold_the_others(monkeypatch):
    """What is left open when a block ends by an error is closed when the team is."""

    def body(comm):
        def fails():
            with SharedModel(comm, np.zeros(10)) as model:
                model.add(np.ones(10))
                raise KeyError

        with pytest.raises(KeyError):
            fails()
        with SharedModel(comm, np.zeros(10)) as model:
            model.add(np.ones(10))

    everywhere("hosts of one rank", body, monkeypatch)


@pytest.mark.mpi(min_size=2)
def test_many_windows_of_members_that_share_processes(monkeypatch):
    """Whichever member of a process comes last makes a window there: it is not always the same."""

    def body(comm):
        for _ in range(12):
            with SharedModel(comm, LIKE) as model:
                model.add(
                    {
                        k: np.ones_like(v) if k != "in" else [np.ones(())]
                        for k, v in LIKE.items()
                    }
                )
                model.barrier()
                assert model.snapshot()[1] == model.size

    monkeypatch.setenv("MPIML_ONESIDED", "windows")
    played("two on each of two hosts", body, monkeypatch)
