"""libmpiml's arrays against NumPy's: orders, strides, copies, and what is said of misfits."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.external.building import plain

DTYPES = {
    **{"bool": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7},
    **{"uint32": 8, "uint64": 9, "float16": 10, "float32": 11, "float64": 12},
    **{"complex64": 13, "complex128": 14},
}
DTYPE, SHAPE, USAGE = 11, 12, 2


class Array(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("shape", ctypes.c_int64 * 8),
        ("strides", ctypes.c_int64 * 8),
    ]


class Spec(ctypes.Structure):
    _fields_ = [
        ("dtype", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("order", ctypes.c_char),
        ("shape", ctypes.c_int64 * 8),
    ]


@pytest.fixture(scope="module")
def lib():
    lib = ctypes.CDLL(str(plain("libarrays.so", ["array.c", "copy.c", "errors.c"])))
    lib.mi_order.restype = ctypes.c_char
    lib.mi_spec_of.restype = Spec
    lib.mi_spec_bytes.restype = ctypes.c_size_t
    lib.mi_unpack.argtypes = [ctypes.POINTER(Array), ctypes.c_char, ctypes.c_void_p]
    lib.mi_pack.argtypes = [ctypes.POINTER(Array), ctypes.c_void_p]
    lib.mpiml_error.restype = ctypes.c_char_p
    for name in ("mpiml_array_c", "mpiml_array_f"):
        function = getattr(lib, name)
        function.restype = Array
        function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return lib


def described(x):
    pad = (0,) * (8 - x.ndim)
    return Array(x.ctypes.data, DTYPES[x.dtype.name], x.ndim, x.shape + pad, x.strides + pad)


def counted(dtype, shape, order="C"):
    n = int(np.prod(shape, dtype=int))
    values = np.arange(n) % 2 if dtype == "bool" else np.arange(n)
    return np.array(values.astype(dtype).reshape(shape), order=order)


def there_and_back(lib, view, into):
    """Pack `view`, unpack it into `into`; both must hold what NumPy says."""
    x = described(view)
    spec = lib.mi_spec_of(ctypes.byref(x))
    order = spec.order.decode()
    assert tuple(spec.shape[: spec.ndim]) == view.shape
    assert lib.mi_spec_bytes(ctypes.byref(spec)) == view.nbytes
    dense = np.full(max(view.nbytes, 1), 77, np.uint8)
    lib.mi_pack(ctypes.byref(x), dense.ctypes.data)
    expected = np.frombuffer(view.tobytes(order), np.uint8)
    np.testing.assert_array_equal(dense[: view.nbytes], expected)
    lib.mi_unpack(ctypes.byref(described(into)), spec.order, dense.ctypes.data)
    np.testing.assert_array_equal(into, view)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes_travel(lib, dtype):
    for shape in [(), (5,), (0, 3), (4, 3), (2, 3, 4)]:
        for order in "CF":
            x = counted(dtype, shape, order)
            there_and_back(lib, x, np.zeros(shape, dtype))
            there_and_back(lib, x, np.zeros(shape, dtype, order="F"))


def test_the_order_is_numpys(lib):
    base = counted("float64", (6, 8))
    for view, order in [
        (base, b"C"), (base.T, b"F"), (base[::2], b"\0"), (base[:, :4], b"\0"), (base[:1], b"C"),
        (base[:, :1], b"\0"), (base[::-1], b"\0"), (base[:0, ::3], b"C"), (base[2], b"C"),
        (base[:, 2], b"\0"), (base[1:3].T, b"F"),
    ]:  # fmt: skip
        assert lib.mi_order(ctypes.byref(described(view))) == order


def test_strides_0_mean_row_order(lib):
    x = counted("int32", (3, 4))
    shape = (ctypes.c_int64 * 2)(3, 4)
    array = lib.mpiml_array_c(x.ctypes.data, DTYPES["int32"], 2, shape)
    assert tuple(array.strides) == (0,) * 8
    into = np.zeros((3, 4), "int32", order="F")
    dense = x.copy()
    lib.mi_unpack(ctypes.byref(described(into)), b"C", dense.ctypes.data)
    np.testing.assert_array_equal(into, x)
    back = np.zeros((3, 4), "int32")
    lib.mi_unpack(
        ctypes.byref(lib.mpiml_array_c(back.ctypes.data, DTYPES["int32"], 2, shape)), b"F",
        np.array(x.ravel("F")).ctypes.data,
    )  # fmt: skip
    np.testing.assert_array_equal(back, x)


def test_column_order_has_the_same_indices(lib):
    x = counted("float32", (3, 4, 2), "F")
    array = lib.mpiml_array_f(x.ctypes.data, 11, 3, (ctypes.c_int64 * 3)(3, 4, 2))
    assert tuple(array.strides[:3]) == x.strides
    assert lib.mi_order(ctypes.byref(array)) == b"F"


@st.composite
def views(draw):
    """A view of a larger array: steps of any sign, axes in any order."""
    shape = draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    x = counted(
        draw(st.sampled_from(["int8", "int16", "float32", "float64", "complex128"])), shape
    )
    cut = tuple(slice(None, None, draw(st.sampled_from([1, 2, -1, -3]))) for _ in range(x.ndim))
    return x[cut].transpose(draw(st.permutations(range(x.ndim))))


@settings(max_examples=200, deadline=None)
@given(view=views(), source=views(), data=st.data())
def test_any_strides_to_any_strides(lib, view, source, data):
    there_and_back(lib, view, np.zeros(view.shape, view.dtype))
    # into a view of memory that is larger: nothing beside it may change
    margin = np.zeros([2 * n + 1 for n in view.shape], view.dtype)
    cut = tuple(slice(1, None, 2) if data.draw(st.booleans()) else slice(-1, 0, -2)
                for _ in view.shape)  # fmt: skip
    there_and_back(lib, view, margin[cut])
    assert np.count_nonzero(margin) == np.count_nonzero(view)


def test_large_transposes_are_exact(lib):
    x = counted("float64", (123, 457))
    there_and_back(lib, x.T, np.zeros((457, 123), order="C"))
    there_and_back(lib, x[::-1].T, np.zeros((457, 123), order="F"))
    x = counted("complex128", (7, 33, 41))
    there_and_back(lib, x.transpose(1, 2, 0)[:, ::-1], np.zeros((33, 41, 7), "complex128"))


def check(lib, array):
    code = lib.mi_check(ctypes.byref(array), None)
    return code, lib.mpiml_error().decode()


def test_what_is_no_array_is_refused(lib):
    good = described(counted("float64", (2, 3)))
    assert check(lib, good)[0] == 0
    for field, value, code, says in [
        ("dtype", 99, DTYPE, "got 99"), ("dtype", 0, DTYPE, "got 0"),
        ("ndim", 9, SHAPE, "0 to 8 dimensions"), ("ndim", -1, SHAPE, "got -1"),
        ("data", None, USAGE, "memory of 48 bytes, got data = NULL"),
    ]:  # fmt: skip
        bad = Array.from_buffer_copy(good)
        setattr(bad, field, value)
        got, text = check(lib, bad)
        assert got == code
        assert text.startswith("expected")
        assert says in text
    bad = Array.from_buffer_copy(good)
    bad.shape[1] = -4
    assert check(lib, bad)[1].endswith("shape[1] = -4")
    bad.shape[0] = bad.shape[1] = 1 << 40
    assert check(lib, bad)[0] == SHAPE
    bad.shape[2], bad.ndim, bad.data = 0, 3, None  # no element, so no memory is needed
    assert check(lib, bad)[0] == 0


def test_misfits_name_both_sides(lib):
    into = described(counted("float64", (2, 3)))
    spec = lib.mi_spec_of(ctypes.byref(described(counted("float32", (2, 3)))))
    assert lib.mi_match(ctypes.byref(into), ctypes.byref(spec)) == DTYPE
    assert "expected float64" in lib.mpiml_error().decode()
    assert "got float32" in lib.mpiml_error().decode()
    for shape, said in [
        ((3, 2), "(3, 2)"),
        ((6,), "(6,)"),
        ((), "()"),
        ((2, 3, 1), "(2, 3, 1)"),
    ]:
        spec = lib.mi_spec_of(ctypes.byref(described(counted("float64", shape))))
        assert lib.mi_match(ctypes.byref(into), ctypes.byref(spec)) == SHAPE
        assert (
            lib.mpiml_error().decode()
            == f"expected shape (2, 3), that of your memory, got {said}"
        )
    spec = lib.mi_spec_of(ctypes.byref(described(counted("float64", (2, 3), "F"))))
    assert lib.mi_match(ctypes.byref(into), ctypes.byref(spec)) == 0


def test_long_texts_are_cut_between_characters(lib):
    lib.mi_fail(13, b"%s", ("é" * 10_000).encode())
    text = lib.mpiml_error()
    assert 8000 < len(text) < 8192
    assert set(text.decode()) == {"é"}
