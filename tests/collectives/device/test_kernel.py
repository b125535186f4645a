"""The CUDA source of the reduction, compiled as C++ and compared with its definition in NumPy."""

import ctypes
import itertools
import shutil
import subprocess

import numpy as np
import pytest

from mpiml._native import reduce
from mpiml.collectives.device import kernel
from mpiml.collectives.ops import DTYPES, OPS, numpy_dtype

# What CUDA has and C++ has not: a grid of three blocks of two threads, one after the other.
SHIM = """
#include <cstring>
#define __global__
#define __device__
struct Index { int x; };
static Index gridDim{3}, blockDim{2}, blockIdx{0}, threadIdx{0};
static inline unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
static inline float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
"""
LAUNCH = """
extern "C" void launch(const unsigned long long *m, int n, int from, int to, long long first,
                       long long packs, double divisor) {
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x)
            mpiml_reduce(m, n, from, to, first, packs, divisor);
}
"""
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
pytest.importorskip("ml_dtypes")

FLOATS = ("float16", "bfloat16", "float32", "float64")
PAIRS = [
    (dtype, op)
    for dtype, op in itertools.product(DTYPES, ("sum", "mean", "prod", "min", "max"))
    if kernel.parts(dtype, op) == (dtype, 1)
    and (op != "mean" or dtype in FLOATS)
    and (dtype != "bool" or op in ("min", "max", "prod"))
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Compile every kernel, each in a namespace of its own, into one library."""
    folder = tmp_path_factory.mktemp("kernels")
    text = SHIM
    for number, (dtype, op) in enumerate(PAIRS):
        body = kernel.source(dtype, op) + LAUNCH
        # extern "C" takes no heed of namespaces
        body = body.replace(kernel.ENTRY, f"reduce_{number}").replace(
            "void launch", f"void launch_{number}"
        )
        text += f"namespace k{number} {{\n{body}\n}}\n"
    (folder / "kernels.cpp").write_text(text)
    library = folder / "kernels.so"
    command = [COMPILER, "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run(
        [*command, str(folder / "kernels.cpp"), "-o", str(library)], check=True, timeout=100
    )
    return ctypes.CDLL(str(library))


def launch(built, dtype, op, arrays, *, only=None, first=0, packs=None):
    function = getattr(built, f"launch_{PAIRS.index((dtype, op))}")
    table = (ctypes.c_ulonglong * len(arrays))(*[a.ctypes.data for a in arrays])
    low, high = (0, len(arrays)) if only is None else (only, only + 1)
    packs = arrays[0].nbytes // kernel.PACK if packs is None else packs
    wide = ctypes.c_longlong
    divisor = ctypes.c_double(len(arrays))
    function(table, len(arrays), low, high, wide(first), wide(packs), divisor)


def aligned(values):
    memory = np.zeros(values.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array = memory[start : start + values.nbytes].view(values.dtype)
    array[:] = values
    return array


def drawn(dtype, n, count, seed):
    rng = np.random.default_rng(seed)
    kind = numpy_dtype(dtype)
    if dtype == "bool":
        return [aligned(rng.integers(0, 2, count).astype(bool)) for _ in range(n)]
    # any pattern of bits: of floats also denormals, infinities, NaN and both zeros
    raw = [rng.integers(0, 256, count * kind.itemsize, dtype=np.uint8) for _ in range(n)]
    return [aligned(r.view(kind)) for r in raw]


def defined(dtype, op, arrays):
    """Return the result by its definition: in the order of members, rounded once."""
    wide = np.dtype("float32") if dtype in ("float16", "bfloat16") else arrays[0].dtype
    function = {
        "sum": np.add,
        "mean": np.add,
        "prod": np.multiply if dtype != "bool" else np.logical_and,
        "min": np.minimum,
        "max": np.maximum,
    }[op]
    with np.errstate(all="ignore"):
        acc = arrays[0].astype(wide)
        for array in arrays[1:]:
            acc = function(acc, array.astype(wide))
        if op == "mean":
            acc = acc / wide.type(len(arrays))
        return acc.astype(arrays[0].dtype)


def isnan(array):
    with np.errstate(all="ignore"):  # ml_dtypes says "invalid value" of a signalling NaN
        return np.isnan(array)


def bits(array):
    return array.view(f"u{array.dtype.itemsize}")


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_kernel_does_what_its_definition_says(built, dtype, op, n):
    count = 4096
    arrays = drawn(dtype, n, count, seed=n)
    expected = defined(dtype, op, arrays)
    launch(built, dtype, op, arrays)
    for array in arrays:
        if dtype in FLOATS:
            nan = isnan(expected)
            assert np.array_equal(isnan(array), nan)
            # minimum(-0.0, 0.0) may be either; -0.0 + 0.0 may not
            with np.errstate(all="ignore"):
                equal = array == expected
            same = (bits(array) == bits(expected)) | (equal if op in ("min", "max") else nan)
            assert np.all(same | nan)
        else:
            assert np.array_equal(array, expected)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_16_bit_float_is_read_and_rounded_exactly(built, dtype):
    every = np.arange(65536, dtype=np.uint16).view(numpy_dtype(dtype))
    halves = [aligned(every), aligned(np.zeros_like(every))]
    launch(built, dtype, "max", [halves[0]])  # one member: read, rounded, written
    nan = isnan(every)
    assert np.array_equal(bits(halves[0])[~nan], bits(every)[~nan])
    assert np.all(isnan(halves[0][nan]))
    # The mean of neighbours lies halfway between two of them: a tie at every exponent.
    pair = [aligned(every), aligned(np.roll(every, 1))]
    expected = defined(dtype, "mean", pair)
    launch(built, dtype, "mean", pair)
    nan = isnan(expected)
    assert np.array_equal(bits(pair[0])[~nan], bits(expected)[~nan])


def test_only_the_stripe_and_only_the_writer_change(built):
    arrays = [aligned(np.full(64, k + 1, np.float32)) for k in range(3)]
    launch(built, "float32", "sum", arrays, only=1, first=4, packs=8)
    assert np.all(arrays[0] == 1)
    assert np.all(arrays[2] == 3)
    assert np.all(arrays[1][:16] == 2)
    assert np.all(arrays[1][16:48] == 6)
    assert np.all(arrays[1][48:] == 2)


def test_complex_numbers_are_two_floats_and_have_no_product():
    assert kernel.parts("complex64", "sum") == ("float32", 2)
    assert kernel.parts("complex128", "mean") == ("float64", 2)
    assert kernel.parts("complex64", "prod") is None
    assert kernel.parts("float8_e4m3", "sum") is None


@pytest.mark.parametrize(("dtype", "op"), PAIRS)
def test_device_and_host_give_the_same_bits(built, dtype, op):
    host = drawn(dtype, 3, 4096, seed=11)
    device = [aligned(array) for array in host]
    raw = [array.view(np.uint8) for array in host]
    reduce(DTYPES[dtype], OPS[op], raw, raw, 3.0)
    launch(built, dtype, op, device)
    for a, b in zip(host, device, strict=True):
        nan = isnan(a) if dtype in FLOATS else np.zeros(a.shape, bool)
        assert np.array_equal(bits(a)[~nan], bits(b)[~nan])
        assert dtype not in FLOATS or np.array_equal(isnan(b), nan)
