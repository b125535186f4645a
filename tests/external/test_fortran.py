"""The Fortran module against NumPy, with any MPI library, whether it has Fortran or not."""

import sys

import pytest

import mpiml
from tests.external.building import HERE, compiler
from tests.external.installed import flags, installed, link, run, tool, wrapper
from tests.mpi import child, environment, launcher, vendor

pytestmark = pytest.mark.skipif(launcher() is None, reason="no mpiexec")
STRICT = ["-std=f2018", "-Wall", "-Wextra", "-Werror", "-fcheck=all"]


def test_what_is_installed_says_its_version():
    for package in ("mpiml", "mpiml-fortran"):
        assert flags(package, "--modversion") == [mpiml.__version__]
    config = next(installed().glob("lib*/cmake/mpiml/mpiml-config-version.cmake"))
    assert f'"{mpiml.__version__}"' in config.read_text()


def test_arrays_of_all_kinds_and_sections_arrive_and_come_back(tmp_path):
    source = HERE / "fortran"
    run(compiler(), "-c", source / "main.c", cwd=tmp_path)
    words = flags("mpiml-fortran", "--cflags")
    # the wheels of the others have no modules of MPI
    words += ["-DMPI_F08"] if vendor() == "debian" else []
    fortran = wrapper() or tool("gfortran")
    run(fortran, "-cpp", *STRICT, *words, "-c", source / "arrays.f90", cwd=tmp_path)
    words = [*flags("mpiml-fortran", "--libs"), *link()]
    run(fortran, "main.o", "arrays.o", "-o", "arrays", *words, cwd=tmp_path)

    python = [sys.executable, "-m", "mpiml.run", source / "arrays.py"]
    exe = tmp_path / "arrays"
    ended = child(launcher(), "-n", 1, exe, ":", "-n", 2, *python, env=environment()).check()
    assert "all seen: True" in ended.stdout
    assert ended.stderr.count("Traceback") == 1  # of the method that is to fail
    assert not ended.leftovers
