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
def test_solvers_refuse_options():
    python = [sys.executable, "-m", "mpiml.run", HEAT / "trainer.py"]
    both = [example("heat") / "heat_c", "--cells", "8", ":", "-n", 1, *python]
    ended = child(launcher(), "-n", 1, *both, env=environment())
    assert ended.rc == 2, ended
    assert "heat: expected no options, got --cells; give it to trainer.py" in ended.stderr
    assert not ended.leftovers


@once
def test_the_plot_is_all_that_is_written(tmp_path):
    plot = tmp_path / "heat.png"
    python = [sys.executable, "-m", "mpiml.run", HEAT / "trainer.py", *SMALL, "--plot", plot]
    words = [example("heat") / "heat_c", ":", "-n", 2, *python, "--solvers", 1]
    trained(child(launcher(), "-n", 1, *words, env=environment(), cwd=tmp_path))
    assert list(tmp_path.iterdir()) == [plot]
    assert plot.read_bytes().startswith(b"\x89PNG")


REFUSED = """
import sys
import mpi4py
mpi4py.rc.initialize = False
from mpiml.loading import load
from mpiml.errors import UsageError
build = load(sys.argv[1])
for text in sys.argv[2:]:
    name, _, value = text.partition("=")
    try:
        build(**{name: int(value) if value.lstrip("-").isdigit() else value})
        print(text, "is accepted")
    except UsageError as error:
        print(error)
"""


@once
def test_what_cannot_be_computed_is_refused():
    wrong = {
        "cells=0": "--cells: expected 4 to 10000, got 0.",
        "cells=2": "--cells: expected 4 to 10000, got 2.",
        "cells=-5": "--cells: expected 4 to 10000, got -5.",
        "solvers=0": "--solvers: expected 1 to 24, got 0.",
        "solvers=25": "--solvers: expected 1 to 24, got 25.",
        "every=0": "--every: expected 1 to 1000000000, got 0.",
        "every=-8": "--every: expected 1 to 1000000000, got -8.",
        "steps=0": "--steps: expected 8 to 1000000000, a multiple of 8 (--every), got 0.",
        "steps=2401": "--steps: expected 8 to 1000000000, a multiple of 8 (--every), got 2401.",
        "learn=0": "--learn: expected 8 to 2400, a multiple of 8 (--every), got 0.",
        "learn=2408": "--learn: expected 8 to 2400, a multiple of 8 (--every), got 2408.",
        "solver=foo": "--solver: expected external or numpy, got 'foo'.",
        "plot=heat.xyz": "--plot: expected a file that ends in .png",
        "plot=not/there/heat.png": "--plot: expected a file that ends in .png",
    }
    ended = child(sys.executable, "-c", REFUSED, HEAT / "trainer.py", *wrong).check()
    said = ended.stdout.splitlines()
    assert len(said) == len(wrong)
    for text, expected in zip(said, wrong.values(), strict=True):
        assert text.startswith(f"heat: {expected}")


@once
@pytest.mark.parametrize("words", [["--solvers", 3], ["--cells", 2]])
def test_what_does_not_fit_is_refused_on_both_sides(words):
    expected = {"--solvers": "expected 3 ranks", "--cells": "expected 4 to 10000, got 2"}
    python = [sys.executable, "-m", "mpiml.run", HEAT / "trainer.py", *words]
    both = [example("heat") / "heat_c", ":", "-n", 1, *python]
    ended = child(launcher(), "-n", 1, *both, env=environment())
    assert ended.rc != 0
    assert re.search(f"heat: mpiml_attach.*{expected[words[0]]}", ended.stderr), ended
    assert re.search(f"^mpiml: .*{expected[words[0]]}", ended.stderr, re.MULTILINE), ended
    assert "Traceback" not in ended.stderr
    assert not ended.leftovers
