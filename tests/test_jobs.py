"""The job templates: whole shell scripts, that run what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi import environment, start

ROOT = Path(__file__).parents[1]
TEMPLATES = sorted((ROOT / "jobs").glob("*.sbatch"))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_templates_are_shell_and_state_what_slurm_must_know(template):
    subprocess.run(["bash", "-n", str(template)], check=True, timeout=20)
    text = template.read_text()
    for option in ("--nodes=", "--ntasks=", "--time=", "--signal=USR1@"):
        assert f"#SBATCH {option}" in text


def job(**more):
    return environment() | {
        "SLURM_NTASKS": "3",
        "SLURM_CPUS_PER_TASK": "1",
        "ENVIRONMENT": sys.prefix,
        **more,
    }


def test_the_template_runs_a_program(mpi_launcher):
    with start("bash", str(ROOT / "jobs/program.sbatch"), env=job(), cwd=ROOT) as child:
        ended = child.wait(60)
    ended.check()
    assert "[worker/1]" in ended.stdout


WAITS = """
import mpiml

def body():
    print("up", flush=True)
    mpiml.context().wait_for_stop()

def forever():
    import time
    while not mpiml.context().stopping:
        time.sleep(0.01)

def build():
    program = mpiml.Program("waits")
    program.add_node(mpiml.PyNode(body), label="up")
    program.add_node(mpiml.PyNode(forever), label="loop", replicas=mpiml.FILL)
    return program
"""


def test_the_warning_signal_stops_the_program_in_order(mpi_launcher, tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    env = job(PROGRAM=str(tmp_path / "waits.py"))
    with start("bash", str(ROOT / "jobs/program.sbatch"), env=env, cwd=ROOT) as child:
        child.wait_for("up")
        os.kill(child.pid, 10)  # SIGUSR1, as Slurm sends it with --signal
        ended = child.wait(60)
    assert ended.rc in (143, 138), ended  # ours, or the launcher's own for USR1
    assert not ended.leftovers
