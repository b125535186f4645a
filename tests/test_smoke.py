"""The house itself: ranks talk, a failure ends all of them, a child cannot outlive its limit."""

import sys
import textwrap
from pathlib import Path

import pytest

from tests.mpi import ROOT, child, environment, mpiexec, start, vendor


@pytest.mark.mpi(min_size=1)
def test_every_rank_is_there():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    assert comm.allgather(comm.rank) == list(range(comm.size))
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE


def test_mpiexec_runs_python_on_every_rank(mpi_launcher):
    code = "from mpi4py import MPI; print('sum', MPI.COMM_WORLD.allreduce(1))"
    ended = mpiexec(3, "-c", code).check()
    assert ended.stdout.count("sum 3") == 3
    assert not ended.leftovers


@pytest.mark.parametrize("rank", [0, 1])
def test_first_failure_under_mpiexec_ends_all_ranks(mpi_launcher, tmp_path, rank):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "test_one.py").write_text(
        textwrap.dedent(f"""
            import pytest

            @pytest.mark.mpi
            def test_one_rank_fails():
                from mpi4py import MPI
                assert MPI.COMM_WORLD.rank != {rank}, "on purpose"
                MPI.COMM_WORLD.barrier()  # the others wait here for ever
        """)
    )
    pytest_args = ("-m", "pytest", "-q", "--with-mpi", "-p", "no:cacheprovider")
    ended = mpiexec(2, *pytest_args, "--rootdir", tmp_path, tmp_path, timeout=60)
    assert ended.rc != 0
    assert f"rank {rank} of 2 failed" in ended.stderr
    assert "on purpose" in ended.stderr
    assert not ended.leftovers


def test_a_child_over_its_limit_is_killed_with_its_children():
    code = (
        "import os, subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import os, time; os.setpgrp(); time.sleep(99)'])\n"
        "print('started', flush=True)\n"
        "time.sleep(99)\n"
    )
    with start(sys.executable, "-c", code) as job:
        job.wait_for("started")
        with pytest.raises(AssertionError, match=r"still running after 0\.1 s\n(?s:.)*started"):
            job.wait(0.1)
        assert not job.pids()


def test_a_process_that_outlives_the_child_is_listed_and_killed():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])"
    ended = child(sys.executable, "-c", code)
    assert len(ended.leftovers) == 1
    assert "time.sleep(99)" in ended.leftovers[0]


def test_a_command_over_its_limit_is_killed_also_if_it_does_not_listen(tmp_path):
    """`tests.mpi` from a shell, with a launcher that ignores what ends others."""
    deaf = tmp_path / "bin" / "mpiexec"
    deaf.parent.mkdir()
    deaf.write_text("#!/bin/sh\ntrap '' TERM INT\necho started\nsleep 60\necho survived\n")
    deaf.chmod(0o755)
    code = "import sys, tests.mpi; tests.mpi.launcher = lambda: sys.argv[2]; tests.mpi.main()"
    env = environment(MPIML_TEST_LIMIT="0.5", MPIML_TEST_GRACE="0.5")
    with start(sys.executable, "-c", code, "1", deaf, env=env, cwd=ROOT) as job:
        ended = job.wait(20)
    assert ended.rc != 0
    assert ended.stdout == "started\n"
    assert not ended.leftovers


def test_a_job_has_a_temporary_folder_of_its_own_that_goes_with_it():
    code = "import tempfile; print(open(tempfile.mkstemp()[1], 'w').name)"
    names = []
    for _ in range(2):
        with start(sys.executable, "-c", code) as job:
            names.append(Path(job.wait(30).check().stdout.strip()))
            assert names[-1].exists()
        assert not names[-1].parent.exists()
    assert names[0].parent != names[1].parent


def test_a_launcher_starts_beside_what_a_killed_one_left(mpi_launcher, tmp_path, monkeypatch):
    if vendor() != "openmpi":
        pytest.skip("it is Open MPI 5 that names its folder so")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # Open MPI names the folder of a session by the launcher's id: of those to come, all taken.
    code = textwrap.dedent("""
        import os, pathlib, sys, tempfile
        for pid in range(os.getpid() + 1, os.getpid() + 400):
            left = pathlib.Path(sys.argv[1], f"ompi.{pid}")
            left.mkdir()
            (left / "pmix.vm.tool").touch()
    """)
    child(sys.executable, "-c", code, tmp_path).check()
    mpiexec(1, "-c", "pass").check()
