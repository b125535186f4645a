"""`mpiml jobs` and its templates, without Slurm; tests/slurm has one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from mpiml import cli
from mpiml.doctor.check import Outcome
from mpiml.errors import UsageError
from mpiml.jobs import checking, templates
from mpiml.jobs.filling import OPTIONS, fill, options_of
from mpiml.vendors import Mpi
from tests.mpi import ROOT, environment, start

SCRIPTS = sorted((ROOT / "jobs").glob("*.sbatch"))
MARK = "# ---- nothing below needs editing"
by_name = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)


# -- the templates -----------------------------------------------------------------------------


@by_name
def test_a_template_is_shell_and_states_what_slurm_must_know(path):
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)
    top, mark, below = path.read_text().partition(MARK)
    assert mark
    for option in ("--nodes=", "--ntasks-per-node=", "--cpus-per-task=", "--time="):
        assert f"\n#SBATCH {option}" in top
    # without B: Slurm signals the steps only, and mpirun is none
    assert "\n#SBATCH --signal=B:USR1@" in top
    assert "#SBATCH" not in below


@by_name
def test_templates_share_what_they_do_with_signals(path):
    program = (ROOT / "jobs/program.sbatch").read_text()
    text = path.read_text()
    for start_, end in ((MARK, "trap warned"), ('if [ -n "$asked" ]', 'exit "$status"')):
        part = program[program.index(start_) : program.index(end)]
        assert part in text


def test_every_template_is_in_the_readme():
    readme = (ROOT / "jobs/README.md").read_text()
    for path in [*SCRIPTS, ROOT / "jobs/kubernetes.yaml"]:
        assert f"| `{path.name}` |" in readme


def job(**more):
    slurm = {"SLURM_NTASKS": "3", "SLURM_CPUS_PER_TASK": "1", "VENV": sys.prefix}
    return environment() | slurm | more


def test_the_template_runs_a_program(mpi_launcher):
    with start("bash", str(ROOT / "jobs/program.sbatch"), env=job(), cwd=ROOT) as child:
        ended = child.wait(60)
    ended.check()
    assert "[worker/1]" in ended.stdout


def test_a_wrong_environment_is_named(tmp_path):
    env = job(VENV=str(tmp_path))
    with start("bash", str(ROOT / "jobs/program.sbatch"), env=env, cwd=ROOT) as child:
        ended = child.wait(60)
    assert ended.rc == 2, ended
    assert f"no Python in VENV={tmp_path}" in ended.stderr


@by_name
def test_a_job_without_a_number_of_ranks_is_refused(path):
    env = job(LAUNCHER="false", SOLVER="none")
    del env["SLURM_NTASKS"]
    with start("bash", str(path), env=env, cwd=ROOT) as child:
        ended = child.wait(60)
    assert ended.rc == 2, ended
    assert "give sbatch --ntasks-per-node" in ended.stderr


FAKE = """#!/bin/bash
# a launcher that drops the first signal, as one does that is starting its ranks
trap 'count=$((count + 1)); [ "$count" -lt 2 ] || exit 143' USR1
echo up
while :; do sleep 0.05; done
"""


def test_a_warning_that_a_launcher_drops_is_given_again(tmp_path):
    (tmp_path / "fake").write_text(FAKE)
    (tmp_path / "fake").chmod(0o755)
    text = (ROOT / "jobs/program.sbatch").read_text()
    assert text.count("while sleep 5 ") == 1
    (tmp_path / "job").write_text(text.replace("sleep 5 ", "sleep 0.2 "))
    env = job(LAUNCHER=str(tmp_path / "fake"))
    with start("bash", str(tmp_path / "job"), env=env, cwd=ROOT) as child:
        child.wait_for("up")
        os.kill(child.pid, 10)  # SIGUSR1, as Slurm sends it
        ended = child.wait(60)
    assert ended.rc == 143, ended
    assert ended.stderr.splitlines() == [
        "mpiml: the job was warned (USR1 or TERM), and ended with status 143"
    ], ended


ECHO = """#!/bin/bash
# a launcher that shows its last words, and what srun would read from the file of --multi-prog
for word; do [ "${last-}" != --multi-prog ] || parts=$word; last=$word; done
if [ -n "${parts-}" ]; then
  read -r _ command < <(tail -n 1 "$parts")
  python() { printf '<%s>' "$@"; }
  export -f python
  export START_RANK=${START_RANK#exec }
  $(sed "s/eval.*//" <<<"$command") "$(sed "s/.*eval/eval/" <<<"$command")"
  echo "parts $parts"
else
  printf '<%s>' "$@"
fi
echo " threads $OMP_NUM_THREADS"
"""


def echoed(tmp_path, template, launcher="fake", **more):
    (tmp_path / launcher).write_text(ECHO)
    (tmp_path / launcher).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = job(LAUNCHER=launcher, PATH=path, PROGRAM="my program.py", **more)
    with start("bash", str(ROOT / f"jobs/{template}.sbatch"), env=env, cwd=ROOT) as child:
        ended = child.wait(60)
    ended.check()
    return ended.stdout


ARGUMENTS = """--title 'my run' --glob "*" --n 3"""
WORDS = "<my program.py><--title><my run><--glob><*><--n><3>"


@pytest.mark.parametrize("template", ["program", "gpu", "array", "apptainer", "coupled"])
def test_arguments_are_quoted_as_in_a_shell(template, tmp_path):
    more = {"SOLVER_RANKS": "1", "SLURM_ARRAY_TASK_ID": "4"}
    assert WORDS in echoed(tmp_path, template, ARGUMENTS=ARGUMENTS, **more)


def test_the_file_of_the_parts_is_read_and_removed(tmp_path):
    more = {"SOLVER_RANKS": "1", "ARGUMENTS": ARGUMENTS, "TMPDIR": str(tmp_path)}
    said = echoed(tmp_path, "coupled", "srun", **more)
    assert WORDS in said
    assert f"parts {tmp_path}/" in said
    assert not list(tmp_path.glob("tmp.*"))


def test_a_job_that_names_no_cores_has_one_for_each_rank(tmp_path):
    assert "threads 1" in echoed(tmp_path, "program", SLURM_CPUS_PER_TASK="")


# -- filling in --------------------------------------------------------------------------------


def show(*words):
    return ["jobs", "show", *words]


def test_show_fills_in_what_is_given_and_leaves_the_rest(capsys):
    line = "program --hosts 4 --ranks-per-host 8 --time 2:00:00 --account team --warning 5m"
    assert cli.main(show(*line.split())) == 0
    out, err = capsys.readouterr()
    assert err == ""
    plain = (ROOT / "jobs/program.sbatch").read_text()
    changed = set(out.splitlines()) - set(plain.splitlines())
    assert changed == {
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --time=02:00:00",
        "#SBATCH --account=team",
        "#SBATCH --signal=B:USR1@300",
    }
    assert len(out.splitlines()) == len(plain.splitlines())


def test_show_without_options_prints_the_template(capsys):
    for path in SCRIPTS:
        assert cli.main(show(path.stem)) == 0
        assert capsys.readouterr().out == path.read_text()


def test_the_hosts_of_a_heterogeneous_job_are_the_workers():
    text = fill(templates.find("hetero").text, {"hosts": "7", "time": "90m"})
    assert re.findall(r"--nodes=(\d+)", text) == ["1", "7"]
    assert re.findall(r"#SBATCH --time=(\S+)", text) == ["01:30:00", "01:30:00"]


@pytest.mark.parametrize(
    "value", ["plain.py", "with space --x 3", "a}b", "it's", 'say "hi"', "$HOME/`x`", "a\\b"]
)
def test_any_text_reaches_the_script_as_it_is(value):
    text = fill('PROGRAM=${PROGRAM:-x.py}  # which\nprintf %s "$PROGRAM"\n', {"program": value})
    again = fill(text, {"program": value})
    assert again == text
    for shell in ("bash", "sh"):
        done = subprocess.run(
            [shell, "-c", text], capture_output=True, text=True, check=True, timeout=20
        )
        assert done.stdout == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["song"], "no template 'song'; those are apptainer"),
        (["program", "--image", "x"], "--image: this template has no place for it"),
        (["program", "--hosts", "0"], "--hosts: expected a whole number of at least 1"),
        (["program", "--hosts", "many"], "got 'many'"),
        (["program", "--time", "soon"], "--time: expected seconds"),
        (["program", "--time", "0"], "--time: expected a time above 0"),
        (["program", "--partition", "a b"], "--partition: expected one word"),
        (["program", "--arguments", "a\nb"], "--arguments: expected one line"),
        (["array", "--seeds", "a-b"], "--seeds: expected seeds such as"),
        (
            ["coupled", "--solver-ranks", "6"],
            "--solver-ranks: expected at most 5, since 1 hosts",
        ),
        (["coupled", "--hosts", "2", "--solver-ranks", "12"], "at most 11"),
        (["program", "--time", "60"], "--time: expected more than --warning"),
        (["gpu", "--time", "2m", "--warning", "2m"], "120 s before the end to stop, got 120 s"),
        (["program", "--requeue", "maybe"], "--requeue: expected yes or no"),
        (["program", "--nodes", "3"], "unrecognized arguments: --nodes"),
        ([], "TEMPLATE"),
    ],
)
def test_what_cannot_be_filled_in_is_a_usage_error(words, said, capsys):
    assert cli.main(show(*words)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_every_option_has_a_place_in_a_template():
    places = {name for template in templates.templates() for name in options_of(template.text)}
    assert places == set(OPTIONS)


def test_the_help_of_a_template_lists_its_options_only(capsys):
    assert cli.main(show("coupled", "--help")) == 0
    out = capsys.readouterr().out
    assert "--solver-ranks" in out
    assert "--image" not in out


def test_list_says_what_each_template_is_for(capsys):
    assert cli.main(["jobs", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        *("apptainer", "array", "coupled", "gpu", "hetero", "kubernetes", "program"),
    ]
    assert all(len(line.split()) > 3 for line in lines)


# -- Kubernetes --------------------------------------------------------------------------------

SCHEMA = json.loads(Path(__file__).with_name("mpijob.json").read_text())


def mpijob(**values):
    return yaml.safe_load(fill(templates.find("kubernetes").text, values))


def test_the_manifest_keeps_to_the_schema():
    Draft202012Validator(SCHEMA).validate(mpijob())
    filled = mpijob(hosts="8", time="2h", image="registry/mpiml:1", arguments='--say "hi: #1"')
    Draft202012Validator(SCHEMA).validate(filled)
    spec = filled["spec"]
    assert spec["runPolicy"]["activeDeadlineSeconds"] == 7200
    assert spec["mpiReplicaSpecs"]["Worker"]["replicas"] == 8
    launcher = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]
    assert launcher["image"] == "registry/mpiml:1"
    assert {"name": "ARGUMENTS", "value": '--say "hi: #1"'} in launcher["env"]
    subprocess.run(["bash", "-n", "-c", launcher["args"][0]], check=True, timeout=20)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("slotsPerWorker: 4", "slotsPerWorker: four"),
        ("slotsPerWorker: 4", "slotPerWorker: 4"),
        ("kubeflow.org/v2beta1", "kubeflow.org/v1"),
        ("mpiImplementation: OpenMPI", "mpiImplementation: openmpi"),
        ("cleanPodPolicy: Running", "cleanPodPolicy: Sometimes"),
        ("    Worker:", "    Workers:"),
        ("mountPath: /dev/shm", "mount: /dev/shm"),
        ("                medium: Memory", "                medium: Disk"),
    ],
)
def test_the_schema_finds_mistakes(old, new):
    text = templates.find("kubernetes").text
    assert old in text
    assert not Draft202012Validator(SCHEMA).is_valid(yaml.safe_load(text.replace(old, new, 1)))


# -- the check ---------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """A machine whose programs answer as told; programs that are not named are not there."""

    def make(**answers):
        monkeypatch.setattr(
            checking.shutil,
            "which",
            lambda name, path=None: f"/fake/{name}" if name in answers else None,
        )
        monkeypatch.setattr(
            checking,
            "attempt",
            lambda command, *_: Outcome(*answers.get(Path(command[0]).name, (127, "", "no"))),
        )

    return make


def test_a_machine_without_slurm_is_told_what_to_do(machine):
    machine()
    check = checking.check_sbatch(1)
    assert check.state == "warn"
    assert "mpiml run -n" in check.cure


def test_a_controller_that_does_not_answer_is_a_failure(machine):
    machine(sbatch=(0, "slurm 22.05", ""), scontrol=(1, "Slurmctld(primary) at x is DOWN", ""))
    assert checking.check_sbatch(1).state == "fail"


def test_partitions_are_listed_and_a_missing_default_is_noted(machine):
    machine(sinfo=(0, "cpu*|up|12|64|(null)|1-00:00:00\ngpu|up|4|32|gpu:4|2:00:00\n", ""))
    check = checking.check_partitions(1)
    assert check.state == "ok"
    assert "gpu: 4 hosts of 32 cores and gpu:4, at most 2:00:00" in check.found
    machine(sinfo=(0, "cpu|up|12|64|(null)|1-00:00:00\n", ""))
    assert "--partition NAME" in checking.check_partitions(1).cure


KINDS = (
    "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions: pmix_v4\n"
)


@pytest.mark.parametrize(
    ("mpi", "kinds", "state", "said"),
    [
        (Mpi("openmpi", (5, 0)), KINDS, "ok", "LAUNCHER='srun --mpi=pmix'"),
        (Mpi("mpich", (5, 0)), KINDS, "ok", "LAUNCHER='srun --mpi=pmi2'"),
        (Mpi("openmpi", (5, 0)), "\tnone\n\tpmi2\n", "note", "wants pmix"),
        (None, KINDS, "note", "not known"),
    ],
)
def test_srun_is_compared_with_the_mpi(machine, mpi, kinds, state, said):
    machine(srun=(0, "", kinds))
    check = checking.check_srun(mpi, 1)
    assert (check.state, said in check.found) == (state, True), check


def test_the_check_of_this_machine_runs(capsys):
    status = cli.main(["jobs", "check", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["status"] == status
    names = [check["name"] for check in found["checks"]]
    assert {"sbatch", "mpirun", "shared memory", "apptainer"} <= set(names)


def test_a_wheel_brings_the_templates_along():
    text = (ROOT / "CMakeLists.txt").read_text()
    assert "install(DIRECTORY jobs/ DESTINATION mpiml/jobs/files" in text
    assert templates.folder() == ROOT / "jobs"  # of the repository, in an editable install


def test_no_template_uses_a_variable_that_slurm_sets():
    for path in SCRIPTS:  # ENVIRONMENT=BATCH is Slurm's, for one
        settings = set(re.findall(r"^(\w+)=\$\{", path.read_text(), re.MULTILINE))
        assert not settings & {"ENVIRONMENT", "HOSTNAME", "TMPDIR"}
    with pytest.raises(UsageError, match="no template"):
        templates.find("nothing")
