"""The doctor: what it makes of what it sees, and one real run with two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mpiml.collectives.device.direct import Direct
from mpiml.config import Config
from mpiml.doctor import direct, main, ranks
from mpiml.doctor.check import Check, Outcome, attempt
from mpiml.doctor.machine import (
    check_container,
    check_cores,
    check_gpu,
    check_shared_memory,
    check_slurm,
)
from mpiml.doctor.probe import MARK, STEPS
from mpiml.doctor.ranks import CURES, check_launcher, findings, gpu_findings, read_probe
from mpiml.doctor.report import render
from mpiml.errors import UsageError
from mpiml.hosts import Facts
from mpiml.mpiexec import Launcher
from mpiml.vendors import Mpi
from tests.mpi import child, environment, launcher

LAUNCHER = Launcher(Path("/x/mpiexec"), Mpi("openmpi", (5, 0, 11)))
LIBRARY = {"ok": True, "library": "Open MPI v5", "mpi": [3, 1], "ranks": 2, "cores": [8, 8]}


def said(*steps):
    return "noise\n" + "".join(MARK + json.dumps(step) + "\n" for step in steps)


def states(checks):
    return {check.name: check.state for check in checks}


def test_steps_after_a_crash_are_tried_in_a_new_start():
    started = []

    def run(names):
        started.append(names)
        if names[0] == "library":
            done = said({"step": "library"}, {"step": "library", "ok": True}, {"step": "dup"})
            return Outcome(139, done, "Segmentation fault\n")
        return Outcome(0, said({"step": "shared"}, {"step": "shared", "ok": True}), "")

    steps = read_probe(["library", "dup", "shared"], run)
    assert started == [["library", "dup", "shared"], ["shared"]]
    assert steps["dup"] == {"ok": False, "error": "Segmentation fault"}
    assert steps["shared"]["ok"]


def test_a_crash_between_steps_and_a_hang_have_a_name_too():
    steps = read_probe(["dup"], lambda names: Outcome(None, "", "late"))
    assert steps == {"dup": {"ok": False, "error": "it did not end in time"}}
    steps = read_probe(["library", "dup"], lambda names: Outcome(3, "", ""))
    assert steps == {"library": {"ok": False, "error": "it ended with status 3"}}


def test_every_step_has_a_cure_and_every_failure_shows_it():
    assert set(STEPS) == set(CURES)
    steps = {name: {"ok": False, "error": "no"} for name in STEPS}
    checks = findings(steps, LAUNCHER, 8)
    assert all(check.cure for check in checks)
    assert states(checks)["threads"] == "fail"
    assert states(checks)["windows"] == "warn"
    assert states(checks)["lost ranks"] == "note"


@pytest.mark.parametrize("level", ["FUNNELED", "SERIALIZED", "MULTIPLE"])
def test_less_than_full_thread_support_is_no_failure(level):
    (check,) = findings({"threads": {"ok": True, "level": level}}, LAUNCHER, 8)
    assert check.state == ("ok" if level == "MULTIPLE" else "warn")
    assert level in check.found
    assert ("docs/inside.md" in check.cure) is (check.state == "warn")


@pytest.mark.parametrize(
    ("levels", "said"),
    [(("funneled", "multiple"), "FUNNELED"), (("single", "single"), "thread level SINGLE")],
)
def test_the_lower_thread_level_of_two_ranks_counts(mpi_launcher, levels, said):
    start = "import sys, mpi4py; mpi4py.rc.thread_level = sys.argv[1]\n"
    start += "from mpiml.doctor.probe import main; main(['threads'])"
    one, other = (["-n", 1, sys.executable, "-c", start, level] for level in levels)
    found = read_probe(
        ["threads"],
        lambda _: Outcome(
            0, child(launcher(), *one, ":", *other, env=environment()).stdout, ""
        ),
    )
    step = found["threads"]
    assert step["ok"] is (levels[0] != "single"), step
    assert said in step["error" if levels[0] == "single" else "level"]


def test_two_singletons_are_not_two_ranks():
    [check] = findings({"library": LIBRARY | {"ranks": 1}}, LAUNCHER, 8)
    assert (check.name, check.state) == ("ranks", "fail")


@pytest.mark.parametrize(
    ("masks", "cores", "state"), [([1, 1], 8, "warn"), ([8, 8], 8, "ok"), ([1, 1], 1, "ok")]
)
def test_ranks_bound_to_one_core(masks, cores, state):
    assert (
        states(findings({"library": LIBRARY | {"cores": masks}}, LAUNCHER, cores))["binding"]
        == state
    )


@pytest.mark.parametrize(
    ("loaded", "state", "goes_on"),
    [
        (Mpi("openmpi", (5, 0, 11)), "ok", True),
        (Mpi("openmpi", (5, 0, 3)), "note", True),
        (Mpi("openmpi", (4, 1, 4)), "fail", False),
        (Mpi("mpich", (5, 0, 11)), "fail", False),
    ],
)
def test_launcher_and_library_must_be_of_one_mpi(loaded, state, goes_on):
    checks, launcher = check_launcher(lambda: LAUNCHER, lambda: loaded)
    assert states(checks)["launcher"] == state
    assert (launcher is not None) is goes_on
    assert bool(checks[-1].cure) is (state == "fail")


def test_no_launcher_and_no_library():
    def find():
        raise UsageError("none here")

    checks, launcher = check_launcher(find, lambda: None)
    assert (states(checks), launcher) == ({"launcher": "fail"}, None)
    assert "none here" in checks[0].found
    checks, _ = check_launcher(lambda: LAUNCHER, lambda: None)
    assert states(checks) == {"mpi library": "fail"}


def test_shared_memory_that_is_small_or_missing(tmp_path, monkeypatch):
    def sized(mib):
        size = os.statvfs_result((4096, 4096, mib * 256, mib * 256, mib * 256, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda path: size)
        return check_shared_memory(tmp_path)

    assert sized(1024).state == "ok"
    small = sized(64)
    assert small.state == "warn"
    assert "64 MiB" in small.found
    assert "--shm-size" in small.cure
    monkeypatch.undo()
    assert check_shared_memory(tmp_path / "absent").state == "warn"
    assert list(tmp_path.iterdir()) == []


def test_more_threads_than_cores():
    facts = Facts("h", frozenset(range(4)), quota=2.0)
    assert check_cores(facts, {}, 8).found.startswith("2 for this process")
    assert check_cores(facts, {"OMP_NUM_THREADS": "2"}, 8).state == "ok"
    assert check_cores(facts, {"OMP_NUM_THREADS": "4"}, 8).state == "warn"


@pytest.mark.parametrize(
    ("root", "container", "state"),
    [(True, False, "warn"), (True, True, "ok"), (False, False, "ok")],
)
def test_root(root, container, state):
    assert check_container(root, container).state == state


def test_srun_without_a_pmi_is_a_failure():
    check = check_slurm(Config(singleton_trap=True, slurm_step_tasks=4), 1.0)
    assert check.state == "fail"
    assert "--mpi=pmix" in check.cure


def test_slurm_is_asked_for_its_pmi(tmp_path, monkeypatch):
    def srun(text):
        path = tmp_path / "srun"
        path.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
        path.chmod(0o755)
        return check_slurm(Config(), 30.0)

    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert srun("MPI plugin types are...\n\tnone\n\tpmix\n\tpmi2").found.endswith("--mpi=pmi2")
    assert srun("none").state == "warn"


def test_a_machine_without_a_gpu(tmp_path):
    (tmp_path / "nvidiactl").touch()
    assert check_gpu(tmp_path, 1.0).state == "note"
    (tmp_path / "nvidia0").touch()
    card_only = check_gpu(tmp_path, 30.0)  # no driver behind it, perhaps no CuPy
    assert card_only.state in ("warn", "ok")
    assert card_only.found.startswith("1 ")


def test_a_child_that_hangs_is_ended_with_all_of_its_session():
    code = "import os, signal; signal.signal(15, signal.SIG_IGN); print(os.getpid(), flush=True); signal.pause()"
    outcome = attempt([sys.executable, "-c", code], 0.5, patience=0.1)
    assert outcome.status is None
    assert outcome.why() == "it did not end in time"
    with pytest.raises(ProcessLookupError):
        os.kill(int(outcome.stdout), 0)


def test_a_command_that_is_not_there():
    assert attempt(["/absent"], 1.0).status == 127


def test_a_report_shows_cures_below_failures():
    text = render([Check("a", "ok", "fine"), Check("bcd", "fail", "broken", "mend it")])
    assert text.splitlines() == [
        "ok    a    fine",
        "FAIL  bcd  broken",
        "           cure: mend it",
    ]


def test_only_one_rank_of_a_job_speaks(monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    assert main([]) == 0
    assert capsys.readouterr() == ("", "")


def test_a_wrong_line_has_status_2(capsys):
    assert main(["--bogus"]) == 2
    assert capsys.readouterr().err.startswith("usage: mpiml doctor")


@pytest.mark.slow
def test_two_real_ranks():
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "mpiml.doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        env=os.environ | {"PYTHONPATH": str(root)},
        check=False,
    )
    found = json.loads(done.stdout)
    checks = {check["name"]: check for check in found["checks"]}
    assert done.stderr == ""
    assert (
        done.returncode
        == found["status"]
        == int(any(c["state"] == "fail" for c in checks.values()))
    )
    for name in ("launcher", "ranks", "threads", "communicators", "matched probe"):
        assert checks[name]["state"] in ("ok", "note"), checks[name]
    assert {
        "windows",
        "shared windows",
        "lost ranks",
        "cores",
        "shared memory",
    } <= checks.keys()


def test_device_arrays_are_tried_only_where_the_library_says_yes():
    tried = []

    def step(name):
        tried.append(name)
        return {"ok": name == "gpu_map", "error": "Segmentation fault", "devices": ["H"]}

    checks = gpu_findings(Direct(False, "libmpi says no"), step)
    assert tried == ["gpu_map"]
    assert states(checks) == {"gpu and MPI": "note", "gpu memory shared": "ok"}
    assert checks[0].found == "libmpi says no"
    checks = gpu_findings(Direct(True, "libmpi says yes"), step)
    assert checks[0].state == "warn"
    assert checks[0].found == "libmpi says yes; Segmentation fault"
    assert "MPIML_GPU_DIRECT=off" in checks[0].cure
    good = gpu_findings(Direct(True, "libmpi says yes"), lambda name: {"ok": True})
    assert states(good) == {"gpu and MPI": "ok", "gpu memory shared": "ok"}


def test_a_library_that_cannot_be_asked_is_not_given_device_arrays(monkeypatch):
    monkeypatch.setattr(ranks, "ASK", "import sys; sys.exit('no MPI here')")
    assert ranks.ask_in_child(30.0) == Direct(
        False, "the MPI library cannot be asked: no MPI here"
    )


def test_a_trial_whose_ranks_crash_is_a_no(monkeypatch):
    monkeypatch.setattr(direct, "check_launcher", lambda find, loaded: ([], LAUNCHER))
    crash = Outcome(139, said({"step": "gpu"}), "Segmentation fault\n")
    monkeypatch.setattr(direct, "starter", lambda launcher, timeout: lambda names: crash)
    assert direct.try_ranks(1.0) == (False, "the trial exchange failed: Segmentation fault")
    none = [Check("launcher", "fail", "none here", "mend it")]
    monkeypatch.setattr(direct, "check_launcher", lambda find, loaded: (none, None))
    assert direct.try_ranks(1.0) == (False, "no trial exchange: none here")


@pytest.mark.slow
def test_a_trial_without_a_device_is_a_no_and_no_crash(mpi_launcher):
    command = [sys.executable, "-m", "mpiml.doctor.direct", "40"]
    done = attempt(command, 90.0)
    found = json.loads(done.stdout.splitlines()[-1])
    if not found["allowed"]:  # here: no CuPy, no device, or an MPI that takes none
        assert found["why"].startswith("the trial exchange failed: ")
    assert done.status == 0
