import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mpiml.torch.memory import physical, tensor_in  # noqa: E402

TENSORS = {
    "plain": lambda: torch.arange(120.0).reshape(2, 3, 4, 5),
    "channels last": lambda: (
        torch.arange(120.0).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    ),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "scalar": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, 3),
    "ones": lambda: torch.arange(3.0).reshape(1, 3, 1),
    "overlapping": lambda: torch.arange(5.0).expand(3, 5),
    "gaps": lambda: torch.arange(12.0).reshape(3, 4)[:, ::2],
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_view_of_a_bucket_has_the_layout_of_the_parameter(name):
    tensor = TENSORS[name]()
    laid, back = physical(tensor)
    array = np.zeros(tuple(laid.shape), np.float32)
    view = tensor_in(array, torch.float32).permute(back)
    assert view.shape == tensor.shape
    if name not in ("overlapping", "gaps", "empty"):
        assert view.stride() == tensor.stride()
    view.copy_(tensor)
    assert torch.equal(view, tensor)
    assert array.sum() == tensor.sum()  # it is the array's memory


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_any_dtype_of_a_gradient(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    name = str(dtype).rpartition(".")[2]
    array = np.zeros((2, 3), ml_dtypes.bfloat16 if name == "bfloat16" else name)
    view = tensor_in(array, dtype)
    view[1, 2] = 1.5
    assert view.dtype == dtype
    assert array[1, 2] == 1.5
