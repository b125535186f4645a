"""RingModel: what an update becomes on its way round, whose turn it is, who is left out."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.collectives import RingModel, SharedModel
from mpiml.collectives.members import team_of
from mpiml.collectives.onesided import ring_token
from mpiml.collectives.onesided.ring_places import clusters_of, groups_of
from mpiml.collectives.onesided.ring_token import Token
from mpiml.datasets import CSR
from mpiml.errors import RankFailedError, ServiceGoneError, SharedMemoryError, UsageError
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.together import Impatient, outcomes, together

LIMIT = 60.0  # seconds, after which a loop that waits for a turn fails
LIKE = {"a": np.zeros(5, "f4"), "b": np.zeros((2, 3))}  # b is not aligned in a message
ways = pytest.mark.parametrize("way", ["windows", "messages"])


def everywhere(place, body, monkeypatch, way="auto"):
    monkeypatch.setenv("MPIML_ONESIDED", way)
    played(place, body, monkeypatch)


def ones(rows, dtype="f8", columns=3):
    """Return rows that each add 1 to the components 0 and 1."""
    indptr, indices = np.arange(rows + 1, dtype="i8") * 2, np.tile(np.array([0, 1], "i4"), rows)
    return CSR(indptr, indices, np.ones(2 * rows, dtype), np.ones(rows, dtype), (rows, columns))


def add_until(model, ready, name=None):
    """Make updates of zero until `ready` is true of the statistics."""
    end = time.monotonic() + LIMIT
    while not ready(found := model.statistics()):
        model.add_at(name, (0,) if name is None else (0, 0), 0.0)
        assert time.monotonic() < end, f"no turn came: {found}"


def root(n):
    """Return beta, by Newton's method."""
    b = 0.75
    for _ in range(60):
        b -= (b**n + b - 1) / (n * b ** (n - 1) + 1)
    return b


# -- pure ------------------------------------------------------------------------------------


@given(
    st.integers(1, 70).flatmap(
        lambda n: st.tuples(
            st.just(n), st.integers(0, 2**62), st.frozensets(st.integers(0, n - 1))
        )
    )
)
def test_what_the_token_says_comes_out_again(drawn):
    size, hops, absent = drawn
    token = Token(hops, size - 1, 3, absent)
    assert Token.unpack(token.pack(size)) == token


def test_clusters_are_hosts_or_parts_of_them():
    hosts = [0, 1, 0, 0, 1]
    for size, expected in [
        (None, [[0, 2, 3], [1, 4]]),
        (1, [[0], [1], [2], [3], [4]]),
        (2, [[0, 2], [1, 4], [3]]),
        (9, [[0, 2, 3], [1, 4]]),
    ]:
        assert clusters_of(hosts, groups_of(hosts, size)) == expected


# -- what an update becomes ------------------------------------------------------------------


@ways
@places
def test_an_update_after_one_turn_of_the_token(place, way, monkeypatch):
    """By hand, b for beta, l for lambda, of an update u at the first cluster, 0 elsewhere.

    The first, D = u: its next gets b u, it keeps l 0 + (1 - l) u + (b + l - 1) u = b u.
    The j-th after it, D = b^j u: its next gets b^(j+1) u, it keeps b^(j+1) u.
    The last, j = n - 1: its next is the first, which has b u and gets b^n u: u again. It keeps
    l b u + (1 - l) b^j u + (b + l - 1) b^j u = l b u + b^n u.
    One cluster alone keeps u.
    """

    def body(comm):
        with RingModel(comm, LIKE, cluster_size=1, delay=1, tolerance=1e-3) as model:
            n, me = model.size, model.index
            u = {"a": np.arange(1, 6), "b": np.arange(6).reshape(2, 3) - 2.5}
            if me == 0:
                model.add(u)
            add_until(model, lambda found: found.get("syncs", 1), "b")
            model.barrier()
            b = root(n)
            lam = 1 - b ** (n - 1)
            expected = [1.0] * n
            for j in range(1, n):
                expected[j] = b ** (j + 1) if j < n - 1 else lam * b + b**n
            if n > 1:
                expected[0] = b + b**n
                assert expected[0] == pytest.approx(1)
            tree, _ = model.snapshot()
            for own in (model.tree, tree):
                np.testing.assert_allclose(own["a"], u["a"] * expected[me], rtol=1e-6)
                np.testing.assert_allclose(own["b"], u["b"] * expected[me], rtol=1e-13)
            tree, _ = model.evaluated()  # the last turn was that of the last cluster
            np.testing.assert_allclose(tree["b"], u["b"] * expected[n - 1], rtol=1e-13)
            found = model.statistics()
            if n > 1:
                assert (found["moved"], found["kept"]) == (11, 0)
            assert found["clusters"] == n
            assert model.cluster == me
            model.barrier()

    everywhere(place, body, monkeypatch, way)


@ways
@places
def test_an_update_below_the_tolerance(place, way, monkeypatch):
    """By hand: nothing goes forward; the first keeps u, and the last, whose next is the first,
    takes l u of it. The step size is part of what is compared: it is 0.4, and u is 2.
    The first: w' = l 0 + (1 - l) u + l 0.4 u = u (1 - 0.6 l), its snapshot w' - 0.4 u.
    """

    def body(comm):
        with RingModel(
            comm, np.zeros(3), cluster_size=1, delay=1, step=0.4, tolerance=0.9
        ) as m:
            if m.index == 0:
                m.add_at(None, [2], [2.0])
            add_until(m, lambda found: found.get("syncs", 1))
            m.barrier()
            lam = m.rule.lam
            first = 2 * (1 - 0.6 * lam)
            last = first if m.size == 1 else lam * first
            value = first if m.index == 0 else last if m.index == m.size - 1 else 0.0
            np.testing.assert_allclose(m.tree, [0, 0, value], rtol=1e-13)
            if m.size > 1:
                assert m.statistics()["moved"] == 0
                assert m.statistics()["kept"] == 3
            m.barrier()

    everywhere(place, body, monkeypatch, way)


class Published:
    """The authors' loop in plain NumPy: a counter for each member, one token."""

    def __init__(self, n, members, delay, step, tolerance, components):
        self.n, self.size, self.delay = n, n * members, delay
        self.step, self.tolerance = step, tolerance
        self.beta = root(n)
        self.lam = 1 - self.beta ** (n - 1)
        self.w, self.s = np.zeros((2, n, components))
        self.token = 0
        self.left = [8 * delay] * self.size
        self.holds = [False] * self.size
        self.order = []

    def update(self, cluster, member, at, value):
        self.w[cluster, at] += value
        k = member * self.n + cluster
        self.left[k] -= 1
        if self.left[k] > 0:
            return
        if self.holds[k]:
            self.holds[k] = False
            self.token = (self.token + 1) % self.size
            self.left[k] = self.delay * self.size
        elif self.token == k:
            self.sync(cluster)
            self.order.append((cluster, member))
            self.holds[k] = True
            self.left[k] = self.delay

    def sync(self, i):
        j = (i + 1) % self.n
        d = self.step * (self.w[i] - self.s[i])
        own, other = self.w[i].copy(), self.w[j].copy()
        moves = abs(d) > self.tolerance
        lam, beta = self.lam, self.beta
        self.w[j] += np.where(moves, beta * d, 0)
        mean = lam * other + (1 - lam) * own
        self.w[i] = mean + np.where(moves, (beta + lam - 1) * d, lam * d)
        self.s[i] = np.where(moves, self.w[i], self.w[i] - d)


@pytest.mark.parametrize(("n", "members"), [(2, 1), (3, 1), (4, 1), (2, 2), (2, 3)])
def test_many_updates_in_step_are_as_published(n, members):
    """One update after another, by members in a drawn order: models, branches, order of turns."""
    size, steps = n * members, 120 * n * members
    rng = np.random.default_rng(7)
    whose, where = rng.integers(0, size, steps), rng.integers(0, 6, steps)
    values = rng.normal(size=steps)
    reference = Published(n, members, 2, 0.7, 0.5, 6)
    for m, at, value in zip(whose, where, values, strict=True):
        reference.update(*divmod(m, members), at, value)
    assert len(reference.order) > 2 * size
    assert sorted(set(reference.order)) == [divmod(m, members) for m in range(size)]

    def body(team):
        turns = []
        args = {"cluster_size": members, "delay": 2, "step": 0.7, "tolerance": 0.5}
        with RingModel(team, np.zeros(6), **args) as model:
            for k in range(steps):
                if whose[k] == model.index:
                    before = model.statistics()["syncs"]
                    model.add_at(None, where[k : k + 1], values[k : k + 1])
                    if model.statistics()["syncs"] > before:
                        turns.append(k)
                team.exchange(b"", "the next update")
            found = model.statistics()
            own = model.tree.copy()
            team.exchange(b"", "all have looked")
        return own, turns, found

    found = together(size, body)
    for m, (own, _, _) in enumerate(found):
        np.testing.assert_allclose(own, reference.w[m // members], rtol=0, atol=1e-12)
    order = sorted(
        (k, divmod(m, members)) for m, (_, turns, _) in enumerate(found) for k in turns
    )
    assert [who for _, who in order] == reference.order
    moved, kept = (sum(f[what] for _, _, f in found) for what in ("moved", "kept"))
    assert moved > 0
    assert kept > 0
    assert moved + kept == 6 * len(order)


# -- no update is lost -----------------------------------------------------------------------


@places
def test_one_cluster_is_a_shared_model(place, monkeypatch):
    def body(comm):
        hosts = len(set(team_of(comm, "the test").hosts))
        with RingModel(comm, LIKE) as ring, SharedModel(comm, LIKE) as shared:
            assert ring.rule.clusters == hosts
            if hosts == 1:
                for model in (ring, shared):
                    model.add({"a": np.ones(5), "b": np.ones((2, 3))}, scale=model.index)
                    model.add_at("a", [1, 1, -1], [1, 2, 3], scale=2)
                    model.add_at("b", ([1], [2]), 4.0)
                    for _ in range(40):
                        model.add_rows("a", ones(25, "f4", 5), np.full(25, 2))
                    model.barrier()
                tree, version = ring.snapshot()
                expected, count = shared.snapshot()
                assert (version, ring.version) == (count, count)
                for key in LIKE:
                    np.testing.assert_array_equal(tree[key], expected[key])
                    np.testing.assert_array_equal(ring[key], expected[key])
                    np.testing.assert_array_equal(ring.evaluated()[0][key], expected[key])
                assert "syncs" not in ring.statistics()
            ring.barrier()

    everywhere(place, body, monkeypatch)


@places
def test_no_update_is_lost_while_turns_are_had(place, monkeypatch):
    """Below the tolerance, w - s of a cluster is exactly what its members have added: a turn
    makes w' = l other + (1 - l) s + D and s' = w' - D, of the step size 1.
    """

    def body(comm):
        size = team_of(comm, "the test").size
        args = {"cluster_size": max(1, size // 2), "delay": 4, "tolerance": 1e12}
        with RingModel(comm, np.zeros(20_000), **args) as model:
            rows, calls = ones(500, columns=20_000), 100
            model.barrier()
            for _ in range(calls):
                model.add_rows(None, rows)
            for _ in range(200):
                model.add_at(None, [0, 1], [1, 1])
            add_until(model, lambda found: found.get("syncs", 2) > 1)
            model.done()
            model.barrier()
            members = model.rule.members[model.cluster]
            delta = model.tree - model._block.twins[0]
            each = members * (500 * calls + 200)
            np.testing.assert_allclose(delta[:2], each, rtol=0, atol=1e-5)
            assert abs(delta[2:]).max() < 1e-5
            found = model.statistics()
            assert found.get("moved", 0) == 0
            model.barrier()

    everywhere(place, body, monkeypatch)


@places
def test_models_meet_while_all_add(place, monkeypatch):
    """Above the tolerance, all race. The ring moves models towards each other: each cluster has
    what only another one has added.
    """

    def body(comm):
        with RingModel(comm, np.zeros(8), cluster_size=1, delay=2, tolerance=0) as model:
            own = np.array([model.index % 8])
            for _ in range(2000):
                model.add_at(None, own, np.ones(1))
            rounds = 3 * model.size
            add_until(model, lambda found: found["clusters"] == 1 or found["hops"] >= rounds)
            model.barrier()
            assert (model.tree[: min(8, model.size)] > 1).all()
            assert np.isfinite(model.tree).all()
            model.barrier()

    everywhere(place, body, monkeypatch)


# -- who is left out -------------------------------------------------------------------------


@places
def test_members_that_have_ended_are_passed_over(place, monkeypatch):
    """Member 0 ends at once, and its cluster with it: the others' models still meet."""

    def body(comm):
        with RingModel(comm, np.zeros(3), cluster_size=1, delay=1, tolerance=0) as model:
            if model.index == 0:
                model.add_at(None, [0], [5.0])
                model.done()
                model.done()
                model.add_at(None, [0], [0.0])
            else:
                if model.index == 1:
                    model.add_at(None, [1], [1.0])
                add_until(model, lambda found: found["syncs"] > 3)
            model.barrier()
            if model.index == 0:
                assert model.statistics().get("syncs", 0) == 0
                assert model.tree.tolist() == [5, 0, 0]  # it gives nothing, it is given nothing
            else:
                assert model.tree[0] == 0
                assert model.tree[1] > 0.1
            model.barrier()
            for _ in range(100):  # still out
                model.add_at(None, [0], [0.0])
            assert model.index or model.statistics().get("syncs", 0) == 0

    everywhere(place, body, monkeypatch)


@places
def test_a_member_that_waits_does_not_hold_the_ring(place, monkeypatch):
    """Members that never add are at the barrier; the others have turns meanwhile, and so have
    they when they are back.
    """

    def body(comm):
        with RingModel(comm, np.zeros(3), cluster_size=1, delay=1) as model:
            for busy in (range(1, model.size), range(1), range(model.size)):
                if model.index in busy:
                    before = model.statistics().get("syncs", 0)
                    add_until(model, lambda f, n=before: f.get("syncs", n + 3) >= n + 3)
                model.barrier()

    everywhere(place, body, monkeypatch)


def test_who_comes_back_has_a_turn_though_all_others_stay_aside():
    """The token has found everybody aside, and rests with a member that will not come back."""
    one_waits, both_wait, hops = threading.Event(), threading.Event(), []

    def body(team):
        with RingModel(team, np.zeros(2), cluster_size=1, delay=1) as model:
            ring = model._ring
            if model.index == 1:
                add_until(model, lambda found: found["syncs"])
                one_waits.set()
            elif model.index == 0:
                add_until(model, lambda _: one_waits.is_set())
                before = model.statistics()["syncs"]
                add_until(model, lambda found: found["syncs"] > before)
                hops.append(ring.seen[0])
                both_wait.set()  # at the barrier it passes the token on, to member 1
            else:
                ring.aside()
                assert both_wait.wait(LIMIT)
                end = time.monotonic() + LIMIT
                while ring.seen[0] < hops[0] + 1 + 3:  # from 1 to 2, 0 and 1 again
                    time.sleep(1e-4)
                    assert time.monotonic() < end
                ring.back()
                add_until(model, lambda found: found["syncs"])
            model.barrier()

    together(3, body)


def test_a_member_that_fails_does_not_hold_the_ring():
    """It leaves by an exception, in the midst of its turn."""

    def body(team):
        if team.index == 1:
            with RingModel(team, np.zeros(3), cluster_size=1, delay=50) as model:
                add_until(model, lambda found: found["syncs"])
                raise KeyError("its own")
        model = RingModel(team, np.zeros(3), cluster_size=1, delay=50)
        add_until(model, lambda found: found["syncs"] > 1)
        model.done()
        return model.statistics()["syncs"]

    found = outcomes(3, body)
    assert isinstance(found[1], KeyError)
    assert found[0] == found[2] == 2


def test_the_token_of_a_dead_member_is_made_anew(monkeypatch):
    """By the next one; the fourth member, that has ended, does not take it for another's."""
    monkeypatch.setattr(ring_token, "_STILL", 0.01)
    died = threading.Event()

    class Hooks(Impatient):
        def waiting(self, seconds, missing, label):
            if died.is_set() and list(missing) == [1]:
                raise RankFailedError(f"{label}: member 1 is dead", (1,))
            super().waiting(seconds, missing, label)

    def body(team):
        model = RingModel(team, np.zeros(3), cluster_size=1, delay=2, tolerance=0)
        if team.index == 1:
            add_until(model, lambda found: found["syncs"])
            died.set()
            return model
        if team.index != 3:
            add_until(model, lambda found: found["syncs"] > 3)
        model.done()
        return model

    models = outcomes(4, body, Hooks([f"member {i}" for i in range(4)]))
    assert not [model for model in models if isinstance(model, BaseException)]
    assert [model.statistics()["syncs"] for model in models] == [4, 1, 4, 0]
    del models[1]
    for _ in range(2):  # nobody gives it on any more; then it is somewhere
        tokens = [model._ring.settle() for model in models]
    assert sum(tokens) == 1


def test_the_last_member_goes_on_alone():
    """Rows of one call have turns between them: each row is an update."""

    def body(team):
        with RingModel(team, np.zeros(3), cluster_size=1, delay=3) as model:
            if team.index == 1:
                model.done()
            else:
                add_until(model, lambda found: found["syncs"] > 1)
                before = model.statistics()
                model.add_rows(None, ones(900))
                after = model.statistics()
                # each turn takes 3 updates to its end, and 3 * 2 until the next
                assert abs(after["syncs"] - before["syncs"] - 100) <= 1
                assert after["adds"] - before["adds"] == 900
                assert after["moved"] == before["moved"]
                assert after["hops"] > before["hops"]
                model.add_rows(None, ones(0))
                np.testing.assert_array_equal(model.tree, [900, 900, 0])
            team.exchange(b"", "the end")

    together(2, body)


# -- values, step sizes ----------------------------------------------------------------------


@ways
@places
def test_assigned_values_are_no_delta(place, way, monkeypatch):
    def body(comm):
        with RingModel(comm, LIKE, cluster_size=1, delay=1, tolerance=0) as model:
            tree = {"a": np.arange(5), "b": np.ones((2, 3))}
            if model.index == model.size - 1:
                model.assign(tree)
                model.flush()
            model.barrier()
            for key in LIKE:
                np.testing.assert_array_equal(model[key], tree[key])
            assert model.version == 1
            model.barrier()
            add_until(model, lambda found: found.get("syncs", 1), "b")
            model.barrier()
            for key in LIKE:
                np.testing.assert_array_equal(model[key], tree[key])
            assert model.statistics().get("moved", 0) == 0
            model.barrier()

    everywhere(place, body, monkeypatch, way)


def test_the_step_size_shrinks_by_epochs():
    def body(team):
        with RingModel(team, np.zeros(2), cluster_size=1, step=0.5, decay=0.64) as model:
            assert model.step == 0.5
            assert model.end_epoch() == model.step == pytest.approx(0.5 * 0.8)
            assert model.end_epoch() == pytest.approx(0.5 * 0.64)
            model.step = 2
            assert model.end_epoch() == pytest.approx(2 * 0.8)
            assert model.statistics()["step"] == model.step
            with pytest.raises(
                UsageError, match="step: expected a number above 0, finite, got -1"
            ):
                model.step = -1
            team.exchange(b"", "the end")

    together(2, body)


@places
def test_staleness_counts_others(place, monkeypatch):
    def body(comm):
        with RingModel(comm, np.zeros(3), delay=10**6) as model:
            mates = model.rule.members[model.cluster]
            model.mark()
            model.barrier()
            last = model.index == model.size - 1
            if last:
                model.add_at(None, [0], [1.0])
            model.barrier()
            if not last:
                model.add_at(None, [0], [1.0])
            found = model.staleness()
            assert found.samples == 1
            hosts = team_of(comm, "the test").hosts
            others = 0 if last or hosts[model.index] != hosts[-1] else 1
            assert others <= found.largest <= max(0, mates - 1)
            model.barrier()

    everywhere(place, body, monkeypatch)


# -- what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"cluster_size": 0}, "RingModel: expected cluster_size >= 1, got 0"),
        ({"cluster_size": 1.5}, r"RingModel: expected an integer as cluster_size, got 1\.5"),
        ({"step": float("nan")}, "RingModel: step: expected a number above 0, finite, got nan"),
        ({"step": 0}, "RingModel: step: expected a number above 0, finite, got 0"),
        ({"tolerance": -1}, "RingModel: tolerance: expected 0 or more, finite, got -1"),
        ({"decay": 0}, "RingModel: decay: expected above 0, at most 1, got 0"),
        ({"delay": 0}, "RingModel: expected delay >= 1, got 0"),
    ],
)
def test_bad_arguments_of_one_member_are_told_to_all(arguments, text):
    def body(team):
        RingModel(team, np.zeros(2), **(arguments if team.index == 1 else {}))

    for error in outcomes(3, body):
        assert isinstance(error, UsageError)
        with pytest.raises(UsageError, match=f"^{text}"):
            raise error


def test_arguments_differ():
    def body(team):
        RingModel(team, np.zeros(2), delay=3 + team.index)

    for error in outcomes(2, body):
        assert isinstance(error, UsageError)
        assert "delay=3" in str(error)


def test_bad_calls():
    def body(team):
        model = RingModel(team, LIKE, cluster_size=1, name="net")
        with pytest.raises(UsageError, match=r"RingModel\.add_at: expected the name of an arr"):
            model.add_at("c", [0], [1])
        with pytest.raises(UsageError, match=r"RingModel\.add_at: indices"):
            model.add_at("a", np.array([5]), np.ones(1, "f4"))
        with pytest.raises(UsageError, match=r"RingModel\.add: expected a tree like"):
            model.add(np.zeros(3))
        with pytest.raises(UsageError, match=r"RingModel\.assign: expected a tree like"):
            model.assign(np.zeros(3))
        with pytest.raises(UsageError, match=r"RingModel\.add_rows: rows: expected a CSR"):
            model.add_rows("a", np.zeros(3))
        with pytest.raises(ValueError, match="read-only"):
            model["a"][0] = 1
        assert repr(model).startswith("<RingModel 'net' of 2 arrays")
        team.exchange(b"", "all have looked")
        model.close()
        model.close()
        for call in (model.snapshot, model.evaluated, model.barrier, model.done, model.flush):
            with pytest.raises(ServiceGoneError, match="is closed"):
                call()
        assert model["a"].sum() == 0

    together(2, body)


@pytest.mark.mpi(min_size=2)
def test_processes_are_hosts_where_there_is_no_room(monkeypatch):
    from mpiml.collectives import arena

    monkeypatch.setattr(arena, "_room", lambda total: f"needs {total} bytes, has none")

    def body(comm):
        with pytest.raises(SharedMemoryError, match="needs"):
            RingModel(comm, np.zeros(3))
        with RingModel(comm, np.zeros(3), cluster_size=4, delay=1, fallback=True) as model:
            assert model.rule.clusters == comm.size
            if model.index == 0:
                model.add_at(None, [1], [1.0])
            add_until(model, lambda found: found["syncs"])
            model.barrier()
            assert model.tree[1] > 0

    everywhere("ranks", body, monkeypatch)
