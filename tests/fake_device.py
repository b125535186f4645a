"""A device made of host memory: pointers are addresses, lanes run when they must or may.

Memory lies in files of /dev/shm, so that another process can map it by the handle, as CUDA's
IPC does. A lane does nothing until somebody waits, or until `nudge` says so: whoever reads
a buffer without having waited reads the old one, as on a real device.
"""

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

import numpy as np

__all__ = ["FakeArray", "FakeDevice", "FakeLane"]


def memory_at(pointer, nbytes):
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(pointer))


class FakeEvent:
    def __init__(self, lane, count):
        self.lane = lane
        self.count = count

    def wait(self):
        while self.lane.done < self.count:
            self.lane.step()


class FakeLane:
    """Work in order; `nudge` (a function) decides, before each call, how much gets done."""

    def __init__(self, nudge=None):
        self.work = []
        self.done = 0
        self.begun = 0
        self.nudge = nudge or (lambda: None)

    def _begin(self, work):
        self.work.append(work)
        self.begun += 1
        self.nudge()

    def step(self):
        work = self.work.pop(0)
        work()
        self.done += 1

    def to_host(self, target, source):
        assert target.dtype == np.uint8
        self._begin(lambda: target.__setitem__(slice(None), memory_at(source, len(target))))

    def to_device(self, target, source):
        assert source.dtype == np.uint8
        self._begin(lambda: memory_at(target, len(source)).__setitem__(slice(None), source))

    def after(self, event):
        self._begin(event.wait)

    def mark(self):
        return FakeEvent(self, self.begun)
