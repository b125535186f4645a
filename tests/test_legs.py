"""Which tests a leg of .ci/run repeats: the rule of tests/legs.py, on real runs of pytest."""

import json
import sys

import pytest

from tests.legs import touches
from tests.mpi import ROOT, child, environment

SOURCES = {
    "conftest": """
        from tests.conftest import *
        @pytest.fixture(scope="session")
        def everywhere(): return os.system("true")
        @pytest.fixture(scope="session")
        def nothing(): pass
        """,
    "test_logic": """
        import pytest
        @pytest.mark.parametrize("word", ["a b", "ü", "::"])
        def test_word(word, nothing): pass
        def test_skipped(): pytest.skip("not here")
        @pytest.mark.mpi
        def test_marked(): assert False, "runs under mpiexec only"
        """,
    "test_starts": """
        import os, pytest, subprocess, sys
        def test_runs(): subprocess.run([sys.executable, "-c", ""], check=True)
        def test_beside(): pass
        @pytest.fixture
        def ended(): return os.system("true")
        def test_fixture(ended): assert ended == 0
        def test_forks():
            if (pid := os.fork()) == 0: os._exit(0)
            os.waitpid(pid, 0)
        """,
    "test_module": """
        import os, pytest
        @pytest.fixture(scope="module")
        def ended(): return os.system("true")
        def test_before(): pass
        def test_first(ended): assert ended == 0
        def test_second(request): request.getfixturevalue("ended")
        """,
    "test_session": "def test_one(everywhere): pass",
    "test_session_2": "def test_one(everywhere): pass",
    "test_launcher": "def test_launcher(mpi_launcher): assert mpi_launcher",
    "test_launcher_2": "def test_launcher(mpi_launcher): assert mpi_launcher",
    "test_vendor": "from tests.mpi import vendor\ndef test_vendor(): vendor()",
    "test_when_collected": "import os\nos.system('true')\ndef test_nothing(): pass",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    for name, source in SOURCES.items():
        lines = source.strip("\n").splitlines()
        margin = len(lines[0]) - len(lines[0].lstrip())
        (tmp_path / f"{name}.py").write_text("\n".join(line[margin:] for line in lines))
    return tmp_path


def run(folder, *options):
    """Run all plain tests of `folder` with a list beside them; return what pytest prints."""
    env = environment(MPIML_TEST_ONCE=folder / "once.json", PYTHONPATH=ROOT)
    args = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "not mpi", "-W", "ignore")
    command = (*args, "--rootdir", folder, *options, folder)
    return child(sys.executable, *command, env=env, cwd=folder)


def test_a_later_leg_leaves_out_what_passed_without_mpi_and_nothing_else(folder, mpi_launcher):
    first = run(folder).check()
    listed = json.loads((folder / "once.json").read_text())
    words = [f"test_logic.py::test_word[{word}]" for word in ("a b", r"\xfc", "::")]
    assert sorted(listed) == sorted([*words, "test_starts.py::test_beside"])
    assert "4 of 16 tests need no other leg" in first.stdout

    (folder / "test_new.py").write_text("def test_new(): pass")
    later = run(folder).check()
    assert "left out: 4 tests" in later.stdout
    assert "13 passed, 1 skipped, 5 deselected" in later.stdout
    assert "test_new.py::test_new PASSED" in later.stdout


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("assert False", "assert False"),
        ("import mpi4py", "mpi4py: not to be imported here"),
        (
            "import multiprocessing as m; m.get_context('spawn').Process(target=print).start()",
            "multiprocessing.popen_spawn_posix: not to be imported here",
        ),
    ],
)
def test_nothing_is_written_down_when_a_test_failed(folder, mpi_launcher, body, said):
    (folder / "test_wrong.py").write_text(f"def test_wrong(): {body}")
    ended = run(folder)
    assert ended.rc == 1
    assert said in ended.stdout
    assert not (folder / "once.json").exists()


@pytest.mark.parametrize(
    ("event", "args", "yes"),
    [
        ("import", ("mpi4py.MPI", None, None, None, None), True),
        ("import", ("mpiml", None, None, None, None), False),
        ("os.posix_spawn", ("/bin/sh", [], {}), True),
        ("ctypes.dlopen", ("libmpi.so.40",), True),
        ("ctypes.dlopen", (None,), False),
        ("open", ("mpiexec", "r", 0), False),
    ],
)
def test_what_touches_mpi(event, args, yes):
    assert touches(event, args) is yes
