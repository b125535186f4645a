"""What a process imports before the user's code runs: each of many ranks pays for it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = """
import sys
import mpiml.run
status = mpiml.run.main(["examples/hello.py"])
assert status == 0, status
"""
START = "import mpiml.run, mpiml.launch, mpiml.linking, mpiml.reporting"
TELL = "\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"


def modules_after(code):
    """Run `code` in a child; return the modules it has loaded."""
    ended = subprocess.run(
        [sys.executable, "-c", code + TELL],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stdout.splitlines()[-1]))


@pytest.mark.parametrize("code", ["import mpiml", START, RUN], ids=["package", "rank", "hello"])
def test_who_meets_no_array_goes_without_numpy(code):
    loaded = modules_after(code)
    assert "mpiml" in loaded
    assert "numpy" not in loaded


def test_a_rank_starts_without_what_only_few_need():
    few = {
        "argparse",
        "asyncio",
        "dataclasses",
        "inspect",
        "logging",
        "pathlib",
        "subprocess",
        "traceback",
    }
    bare = modules_after("from mpi4py import MPI")
    assert sorted((modules_after(START) - bare) & few) == []


RECEIVER = """
import sys
from mpiml.payload import ENC_FLAT, SNAPSHOT, pack, pack_call, unpack
assert "numpy" not in sys.modules
got = unpack(ENC_FLAT, bytes.fromhex({body!r}))
numpy = sys.modules["numpy"]
assert type(got) is numpy.ndarray and got.tolist() == [0.0, 1.0] and got.flags.writeable
assert pack(got).encoding == ENC_FLAT
"""
SENDER = """
import sys
from mpiml.payload import BORROW, ENC_FLAT, ENC_PICKLE, RESULT, SNAPSHOT, give, pack, pack_call
large = bytes(300_000)
for value in ([1, {{"a": (2,)}}], large, give(large), {{1}}, lambda: 1, memoryview(b"x" * 20_000)):
    for mode in (BORROW, SNAPSHOT, RESULT):
        assert pack(value, mode).encoding == ENC_PICKLE
        assert pack_call((value,), {{"key": value}}, mode).encoding == ENC_PICKLE
assert "numpy" not in sys.modules
import numpy
if {call}:
    assert pack_call((numpy.ones(2),), {{}}, SNAPSHOT).encoding == ENC_FLAT
assert pack(numpy.ones(2)).encoding == ENC_FLAT
assert len(pack([numpy.ones(10**5)], BORROW).buffers) == 1
"""


def test_the_first_array_to_arrive_brings_numpy():
    import numpy as np

    from mpiml.payload import ENC_FLAT, pack

    encoding, body, _ = pack(np.arange(2.0))
    assert encoding == ENC_FLAT
    modules_after(RECEIVER.format(body=body.hex()))


@pytest.mark.parametrize("call", [False, True])
def test_arrays_are_known_as_soon_as_the_user_has_loaded_numpy(call):
    modules_after(SENDER.format(call=call))
