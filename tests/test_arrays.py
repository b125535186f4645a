"""Arrays as memory, without MPI: dtypes, orders, and the libraries beside NumPy."""

import sys
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpiml.arrays import (
    as_buffer,
    code_of,
    family,
    foreign_loaded,
    is_plain,
    namespace,
    order_of,
    rebuild,
    restore,
    spec_of,
    to_host,
)
from mpiml.errors import UsageError
from mpiml.payload import BORROW, RESULT, SNAPSHOT, give, pack, unpack


class FakeCupyArray:
    """Device memory that counts its way to the host."""

    def __init__(self, host):
        self.host = np.array(host)
        self.staged = 0

    def __reduce__(self):
        """Torch's own pickle, too, asks for no buffer."""
        return str, ("its own pickle",)


@pytest.fixture
def cupy(monkeypatch):
    module = types.ModuleType("cupy")
    cls = type("ndarray", (FakeCupyArray,), {"__module__": "cupy"})

    def asnumpy(x, order="C"):
        x.staged += 1
        return x.host.copy(order)

    module.ndarray, module.asnumpy, module.asarray = cls, asnumpy, cls
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@given(
    hnp.arrays(
        st.one_of(
            hnp.scalar_dtypes(),
            hnp.byte_string_dtypes(),
            hnp.unicode_string_dtypes(),
            hnp.nested_dtypes(),
        ),
        hnp.array_shapes(min_dims=0, min_side=0, max_dims=4, max_side=4),
    ),
    st.sampled_from("CF"),
)
def test_a_buffer_is_the_memory_and_makes_the_array_again(array, order):
    array = np.asarray(array, order=order)
    buffer = as_buffer(array)
    assert (buffer.format, buffer.ndim, buffer.nbytes) == ("B", 1, array.nbytes)
    if array.size and array.dtype.itemsize:
        again = rebuild(bytearray(buffer), array.dtype, array.shape, order_of(array))
        assert again.tobytes() == array.tobytes()
        assert again.dtype == array.dtype
        assert again.flags.f_contiguous == array.flags.f_contiguous
        assert np.shares_memory(np.frombuffer(buffer, "u1"), array)


def test_a_strided_array_is_copied_into_c_order():
    array = np.arange(24).reshape(4, 6)[:, ::2]
    assert order_of(array) == ""
    assert bytes(as_buffer(array)) == array.tobytes()


def test_the_buffer_of_bytes_is_theirs():
    assert bytes(as_buffer(b"abc")) == b"abc"
    assert bytes(as_buffer(memoryview(b"abcd").cast("H"))) == b"abcd"
    assert len(as_buffer(bytearray())) == 0


@pytest.mark.parametrize(
    ("dtype", "code"),
    [("f8", "d"), ("?", "?"), (">f8", None), ("M8[ns]", None), ([("a", "i4")], None)],
)
def test_only_builtin_native_dtypes_have_a_code(dtype, code):
    assert code_of(np.dtype(dtype)) == code


def test_a_dtype_with_metadata_is_not_taken_for_the_plain_one():
    assert code_of(np.dtype("f8", metadata={"unit": "m"})) is None


@pytest.mark.parametrize("dtype", ["O", [("a", "O")], "V0"])
def test_objects_and_nothing_are_not_plain_memory(dtype):
    assert not is_plain(np.empty(2, dtype))


def test_a_spec_is_for_small_arrays_in_c_order():
    assert spec_of(np.zeros((2, 2))) == (bytearray(32), "d", (2, 2))
    assert spec_of(np.zeros((2, 2), order="F")) is None
    assert spec_of(np.zeros(1 << 16)) is None
    assert rebuild(*spec_of(np.float32(1.5))) == np.float32(1.5)
    assert type(rebuild(*spec_of(np.float32(1.5)))) is np.float32


def test_a_read_only_buffer_is_copied():
    source = np.arange(3.0)
    array = rebuild(source.tobytes(), "d", (3,))
    array[0] = 7
    assert array.tolist() == [7, 1, 2]


def test_namespaces_go_by_the_class(cupy):
    assert namespace(np.zeros(1)) is np
    assert namespace([1]) is np
    assert namespace(cupy.ndarray([1])) is cupy
    assert family(np.ndarray) is None
    assert family(type("Tensor", (), {"__module__": "torch.mine"})) == "torch"
    assert family(type("Tensor", (), {"__module__": "torchlike"})) is None
    assert foreign_loaded()


@pytest.mark.parametrize("mode", [BORROW, SNAPSHOT, RESULT])
@pytest.mark.parametrize("count", [3, 100_000])
def test_a_device_array_goes_through_the_host_once_and_back(cupy, mode, count):
    array = cupy.ndarray(np.arange(float(count)))
    packed = pack({"deep": [array, array]}, mode)
    assert array.staged == 1
    assert len(packed.buffers) == (count > 1000)
    first, second = unpack(*packed)["deep"]
    assert type(first) is cupy.ndarray
    assert first is second
    assert np.array_equal(first.host, array.host)


def test_plain_values_beside_a_loaded_library_are_plain(cupy):
    assert unpack(*pack({"a": [1, 2], "b": ("x", None)})) == {"a": [1, 2], "b": ("x", None)}
    deep = cupy.ndarray([1.0])
    for value in ([[[deep]]], {"a": {"b": deep}}, (1, [deep]), [*range(50), deep]):
        deep.staged = 0
        packed = pack(value)
        assert deep.staged == 1
        assert b"its own" not in packed.body


def test_a_fortran_device_array_stays_so(cupy):
    array = cupy.ndarray(np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    assert unpack(*pack(array)).host.flags.f_contiguous


def test_what_cannot_be_exported_says_so(cupy, monkeypatch):
    monkeypatch.setattr("mpiml.arrays.to_host", lambda x: None)
    with pytest.raises(UsageError, match="dense memory"):
        as_buffer(cupy.ndarray([1]))


def test_torch_tensors_arrive_with_dtype_shape_and_flag():
    torch = pytest.importorskip("torch")
    for dtype in (torch.bfloat16, torch.float32, torch.int8, torch.bool, torch.complex64):
        for shape in ((), (0, 3), (2, 3), (300, 400)):
            tensor = torch.ones(shape).to(dtype)
            for mode in (BORROW, SNAPSHOT, RESULT):
                again = unpack(*pack([tensor], mode))[0]
                assert again.dtype == dtype
                assert again.shape == tensor.shape
                assert torch.equal(again, tensor)
    leaf = torch.zeros(2, requires_grad=True)
    arrived = unpack(*pack({"w": leaf * 2, "p": torch.nn.Parameter(leaf)}))
    assert arrived["w"].requires_grad
    assert arrived["w"].is_leaf
    assert type(arrived["p"]) is torch.nn.Parameter


def test_a_torch_snapshot_is_one_and_a_given_tensor_is_not_copied():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(100_000)
    packed, lent = pack((1, tensor)), pack(give(tensor))
    tensor += 1
    assert unpack(*packed)[1].sum() == 0
    assert unpack(*lent).sum() == 100_000
    base = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(unpack(*pack(base.T[1:])), base.T[1:])
    assert torch.equal(unpack(*pack(torch.eye(3).to_sparse())).to_dense(), torch.eye(3))


def test_jax_arrays_arrive():
    jax = pytest.importorskip("jax")
    for value in (jax.numpy.arange(5), jax.numpy.ones((300, 400), jax.numpy.bfloat16)):
        again = unpack(*pack({"x": value}))["x"]
        assert isinstance(again, jax.Array)
        assert again.dtype == value.dtype
        assert bool((again == value).all())
    key = jax.random.key(0)
    assert to_host(key) is None


@pytest.mark.gpu
def test_cupy_arrays_arrive():
    cupy = pytest.importorskip("cupy")
    array = cupy.arange(100_000.0)
    again = unpack(*pack({"x": array}, SNAPSHOT))["x"]
    assert isinstance(again, cupy.ndarray)
    assert bool((again == array).all())
    host, more, _ = to_host(array)
    assert bool((restore("cupy", host, more) == array).all())
