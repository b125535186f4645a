"""The memory of a server: what a pull was given stays, whatever updates follow."""

import gc

import numpy as np
import pytest

from mpiml.roles.parameter_server.memory import Private, Shared, SharedView, memory_of


class Owner:
    """Holds the memory as a server does: by what `renew` was called with."""

    def __init__(self, shared, nbytes=1000, phase=16, words=2):
        self.memory = memory_of(nbytes, phase, self.renew, words, shared)

    def renew(self, memory):
        self.array = np.frombuffer(memory, np.uint8)

    def update(self, value):
        self.memory.begin()
        self.array[:] = value
        self.memory.end()


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def owner(request):
    owner = Owner(request.param)
    yield owner
    owner.memory.close()


def test_memory_is_as_it_was_asked_for(owner):
    assert isinstance(owner.memory, Private if owner.memory.address is None else Shared)
    assert owner.array.ctypes.data % 64 == 16
    assert len(owner.array) == 1000


def test_what_was_pulled_stays(owner):
    found = []
    for value in range(4):
        owner.update(value)
        found.append(owner.memory.snapshot())
        assert owner.memory.snapshot() is found[-1]  # one for all pulls of a version
    for value, bytes_ in enumerate(found):
        assert set(bytes_) == {value}


def test_what_is_made_of_a_snapshot_keeps_it(owner):
    owner.update(1)
    view = owner.memory.snapshot().view(np.float32)[3:5]
    raw = memoryview(owner.memory.snapshot())[:8]
    gc.collect()
    owner.update(2)
    assert set(view.view(np.uint8)) == set(raw) == {1}


def test_private_memory_is_copied_only_for_who_holds_it():
    owner = Owner(False)
    owner.update(1)
    first = owner.array
    owner.memory.snapshot()
    owner.update(2)
    assert owner.array is first
    held = owner.memory.snapshot()
    owner.update(3)
    assert owner.array is not first
    assert set(held) == {2}


def test_a_view_copies_between_two_updates():
    owner = Owner(True)
    view = SharedView.open(owner.memory.address)
    out = bytearray(1000)
    assert view.copy_to(out) == 0
    owner.update(7)
    assert view.copy_to(out) == 1
    assert set(out) == {7}
    owner.memory.begin()
    owner.array[:500] = 8
    assert view.copy_to(out) is None  # within an update
    owner.memory.end()
    assert view.copy_to(out) == 2
    owner.memory.words[:] = 1, 2
    assert list(view.words) == [1, 2]
    owner.memory.begin()
    owner.memory.end(38)
    assert view.copy_to(out) == view.version == 40


def test_a_view_of_something_else_is_none():
    owner = Owner(True)
    address = owner.memory.address
    assert SharedView.open(address._replace(token=b"0" * 16)) is None
    assert SharedView.open(address._replace(nbytes=10)) is None
    assert SharedView.open(address._replace(fd=1 << 20)) is None
    owner.memory.close()
    assert SharedView.open(address) is None
