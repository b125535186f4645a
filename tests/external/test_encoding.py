"""Arrays and names as bytes: what goes in comes out, and nothing else gets in."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpiml.control import Note
from mpiml.engine import APART
from mpiml.errors import UsageError
from mpiml.external.codes import TEXT, ArraysError, pack_code, shortened
from mpiml.external.encoding import DTYPES, ENC_ARRAYS, Named, as_array, decode, encode
from mpiml.external.specs import Array
from mpiml.payload import unpack, unpack_call


def there_and_back(value, **kwargs):
    encoding, body, buffers = encode(value, "it", **kwargs)
    assert encoding == ENC_ARRAYS
    return decode(body, buffers)


def same(a, b):
    a = np.asarray(a)
    assert (a.dtype.newbyteorder("="), a.shape) == (b.dtype, b.shape)
    assert np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")
    assert b.flags.writeable
    return True


@given(
    arrays.arrays(
        st.sampled_from(DTYPES[1:]).map(np.dtype),
        arrays.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=6),
    ),
    st.integers(0, 3),
)
def test_any_array_arrives_equal_in_its_order(x, way):
    x = (x, np.asfortranarray(x), x.T, x[..., ::-1] if x.ndim else x)[way]
    back = there_and_back(x)
    assert same(x, back)
    if x.flags.f_contiguous and not x.flags.c_contiguous:
        assert back.flags.f_contiguous


@given(st.lists(st.integers(0, 5000), max_size=8))
def test_large_arrays_stand_apart_and_small_ones_fit_in_a_frame(sizes):
    value = tuple(np.arange(float(n)) for n in sizes)
    _, body, buffers = encode(value, "it")
    assert len(body) < 30_000
    assert sum(map(len, buffers)) + 16 * 1024 >= sum(a.nbytes for a in value)
    for a, b in zip(value, there_and_back(value), strict=True):
        assert same(a, b)


def test_numbers_are_arrays_without_dimensions():
    back = there_and_back((True, 3, 2.5, 1j, np.float32(7)))
    assert [b.dtype.name for b in back] == ["bool", "int64", "float64", "complex128", "float32"]
    assert [b.item() for b in back] == [True, 3, 2.5, 1j, 7.0]


def test_names_come_with_arrays_or_without():
    back = there_and_back(Named({"w": np.ones(3), "layers/0/bß": None}))
    assert list(back) == ["w", "layers/0/bß"]
    assert back["layers/0/bß"] is None
    assert same(np.ones(3), back["w"])


def test_what_is_large_is_copied_unless_it_may_stay():
    x = np.zeros(10_000)
    _, _, (kept,) = encode(x, "it", copy=False)
    _, _, (copy,) = encode(x, "it")
    x[0] = 1
    assert bytes(kept[:8]) != bytes(copy[:8])


@pytest.mark.parametrize(
    "wrong",
    ["text", b"bytes", [1.0], {"a": 1}, object(), np.array(["a"]), np.array([None]), 2**80,
     np.zeros(1, "M8[s]"), np.zeros((1,) * 9), (1, "a"), (1.0,) * 33],
    ids=repr,
)  # fmt: skip
def test_anything_else_is_refused_with_what_it_is(wrong):
    with pytest.raises(ArraysError, match=r"^the result"):
        encode(wrong, "the result")


def test_whole_numbers_have_one_dtype_whatever_their_value():
    for number in (0, -(2**63), 2**63 - 1):
        assert as_array(number, "it").dtype == np.int64
    for number in (2**63, -(2**63) - 1, 2**64):
        with pytest.raises(ArraysError, match=r"it: expected a number from -2\*\*63"):
            as_array(number, "it")
    assert as_array(np.uint64(2**63), "it").dtype == np.uint64
    assert as_array(True, "it").dtype == np.bool_


class Turned(np.ndarray):
    def tobytes(self, order="C"):
        return b"nonsense"

    def reshape(self, *shape, order="C"):
        raise ValueError("no")


@pytest.mark.parametrize("n", [4, 90_000])
def test_subclasses_of_arrays_are_sent_as_what_they_are_in_memory(n):
    x = np.arange(float(n))
    assert same(x, there_and_back(x.view(Turned)))
    with pytest.raises(ArraysError, match=r"it: .* a masked array.* x\.filled\(0\)"):
        encode(np.ma.array(x, mask=x > 2), "it")


def test_texts_for_guests_fit_in_a_frame_and_keep_head_and_tail():
    for letter in ("x", "\u9519", "\U0001f600", "\udcff"):
        for prefix in ("", "a", "ab", "abc"):
            text = shortened(f"{prefix}first line\n{letter * 40_000}\nValueError: the reason")
            assert len(text.encode()) <= TEXT
            assert text.startswith(f"{prefix}first line\n")
            assert text.endswith("\nValueError: the reason")
            assert "\n...\n" in text
            assert "\ufffd" not in text
            assert len(pack_code(13, letter * 40_000)) < APART
            assert len(Note(2, 1, 0, 0, text).pack()) < APART
    assert shortened("short \u9519") == "short \u9519"


def test_arrays_of_other_byte_order_are_turned():
    assert as_array(np.arange(3, dtype=">i4"), "it").dtype == np.dtype("<i4")
    assert same(np.arange(3), there_and_back(np.arange(3, dtype=">i8")))


@given(st.binary(max_size=200), st.lists(st.binary(max_size=20), max_size=2))
def test_other_bytes_are_a_usage_error_and_nothing_else(body, buffers):
    with contextlib.suppress(UsageError):
        decode(body, buffers)


@given(st.data())
def test_bytes_with_a_fault_in_them_are_no_crash(data):
    _, body, buffers = encode((np.arange(3.0), np.zeros((2, 2), "c8"), np.zeros(3000)), "it")
    at = data.draw(st.integers(0, len(body) - 1))
    broken = body[:at] + bytes([data.draw(st.integers(0, 255))]) + body[at + 1 :]
    with contextlib.suppress(UsageError):
        decode(broken, buffers)


def test_payloads_of_calls_and_messages_may_be_arrays():
    encoding, body, buffers = encode((1, 2.0), "it")
    args, kwargs = unpack_call(encoding, body, buffers)
    assert [a.item() for a in args] == [1, 2.0]
    assert kwargs == {}
    encoding, body, buffers = encode(np.eye(3), "it")
    assert same(np.eye(3), unpack(encoding, body, buffers))
    assert unpack_call(*encode(Named(w=None), "it"))[0] == ({"w": None},)
    assert unpack_call(*encode((), "it")) == ((), {})


# -- descriptions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float64", "f8", "<f8", np.float64, np.dtype("f8"), float], ids=repr
)
def test_a_dtype_is_named_in_many_ways(dtype):
    if dtype is float:
        with pytest.raises(UsageError):
            Array(dtype)
    else:
        assert Array(dtype) == ("float64", None)


@pytest.mark.parametrize(
    "wrong", [("f7",), ("U3",), ("f8", 3), ("f8", "ab"), ("f8", (-1,)), ("f8", (None,) * 9)]
)
def test_a_wrong_description_is_refused(wrong):
    with pytest.raises(UsageError, match=r"Array: (dtype|shape): expected"):
        Array(*wrong)


def test_a_description_holds_for_dtype_dimensions_and_lengths():
    spec = Array("f8", (None, 3))
    spec.check(np.zeros((7, 3)), "here")
    for wrong in (np.zeros((7, 3), "f4"), np.zeros((7, 4)), np.zeros(3), np.zeros((1, 7, 3))):
        with pytest.raises(UsageError, match=r"here: expected Array\('float64', \(None, 3\)\)"):
            spec.check(wrong, "here")
    Array("f8").check(np.zeros((1, 2, 3)), "here")
