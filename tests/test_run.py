"""`python -m mpiml.run`: which of the three ways it takes, and what it says of a wrong line.

`mpiml.launch` is a small fake here: it says what it was given and loads the program.
"""

import sys
import types
from pathlib import Path

import pytest

from mpiml import cli, run
from mpiml.errors import UsageError

PROGRAM = """
import mpiml.nodes, mpiml.program
from mpiml.settings import FILL
def work(): pass
def build(workers: int = FILL, steps: int = 3):
    program = mpiml.program.Program("sample")
    program.add_node(mpiml.nodes.PyNode(work), label="boss")
    program.add_node(mpiml.nodes.PyNode(work), label="worker", replicas=workers)
    return program
"""
SLURM = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}
PREFIXES = ("SLURM_", "PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPIML_")


def rank(number, size=4):
    return {"PMI_RANK": str(number), "PMI_SIZE": str(size)}


@pytest.fixture
def launched(monkeypatch):
    """The calls of `run_program`: options, and the program or what loading raised."""
    calls = []

    def run_program(load, options, comm=None):
        try:
            calls.append((options, load()))
        except (Exception, SystemExit) as error:
            calls.append((options, error))
        return 7

    fake = types.ModuleType("mpiml.launch")
    fake.run_program = run_program
    monkeypatch.setitem(sys.modules, "mpiml.launch", fake)
    return calls


@pytest.fixture
def environ(monkeypatch):
    """Sets the variables of a launcher, after removing those of the launcher of this test."""
    import os

    def put(variables):
        for name in list(os.environ):
            if name.startswith(PREFIXES):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    put({})
    return put


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "sample_program.py"
    path.write_text(PROGRAM)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    yield str(path)
    sys.modules.pop("sample_program", None)


@pytest.mark.parametrize("variables", [{}, rank(0), rank(3)])
def test_without_n_this_process_runs_the_program(environ, launched, file, variables):
    environ(variables)
    assert run.main(["--seed", "5", file, "--workers", "2"]) == 7
    [(options, program)] = launched
    assert (options.seed, options.build_args) == (5, ("--workers", "2"))
    assert program.name == "sample"
    assert sys.argv == [file, "--workers", "2"]


def test_n_starts_mpiexec(environ, launched, file, monkeypatch):
    started = []
    monkeypatch.setattr("mpiml.starter.start", lambda options: started.append(options) or 3)
    assert run.main(["-n", "2", file]) == 3
    assert started[0].n == 2
    assert launched == []
    environ(rank(0, size=1))  # `srun -n 1 --pty bash` is no reason not to
    assert run.main(["-n", "2", file]) == 3


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--bogus"], "usage: mpiml run"),
        (["-n", "2", "/absent.py"], "mpiml run: /absent.py: there is no such file"),
        (["--dry-run", "/absent.py"], "mpiml run: /absent.py: there is no such file"),
    ],
)
def test_a_wrong_line_is_said_once_with_status_2(environ, launched, capsys, argv, reason):
    assert run.main(argv) == 2
    out, err = capsys.readouterr()
    assert (out, launched) == ("", [])
    assert err.startswith(reason)


def test_a_wrong_variable_of_ours_too(environ, launched, capsys):
    environ({"MPIML_SPIN_US": "often"})
    assert run.main(["x.py"]) == 2
    assert "MPIML_SPIN_US" in capsys.readouterr().err


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize(
    ("argv", "variables", "reason"),
    [
        (["--bogus"], {}, "usage: mpiml run"),
        (["x.py"], {"MPIML_BOGUS": "1"}, "MPIML_BOGUS is not a variable"),
        (["-n", "2", "x.py"], {}, "already one of 4 ranks"),
        (["--threads", "2", "x.py"], {}, "--threads 2 is for a run without MPI"),
    ],
)
def test_a_rank_takes_a_wrong_line_into_the_launch(
    environ, launched, capsys, argv, variables, reason, number
):
    environ(rank(number) | variables)
    assert run.main(argv) == 7
    [(_, error)] = launched
    assert isinstance(error, UsageError)
    assert reason in str(error)
    assert capsys.readouterr() == ("", "")  # printed by whom `run_program` chooses


@pytest.mark.parametrize(("number", "lines"), [("0", 1), ("3", 0)])
def test_srun_without_a_pmi_is_refused_with_its_cure(environ, launched, capsys, number, lines):
    environ(SLURM | {"SLURM_PROCID": number})
    assert run.main(["x.py"]) == 2
    err = capsys.readouterr().err
    assert err.count("srun started 4 tasks") == err.count("--mpi=pmix") == lines
    assert launched == []


def test_help_is_said_by_one(environ, launched, capsys, file):
    assert run.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: mpiml run [run options] FILE")
    assert run.main(["-n", "4", file, "--help"]) == 0  # nothing is started for it
    assert "--workers" in capsys.readouterr().out
    for number, said in [(0, True), (1, False)]:
        environ(rank(number))
        assert run.main([file, "--help"]) == 7
        assert ("--workers" in capsys.readouterr().out) is said
        end = launched[-1][1]
        assert isinstance(end, SystemExit)
        assert end.code == 0


def test_a_dry_run_shows_graph_placement_and_environment(environ, launched, capsys, file):
    assert run.main(["--dry-run", "-n", "4", file]) == 0
    out = capsys.readouterr().out
    assert "sample" in out
    assert "worker" in out
    assert "rank" in out
    assert "start: " in out
    assert "OMP_NUM_THREADS" in out
    assert launched == []
    environ(rank(3))
    assert run.main(["--dry-run", file]) == 0  # rank 0 shows it
    assert capsys.readouterr() == ("", "")


def test_a_dry_run_places_what_runs_in_python(environ, launched, capsys, tmp_path):
    path = tmp_path / "beside.py"
    path.write_text(
        "import mpiml\ndef build():\n    p = mpiml.Program('p')\n"
        "    p.add_node(mpiml.PyNode(print), label='py', replicas=mpiml.FILL)\n"
        "    p.add_node(mpiml.ExternalNode(), label='solver', replicas=mpiml.FILL)\n    return p\n"
    )
    assert run.main(["--dry-run", "-n", "2", str(path)]) == 0
    out = capsys.readouterr().out
    assert "py/1" in out
    assert "solver/0" not in out


def test_a_dry_run_of_a_program_that_does_not_fit(environ, launched, capsys, file):
    assert run.main(["--dry-run", "-n", "9", file, "--workers", "2"]) == 1
    assert "needs 3 ranks, but there are 9" in capsys.readouterr().err


def test_a_rank_that_cannot_import_the_launch_initialises_and_aborts(
    environ, monkeypatch, capsys, file
):
    said = []
    fake = types.ModuleType("mpi4py")
    fake.MPI = types.SimpleNamespace(
        Is_initialized=lambda: bool(said),
        Init_thread=lambda: said.append("init"),
        COMM_WORLD=types.SimpleNamespace(Abort=lambda status: said.append(status)),
    )
    monkeypatch.setitem(sys.modules, "mpi4py", fake)
    monkeypatch.setitem(sys.modules, "mpiml.launch", None)  # importing it fails
    environ(rank(3))
    with pytest.raises(ImportError):
        run.main([file])
    assert said == ["init", 1]
    assert "mpiml.launch" in capsys.readouterr().err
    environ({})
    with pytest.raises(ImportError):
        run.main([file])
    assert said == ["init", 1]


@pytest.mark.parametrize(("argv", "status"), [(["--help"], 0), (["sing"], 2), ([], 2)])
def test_the_console_script(argv, status, capsys):
    assert cli.main(argv) == status
    out, err = capsys.readouterr()
    shown, silent = (out, err) if status == 0 else (err, out)
    assert shown.startswith("usage: mpiml {run,bench,doctor,jobs}")
    assert silent == ""


def test_the_console_script_runs_programs(environ, launched, file):
    assert cli.main(["run", file]) == 7
    assert launched[0][1].name == "sample"


def test_any_module_runs_as_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    Path(tmp_path, "a_bench.py").write_text("import sys\nprint(sys.argv[1:])\nsys.exit(4)\n")
    assert cli._module("a_bench", ["--json"]) == 4
    assert capsys.readouterr().out == "['--json']\n"
