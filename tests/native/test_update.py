"""Optimizer kernels: bad arguments are refused; every instruction set gives the same bits."""

import numpy as np
import pytest

from mpiml._native import update, use_isa

# rate, decay, shrink, keep1, add1, keep2, add2, scale, eps, nesterov
COEFFICIENTS = (0.01, 0.1, 0.999, 0.9, 0.1, 0.99, 0.01, 1.5, 1e-8, 1.0)
STATES = [0, 1, 1, 2]


@pytest.fixture(autouse=True)
def best_isa():
    yield
    use_isa("avx512")  # or what comes nearest


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rule", range(4))
def test_instruction_sets_agree_in_every_bit(rule, dtype):
    if use_isa("avx2") == "plain":
        pytest.skip("one instruction set only")
    for n in (0, 1, 3, 16, 17, 1000):
        for shift in (0, 1):  # aligned to the vector or not
            got = []
            for isa in ("plain", "avx2", "avx512"):
                use_isa(isa)
                rng = np.random.default_rng(n)
                whole = rng.random((2 + STATES[rule], n + shift)).astype(dtype)
                p, g, *states = whole[:, shift:]
                update(rule, p.itemsize, p, g, tuple(states), COEFFICIENTS)
                got.append(b"".join(a.tobytes() for a in (p, *states)))
            assert got[0] == got[1] == got[2]


def test_isa_of_no_such_name():
    with pytest.raises(
        ValueError, match=r"^use_isa: name: expected plain, avx2 or avx512, got"
    ):
        use_isa("sse9")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rule": 4}, "rule: expected 0 to 3, got 4"),
        ({"itemsize": 2}, "itemsize: expected 4 or 8, got 2"),
        (
            {"grad": np.zeros(5, "f4")},
            "grad: expected 16 bytes as param has, in items of 4, got 20",
        ),
        ({"states": (np.zeros(4, "f4"),)}, "states: expected 2, got 1"),
        ({"states": (np.zeros(4, "f4"), np.zeros(3, "f4"))}, "state: expected 16 bytes"),
        ({"param": np.zeros(9, "u1")[:7]}, "param: expected 7 bytes"),
        ({"grad": np.zeros(17, "u1")[1:]}, "grad: expected memory aligned to 4 bytes"),
    ],
)
def test_bad_arguments(change, text):
    good = {
        "rule": 3,
        "itemsize": 4,
        "param": np.zeros(4, "f4"),
        "grad": np.zeros(4, "f4"),
        "states": (np.zeros(4, "f4"), np.zeros(4, "f4")),
        "coefficients": COEFFICIENTS,
    }
    with pytest.raises(ValueError, match=f"^update: {text}"):
        update(**(good | change))


def test_parameters_must_be_writable():
    frozen = np.zeros(4, "f4")
    frozen.flags.writeable = False
    with pytest.raises(BufferError, match="update: param: expected writable memory"):
        update(0, 4, frozen, np.zeros(4, "f4"), (), COEFFICIENTS)
