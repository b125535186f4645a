"""Agreement: all go on, or all raise the same error."""

import numpy as np
import pytest

from mpiml.collectives.compression.exchange import agree, sum_together
from mpiml.errors import RemoteError, UsageError
from tests.collectives.compression.crowd import crowd


def test_members_learn_each_others_lengths():
    got = crowd(3, lambda m: agree(m, "here", "the same", 10 * m.index, None))
    assert got == [[0, 10, 20]] * 3


def test_members_that_differ_get_one_error_that_names_both():
    texts = ["f(k=1)\n\nw (3,)", "f(k=2)\n\nw (3,)", "f(k=1)\n\nw (3,)"]
    got = crowd(3, lambda m, text: agree(m, "here", text, 0, None), texts)
    assert {type(error) for error in got} == {UsageError}
    assert len({str(error) for error in got}) == 1
    assert "f(k=1)" in str(got[0])
    assert "members 0, 2" in str(got[0])
    assert "f(k=2)" in str(got[0])


def test_the_users_mistake_is_a_usage_error_on_all():
    errors = [None, UsageError("NaN in w"), None]
    got = crowd(3, lambda m, error: agree(m, "here", "t", 0, error), errors)
    assert [str(error) for error in got] == ["here: learner/1: NaN in w"] * 3
    assert {type(error) for error in got} == {UsageError}
    assert got[1].__cause__ is errors[1]


def test_the_users_exception_is_a_remote_error_on_all_and_a_cause_on_one():
    errors = [KeyError("x"), None, UsageError("NaN in w")]
    got = crowd(3, lambda m, error: agree(m, "here", "", 0, error), errors)
    assert {type(error) for error in got} == {RemoteError}
    assert {str(error) for error in got} == {
        "here: learner/0: KeyError: 'x'; learner/2: NaN in w"
    }
    assert got[0].__cause__ is errors[0]
    assert got[1].__cause__ is None


def test_a_long_story_is_cut():
    errors = [UsageError("x" * 100_000)] * 2
    got = crowd(2, lambda m, error: agree(m, "here", "", 0, error), errors)
    assert len(str(got[0])) < 50_000
    assert str(got[0]) == str(got[1])


def test_sums_of_many_arrays_are_one_message_for_each_dtype():
    def body(m):
        arrays = [
            np.full((2, 3), m.index, np.float32),
            np.arange(4) + m.index,
            np.zeros((0,), np.float32),
            np.array(1.5, np.float32),
        ]
        return sum_together(m, arrays), m.log, arrays

    for sums, log, arrays in crowd(3, body):
        assert [kind for kind, _ in log] == ["sum", "sum"]
        np.testing.assert_array_equal(sums[0], np.full((2, 3), 3, np.float32))
        np.testing.assert_array_equal(sums[1], 3 * np.arange(4) + 3)
        assert sums[2].shape == (0,)
        assert sums[3] == 4.5
        assert [(s.shape, s.dtype) for s in sums] == [(a.shape, a.dtype) for a in arrays]
        assert arrays[3] == 1.5  # what was given is left alone


def test_nothing_is_sent_for_nothing():
    got = crowd(2, lambda m: (sum_together(m, [np.zeros(0)]), sum_together(m, []), m.log))
    assert got[0][1:] == ([], [])


@pytest.mark.parametrize("count", [1, 4])
def test_the_crowd_itself_sums_in_order(count):
    values = [np.float32([1e8]), np.float32([1]), np.float32([-1e8]), np.float32([1])][:count]
    got = crowd(count, lambda m, value: m.sum(value.copy()), values)
    expected = np.float32(0)
    for value in values:
        expected += value
    assert got == [expected] * count
