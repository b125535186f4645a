"""Rows of a key range, beside a dict that has one array for each."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.errors import UsageError
from mpiml.optim import SGD, Adagrad, Adam, Momentum
from mpiml.roles.parameter_server import table as module
from mpiml.roles.parameter_server.keys import Keys
from mpiml.roles.parameter_server.table import Table

WIDTH = 2
FIRST = 2**40  # the keys of the tests lie behind it


class Model:
    """A dict from key to row and state; sums and steps one by one."""

    def __init__(self, optimizer, fill):
        self.optimizer, self.fill, self.rows = optimizer, fill, {}

    def apply(self, keys, values, step, scale):
        sums = {}
        for key, row in zip(keys, values, strict=True):
            sums[key] = sums.get(key, 0) + row
        for key, row in sums.items():
            if key not in self.rows:
                fresh = np.full(WIDTH, self.fill, "f4")
                self.rows[key] = fresh, self.optimizer.init(fresh)
            param, state = self.rows[key]
            self.optimizer.apply(param, row * np.float32(scale), state, step)

    def read(self, keys):
        unknown = np.full(WIDTH, self.fill, "f4"), ()
        return np.array([self.rows.get(key, unknown)[0] for key in keys], "f4")


# sums of quarters are exact in any order
values = st.lists(st.integers(-8, 8), min_size=WIDTH, max_size=WIDTH)
entries = st.lists(st.tuples(st.integers(0, 40), values), min_size=1, max_size=12)


@given(
    st.sampled_from([SGD(0.1), Momentum(0.1), Adagrad(0.1), Adam(0.1)]),
    st.lists(st.tuples(entries, st.sampled_from([1.0, 0.5])), max_size=8),
    st.integers(0, 8),
)
def test_a_table_does_what_a_dict_of_rows_does(optimizer, pushes, reload_at):
    def new():
        return Table(Keys(2**62, WIDTH, fill=0.25), FIRST, FIRST + 41, optimizer)

    table, model = new(), Model(optimizer, 0.25)
    whole = FIRST + np.arange(41)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "RECENT", 2)  # merge often
        patch.setattr(module, "_ROOTS", 1)
        patch.setattr(module, "_ROOM", 1)
        for step, (pushed, scale) in enumerate(pushes, 1):
            keys = FIRST + np.array([key for key, _ in pushed])
            rows = np.array([row for _, row in pushed], "f4") / 4
            table.apply(keys, rows, step, scale)
            model.apply(keys, rows, step, scale)
            if step == reload_at:
                state, table = pickle.loads(pickle.dumps(table.state_dict())), new()
                table.load_state_dict(state)
            assert (table.read(keys[::-1]) == model.read(keys[::-1])).all()
            assert (table.read(whole) == model.read(whole)).all()
            assert table.rows == len(model.rows)


def test_reading_copies_and_makes_no_rows():
    table = Table(Keys(100, 3, "float64", fill=-1.5), 0, 100, SGD(1.0))
    assert (table.read([5, 99, 5]) == np.full((3, 3), -1.5)).all()
    assert table.read([]).shape == (0, 3)
    assert table.rows == 0
    table.apply([5], np.ones((1, 3)), 1)
    table.read([5])[:] = 7
    assert (table.read([5]) == -2.5).all()
    assert table.rows == 1


def test_few_new_keys_leave_the_large_index_alone():
    table = Table(Keys(2**62), 0, 2**62, SGD(1.0))
    table.apply(np.arange(0, 200_000, 2), np.ones(100_000, "f4"), 1)
    large, values = table._index._keys, table._values
    assert len(large) == 100_000
    for key in range(1, 201, 2):
        table.apply([key], np.ones(1, "f4"), 1)
    assert table._index._keys is large
    grown = [table._values is not values]
    assert grown == [True]  # once, by half
    values = table._values
    table.apply([2**62 - 1], np.ones(1, "f4"), 1)
    assert table._values is values
    assert table.rows == 100_101
    assert (table.read([0, 1, 199, 201, 2**62 - 1]).T == [-1, -1, -1, 0, -1]).all()


def test_a_function_keeps_state_for_rows_and_for_all():
    def update(param, grad, state, step):
        state["sum"] = state.get("sum", 0) + grad
        state["steps"] = [*state.get("steps", []), step]
        param -= state["sum"]

    table = Table(Keys(10, 2), 0, 10, update)
    one = np.ones((1, 2), "f4")
    table.apply([3], one, 1)
    table.apply([7, 3, 3], np.ones((3, 2), "f4"), 2)
    other = Table(Keys(10, 2), 0, 10, update)
    other.load_state_dict(table.state_dict())
    for t in (table, other):
        t.apply([7], one, 3)
        assert (t.read([3, 7])[:, 0] == [-(1 + 3), -(1 + 2)]).all()
        assert t.state_dict()["rest"] == {"steps": [1, 2, 3]}


def test_a_function_that_changes_the_form_of_its_state_is_told_so():
    def update(param, grad, state, step):
        state["sum"] = grad if step == 1 else grad.sum()

    table = Table(Keys(10, 2), 0, 10, update)
    table.apply([3, 4], np.ones((2, 2), "f4"), 1)
    with pytest.raises(UsageError, match=r"state 'sum': expected .*\(1, 2\)"):
        table.apply([3], np.ones((1, 2), "f4"), 2)


@pytest.mark.parametrize(
    ("keys", "got"),
    [
        ([12, 9], "expected 10 to 19, got 9 at place 1"),
        ([20], "expected 10 to 19, got 20 at place 0"),
        ([12, -1], "got -1 at place 1"),
        (np.array([2**64 - 1], "u8"), "got 18446744073709551615 at place 0"),
        ([12.0], r"whole numbers in one dimension, got float64\(1,\)"),
        ([[12]], r"got int64\(1, 1\)"),
        (12, r"got int64\(\)"),
        ([True], "got bool"),
        ([2**70], "got object"),
    ],
)
def test_bad_keys(keys, got):
    table = Table(Keys(100), 10, 20, SGD(1.0))
    with pytest.raises(UsageError, match=f"^pull: keys: .*{got}"):
        table.read(keys)
    with pytest.raises(UsageError, match=f"^push: keys: .*{got}"):
        table.apply(keys, np.ones(len(np.atleast_1d(keys)), "f4"), 1)
    assert table.rows == 0


def test_bad_values_change_nothing():
    table = Table(Keys(100, 2), 10, 20, SGD(1.0))
    for values in (np.ones((2, 2), "f4"), np.ones(1, "f4"), np.ones((1, 2), int)):
        with pytest.raises(UsageError, match=r"expected floating-point .*\(1, 2\), a row"):
            table.apply([12], values, 1)
    assert table.rows == 0
    table.apply([], [], 1)
    assert table.rows == 0


def test_state_of_other_tables():
    state = Table(Keys(100, 2), 10, 20, SGD(1.0)).state_dict()
    with pytest.raises(UsageError, match="expected keys 10 to 30, 2 wide, got 10 to 20, 2"):
        Table(Keys(100, 2), 10, 30, SGD(1.0)).load_state_dict(state)
    with pytest.raises(UsageError, match="expected the state of Adam"):
        Table(Keys(100, 2), 10, 20, Adam(1.0)).load_state_dict(state)


def test_what_a_range_may_be():
    keys = Keys(2**62, np.int64(3), np.float64, -1)
    assert keys == pickle.loads(pickle.dumps(keys)) != Keys(2**62, 3)
    assert hash(keys) == hash(Keys(2**62, 3, "f8", -1.0))
    assert repr(keys) == f"Keys({2**62}, width=3, dtype='float64', fill=-1.0)"
    assert (keys.shape, keys.rowsize) == ((2**62, 3), 24)
    assert (keys.check([2**62 - 1], "push") == 2**62 - 1).all()
    for arguments, match in [
        ((0,), "n: expected a whole number from 1"),
        ((2**62 + 1,), "n: "),
        ((1.5,), r"n: .* got 1\.5"),
        ((1, 0), "width: "),
        ((1, 1, "int32"), "dtype: expected float32 or float64, got 'int32'"),
        ((1, 1, "nonsense"), "dtype: "),
        ((1, 1, "f4", float("nan")), "fill: expected a finite number or a function, got nan"),
    ]:
        with pytest.raises(UsageError, match=f"Keys: {match}"):
            Keys(*arguments)


def test_rows_begin_as_a_function_says():
    def fill(keys):
        return np.stack([keys % 7, -(keys % 7)], axis=1)

    table = Table(Keys(1000, 2, fill=fill), 100, 900, SGD(1.0))
    keys = np.array([500, 103, 500])
    np.testing.assert_array_equal(table.read(keys), fill(keys))
    assert table.rows == 0
    table.apply(keys[:2], np.ones((2, 2), "f4"), 1)
    np.testing.assert_array_equal(table.read(keys), fill(keys) - 1)
    np.testing.assert_array_equal(
        table.read([101, 103]), [[101 % 7, -(101 % 7)], fill(keys)[1] - 1]
    )


@pytest.mark.parametrize(
    "fill",
    [lambda keys: keys, lambda keys: np.full((len(keys), 2), np.nan)],
    ids=["shape", "nan"],
)
def test_a_function_that_fills_wrongly_is_told_and_nothing_has_changed(fill):
    table = Table(Keys(10, 2, fill=fill), 0, 10, SGD(1.0))
    for use in (lambda: table.read([1]), lambda: table.apply([1], np.ones((1, 2), "f4"), 1)):
        with pytest.raises(UsageError, match=r"fill: expected finite rows of shape \(1, 2\)"):
            use()
    assert table.rows == 0


def test_a_function_that_returns_is_refused():
    table = Table(Keys(10, 2), 0, 10, lambda p, g, state, step: p - g)
    with pytest.raises(
        UsageError, match="expected None, as it changes parameter and state in place"
    ):
        table.apply([1], np.ones((1, 2), "f4"), 1)


def test_a_number_for_each_row_needs_an_axis():
    def update(p, g, state, step):
        state["sum"] = np.zeros(len(p))

    table = Table(Keys(10, 2), 0, 10, update)
    with pytest.raises(UsageError, match=r"state 'sum': expected an array of shape \(2, 1\)"):
        table.apply([1, 2], np.ones((2, 2), "f4"), 1)
