"""Gradients by hand, and members that are held back by an event."""

import threading

import numpy as np

LIMIT = 20.0  # s, after which a test that hangs fails


def gradient(part, step, dtype="f8"):
    """The gradient of a partition, or of a member: whole numbers, so that sums are exact."""
    base = np.arange(6).reshape(2, 3) + 10 * part + 100 * step
    return {"w": base.astype(dtype), "b": [np.array(part - step, dtype)]}


def total(parts, step, dtype="f8"):
    """The sum of the gradients of partitions."""
    found = [gradient(part, step, dtype) for part in parts]
    return {"w": sum(g["w"] for g in found), "b": [sum(g["b"][0] for g in found)]}


def check(tree, expected, rtol=0.0, scale=1.0):
    """Compare trees; rtol: of the sum of the magnitudes."""
    for got, wanted in ((tree["w"], expected["w"]), (tree["b"][0], expected["b"][0])):
        assert type(got) is np.ndarray
        assert got.shape == np.shape(wanted)
        bound = rtol * 5000
        np.testing.assert_allclose(got / scale, wanted / scale, rtol=0, atol=bound)


def raw(tree):
    """The bits of a tree."""
    return tree["w"].tobytes() + tree["b"][0].tobytes()


def like(dtype="f8"):
    return gradient(0, 0, dtype)


class Latch:
    """An event that is set once, by the last of so many."""

    def __init__(self, count=1):
        self._left = count
        self._lock = threading.Lock()
        self._event = threading.Event()

    def down(self):
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self._event.set()

    def wait(self):
        assert self._event.wait(LIMIT), "held back for ever"
