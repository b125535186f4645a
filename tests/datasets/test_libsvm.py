import bz2
import gzip
import lzma
import os
import tempfile
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.datasets import CSR, blocks, read_libsvm, write_libsvm
from mpiml.errors import UsageError
from tests.datasets.joined import joined

NAMES = ("indptr", "indices", "values", "labels")
TEXT = b"""# two comments
#
+1 1:0.5 3:-2e-1 # a row
-1

  1.5 2:1\t4:4\t
-1 1:1 2:2 3:3 4:4"""


def same(a, b):
    """Tell that two are the same in every bit, and say where not."""
    for name in NAMES:
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype, name
        np.testing.assert_array_equal(x, y, err_msg=name)
        assert x.tobytes() == y.tobytes(), name  # the sign of zero
    assert (a.qid is None) == (b.qid is None)
    if a.qid is not None:
        np.testing.assert_array_equal(a.qid, b.qid)
    assert a.shape == b.shape


def file(folder, text, name="data.svm"):
    path = Path(folder) / name
    path.write_bytes(text)
    return path


def test_a_file_by_hand(tmp_path):
    csr = read_libsvm(file(tmp_path, TEXT))
    np.testing.assert_array_equal(csr.indptr, [0, 2, 2, 4, 8])
    np.testing.assert_array_equal(csr.indices, [0, 2, 1, 3, 0, 1, 2, 3])
    np.testing.assert_array_equal(
        csr.values, np.array([0.5, -0.2, 1, 4, 1, 2, 3, 4], np.float32)
    )
    np.testing.assert_array_equal(csr.labels, np.array([1, -1, 1.5, -1], np.float32))
    assert csr.shape == (4, 4)
    assert csr.qid is None


def test_dtype_and_features(tmp_path):
    csr = read_libsvm(file(tmp_path, TEXT), features=10, dtype=np.float64)
    assert csr.shape == (4, 10)
    assert csr.values.dtype == csr.labels.dtype == np.float64
    assert csr.values[1] == -0.2


@pytest.mark.parametrize("end", [b"\r\n", b" \n", b"\n\n"])
def test_other_ends_of_lines(tmp_path, end):
    same(
        read_libsvm(file(tmp_path, TEXT.replace(b"\n", end) + end)),
        read_libsvm(file(tmp_path, TEXT, "other")),
    )


@pytest.mark.parametrize("text", [b"", b"\n\n", b"# nothing\n"])
def test_no_rows(tmp_path, text):
    for size in (1, 2):
        csr = read_libsvm(file(tmp_path, text), size - 1, size)
        assert csr.shape == (0, 0)
        assert csr.indptr.tolist() == [0]
        assert read_libsvm(file(tmp_path, text), features=3).shape == (0, 3)


def test_qids_stand_beside_the_rows(tmp_path):
    text = b"1 qid:7 1:1\n\n2 qid:-3\n3 2:1 # qid:9\n"
    csr = read_libsvm(file(tmp_path, text))
    np.testing.assert_array_equal(csr.qid, [7, -3, -1])
    np.testing.assert_array_equal(csr.indices, [0, 1])
    np.testing.assert_array_equal(csr.labels, [1, 2, 3])


@pytest.mark.parametrize("size", [1, 2])
def test_indices_from_zero_are_found_anywhere_in_the_file(tmp_path, size):
    text = b"# 0:1 is no column\n" + b"1 1:1 2:1\n" * 20
    one = file(tmp_path, text)
    zero = file(tmp_path, text + b"1 0:1\n", "zero")
    for rank in range(size):
        assert set(read_libsvm(one, rank, size).indices) == {0, 1}
        assert set(read_libsvm(zero, rank, size).indices) >= {1, 2}
        assert set(read_libsvm(one, rank, size, zero_based=True).indices) == {1, 2}
    with pytest.raises(UsageError, match="line 22: '0:1': expected an index of 1 or more"):
        read_libsvm(zero, size - 1, size, zero_based=False)


@pytest.mark.parametrize("packer", [gzip, bz2, lzma])
@pytest.mark.parametrize("size", [1, 3])
def test_packed_files(tmp_path, packer, size):
    plain = read_libsvm(file(tmp_path, TEXT))
    packed = file(tmp_path, packer.compress(TEXT), "any name")
    parts = [read_libsvm(packed, rank, size, 4) for rank in range(size)]
    same(joined(parts), plain)
    assert [len(p) for p in parts] == ([4] if size == 1 else [1, 1, 2])


@pytest.mark.parametrize("packer", [gzip, bz2, lzma])
def test_a_packed_file_that_ends_early_is_refused(tmp_path, packer):
    text = "\n".join(f"1 1:{i / 7}" for i in range(500)).encode()
    packed = file(tmp_path, packer.compress(text)[:-20])
    with pytest.raises(UsageError, match="expected a whole compressed file"):
        read_libsvm(packed)


lines = st.one_of(
    st.sampled_from(["", "  ", "# c", " # 1 1:1", "\t"]),
    st.tuples(
        st.sampled_from(["1", "-1", "+2", " 3"]),
        st.sampled_from(["", " qid:5", " qid:0"]),
        st.lists(st.integers(1, 30), unique=True, max_size=5).map(sorted),
        st.sampled_from(["", " ", " #", "\r"]),
    ).map(lambda t: t[0] + t[1] + "".join(f" {i}:{i}.25" for i in t[2]) + t[3]),
)


@settings(deadline=None)
@given(
    st.lists(lines, max_size=12),
    st.booleans(),
    st.integers(1, 60),
    st.sampled_from(["bytes", "rows"]),
)
def test_the_shards_hold_each_row_once_and_in_order(content, ended, block, balance):
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(blocks, "BLOCK", block):
        path = file(folder, ("\n".join(content) + "\n" * ended).encode())
        whole = read_libsvm(path, features=40)
        rows = [x.partition("#")[0].split() for x in content]
        rows = [r for r in rows if r]
        assert whole.labels.tolist() == [float(r[0]) for r in rows]
        pairs = [t.split(":") for r in rows for t in r[1:] if "qid" not in t]
        assert whole.indices.tolist() == [int(i) - 1 for i, _ in pairs]
        assert whole.values.tolist() == [float(v) for _, v in pairs]
        for size in range(1, 6):
            parts = [read_libsvm(path, r, size, 40, balance=balance) for r in range(size)]
            same(joined(parts), whole)
            if balance == "rows":
                lengths = [len(p) for p in parts]
                assert max(lengths) - min(lengths) <= 1


def test_shards_by_bytes_are_balanced(tmp_path):
    text = b"".join(b"1 %d:1\n" % (i + 100) for i in range(800))  # all lines alike
    parts = [read_libsvm(file(tmp_path, text), rank, 3) for rank in range(3)]
    assert [len(p) for p in parts] == [267, 267, 266]


@st.composite
def problems(draw):
    dtype = draw(st.sampled_from([np.float32, np.float64]))
    bits = np.finfo(dtype).bits
    numbers = st.floats(width=bits, allow_nan=False, allow_infinity=False)
    rows = draw(st.lists(st.lists(st.integers(0, 50), unique=True).map(sorted), max_size=6))
    indices = np.array([i for row in rows for i in row], np.int32)
    values = draw(st.lists(numbers, min_size=indices.size, max_size=indices.size))
    labels = draw(st.lists(numbers, min_size=len(rows), max_size=len(rows)))
    qid = draw(st.none() | st.just(np.arange(len(rows), dtype=np.int64)))
    return CSR(
        np.cumsum([0, *map(len, rows)]).astype(np.int64),
        indices,
        np.array(values, dtype),
        np.array(labels, dtype),
        (len(rows), 51),
        qid if rows else None,
    )


@settings(deadline=None)
@given(problems(), st.booleans(), st.sampled_from(["", ".gz", ".xz"]))
def test_what_is_written_is_read_again(csr, zero_based, suffix):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"data{suffix}"
        write_libsvm(path, csr, zero_based=zero_based, comment="made\nby a test")
        again = read_libsvm(path, 0, 1, 51, csr.values.dtype, zero_based=zero_based)
        same(again, csr)
        assert [p.name for p in Path(folder).iterdir()] == [path.name]


def test_a_written_file_by_hand(tmp_path):
    csr = read_libsvm(file(tmp_path, b"1 qid:4 2:0.25\n-1 1:3 7:1e-9\n"))
    write_libsvm(tmp_path / "out", csr, comment="a b")
    assert (tmp_path / "out").read_bytes() == (
        b"# a b\n1 qid:4 2:0.25\n-1 1:3 7:9.99999972e-10\n"  # float32's 1e-9
    )
    with pytest.raises(UsageError, match="comment: expected ASCII"):
        write_libsvm(tmp_path / "out", csr, comment="\u00e9")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"rank": 2, "size": 2}, "rank: expected a whole number from 0 to 1, got 2"),
        ({"rank": -1}, "rank: expected a whole number from 0 to 0, got -1"),
        ({"rank": 0.5, "size": 2}, r"rank: expected a whole number from 0 to 1, got 0\.5"),
        ({"size": "2"}, "size: expected a whole number >= 1, got '2'"),
        (
            {"features": 0},
            "features, if not None: expected a whole number from 1 to 2147483647",
        ),
        ({"features": 9.0}, r"features, if not None: expected a whole number .*, got 9\.0"),
        ({"dtype": "int32"}, "dtype: expected float32 or float64, got 'int32'"),
        ({"dtype": "flt"}, "dtype: expected float32 or float64, got 'flt'"),
        ({"zero_based": "yes"}, "zero_based: expected True, False or 'auto', got 'yes'"),
        ({"balance": "x"}, "balance: expected 'bytes' or 'rows', got 'x'"),
    ],
)
def test_arguments_that_are_wrong(tmp_path, given, match):
    with pytest.raises(UsageError, match=f"^read_libsvm: {match}"):
        read_libsvm(file(tmp_path, TEXT), **given)


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match="expected a file"):
            read_libsvm(path)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_libsvm(tmp_path / "none")
