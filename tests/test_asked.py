"""The settings of a run, checked."""

import pytest

from mpiml.asked import check_settings
from mpiml.errors import UsageError
from mpiml.runtime import Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("grace", -1),
        ("grace", "3"),
        ("grace", None),
        ("grace", float("nan")),
        ("grace", float("inf")),
        ("stall_warning", -0.5),
        ("stall_warning", True),
        ("seed", -1),
        ("seed", 1.0),
        ("max_time", 0),
        ("max_time", -2),
        ("on_stuck", "no"),
        ("on_stuck", ["abort"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_may_be(name, value):
    with pytest.raises(UsageError) as caught:
        check_settings(Settings(**{name: value}), None, "attach")
    assert str(caught.value).startswith(f"mpiml.attach: {name}: expected ")
    assert str(caught.value).endswith(f", got {value!r}")


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True])
def test_wrong_threads(threads):
    with pytest.raises(
        UsageError, match=r"mpiml\.launch: threads: expected None or at least 1"
    ):
        check_settings(Settings(), threads, "launch")


def test_right_ones():
    check_settings(Settings(), None, "launch")
    check_settings(Settings(0, 0, 0, 0.5, "raise"), 1, "launch")
    import numpy as np

    number, whole = np.float32(1.5), np.int64(3)
    check_settings(Settings(number, number, whole, number), whole, "launch")
