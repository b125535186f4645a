"""Gradient coding: the serial gradient, for every choice of missing workers."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.collectives.stragglers import Cyclic, FractionalRepetition
from mpiml.collectives.stragglers.survivors import solve
from mpiml.errors import UsageError

PAIRS = [(n, s) for n in range(1, 7) for s in range(n)]
REPETITIONS = [(n, s) for n, s in PAIRS if n % (s + 1) == 0]
#: s, n up to which the documented relative error holds, for float64 and float32
DOCUMENTED = [(4, 2e-14, 1e-6), (6, 5e-14, 2e-6), (8, 5e-13, 1e-5), (12, 1e-11, 2e-4)]


def codes_of(n, s):
    yield Cyclic(n, s)
    if (n, s) in REPETITIONS:
        yield FractionalRepetition(n, s)


def survivors(n, s):
    """Every choice of n - s workers or more."""
    for count in range(n - s, n + 1):
        yield from itertools.combinations(range(n), count)


def sent(code, gradients):
    """What each worker sends."""
    return {
        i: code.encode(i, {j: gradients[j] for j in code.assignment(i)}) for i in range(code.n)
    }


def among(messages, workers):
    return {i: messages[i] for i in workers}


def check_within(result, parts, error):
    """Compare element by element with the exact sum; error is of the sum of magnitudes."""
    for index in np.ndindex(result.shape):
        exact = sum(Fraction(float(part[index])) for part in parts)
        size = math.fsum(abs(float(part[index])) for part in parts)
        assert abs(Fraction(float(result[index])) - exact) <= Fraction(error * size)


# ---- who holds what -----------------------------------------------------------------------


def test_fractional_repetition_of_six_by_hand():
    code = FractionalRepetition(6, 1)
    assert code.groups == 3
    assert [code.assignment(i) for i in range(6)] == [(0, 1), (2, 3), (4, 5)] * 2
    block = [[1, 1, 0, 0, 0, 0], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]
    assert code.matrix.tolist() == block * 2
    assert code.coefficients([5, 4, 0]).tolist() == [1, 0, 0, 0, 1, 1]


def test_cyclic_assignment_goes_around_the_end():
    code = Cyclic(5, 2)
    assert code.assignment(0) == (0, 1, 2)
    assert code.assignment(4) == (4, 0, 1)


@pytest.mark.parametrize(("n", "s"), PAIRS)
def test_rows_of_a_cyclic_matrix_are_as_in_the_paper(n, s):
    matrix = Cyclic(n, s).matrix
    for i, row in enumerate(matrix):
        held = {(i + k) % n for k in range(s + 1)}
        assert {j for j in range(n) if row[j]} == held
        assert np.abs(row).max() == 1
    # rows span the null space of an H of rank s: the matrix has rank n - s
    singular = np.linalg.svd(matrix, compute_uv=False)
    assert int((singular > 1e-9 * singular[0]).sum()) == n - s
    assert not matrix.flags.writeable


def test_each_partition_is_held_by_s_plus_one_workers():
    for n, s in PAIRS:
        for code in codes_of(n, s):
            held = [j for i in range(n) for j in code.assignment(i)]
            assert all(held.count(j) == s + 1 for j in range(n))


def test_a_matrix_of_three_is_solved_as_by_hand():
    matrix = np.array([[0.5, 1, 0], [0, 1, -1], [0.5, 0, 1]])
    for workers, wanted in [((0, 1), (2, -1)), ((0, 2), (1, 1)), ((1, 2), (1, 2))]:
        solved = solve(matrix[list(workers)], 2)
        np.testing.assert_allclose(solved.coefficients, wanted, rtol=1e-14)
        assert solved.residual <= 1e-15
        by_hand = max(sum(abs(a * matrix[i]) for a, i in zip(wanted, workers, strict=True)))
        assert solved.growth == pytest.approx(by_hand)
        assert solved.condition == pytest.approx(np.linalg.cond(matrix[list(workers)]))


# ---- the full sum, whoever is missing -------------------------------------------------------


@pytest.mark.parametrize(("n", "s"), REPETITIONS)
def test_repetition_gives_the_serial_sum_of_whole_numbers(n, s):
    random = np.random.default_rng(n + 10 * s)
    gradients = [
        {
            "w": random.integers(-(2**62), 2**62, (2, 3)),
            "b": random.integers(0, 255, 2, np.uint8),
        }
        for _ in range(n)
    ]
    w = np.add.reduce([g["w"] for g in gradients])  # modulo 2^64
    b = np.add.reduce([g["b"] for g in gradients], dtype=np.uint8)
    code = FractionalRepetition(n, s)
    messages = sent(code, gradients)
    for workers in survivors(n, s):
        total = code.decode(among(messages, workers))
        assert total["w"].dtype == np.int64
        np.testing.assert_array_equal(total["w"], w)
        assert total["b"].dtype == np.uint8
        np.testing.assert_array_equal(total["b"], b)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64"])
@pytest.mark.parametrize(("n", "s"), REPETITIONS)
def test_repetition_gives_the_same_bits_whoever_is_missing(n, s, dtype):
    random = np.random.default_rng(n + 10 * s)
    gradients = [random.standard_normal(5).astype(dtype) for _ in range(n)]
    groups = []
    for first in range(0, n, s + 1):
        group = gradients[first].copy()
        for j in range(first + 1, first + s + 1):
            group = group + gradients[j]
        groups.append(group)
    wanted = groups[0]
    for group in groups[1:]:
        wanted = wanted + group
    code = FractionalRepetition(n, s)
    messages = sent(code, gradients)
    for workers in survivors(n, s):
        assert code.decode(among(messages, workers)).tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("n", "s"), PAIRS)
def test_cyclic_gives_the_serial_sum_whoever_is_missing(n, s, dtype):
    random = np.random.default_rng(n + 10 * s)
    gradients = [random.standard_normal((2, 1)).astype(dtype) for _ in range(n)]
    code = Cyclic(n, s)
    messages = sent(code, gradients)
    for workers in survivors(n, s):
        total = code.decode(among(messages, workers))
        assert (total.shape, total.dtype) == ((2, 1), dtype)
        error = code.error(workers, dtype)
        check_within(total, gradients, error)
        if len(workers) == n - s:
            assert error <= code.error(dtype=dtype)
    assert code.error(dtype=dtype) <= (5e-14 if dtype == "float64" else 2e-6)


@pytest.mark.parametrize(("most", "float64", "float32"), DOCUMENTED)
def test_documented_errors_hold(most, float64, float32):
    for n, s in [(most - 1, 2), *((most, s) for s in range(0, most, 1 + (most > 8) * 2))]:
        code = Cyclic(n, s)
        assert code.error() <= float64
        assert code.error(dtype=np.float32) <= float32


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_cyclic_stays_within_its_error_for_any_numbers(data):
    n = data.draw(st.integers(2, 7))
    s = data.draw(st.integers(0, n - 1))
    code = Cyclic(n, s, seed=data.draw(st.integers(0, 3)))
    number = st.floats(-1e6, 1e6, allow_subnormal=False).map(
        lambda x: x if abs(x) > 1e-200 else 0.0
    )
    gradients = [
        np.array(data.draw(st.lists(number, min_size=2, max_size=2))) for _ in range(n)
    ]
    workers = data.draw(st.sets(st.integers(0, n - 1), min_size=n - s))
    total = code.decode(among(sent(code, gradients), workers))
    check_within(total, gradients, code.error(workers))


def test_least_squares_by_coded_gradients_is_serial_gradient_descent():
    random = np.random.default_rng(1)
    a, y = random.standard_normal((24, 3)), random.standard_normal(24)
    parts = np.split(np.arange(24), 6)

    def gradient(w, j):
        return a[parts[j]].T @ (a[parts[j]] @ w - y[parts[j]])

    for code in (Cyclic(6, 2), Cyclic(6, 3), FractionalRepetition(6, 2)):
        serial, coded = np.zeros(3), np.zeros(3)
        for missing in itertools.combinations(range(6), code.s):
            serial = serial - 0.01 * (a.T @ (a @ serial - y))
            workers = set(range(6)) - set(missing)
            messages = {
                i: code.encode(i, {j: gradient(coded, j) for j in code.assignment(i)})
                for i in workers
            }
            coded = coded - 0.01 * code.decode(messages)
            np.testing.assert_allclose(coded, serial, rtol=0, atol=1e-13)


def test_large_and_strided_and_complex_arrays_and_scalars():
    random = np.random.default_rng(2)
    n, code = 4, Cyclic(4, 1)
    gradients = [
        {
            "long": random.standard_normal(40_001).astype(np.float32),
            "strided": random.standard_normal((3, 8))[:, ::3],
            "complex": random.standard_normal(2) + 1j * random.standard_normal(2),
            "loss": np.float64(random.standard_normal()),
            "none": np.zeros((0, 2)),
        }
        for _ in range(n)
    ]
    before = [g["long"].copy() for g in gradients]
    total = code.decode(among(sent(code, gradients), (0, 1, 3)))
    for name, rtol in [("long", 1e-5), ("strided", 1e-13), ("complex", 1e-13), ("loss", 1e-13)]:
        wanted = sum(
            np.asarray(g[name], np.result_type(g[name], np.float64)) for g in gradients
        )
        np.testing.assert_allclose(total[name], wanted, rtol=rtol, atol=10 * rtol)
        assert total[name].dtype == gradients[0][name].dtype
    assert total["none"].shape == (0, 2)
    for old, gradient in zip(before, gradients, strict=True):
        np.testing.assert_array_equal(old, gradient["long"])


def test_the_sum_is_no_view_of_a_message():
    code = FractionalRepetition(2, 1)
    gradients = {0: np.ones(2), 1: np.ones(2)}
    message = code.encode(0, gradients)
    code.decode({0: message})[:] = 7
    assert message.tolist() == [2, 2]
    FractionalRepetition(1, 0).encode(0, {0: gradients[0]})[:] = 7
    assert gradients[0].tolist() == [1, 1]


# ---- alike everywhere, remembered -----------------------------------------------------------


def test_a_code_is_the_same_wherever_it_is_made():
    assert Cyclic(6, 2).matrix.tobytes() == Cyclic(6, 2).matrix.tobytes()
    assert Cyclic(6, 2).matrix.tobytes() != Cyclic(6, 2, seed=1).matrix.tobytes()
    assert repr(Cyclic(6, 2, seed=3)) == "Cyclic(6, 2, seed=3)"
    assert repr(FractionalRepetition(6, 2)) == "FractionalRepetition(6, 2)"


def test_coefficients_are_solved_once_for_each_set(monkeypatch):
    calls = []

    def counted(*arguments):
        calls.append(arguments)
        return solve(*arguments)

    code = Cyclic(4, 1)
    monkeypatch.setattr("mpiml.collectives.stragglers.cyclic.solve", counted)
    first = code.coefficients([0, 1, 3])
    first[:] = 0  # the caller's own
    again = code.coefficients(iter((3, 1, 0)))
    assert len(calls) == 1
    assert again[2] == 0
    np.testing.assert_allclose(again @ code.matrix, np.ones(4), rtol=1e-14)
    code.coefficients([0, 1, 2])
    assert len(calls) == 2
    monkeypatch.setattr("mpiml.collectives.stragglers.cyclic._KEPT", 2)
    code.coefficients([1, 2, 3])
    assert len(code._known) == 1


@pytest.mark.parametrize(("n", "s"), PAIRS)
def test_enough_says_what_decode_takes(n, s):
    for code in codes_of(n, s):
        messages = sent(code, [np.ones(1)] * n)
        for count in range(n + 1):
            for workers in itertools.combinations(range(n), count):
                if code.enough(workers):
                    code.decode(among(messages, workers))
                else:
                    assert count < n - s
                    with pytest.raises(UsageError, match="missing"):
                        code.decode(among(messages, workers))
                assert code.enough(workers) or count < n - s


# ---- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Cyclic, FractionalRepetition])
def test_numbers_out_of_range_are_refused(kind):
    name = kind.__name__
    for n, s, message in [
        (4, -1, f"{name}: s: expected 0 to n - 1 = 3 workers that may be missing, got -1"),
        (4, 4, f"{name}: s: expected 0 to n - 1 = 3 .* got 4: nobody would be left to send"),
        (0, 0, f"{name}: n: expected a whole number >= 1, got 0"),
        (4, 1.0, f"{name}: s: expected a whole number, got 1.0"),
        (True, 0, f"{name}: n: expected a whole number >= 1, got True"),
    ]:
        with pytest.raises(UsageError, match=message):
            kind(n, s)


def test_a_number_that_does_not_divide_is_refused_with_the_other_code():
    with pytest.raises(UsageError, match=r"s \+ 1 = 3 divides, got 7\. Use Cyclic\(7, 2\)"):
        FractionalRepetition(7, 2)


def test_seeds_out_of_range_are_refused():
    with pytest.raises(
        UsageError, match="seed: expected a whole number from 0 to 4294967295, got -1"
    ):
        Cyclic(4, 1, seed=-1)


def test_a_condition_number_beyond_the_bound_is_refused(monkeypatch):
    code = Cyclic(4, 1)
    monkeypatch.setattr("mpiml.collectives.stragglers.cyclic.CONDITION", 1.5)
    with pytest.raises(UsageError, match=r"got \d.*Wait for one worker more than \[0, 1, 2\]"):
        code.coefficients([0, 1, 2])
    with pytest.raises(UsageError, match=r"Cyclic\(4, 1, seed=0\): .* Use another seed"):
        Cyclic(4, 1)


@pytest.mark.parametrize("code", [Cyclic(4, 1), FractionalRepetition(4, 1)], ids=repr)
def test_workers_that_cannot_be_are_refused(code):
    message = code.encode(0, {j: np.ones(2) for j in code.assignment(0)})
    few = {0: message}
    with pytest.raises(UsageError, match="messages of 3 of 4 workers, got 1; missing: 1, 2, 3"):
        code.decode(few)
    with pytest.raises(UsageError, match="got 0; missing: 0, 1, 2, 3"):
        code.decode({})
    for stranger in (4, -1):
        with pytest.raises(
            UsageError, match=f"worker: expected a whole number from 0 to 3, got {stranger}"
        ):
            code.decode({0: message, 1: message, stranger: message})
        with pytest.raises(
            UsageError, match=f"worker: expected a whole number from 0 to 3, got {stranger}"
        ):
            code.assignment(stranger)
        with pytest.raises(
            UsageError, match=f"worker: expected a whole number from 0 to 3, got {stranger}"
        ):
            code.encode(stranger, {})
    with pytest.raises(UsageError, match="worker 1 is there twice"):
        code.decode([(0, message), (1, message), (1, message), (2, message)])
    with pytest.raises(UsageError, match="worker 1 is there twice"):
        code.enough([1, 0, 1])


@pytest.mark.parametrize("code", [Cyclic(4, 1), FractionalRepetition(4, 1)], ids=repr)
def test_gradients_of_other_partitions_are_refused(code):
    x = np.ones(2)
    for gradients in ({0: x}, {0: x, 1: x, 2: x}, {0: x, 3: x}, {}):
        with pytest.raises(
            UsageError, match=r"worker 0 holds the partitions \[0, 1\], got gra"
        ):
            code.encode(0, gradients)


@pytest.mark.parametrize("code", [Cyclic(2, 1), FractionalRepetition(2, 1)], ids=repr)
def test_trees_that_differ_are_refused(code):
    x = np.ones(2)
    for odd, message in [
        (
            {"w": np.ones(3)},
            r"leaf \['w'\]: expected shape \(2,\) of float64 .* of partition 0,",
        ),
        ({"w": np.ones(2, np.float32)}, r"got shape \(2,\) of float32 of partition 1"),
        ({"v": x}, "expected a tree like that of partition 0"),
        ([x], "expected a tree like that of partition 0"),
        (
            {"w": [1.0, 2.0]},
            r"partition 1: leaf \['w'\]\[0\]: expected an array, got the number",
        ),
    ]:
        with pytest.raises(UsageError, match=message):
            code.encode(0, {0: {"w": x}, 1: odd})
    with pytest.raises(UsageError, match=r"decode: expected shape \(2,\) .* of worker 0, got"):
        code.decode({1: np.ones(3), 0: x})


def test_dtypes_that_lose_too_much_are_refused():
    for dtype in ("int64", "float16"):
        x = np.ones(2, dtype)
        with pytest.raises(UsageError, match=f"got {dtype}: .* use FractionalRepetition"):
            Cyclic(2, 1).encode(0, {0: x, 1: x})
    with pytest.raises(UsageError, match="op 'sum' is not defined for bool"):
        FractionalRepetition(2, 1).encode(0, {0: np.ones(2, bool), 1: np.ones(2, bool)})
    with pytest.raises(UsageError, match="dtype: expected one of float32"):
        Cyclic(2, 1).error(dtype="float16")


def test_arrays_of_other_libraries_are_refused():
    class Elsewhere:
        dtype, shape = np.dtype(np.float32), (2,)

    with pytest.raises(UsageError, match=r"expected a NumPy array, got .*Elsewhere"):
        FractionalRepetition(1, 0).encode(0, {0: Elsewhere()})
