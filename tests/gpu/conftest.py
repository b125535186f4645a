"""Tests here need a CUDA device and CuPy; the doctor says whether there is one."""

import functools
from pathlib import Path

import pytest

from mpiml.doctor.machine import check_gpu

HERE = Path(__file__).parent


@functools.cache
def missing():
    """Return why these tests are skipped, or nothing."""
    check = check_gpu(Path("/dev"), 120.0)
    if check.state == "ok":
        return ""
    return "no CUDA device" if check.state == "note" else f"no CUDA device: {check.found}"


def pytest_collection_modifyitems(items):
    """Skip what is marked gpu where there is no device."""
    for item in items:
        if HERE in item.path.parents and missing():
            item.add_marker(pytest.mark.skip(reason=missing()))


@pytest.fixture
def cupy():
    """Return CuPy, and give its memory back afterwards."""
    import cupy

    yield cupy
    cupy.get_default_memory_pool().free_all_blocks()
