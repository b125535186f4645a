"""What gradients do to the parameters of a server, beside NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.errors import UsageError
from mpiml.optim import SGD, Adagrad, Adam
from mpiml.roles.parameter_server.layout import split
from mpiml.roles.parameter_server.store import Sparse, Store

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
