"""svm_epoch: the published step bit for bit, races that lose nothing, and that it learns."""

import re

import numpy as np
import pytest

from mpiml.collectives import RingModel, SharedModel, allreduce
from mpiml.collectives.onesided.svm import _blocks, svm_epoch, svm_score
from mpiml.datasets import CSR, sparse_svm
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.together import together

HOWS = pytest.mark.parametrize("how", ["atomic", "racy", "spinlock", "mutex"])
DTYPES = pytest.mark.parametrize("dtype", ["float32", "float64"])


def by_hand(w, rows, eta, mu, degrees, order):
    """The step as the paper writes it, one row after the other; changes w."""
    kind = w.dtype.type
    active, loss = 0, 0.0
    for i in order:
        part = slice(rows.indptr[i], rows.indptr[i + 1])
        at, x, y = rows.indices[part], rows.values[part], rows.labels[i]
        dot = 0.0
        for j, v in zip(at, x, strict=True):
            dot += float(w[j]) * float(v)
        if y * dot < 1:
            active, loss = active + 1, loss + (1 - float(y) * dot)
            w[at] += kind(eta) * y * x
        w[at] *= kind(1) - kind(eta * mu) / degrees[at].astype(w.dtype)
    return active, loss


def small(seed=0, rows=60, dtype="float64", rank=0, size=1):
    return sparse_svm(rows, 40, 5, seed=seed, dtype=dtype, rank=rank, size=size).data


def columns_of(rows, member, size):
    """The same rows in columns that no other member has."""
    return CSR(
        rows.indptr, (rows.indices * size + member).astype(np.int32), rows.values, rows.labels,
        (len(rows), rows.shape[1] * size),
    )  # fmt: skip


# -- the step --------------------------------------------------------------------------------------


@HOWS
@DTYPES
@pytest.mark.parametrize("mu", [0.0, 0.1])
def test_one_member_does_the_published_steps_to_the_last_bit(how, dtype, mu):
    def body(team):
        rows = small(dtype=dtype)
        degrees = rows.degrees()
        order = np.random.default_rng(1).integers(0, 60, 200)
        expected = np.zeros(40, dtype)
        with SharedModel(team, {"a": np.zeros(3), "w": np.zeros(40, dtype)}) as model:
            seen = svm_epoch(model, "w", rows, 0.3, mu, degrees, how=how)
            assert seen == by_hand(expected, rows, 0.3, mu, degrees, range(60))
            seen = svm_epoch(model, "w", rows, 0.2, mu, degrees, order, how)
            assert seen == by_hand(expected, rows, 0.2, mu, degrees, order)
            assert 0 < seen.active < 200
            assert model["w"].tobytes() == expected.tobytes()
            assert not model["a"].any()
            assert model.version == model.statistics()["adds"] == 260
            svm_epoch(model, "w", rows, 0.2, mu, degrees, [])
            assert model.version == 260

    together(1, body)


def test_rows_of_another_dtype_are_converted_and_a_table_is_one_axis():
    def body(team):
        rows = small(dtype="float64")
        degrees, order = rows.degrees(), np.arange(60, dtype=np.uint8)
        with SharedModel(team, np.zeros((8, 5), np.float32)) as model:
            svm_epoch(model, None, rows, 0.3, 0.1, degrees, order)
            expected = np.zeros(40, np.float32)
            narrow = small(dtype="float64")
            narrow = CSR(
                rows.indptr, rows.indices, rows.values.astype("f4"),
                rows.labels.astype("f4"), rows.shape,
            )  # fmt: skip
            by_hand(expected, narrow, 0.3, 0.1, degrees, range(60))
            assert model.tree.tobytes() == expected.tobytes()

    together(1, body)


class Ring:
    """Lets so many updates pass between two counts."""

    def __init__(self, room):
        self.room, self.counted = room, []

    def count(self, updates):
        self.counted.append(updates)


class Counted:
    """A SharedModel whose updates are counted like those of a RingModel."""

    def __init__(self, model, ring):
        self._model, self._ring = model, ring

    def _direct(self, call):
        return self._model._direct(call)[0], self._ring


@pytest.mark.parametrize("visits", [None, 9000])
def test_turns_between_rows_change_no_step(visits):
    def body(team):
        rows = small(dtype="float32")
        degrees = rows.degrees()
        order = None if visits is None else np.random.default_rng(2).integers(0, 60, visits)
        expected = np.zeros(40, "f4")
        with SharedModel(team, np.zeros(40, "f4")) as model:
            ring = Ring(7)
            counted = Counted(model, ring)
            seen = svm_epoch(counted, None, rows, 0.3, 0.1, degrees, order)
            done = by_hand(
                expected, rows, 0.3, 0.1, degrees, range(60) if order is None else order
            )
            assert seen.active == done[0]
            np.testing.assert_allclose(seen.loss, done[1], rtol=1e-12)
            assert model.tree.tobytes() == expected.tobytes()
            assert sum(ring.counted) == model.version == (visits or 60)
            assert max(ring.counted) == 7

    together(1, body)


def test_rows_are_gathered_as_they_are_visited():
    lengths = [3, 0, 1, 2]
    rows = CSR(
        np.cumsum([0, *lengths]), np.array([0, 2, 4, 1, 0, 3], np.int32),
        np.arange(6.0), np.array([1.0, -1.0, -1.0, 1.0]), (4, 5),
    )  # fmt: skip
    (found,) = _blocks(rows, np.array([3, 1, 0, 3]))
    assert found.indptr.tolist() == [0, 2, 2, 5, 7]
    assert found.indices.tolist() == [0, 3, 0, 2, 4, 0, 3]
    assert found.values.tolist() == [4, 5, 0, 1, 2, 4, 5]
    assert found.labels.tolist() == [1, -1, 1, 1]
    assert [len(part) for part in _blocks(rows, np.zeros(9000, int))] == [4096, 4096, 808]


# -- together --------------------------------------------------------------------------------------


@places
def test_members_that_share_no_column_do_what_each_would_alone(place, monkeypatch):
    def body(comm):
        with SharedModel(comm, np.zeros(40 * 4, "f4")) as model:
            me = model.index
            rows = columns_of(small(me, 400, "float32"), me, 4)
            degrees = rows.degrees()
            model.barrier()
            if model.home:
                for _ in range(5):
                    seen = svm_epoch(model, None, rows, 0.3, 0.1, degrees)
                expected = np.zeros(160, "f4")
                for _ in range(5):
                    done = by_hand(expected, rows, 0.3, 0.1, degrees, range(400))
                assert seen == done
                assert model.tree[me::4].tobytes() == expected[me::4].tobytes()
            else:
                with pytest.raises(
                    UsageError, match=r"Use RingModel, .* or SharedModel\.add_rows"
                ):
                    svm_epoch(model, None, rows, 0.3, 0.1, degrees)
            model.barrier()

    played(place, body, monkeypatch)


@places
@pytest.mark.parametrize("how", ["atomic", "spinlock", "mutex"])
def test_a_race_for_the_same_columns_loses_nothing(place, how, monkeypatch):
    """All rows stay within the margin, and powers of two add up exactly."""
    n, epochs = 10_000, 40  # in calls that release the GIL
    rows = CSR(
        np.arange(0, 4 * n + 1, 4), np.tile(np.arange(4, dtype=np.int32), n),
        np.full(4 * n, 2.0**-20), np.ones(n), (n, 4),
    )  # fmt: skip

    def body(comm):
        with SharedModel(comm, np.zeros(4)) as model:
            homes = model._team.hosts.count(model._team.hosts[0])
            model.barrier()
            if model.home:
                for _ in range(epochs):
                    seen = svm_epoch(model, None, rows, 2.0**-3, 0.0, np.ones(4), how=how)
                    assert seen.active == n
            model.barrier()
            assert (model.tree == homes * epochs * n * 2.0**-23).all()
            assert model.version == homes * epochs * n

    played(place, body, monkeypatch)


@places
@pytest.mark.parametrize("how", ["atomic", "mutex"])
def test_members_learn_together(place, how, monkeypatch):
    def body(comm):
        with SharedModel(comm, np.zeros(300)) as model:
            homes = model._team.hosts.count(model._team.hosts[0])
            whole = sparse_svm(3000, 300, 12, noise=0.0, dtype="float64").data
            degrees = whole.degrees()
            if model.home:
                own = model._team.hosts[: model.index].count(model._team.hosts[0])
                rows = whole.rows(3000 * own // homes, 3000 * (own + 1) // homes)
                rng = np.random.default_rng(model.index)
                for epoch in range(12):
                    order = rng.permutation(len(rows))
                    svm_epoch(model, None, rows, 0.5 * 0.8**epoch, 1e-2, degrees, order, how)
            model.barrier()
            start, found = (svm_score(w, whole, 1e-2) for w in (np.zeros(300), model.tree))
            assert found.objective < 0.25 * start.objective
            assert found.accuracy > 0.93
            model.barrier()

    played(place, body, monkeypatch)


@places
@pytest.mark.parametrize("cluster_size", [1, 2])
def test_the_clusters_of_a_ring_learn_together(place, cluster_size, monkeypatch):
    def body(comm):
        whole = sparse_svm(3000, 300, 12, noise=0.0, dtype="float32").data
        with RingModel(
            comm, np.zeros(300, "f4"), cluster_size=cluster_size, step=0.5, tolerance=1e-4
        ) as model:
            size, me = model.size, model.index
            rows = whole.rows(3000 * me // size, 3000 * (me + 1) // size)
            degrees = allreduce(rows.degrees(), "sum", comm)
            assert (degrees == whole.degrees()).all()
            rng = np.random.default_rng(me)
            for _ in range(12):
                order = rng.permutation(len(rows))
                seen = svm_epoch(model, None, rows, model.step, 1e-2, degrees, order)
                assert 0 <= seen.active <= len(rows)
                model.end_epoch()
                model.barrier()  # no member is far ahead
            assert model.statistics()["adds"] == 12 * len(rows)
            tree, _ = model.evaluated()
            assert svm_score(tree, whole, 1e-2).accuracy > 0.85
            model.barrier()

    played(place, body, monkeypatch)


# -- how good it is --------------------------------------------------------------------------------


def test_score_by_hand():
    rows = CSR(
        np.array([0, 2, 3, 3]), np.array([0, 1, 1], np.int32), np.array([1.0, 2.0, 4.0]),
        np.array([1.0, -1.0, 1.0]), (3, 2),
    )  # fmt: skip
    # margins: 1 * (0.5 - 0.5) = 0; -1 * (-1) = 1; 0
    found = svm_score(np.array([0.5, -0.25]), rows, 0.1)
    assert found.hinge == pytest.approx(1 + 0 + 1)
    assert found.objective == pytest.approx(2 + 0.05 * (0.25 + 0.0625))
    assert found.accuracy == pytest.approx(1 / 3)
    assert svm_score(np.zeros(2), rows.rows(0, 0), 0.1) == (0.0, 0.0, 1.0)


def test_one_epoch_of_small_steps_lowers_the_objective():
    """The step is a subgradient of the objective, row by row."""
    rows = small(rows=200)
    w = np.random.default_rng(0).normal(size=40)
    degrees, eta, mu = rows.degrees(), 1e-6, 0.5
    moved = w.copy()
    by_hand(moved, rows, eta, mu, degrees, range(200))
    margins = rows.labels * rows.dot(w)
    gradient = mu * np.where(degrees > 0, w, 0)
    for i in np.flatnonzero(margins < 1):
        part = slice(rows.indptr[i], rows.indptr[i + 1])
        gradient[rows.indices[part]] -= rows.labels[i] * rows.values[part]
    np.testing.assert_allclose((w - moved) / eta, gradient, atol=1e-3)
    assert svm_score(moved, rows, mu).objective < svm_score(w, rows, mu).objective


# -- what does not fit -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"name": "v"}, "expected the name of an array, one of .*'w'"),
        ({"rows": np.zeros(3)}, r"rows: expected a mpiml\.datasets\.CSR, .* got ndarray"),
        ({"rows": small().with_features(41)}, "expected 40 features, .* got 41"),
        ({"how": "fast"}, "how: expected one of atomic, racy, spinlock, mutex, got 'fast'"),
        ({"eta": 0.0}, r"expected eta > 0, .* got eta=0\.0"),
        ({"mu": -0.1}, r"expected eta > 0, mu >= 0 .* mu=-0\.1"),
        ({"eta": 3.0, "mu": 0.5}, r"eta \* mu <= 1, .* Lower eta"),
        ({"eta": float("nan")}, "expected eta > 0"),
        ({"degrees": np.ones(39)}, "degrees: expected 40, one for each feature, got 39"),
        ({"degrees": np.zeros(40)}, "svm_epoch: degrees: expected a positive number"),
        ({"order": [0, 60]}, "order: expected 0 to 59, got 0 to 60"),
        ({"order": [-1]}, "order: expected 0 to 59, got -1"),
        ({"order": [0.5]}, "order: expected whole numbers on one axis, got float64"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change, text):
    def body(team):
        with SharedModel(team, {"w": np.zeros(40)}) as model:
            rows = small()
            good = {
                "name": "w", "rows": rows, "eta": 0.3, "mu": 0.1, "degrees": rows.degrees(),
            }  # fmt: skip
            with pytest.raises(UsageError) as caught:
                svm_epoch(model, **{**good, **change})
            assert re.search(text, str(caught.value)), caught.value
            assert not model["w"].any()
            assert model.version == 0

    together(1, body)


def test_labels_other_than_signs_and_a_closed_model():
    def body(team):
        model = SharedModel(team, np.zeros(40))
        rows = small()
        rows.labels[3] = 0
        with pytest.raises(UsageError, match="svm_epoch: labels: expected 1 or -1"):
            svm_epoch(model, None, rows, 0.3, 0.1, rows.degrees())
        model.close()
        with pytest.raises(ServiceGoneError, match="svm_epoch: the model is closed"):
            svm_epoch(model, None, small(), 0.3, 0.1, rows.degrees())

    together(1, body)
