"""What gradients do to the parameters of a server, beside NumPy."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.errors import UsageError
from mpiml.optim import SGD, Adagrad, Adam, Momentum
from mpiml.roles.parameter_server.keys import Keys
from mpiml.roles.parameter_server.layout import Piece, split
from mpiml.roles.parameter_server.store import BLOCK, Sparse, Store
from mpiml.roles.parameter_server.table import Table

rng = np.random.default_rng(0)
LEAVES = [rng.standard_normal((40, 5)).astype("f4"), rng.standard_normal(70)]


def stores(optimizer, servers=2):
    sizes = [leaf.size for leaf in LEAVES]
    ranges = split(sizes, [leaf.itemsize for leaf in LEAVES], servers)
    return [Store(LEAVES, pieces, optimizer) for pieces in ranges]


def cut(store, leaves):
    return [leaves[p.leaf].reshape(-1)[p.start : p.stop] for p in store.pieces]


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(0.1), Adam(0.1)], ids=lambda o: o.name)
def test_servers_together_do_what_one_optimizer_does(optimizer):
    whole = [leaf.copy() for leaf in LEAVES]
    states = [optimizer.init(leaf) for leaf in whole]
    servers = stores(optimizer)
    for step in range(1, 4):
        grads = [
            [rng.standard_normal(x.shape).astype(x.dtype) for x in LEAVES] for _ in range(2)
        ]
        for x, state, *both in zip(whole, states, *grads, strict=True):
            mean = np.zeros_like(x)
            for g in both:
                mean += g * x.dtype.type(0.5)
            optimizer.apply(x, mean, state, step)
        for store in servers:
            store.apply([cut(store, g) for g in grads])
            for mine, piece in zip(store.arrays, cut(store, whole), strict=True):
                assert (mine == piece).all()


@given(
    st.lists(st.tuples(st.integers(0, 19), st.floats(-2, 2, width=32)), min_size=1, max_size=30)
)
def test_sparse_gradients_add_what_comes_twice_and_touch_nothing_else(entries):
    (store,) = stores(Adagrad(0.5), 1)
    before = store.arrays[0].copy()
    indices = np.array([i for i, _ in entries])
    values = np.array([v for _, v in entries], "f4")
    dense = np.zeros(20, "f4")
    np.add.at(dense, indices, values)
    store.apply([[Sparse(indices, values), None]])
    touched = np.zeros(len(before), bool)
    touched[indices] = True
    assert (store.arrays[0][~touched] == before[~touched]).all()
    expected = before[:20].copy()
    Adagrad(0.5).apply(expected, dense, Adagrad(0.5).init(expected), 1)
    some = touched[:20]
    np.testing.assert_allclose(store.arrays[0][:20][some], expected[some], rtol=1e-5)


def test_dense_and_sparse_of_one_piece_together():
    (store,) = stores(SGD(1.0), 1)
    before = store.arrays[0].copy()
    store.apply(
        [[np.ones(200, "f4"), None], [Sparse(np.array([3, 3]), np.ones(2, "f4")), None]]
    )
    expected = before - np.float32(0.5)
    expected[3] -= 1
    np.testing.assert_allclose(store.arrays[0], expected, rtol=1e-6)


def test_an_update_function_keeps_its_state():
    def update(param, grad, state, step):
        state["sum"] = state.get("sum", 0) + grad
        param -= 0.1 * state["sum"]
        assert step == len(seen) + 1
        seen.append(step)

    seen = []
    leaves = [np.zeros(3)]
    store = Store(leaves, split([3], [8], 1)[0], update)
    for _ in range(2):
        store.apply([[np.ones(3)]])
    np.testing.assert_allclose(store.arrays[0], [-0.3] * 3)


def test_state_goes_on_where_it_was():
    one, other = stores(Adam(0.1))[0], stores(Adam(0.1))[0]
    grads = [
        [rng.standard_normal(a.shape).astype(a.dtype) for a in one.arrays] for _ in range(4)
    ]
    one.apply(grads[:1])
    other.load_state_dict(one.state_dict())
    for store in (one, other):
        store.apply(grads[1:2])
    for a, b in zip(one.arrays, other.arrays, strict=True):
        assert (a == b).all()
    with pytest.raises(UsageError, match="as many shards"):
        stores(Adam(0.1), 1)[0].load_state_dict(one.state_dict())


def test_one_dense_gradient_is_not_copied():
    seen = []

    class Seen(SGD):
        def apply(self, param, grad, state, step, rate=1.0):
            seen.append(grad)
            super().apply(param, grad, state, step, rate)

    gradient = np.ones(1 << 18, "f4")
    (pieces,) = split([gradient.size], [4], 1)
    for optimizer in (Seen(0.1), lambda param, grad, state, step: seen.append(grad)):
        store = Store([np.zeros_like(gradient)], pieces, optimizer)
        store.apply([[gradient]])
        assert seen.pop() is gradient
    for optimizer in (SGD(0.1), Adagrad(0.1), Adam(0.1)):
        store = Store([np.zeros_like(gradient)], pieces, optimizer)
        store.apply([[gradient]])
        tracemalloc.start()
        store.apply([[gradient]])
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < gradient.nbytes // 16


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_the_mean_is_the_same_in_blocks(dtype):
    size = 2 * BLOCK + 5
    grads = [rng.standard_normal(size).astype(dtype) for _ in range(3)]
    store = Store([np.zeros(size, "f4")], [Piece(0, 0, size)], SGD(1.0))
    store.apply([[g] for g in grads])
    total = np.zeros(size, "f4")
    for g in grads:
        total += np.multiply(g, 1 / 3, dtype="f4")
    assert (store.arrays[0] == -total).all()


@pytest.mark.parametrize(
    "optimizer", [SGD(1.0), Momentum(1.0), Adagrad(0.5), Adam(0.1)], ids=lambda o: o.name
)
def test_the_rate_is_of_the_step_and_not_of_the_gradient(optimizer):
    """Half a rate moves every kind of parameter half as far, and the state learns the same."""
    for rate in (1.0, 0.5):
        leaves = [np.zeros(4, "f4"), np.zeros(4, "f4"), Keys(2**40, 1)]
        pieces = [Piece(0, 0, 4), Piece(1, 0, 4), Piece(2, 0, 2**40)]
        store = Store(leaves, pieces, optimizer)
        some = Sparse(np.array([1, 2]), np.full(2, 3, "f4"))
        rows = Sparse(np.array([1, 2]), np.full((2, 1), 3, "f4"))
        store.apply([[np.full(4, 3, "f4"), some, rows]], rate)
        moved = [store.arrays[0][1], store.arrays[1][1], store.take(2, np.array([2]))[0, 0]]
        assert moved == pytest.approx([moved[0]] * 3)
        if rate == 1:
            whole = moved[0]
    assert moved[0] == pytest.approx(whole / 2)


def test_a_function_gets_its_gradient_by_the_rate():
    seen = []
    (store,) = stores(lambda p, g, state, step: seen.append(g.copy()), 1)
    store.apply([[np.full_like(a, 4) for a in store.arrays]], 0.25)
    assert all((g == 1).all() for g in seen)
    assert seen


def test_a_state_is_a_copy_of_all_a_function_keeps():
    def update(p, g, state, step):
        state.setdefault("sums", [np.zeros_like(p)])[0] += g

    (store,) = stores(update, 1)
    ones = [[np.ones_like(a) for a in store.arrays]]
    store.apply(ones)
    saved = store.state_dict()
    store.apply(ones)
    assert all((state["sums"][0] == 1).all() for state in saved["states"])
    (other,) = stores(update, 1)
    other.load_state_dict(saved)
    other.apply(ones)
    assert all((state["sums"][0] == 1).all() for state in saved["states"])


def keyed(optimizer):
    leaves = [np.zeros(4, "f4"), Keys(2**40, 2)]
    ranges = split([4, 2**40], [4, 4], 2, [1])
    return [Store(leaves, pieces, optimizer) for pieces in ranges]


@pytest.mark.parametrize("optimizer", [SGD(1.0), Adagrad(0.5), Adam(0.1)], ids=lambda o: o.name)
def test_gradients_of_a_key_range(optimizer):
    one, two = keyed(optimizer)
    assert [p.leaf for p in one.pieces] == [0, 1]
    assert [p.leaf for p in two.pieces] == [1]  # four numbers are not worth a tear
    table = two.arrays[0]
    assert isinstance(table, Table)
    assert (table.start, table.stop) == (2**39, 2**40)
    expected = np.zeros((3, 2), "f4")
    state = optimizer.init(expected)
    grads = [
        Sparse(np.array([7, 0]), np.array([[1, 2], [3, 4]], "f4")),
        Sparse(np.array([5, 7, 7]), np.array([[4, 4], [1, 1], [2, 2]], "f4")),
    ]
    two.apply([[grads[0]], [grads[1]], [None]])
    mean = np.array([[3, 4], [4, 4], [4, 5]], "f4") * np.float32(1 / 3)  # keys 0, 5, 7
    optimizer.apply(expected, mean, state, 1)
    np.testing.assert_allclose(two.take(0, np.array([0, 5, 7])), expected, rtol=1e-6)
    two.apply([[grads[0]], [None]])
    mean = np.array([[1.5, 2], [0.5, 1]], "f4")
    some, states = expected[[0, 2]], tuple(s[[0, 2]] for s in state)
    optimizer.apply(some, mean, states, 2)
    np.testing.assert_allclose(two.take(0, np.array([0, 7])), some, rtol=1e-6)
    assert (two.take(0, np.array([5, 6])) == [expected[1], [0, 0]]).all()
    assert (table.read([2**39 + 7]) == two.take(0, np.array([7]))).all()
    assert table.rows == 3


def test_state_of_key_ranges_goes_on_where_it_was():
    gradient = [np.ones(4, "f4"), Sparse(np.array([3, 1]), np.ones((2, 2), "f4"))]
    one, other = keyed(Adam(0.1))[0], keyed(Adam(0.1))[0]
    one.apply([gradient])
    other.load_state_dict(one.state_dict())
    for store in (one, other):
        store.apply([gradient])
    assert (one.arrays[0] == other.arrays[0]).all()
    at = np.arange(5)
    assert (one.take(1, at) == other.take(1, at)).all()
    assert (one.take(0, at[:2]) == one.arrays[0][:2]).all()
    with pytest.raises(UsageError, match="as many shards"):
        keyed(Adam(0.1))[1].load_state_dict(one.state_dict())
    sgd = keyed(SGD(0.1))[0]
    with pytest.raises(UsageError, match="expected the state of SGD"):
        sgd.load_state_dict(one.state_dict())
    assert (sgd.arrays[0] == 0).all()


def test_gradients_are_checked_one_by_one():
    one, _ = keyed(SGD(1.0))
    dense, rows = np.ones(4, "f4"), Sparse([3], np.ones((1, 2), "f4"))
    for good in ([dense, rows], [None, None], [Sparse([3, 3], np.ones(2)), None]):
        one.check(good)
    for bad, match in [
        ([dense], "of 2 pieces, got 1"),
        (
            [dense, np.ones((3, 2), "f4")],
            "keys and values for a range of 1099511627776 keys, got",
        ),
        ([dense, Sparse([2**39], np.ones((1, 2), "f4"))], "keys: expected 0 to 549755813887"),
        ([dense, Sparse([3.0], np.ones((1, 2), "f4"))], "keys: expected whole numbers"),
        ([dense, Sparse([3], np.ones(2, "f4"))], r"values: expected .* \(1, 2\)"),
        (
            [np.ones(3, "f4"), rows],
            r"expected an array of \(4,\) floating-point numbers, got float32 \(3,\)",
        ),
        ([Sparse([4], np.ones(1)), rows], "keys: expected 0 to 3, got 4"),
        (
            [Sparse([3], np.ones(2)), rows],
            r"expected an array of \(1,\) floating-point numbers, got float64 \(2,\)",
        ),
    ]:
        with pytest.raises(UsageError, match=f"^push: .*{match}"):
            one.check(bad)
    with pytest.raises(UsageError, match="keys: expected 549755813888 to 1099511627775"):
        keyed(SGD(1.0))[1].check([Sparse(np.array([2**64 - 1], "u8"), np.ones((1, 2), "f4"))])
    one.apply([[dense, rows]])
    assert (one.take(1, np.array([3])) == -1).all()
