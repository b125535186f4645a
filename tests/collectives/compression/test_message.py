"""A block of payloads: read gives what was written, with and without known layouts."""

import ml_dtypes
import numpy as np

from mpiml.collectives.compression.message import read, write

PAYLOADS = [
    (np.arange(3, dtype=np.uint16), np.float32([1.5, 2.5, -1])),
    (np.array(2.5), np.zeros((0, 4), np.int64)),
    (np.array([[1, 2]], ml_dtypes.bfloat16), np.array([True, False])),
]


def layout(payload):
    return [(part.dtype, part.shape) for part in payload]


def check(layouts):
    block = write(PAYLOADS, layouts)
    assert block.dtype == np.uint8
    for payload, got in zip(PAYLOADS, read(block, layouts), strict=True):
        assert layout(got) == layout(payload)
        for part, other in zip(payload, got, strict=True):
            np.testing.assert_array_equal(part, other)
    return block


def test_known_layouts_cost_nothing_but_alignment():
    block = check([layout(payload) for payload in PAYLOADS])
    assert block.size == (8 + 16) + (8 + 0) + (8 + 8)


def test_unknown_layouts_are_sent_along():
    check([None] * 3)


def test_both_may_be_mixed():
    check([None, layout(PAYLOADS[1]), None])
