import os
import sys
import warnings

import numpy as np
import pytest

from mpiml.datasets import libsvm, read_libsvm
from mpiml.errors import UsageError

TEXT = b"1 1:1 3:0.5\n-1\n-1 2:2\n"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.svm"
    path.write_bytes(TEXT)
    return path


@pytest.fixture
def h5py():
    return pytest.importorskip("h5py", reason="h5py (the extra `checkpoint`) is not installed")


@pytest.fixture
def parsed(monkeypatch):
    """Count the blocks that are parsed."""
    blocks = []

    def counted(block, style):
        blocks.append(block)
        return parse(block, style)

    parse = libsvm.parse
    monkeypatch.setattr(libsvm, "parse", counted)
    return blocks


def kept(folder):
    return sorted(p for p in folder.iterdir() if p.name != "data.svm")


def same(a, b):
    for name in ("indptr", "indices", "values", "labels"):
        assert getattr(a, name).dtype == getattr(b, name).dtype
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert (a.shape, a.qid is None) == (b.shape, b.qid is None)


def test_without_h5py_the_cure_is_named(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UsageError, match=r"pip install 'mpiml\[checkpoint\]'"):
        read_libsvm(path, cache=True)
    assert len(read_libsvm(path, cache=None)) == len(read_libsvm(path, cache=False)) == 3


@pytest.mark.usefixtures("h5py")
def test_the_second_time_nothing_is_parsed(path, parsed):
    first = read_libsvm(path, cache=True)
    assert len(parsed) == 1
    same(read_libsvm(path, cache=True), first)
    assert len(parsed) == 1
    (file,) = kept(path.parent)
    assert file.name.startswith("data.svm.")
    assert file.suffix == ".h5"


@pytest.mark.usefixtures("h5py")
def test_qids_and_empty_shards_are_kept_too(path, parsed):
    path.write_bytes(b"1 qid:4\n")
    for rank in (0, 1, 2):
        first = read_libsvm(path, rank, 3, cache=True)
        count = len(parsed)
        again = read_libsvm(path, rank, 3, cache=True)
        assert len(parsed) == count
        same(again, first)
        assert first.qid is None or again.qid.tolist() == [4]
    assert len(kept(path.parent)) == 3


@pytest.mark.usefixtures("h5py")
def test_each_way_to_read_has_a_cache_of_its_own(path, parsed, tmp_path):
    folder = tmp_path / "a" / "b"
    ways = [
        {},
        {"size": 2},
        {"rank": 1, "size": 2},
        {"features": 4},
        {"dtype": "float64"},
        {"zero_based": True},
        {"allow_nan": True},
        {"balance": "rows"},
    ]
    first = [read_libsvm(path, **way, cache=folder) for way in ways]
    count = len(parsed)
    for way, csr in zip(ways, first, strict=True):
        same(read_libsvm(path, **way, cache=str(folder)), csr)
    assert len(parsed) == count
    assert len(kept(folder)) == len(ways)


@pytest.mark.usefixtures("h5py")
def test_one_folder_for_files_of_one_name(path, tmp_path):
    other = tmp_path / "other" / path.name
    other.parent.mkdir()
    other.write_bytes(TEXT.replace(b"2:2", b"2:3"))
    os.utime(other, ns=(1, path.stat().st_mtime_ns))
    for _ in range(2):
        assert read_libsvm(path, cache=tmp_path / "c").values[-1] == 2
        assert read_libsvm(other, cache=tmp_path / "c").values[-1] == 3


@pytest.mark.usefixtures("h5py")
@pytest.mark.parametrize("change", ["size", "time"])
def test_a_stale_cache_is_replaced(path, parsed, change):
    before = path.stat().st_mtime_ns
    read_libsvm(path, cache=True)
    files = kept(path.parent)
    path.write_bytes(TEXT.replace(b"2:2", b"2:3" if change == "time" else b"2:3.5"))
    os.utime(path, ns=(before, before + (change == "time")))
    assert read_libsvm(path, cache=True).values[-1] == (3 if change == "time" else 3.5)
    assert len(parsed) == 2
    assert kept(path.parent) == files
    read_libsvm(path, cache=True)
    assert len(parsed) == 2


def cut(file, h5py):
    file.write_bytes(file.read_bytes()[:-100])


def turn(file, h5py):
    with h5py.File(file, "r+") as f:
        f["values"][1] = 9


def drop(file, h5py):
    with h5py.File(file, "r+") as f:
        del f["labels"]


def widen(file, h5py):
    with h5py.File(file, "r+") as f:
        f.attrs["shape"] = (3, 8)


def no_mark(file, h5py):
    with h5py.File(file, "r+") as f:
        del f.attrs["checksum"]


def other(file, h5py):
    file.write_bytes(b"not HDF5")


@pytest.mark.parametrize("damage", [cut, turn, drop, widen, no_mark, other])
def test_a_torn_cache_is_replaced(path, parsed, h5py, damage):
    first = read_libsvm(path, cache=True)
    (file,) = kept(path.parent)
    damage(file, h5py)
    same(read_libsvm(path, cache=True), first)
    assert len(parsed) == 2
    same(read_libsvm(path, cache=True), first)
    assert len(parsed) == 2


@pytest.mark.usefixtures("h5py")
def test_a_file_that_changes_meanwhile_is_not_kept(path, monkeypatch):
    def changing(block, style):
        path.write_bytes(TEXT + TEXT)
        return parse(block, style)

    parse = libsvm.parse
    monkeypatch.setattr(libsvm, "parse", changing)
    read_libsvm(path, cache=True)
    assert kept(path.parent) == []


def test_a_full_disk_is_a_warning(path, monkeypatch, h5py):
    monkeypatch.setattr(h5py.File, "__setitem__", full)
    with pytest.warns(RuntimeWarning, match="could not write .*data.svm.*: no room") as caught:
        assert len(read_libsvm(path, cache=True)) == 3
    assert kept(path.parent) == []
    assert caught[0].filename == __file__


def full(*_):
    raise OSError("no room")


@pytest.mark.usefixtures("h5py")
def test_a_cache_that_is_no_folder_is_refused_before_parsing(path, parsed):
    with pytest.raises(UsageError, match="expected a folder to write to"):
        read_libsvm(path, cache=path)
    assert parsed == []


def test_reading_warns_of_nothing(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_libsvm(path)
