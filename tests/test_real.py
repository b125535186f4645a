"""Real numbers among arguments, and that all settings of a parameter server take the same ones."""

import math
from fractions import Fraction

import numpy as np
import pytest

from mpiml.consistency import Async
from mpiml.errors import UsageError
from mpiml.filters import KKT, RandomSkip, SignificantlyModified
from mpiml.real import as_real, finite_number
from mpiml.roles.parameter_server.keys import Keys

NONE = (True, "1", b"1", bytearray(b"1"), [1.0], None, math.nan, 1j, object())
TAKERS = {
    "threshold": SignificantlyModified,
    "probability": RandomSkip,
    "lam": KKT,
    "compensate": lambda value: Async(compensate=value),
    "fill": lambda value: Keys(10, fill=value),
}


@pytest.mark.parametrize("value", NONE, ids=lambda v: repr(v)[:9])
def test_what_is_no_number_is_refused(value):
    assert as_real(value) is None
    with pytest.raises(UsageError, match=r"^here: expected a number, got ") as caught:
        finite_number("here", value, "a number")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [0, -2, 0.5, Fraction(1, 2), np.float32(0.5), np.int64(3)])
def test_numbers_become_floats(value):
    for found in (as_real(value), finite_number("here", value, "a number", -2)):
        assert type(found) is float
        assert found == value


@pytest.mark.parametrize("value", [math.inf, 10**400, -math.inf, -(10**400)])
def test_what_is_too_large_for_a_float_is_infinite(value):
    assert as_real(value) == (math.inf if value > 0 else -math.inf)
    with pytest.raises(UsageError, match=r"^here: expected a number, got "):
        finite_number("here", value, "a number")


def test_what_is_below_the_least_is_refused():
    with pytest.raises(UsageError, match=r"^here: expected a number >= 0, got -1$"):
        finite_number("here", -1, "a number >= 0", 0)


@pytest.mark.parametrize("name", TAKERS)
@pytest.mark.parametrize("value", [*NONE, math.inf, 10**400], ids=lambda v: repr(v)[:9])
def test_settings_refuse_them_all_alike(name, value):
    with pytest.raises(UsageError, match=f": {name}: expected a ") as caught:
        TAKERS[name](value)
    assert repr(value) in str(caught.value)


def test_settings_hold_floats():
    assert type(SignificantlyModified(np.float32(0.5)).threshold) is float
    assert type(Async(compensate=np.float32(0.5)).compensate) is float
    assert type(Keys(10, fill=1).fill) is float
