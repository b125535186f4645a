"""The CMakeLists.txt of docs/external.md, and libmpiml of another MPI library."""

import re
import shutil
import subprocess

import pytest

from tests.external.building import compiler
from tests.external.installed import installed, run, tool, wrapper
from tests.mpi import ROOT

C = """#include <mpiml.h>
int main(int argc, char **argv) {
  MPI_Comm own;
  MPI_Init(&argc, &argv);
  mpiml_attach(MPI_COMM_WORLD, "solver", &own);
  return MPI_Finalize();
}
"""
FORTRAN = """program solver
  use mpi_f08
  use mpiml
  type(mpi_comm) :: own
  integer :: code
  call mpi_init()
  call mpiml_attach(mpi_comm_world%mpi_val, "solver", own%mpi_val, code)
  call mpi_finalize()
end program
"""


def from_the_page(source):
    """Text of the CMakeLists.txt of docs/external.md that builds this source."""
    page = (ROOT / "docs/external.md").read_text()
    (found,) = (
        text for text in re.findall(r"```cmake\n(.*?)```", page, re.S) if source in text
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "text"), [("solver.c", C), ("solver.f90", FORTRAN)])
def test_the_page_s_project_is_built(tmp_path, name, text):
    options = [f"-DCMAKE_PREFIX_PATH={installed()}", f"-DMPI_C_COMPILER={compiler()}"]
    if name.endswith("f90"):
        if wrapper() is None:
            pytest.skip("this MPI library has no Fortran")
        options.append(f"-DMPI_Fortran_COMPILER={wrapper()}")
    (tmp_path / "CMakeLists.txt").write_text(from_the_page(name))
    (tmp_path / name).write_text(text)
    run(tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build", *options)
    run(tool("cmake"), "--build", tmp_path / "build")
    assert (tmp_path / "build/solver").exists()


@pytest.mark.slow
def test_a_library_of_another_mpi_is_refused(tmp_path):
    (config,) = installed().glob("lib*/cmake/mpiml")
    shutil.copytree(config, tmp_path / "mpiml")
    file = tmp_path / "mpiml/mpiml-config.cmake"
    text, times = re.subn(
        r"(mpiml_MPI_LIBRARIES) \".+\"", r'\1 "/other/libmpi.so"', file.read_text()
    )
    assert times == 1
    file.write_text(text)
    (tmp_path / "CMakeLists.txt").write_text(from_the_page("solver.c"))
    (tmp_path / "solver.c").write_text(C)
    words = [tool("cmake"), "-S", tmp_path, "-B", tmp_path / "build"]
    words += [f"-Dmpiml_DIR={tmp_path}/mpiml", f"-DMPI_C_COMPILER={compiler()}"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    said = " ".join(ended.stderr.split())
    assert ended.returncode != 0
    assert "libmpiml was built with another MPI library" in said
    assert "expected /other/libmpi.so, got /" in said
