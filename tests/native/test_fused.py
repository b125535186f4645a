"""Plan.update: a reduction that ends in an optimizer step has the bits of the two in turn."""

import ml_dtypes
import numpy as np
import pytest

from mpiml._native import Gang, Plan, gang_bytes, reduce, update

RATES = (0.01, 0.1, 0.999, 0.9, 0.1, 0.99, 0.01, 1.5, 1e-8, 1.0)
STATES = [0, 1, 1, 2]
SUM, MEAN, MIN = 0, 1, 2
ALL, OWN = -1, -2
DTYPES = {
    "float32": (0, np.float32, np.float32),
    "float64": (1, np.float64, np.float64),
    "float16": (2, np.float16, np.float32),
    "bfloat16": (3, ml_dtypes.bfloat16, np.float32),
    "float16 for float64": (2, np.float16, np.float64),
}


def member(size, segment):
    """One member of a gang that reads all segments; it meets nobody in these tests."""
    memory = bytearray(gang_bytes(size, 512, segment, 0) + 128)
    shift = -np.frombuffer(memory, np.uint8).ctypes.data % 128
    aligned = memoryview(memory)[shift:]
    gang = Gang(aligned, size - 1, size, 512, segment, 0, 0, 0, False)
    return gang, aligned


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", range(4))
@pytest.mark.parametrize(("size", "op"), [(1, SUM), (1, MEAN), (2, MEAN), (3, SUM), (4, MEAN)])
@pytest.mark.parametrize("count", [1, 17, 3001])
def test_same_bits_as_reduce_and_update(dtype, rule, size, op, count):
    code, low, full = DTYPES[dtype]
    rng = np.random.default_rng(count)
    gang, memory = member(size, count * 8 + 64)
    at = 64
    grads = []
    for i in range(size):
        grad = np.frombuffer(memory, low, count, gang.segment_at(i) + at)
        grad[:] = rng.normal(size=count).astype(low)
        grads.append(grad)
    before = [grad.tobytes() for grad in grads]
    total = np.zeros(count, low)
    reduce(code, op, grads, [total], float(size))
    arrays = rng.random((1 + STATES[rule], count)).astype(full)
    param, *states = arrays.copy()
    other, *others = arrays.copy()
    update(rule, full().itemsize, other, total.astype(full), tuple(others), RATES)

    plan = Plan()
    wide = full is np.float64
    plan.update(code, op, float(size), at, count, ALL, rule, wide, param, tuple(states))
    plan.set_coefficients(RATES)
    assert gang.run(plan, 1, True, 0) == 0
    assert param.tobytes() == other.tobytes()
    assert [s.tobytes() for s in states] == [s.tobytes() for s in others]
    assert [grad.tobytes() for grad in grads] == before  # only read


def test_from_the_own_segment_or_that_of_a_member():
    gang, memory = member(3, 64)
    for i in range(3):
        np.frombuffer(memory, "f4", 4, gang.segment_at(i))[:] = 10.0**i
    for where, expected in ((OWN, -100.0), (0, -1.0), (1, -10.0), (ALL, -111.0)):
        param = np.zeros(4, "f4")
        plan = Plan()
        plan.update(0, SUM, 1.0, 0, 4, where, 0, False, param, ())
        plan.set_coefficients((1.0, 0, 1, 0, 0, 0, 0, 1, 0, 0))
        assert gang.run(plan, 1, True, 0) == 0
        assert param.tolist() == [expected] * 4


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"op": MIN}, "expected the operation sum or mean"),
        ({"rule": 4}, "no such rule"),
        ({"dtype": 6}, "expected gradients of floats"),
        ({"states": ()}, "expected 1 states, got 0"),
        ({"param": np.zeros(3, "f4")}, "param: expected 16 bytes, got 12"),
        ({"states": (np.zeros(4),)}, "state: expected 16 bytes, got 32"),
        ({"param": np.zeros(17, "u1")[1:]}, "param: expected aligned memory"),
    ],
)
def test_bad_arguments(change, text):
    good = {
        "dtype": 0,
        "op": SUM,
        "divisor": 1.0,
        "at": 0,
        "count": 4,
        "where": ALL,
        "rule": 1,
        "wide": False,
        "param": np.zeros(4, "f4"),
        "states": (np.zeros(4, "f4"),),
    }
    with pytest.raises(ValueError, match=f"^Plan.update: {text}"):
        Plan().update(**(good | change))
