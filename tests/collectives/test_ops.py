"""Names, numbers and refusals of operations and dtypes."""

import subprocess
import sys

import numpy as np
import pytest

from mpiml.collectives import ops
from mpiml.errors import UsageError


def test_names_and_numbers_are_those_of_the_kernels():
    assert list(ops.OPS) == ["sum", "mean", "min", "max", "prod"]
    names = "float32 float64 float16 bfloat16 int8 int16 int32 int64 uint8 uint16 uint32 uint64"
    for code, name in enumerate([*names.split(), "complex64", "complex128"]):
        assert ops.dtype_code(name, "here") == code
    assert ops.dtype_code("bool", "here") == ops.dtype_code("uint8", "here")


@pytest.mark.parametrize("name", ops.DTYPES)
def test_dtype_by_name_and_back(name):
    assert ops.dtype_name(np.zeros(1, ops.numpy_dtype(name))) == name


def test_dtype_of_torch():
    torch = pytest.importorskip("torch")
    for name in ("float32", "bfloat16", "bool", "int64", "complex64", "half"):
        expected = "float16" if name == "half" else name
        assert ops.dtype_name(torch.zeros(1, dtype=getattr(torch, name))) == expected


def test_bfloat16_without_ml_dtypes(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(UsageError, match="pip install ml_dtypes"):
        ops.numpy_dtype("bfloat16")


@pytest.mark.parametrize("name", ["float128", "complex256", "object", "str32", "float8_e4m3fn"])
def test_other_dtypes_are_refused(name):
    with pytest.raises(UsageError, match=rf"^here: expected one of .* got {name}\. Convert"):
        ops.dtype_code(name, "here")


def test_order_of_bytes():
    assert ops.native_order(np.zeros(1, "=f4"))
    assert ops.native_order(np.zeros(1, "u1"))
    assert not ops.native_order(np.zeros(1, np.dtype("f4").newbyteorder("S")))


@pytest.mark.parametrize("op", ["avg", "SUM", "", None, 3, np.add, sum])
def test_other_operations_are_refused(op):
    with pytest.raises(UsageError, match=r"^here: op: expected 'sum', 'mean', .* got"):
        ops.op_name(op, "here")


def test_operations_of_mpi4py():
    # in a child: this process must never start MPI
    code = """
from mpi4py import MPI
from mpiml.collectives.ops import op_name
from mpiml.errors import UsageError
for name in "sum min max prod".split():
    assert op_name(getattr(MPI, name.upper()), "here") == name
    assert op_name(name, "here") == name
for op in (MPI.LAND, MPI.BXOR, MPI.MINLOC, MPI.OP_NULL, MPI.Op.Create(lambda a, b, c: None)):
    try:
        print(op_name(op, "here"))
    except UsageError:
        pass
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == ""


@pytest.mark.parametrize("op", ops.OPS)
@pytest.mark.parametrize("dtype", ops.DTYPES)
def test_what_an_operation_means_for_a_dtype(op, dtype):
    kind = "f" if dtype == "bfloat16" else np.dtype(dtype).kind
    wrong = (
        (op == "mean" and kind in "iub")
        or (op == "sum" and kind == "b")
        or (op in ("min", "max") and kind == "c")
    )
    if not wrong:
        assert ops.op_code(op, dtype, "here") == list(ops.OPS).index(op)
        return
    cure = {"c": r"abs\(x\)", "b": "any", "i": "divide", "u": "divide"}[kind]
    with pytest.raises(
        UsageError, match=f"^here: op '{op}' is not defined for {dtype}.*{cure}"
    ):
        ops.op_code(op, dtype, "here")
