"""What counts as a whole number, and what an error says of what does not."""

import re

import numpy as np
import pytest

from mpiml.errors import UsageError
from mpiml.whole import as_whole, whole_number


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_whole_numbers_are_ints_then(value):
    found = whole_number("here: n", value, 1, 3)
    assert (found, type(found)) == (3, int)
    assert whole_number("here: n", int(value) - 9) == -6  # no range: any


@pytest.mark.parametrize("value", [True, False, np.True_, 3.0, np.float32(3), "3", None, [3]])
def test_what_is_no_whole_number(value):
    assert as_whole(value) is None
    text = f"here: n: expected a whole number, got {value!r}"
    with pytest.raises(UsageError, match=f"^{re.escape(text)}$"):
        whole_number("here: n", value)


@pytest.mark.parametrize(
    ("value", "most", "text"),
    [(0, None, ">= 1, got 0"), (0, 4, "from 1 to 4, got 0"), (5, 4, "from 1 to 4, got 5")],
)
def test_numbers_out_of_their_range(value, most, text):
    with pytest.raises(UsageError, match=f"^here: n: expected a whole number {text}$"):
        whole_number("here: n", value, 1, most)
