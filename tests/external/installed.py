"""Installs libmpiml by its CMakeLists.txt, once for each MPI, and builds on it as a user does.

    prefix = installed()               # include/, lib/, lib/cmake/, lib/pkgconfig/; or a skip
    words = flags("mpiml-fortran")     # what pkg-config says
    folder = example("heat")           # an example built on it by find_package(mpiml)

A tool that is missing fails the test where .ci/run has installed Debian's packages.
"""

import functools
import hashlib
import os
import shutil
import subprocess

import pytest

from tests.external.building import CACHE, compiler
from tests.mpi import ROOT

__all__ = ["example", "flags", "installed", "link", "run", "tool", "wrapper"]


def tool(name):
    """Path of a program; without it the test is skipped, or fails where it must be there."""
    found = shutil.which(name)
    if found is None:
        there = os.environ.get("MPIML_TEST_SLURM")  # .ci/run has installed what it names
        (pytest.fail if there else pytest.skip)(
            f"no {name}: apt-get install cmake gfortran pkg-config"
        )
    return found


def run(*command, cwd=None, env=None):
    """Run a tool to its end; return what it says."""
    words = [str(word) for word in command]
    ended = subprocess.run(
        words, capture_output=True, text=True, timeout=120, check=False, cwd=cwd, env=env
    )
    assert ended.returncode == 0, f"{' '.join(words)}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def files(folder):
    found = (path for path in (ROOT / folder).rglob("*") if path.is_file())
    return sorted(path for path in found if "__pycache__" not in path.parts)


def configured(folder, *options):
    """Path of the build of a folder with a CMakeLists.txt, made once for its content."""
    digest = hashlib.sha256(repr((compiler(), options)).encode())
    for path in files(folder):
        digest.update(path.name.encode() + path.read_bytes())
    target = CACHE / f"cmake-{digest.hexdigest()[:20]}"
    done = target / "done"
    if not done.exists():
        shutil.rmtree(target, ignore_errors=True)
        cmake = tool("cmake")
        options = [*options, f"-DMPI_C_COMPILER={compiler()}"]
        if fortran := wrapper():
            options.append(f"-DMPI_Fortran_COMPILER={fortran}")
        said = run(
            cmake, "-S", ROOT / folder, "-B", target, f"-DCMAKE_INSTALL_PREFIX={target}/prefix", *options
        )  # fmt: skip
        said += run(cmake, "--build", target, "--parallel", "2")
        if (target / "cmake_install.cmake").read_text().count("file(INSTALL"):
            said += run(cmake, "--install", target)
        done.write_text(said)
    return target


def wrapper():
    """Path of the Fortran compiler of this environment's MPI; None: it has none, as wheels."""
    path = compiler()
    name = "mpif90.openmpi" if path.endswith(".openmpi") else "mpif90"
    found = os.path.join(os.path.dirname(path), name)
    return found if os.path.exists(found) else None


@functools.cache
def installed():
    """Where libmpiml is installed, with its Fortran module."""
    tool("gfortran")
    return configured("libmpiml") / "prefix"


def example(name):
    """Where the programs of examples/NAME are built."""
    return configured(f"examples/{name}", f"-DCMAKE_PREFIX_PATH={installed()}")


def flags(package, *what):
    """Words of pkg-config about a package of libmpiml."""
    paths = installed().glob("lib*/pkgconfig")
    env = {**os.environ, "PKG_CONFIG_PATH": os.pathsep.join(map(str, paths))}
    return run(tool("pkg-config"), *what, package, env=env).split()


def link():
    """Words by which another compiler than the MPI library's links with it."""
    words = run(compiler(), "-show").split()[1:]
    return [word for word in words if word.startswith(("-L", "-Wl", "-l"))]
