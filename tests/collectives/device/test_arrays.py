"""Arrays of other libraries as addresses: what needs no device to be tested."""

import ctypes
import sys

import numpy as np
import pytest

from mpiml.collectives.device import arrays
from mpiml.collectives.device.arrays import device_of, on_device, target
from mpiml.errors import UsageError
from tests.fake_device import FakeArray, install


def at(pointer, nbytes):
    return ctypes.string_at(pointer, nbytes)


def test_arrays_in_host_memory_are_on_no_device():
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    assert not on_device(np.ones(3))
    assert not on_device(3.0)
    assert not on_device(torch.ones(3))
    assert not on_device(jnp.ones(3)) or sys.modules["jax"].default_backend() == "gpu"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64"])
def test_memory_of_a_tensor(dtype):
    torch = pytest.importorskip("torch")
    library = arrays._Torch()
    x = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))
    lent = library.lend(x)
    assert lent.pointer == x.data_ptr()  # where it lies
    assert lent.nbytes == 12 * x.element_size()
    turned = library.lend(x.T)
    assert (
        at(turned.pointer, turned.nbytes)
        == x.T.contiguous().view(torch.uint8).numpy().tobytes()
    )
    made = library.empty(x.T)
    ctypes.memmove(made.pointer, turned.pointer, turned.nbytes)
    assert torch.equal(made.made(), x.T)
    assert made.made().dtype == x.dtype


def test_tensors_that_are_views_of_a_kind():
    torch = pytest.importorskip("torch")
    library = arrays._Torch()
    z = torch.tensor([1 + 2j, 3 - 1j])
    lent = library.lend(z.conj())
    assert at(lent.pointer, lent.nbytes) == z.numpy().conj().tobytes()
    w = torch.ones(3, requires_grad=True)
    assert library.lend(w).pointer == w.data_ptr()
    assert library.lend(torch.zeros(0, 3)).nbytes == 0
    for wrong in (z.conj(), torch.zeros(3, 4).T):
        with pytest.raises(UsageError, match="here: out: expected arrays that are contiguous"):
            library.target(wrong, "here")


def test_jax_arrays_cannot_be_written():
    with pytest.raises(UsageError, match="out: JAX arrays cannot be written"):
        arrays._Jax().target(None, "allreduce")


def test_a_device_without_cupy_has_a_cure(monkeypatch):
    install(monkeypatch)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UsageError, match="need CuPy, which cannot be loaded"):
        arrays._cupy()


def test_results_and_their_places(monkeypatch):
    install(monkeypatch)
    x, other = np.ones((2, 3)).view(FakeArray), np.ones((2, 3)).view(FakeArray)
    assert target(x, other, "here").made() is other
    fresh = target(x, None, "here").made()
    assert (fresh.shape, fresh.dtype) == (x.shape, x.dtype)
    other.index = 1
    for wrong in (np.ones((2, 3)), x[:1], x.astype("f4"), other):
        with pytest.raises(UsageError, match=r"here: out: expected an array like x, \(2, 3\)"):
            target(x, wrong, "here")
    assert device_of([x, x], ["", ""], "here").index == 0
