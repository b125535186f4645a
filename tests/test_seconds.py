"""Seconds among arguments, and that all calls with a timeout take the same ones."""

import math
from fractions import Fraction

import numpy as np
import pytest

import mpiml
from mpiml.seconds import as_seconds, timeout_seconds
from tests.playing import both, play

WRONG = (True, False, "1", b"1", [1.0], math.nan, -1, -math.inf, -(10**400), 1j, object())


@pytest.mark.parametrize("value", WRONG, ids=lambda w: repr(w)[:9])
def test_what_is_no_number_of_seconds_is_refused(value):
    assert as_seconds(value) is None
    with pytest.raises(
        mpiml.UsageError, match=r"^here: expected timeout >= 0 or None, got "
    ) as caught:
        timeout_seconds("here", value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", [0, 2, 0.5, Fraction(1, 2), np.float32(0.5), np.int64(3)])
def test_numbers_become_floats(value):
    for found in (as_seconds(value), timeout_seconds("here", value)):
        assert type(found) is float
        assert found == value


@pytest.mark.parametrize(
    "value",
    [None, math.inf, 10**400, 1e300, np.float32("inf")],
    ids=["none", "inf", "huge", "long", "numpy"],
)
def test_no_deadline(value):
    assert timeout_seconds("here", value) is None


class Service:
    def __init__(self):
        pass

    def answer(self):
        return 42


@both
def test_all_calls_take_the_same(mode):
    def body(service, barrier):
        for endless in (None, math.inf, 1e300):
            mpiml.wait_until_ready(service, timeout=endless)
            assert service.with_options(timeout=endless).answer() == 42
            barrier.wait(timeout=endless)
        calls = (
            lambda timeout: mpiml.wait_until_ready(service, timeout=timeout),
            lambda timeout: service.with_options(timeout=timeout),
            lambda timeout: barrier.wait(timeout=timeout),
        )
        for call in calls:
            for wrong in WRONG[:-1]:
                with pytest.raises(
                    mpiml.UsageError, match="expected timeout >= 0 or None, got"
                ):
                    call(wrong)

    play(mode, body, service=Service, barrier=mpiml.ServiceNode(mpiml.roles.Barrier))
