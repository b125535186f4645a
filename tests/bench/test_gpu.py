"""The benchmark of device arrays: its rows, and its ways on a device made of host memory."""

from types import SimpleNamespace

import numpy as np
import pytest

from mpiml.bench import gpu, gpu_ways
from mpiml.bench.spawn import Options
from mpiml.doctor.check import Check
from mpiml.errors import UsageError
from tests.fake_device import FakeArray, install

FOUND = {
    "by_hand": [0.008], "bucket": [0.001], "staged": [0.004], "outside": [0.002],
    "half": [0.001], "half_staged": [0.004], "copy": [0.0005], "link": [0.002],
}  # fmt: skip


def test_rows_compare_with_what_one_writes_by_hand_and_with_the_bounds():
    rows = {row.key: row for row in gpu.gpu_rows("16 MiB", FOUND, 2)}
    assert rows["16MiB_bucket"].ratio == pytest.approx(1 / 8)
    assert rows["16MiB_staged"].ratio == pytest.approx(1 / 2)
    assert rows["16MiB_bucket_bound"].value == pytest.approx(50)
    assert rows["16MiB_staged_bound"].value == pytest.approx(50)
    assert rows["16MiB_copy_speed"].value == pytest.approx(4 * (16 << 20) / 0.0005 / 1e9)
    assert "16MiB_mpi" not in rows
    small = {row.key for row in gpu.gpu_rows("64 KiB", FOUND | {"mpi": [1e-5]}, 2)}
    assert "64KiB_mpi" in small
    assert "64KiB_copy" not in small


def test_without_a_device_it_says_so(monkeypatch):
    monkeypatch.setattr(gpu, "check_gpu", lambda *_: Check("gpu", "note", "no NVIDIA device"))
    with pytest.raises(UsageError, match="no CUDA device: no NVIDIA device"):
        gpu.measure(Options("gpu"), None)
    with pytest.raises(UsageError, match="--ranks 1: expected 2 or more"):
        gpu.measure(Options("gpu", ranks=1), None)


def test_the_plans_name_sizes_that_there_are():
    class Answer:
        def scenario(self, where, n, plan):
            module, _, function = where.partition(":")
            assert hasattr(gpu_ways, function)
            assert module == "gpu_ways"
            about = dict.fromkeys(("devices", "cupy", "cuda", "driver", "way", "mpi"), "x")
            return {size: dict(FOUND) for size in plan["sizes"]} | {"about": about}

    for quick in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu, "check_gpu", lambda *_: Check("gpu", "ok", "1"))
            rows, notes = gpu.measure(Options("gpu", quick=quick), Answer())
        assert len(rows) > 20
        assert notes


def shim():
    """Return what of CuPy the benchmark uses, on arrays that are not on a device."""
    runtime = SimpleNamespace(
        deviceSynchronize=lambda: None,
        getDeviceCount=lambda: 1,
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13010,
    )
    return SimpleNamespace(
        zeros=lambda *args: np.zeros(*args).view(FakeArray),
        ones=lambda *args: np.ones(*args).view(FakeArray),
        cuda=SimpleNamespace(
            runtime=runtime, Device=lambda *_: SimpleNamespace(id=0, use=lambda: None)
        ),
        get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: None),
        __version__="14.0",
    )


@pytest.mark.mpi(min_size=2)
def test_every_way_sums_right(monkeypatch):
    from mpi4py import MPI

    install(monkeypatch)
    monkeypatch.setitem(__import__("sys").modules, "cupy", shim())
    comm = MPI.COMM_WORLD
    found = gpu_ways.sizes(comm, {"sizes": {"8 B": [2, 2, 1], "1 MiB": [1, 1, 1]}})
    about = found.pop("about")
    assert about["devices"] == "1 x a fake device 0"
    assert (about["cuda"], about["driver"]) == ("13.0", "13.1")
    assert about["way"].startswith("device")
    for size, took in found.items():
        assert {"by_hand", "bucket", "staged", "outside", "half", "copy", "link"} <= took.keys()
        rows = gpu.gpu_rows(size, took, comm.size)
        assert all(row.value > 0 for row in rows)
