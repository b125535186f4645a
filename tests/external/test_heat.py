"""The coupled example: a solver learns its boundary while it runs, in C, Fortran and NumPy."""

import functools
import re
import sys

import pytest

from tests.conftest import LEG
from tests.external.installed import example
from tests.mpi import ROOT, child, environment, launcher

pytestmark = pytest.mark.skipif(launcher() is None, reason="no mpiexec")
once = pytest.mark.skipif(LEG not in (None, "openmpi"), reason="the same with any MPI library")
HEAT = ROOT / "examples/heat"
SMALL = ["--cells", "16", "--learn", "720", "--steps", "1080"]  # two periods, and one
SAID = re.compile(
    r"boundary given:  error (\S+), sum (\S+)\n.*"
    r"boundary called: error (\S+), of the surrogate (\S+)\n",
    re.DOTALL,
)


def trained(ended):
    """What a run says: error and sum of the field when the surrogate takes over; both errors then."""
    ended.check()
    assert not ended.leftovers
    found = SAID.search(ended.stdout)
    assert found, ended
    return tuple(map(float, found.groups()))


def coupled(name, *more, solvers=2, run=()):
    python = [sys.executable, "-m", "mpiml.run", *run, HEAT / "trainer.py", *SMALL, *more]
    exe = example("heat") / name
    if not exe.exists():
        assert LEG != "debian", f"no {name}, though this MPI library has Fortran"
        pytest.skip(f"no {name}: this MPI library has no Fortran")
    with_python = [exe, ":", "-n", 2, *python, "--solvers", solvers]
    return child(launcher(), "-n", solvers, *with_python, env=environment())


@functools.cache
def reference():
    python = [sys.executable, "-m", "mpiml.run", "-n", "3", HEAT / "trainer.py", *SMALL]
    return trained(child(*python, "--solver", "numpy", "--solvers", "1", env=environment()))


def test_numpy():
    error, _, later, of_surrogate = reference()
    assert error < 2e-3
    assert max(later, of_surrogate) < 0.05  # of a field between -1.5 and 1.5


@pytest.mark.parametrize("name", ["heat_c", "heat_f"])
def test_the_surrogate_stands_in_for_the_boundary(name):
    error, total, later, of_surrogate = trained(coupled(name))
    assert total == pytest.approx(reference()[1], rel=1e-12)  # the same numbers as in NumPy
    assert error < 2e-3
    assert max(later, of_surrogate) < 0.05


@once
def test_an_untrained_surrogate_does_not():
    _, total, later, _ = trained(coupled("heat_c", "--no-trained", solvers=3))
    assert total == pytest.approx(reference()[1], rel=1e-12)  # on three ranks too
    assert later > 0.5


@pytest.mark.parametrize("name", ["heat_c", "heat_f"])
def test_a_stop_ends_all_solvers_in_the_same_step(name):
    ended = coupled(
        name, "--learn", 10**6, "--steps", 2 * 10**6, run=["--max-time", 1], solvers=3
    )
    assert ended.rc == 143, ended
    assert "still running" not in ended.stderr
    assert not ended.leftovers


@once
def test_the_plot_is_all_that_is_written(tmp_path):
    plot = tmp_path / "heat.png"
    python = [sys.executable, "-m", "mpiml.run", HEAT / "trainer.py", *SMALL, "--plot", plot]
    words = [example("heat") / "heat_c", ":", "-n", 2, *python, "--solvers", 1]
    trained(child(launcher(), "-n", 1, *words, env=environment(), cwd=tmp_path))
    assert list(tmp_path.iterdir()) == [plot]
    assert plot.read_bytes().startswith(b"\x89PNG")


@once
def test_another_number_of_solvers_is_refused_on_both_sides():
    python = [sys.executable, "-m", "mpiml.run", HEAT / "trainer.py", "--solvers", "3"]
    words = [example("heat") / "heat_c", ":", "-n", 1, *python]
    ended = child(launcher(), "-n", 1, *words, env=environment())
    assert ended.rc != 0
    assert "heat: mpiml_attach" in ended.stderr
    assert "expected 3 ranks" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not ended.leftovers
