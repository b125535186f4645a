"""The command line of `mpiml run`: options, durations, files, the parameters of build."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.cmdline import (
    Help,
    Options,
    call_build,
    load,
    parse,
    parse_script,
    rank_argv,
)
from mpiml.errors import UsageError
from mpiml.options import parse_duration
from mpiml.settings import FILL

HEADER = "from __future__ import annotations\nimport mpiml.program\nfrom mpiml.settings import FILL\n"


@pytest.fixture
def program_file(tmp_path, monkeypatch):
    """Writes a program's file and returns its path; undoes what importing it leaves behind."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text, name="prog.py"):
        path = tmp_path / name
        path.write_text(HEADER + text)
        return path

    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_options_stand_before_the_file_and_the_rest_belongs_to_build():
    options = parse(["-n", "4", "--seed", "7", "hello.py:make", "-n", "2", "--s", "--help"])
    assert options == Options(
        n=4, seed=7, file="hello.py", build="make", build_args=("-n", "2", "--s", "--help"),
    )  # fmt: skip


def test_defaults_are_those_of_the_contract():
    options = parse(["hello.py"])
    assert options == Options(file="hello.py")
    assert (options.grace, options.stall_warning, options.seed) == (10.0, 60.0, 0)


def test_a_double_dash_after_the_file_reaches_build_as_it_was_typed():
    assert parse(["hello.py", "--", "--x"]).build_args == ("--", "--x")
    assert parse(["-n4", "--grace=3", "--", "-odd.py", "--x"])[-3:] == (
        "-odd.py",
        "build",
        ("--x",),
    )


def test_a_file_with_a_colon_in_its_name_stays_whole(tmp_path):
    file = tmp_path / "a:b"
    file.write_text("")
    assert parse([str(file)]).file == str(file)


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "required: FILE"),
        (["-n", "0", "x.py"], "at least 1, got 0"),
        (["-n", "two", "x.py"], "not a whole number: 'two'"),
        (["--bogus", "x.py"], "--bogus"),
        (["--gra", "3", "x.py"], "--gra"),
        (["--mpi", "lam", "x.py"], "invalid choice: 'lam'"),
        (["--max-time", "soon", "x.py"], "got 'soon'"),
        (["--max-time", "0", "x.py"], "above 0"),
        (["--seed", "-1", "x.py"], "--seed"),
        (["-n", "2", "--threads", "2", "x.py"], "--threads N is for a run without MPI"),
    ],
)
def test_a_wrong_line_shows_usage_and_reason(argv, reason):
    with pytest.raises(UsageError) as caught:
        parse(argv)
    assert str(caught.value).startswith("usage: mpiml run")
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    "argv",
    [["--spares", "1"], ["--trace", "d"], ["--checkpoint", "d"], ["--resume"]],
)
def test_options_of_later_releases_are_refused_by_name(argv):
    with pytest.raises(UsageError, match=f"{argv[0]} comes with"):
        parse([*argv, "x.py"])


def test_help_names_every_option():
    with pytest.raises(Help) as caught:
        parse(["--help"])
    for option in ("-n", "--mpi", "--dry-run", "--threads", "--grace", "--stall-warning",
                   "--seed", "--max-time", "--log-dir", "--no-progress", "--spares", "--trace",
                   "--checkpoint", "--resume"):  # fmt: skip
        assert option in str(caught.value)
    assert "comes with" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90), ("1.5", 1.5), (".5", 0.5), ("45s", 45), ("1h30m", 5400), ("2d", 172800),
        ("1H", 3600), ("01:30", 90), ("90:00", 5400), ("1:30:00", 5400), ("1-00:00:30", 86430),
    ],
)  # fmt: skip
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-1",
        "nan",
        "inf",
        "1e400",
        "1h1h",
        "30m1h",
        "1:60",
        "1:75:00",
        "1-00:30",
        "1:2:3:4",
        "5x",
    ],
)
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(UsageError, match="expected seconds"):
        parse_duration(text)


OPTIONS = st.builds(
    Options,
    n=st.none(),
    mpi=st.just("auto"),
    dry_run=st.just(False),
    threads=st.none() | st.integers(1, 9),
    grace=st.floats(0, 1e6).map(lambda x: round(x, 3)),
    stall_warning=st.floats(0.01, 1e6).map(lambda x: round(x, 3)),
    seed=st.integers(0, 2**70),
    max_time=st.none() | st.integers(1, 10**6).map(float),
    log_dir=st.none() | st.just(Path("logs")),
    progress=st.none() | st.booleans(),
    file=st.just("dir/x.py"),
    build=st.sampled_from(["build", "make"]),
    build_args=st.lists(st.sampled_from(["--n", "3", "-x", "--", ""])).map(tuple),
)


@given(OPTIONS)
def test_a_rank_reads_back_the_options_of_its_starter(options):
    assert parse(rank_argv(options)) == options


def test_the_starters_own_options_do_not_reach_the_ranks():
    argv = rank_argv(parse(["-n", "4", "--mpi", "mpich", "x.py"]))
    assert argv == ["x.py:build"]


def test_a_script_gives_all_its_arguments_to_build():
    options = parse_script(["dir/hello.py", "--workers", "2"], "make")
    assert options == Options(file="dir/hello.py", build="make", build_args=("--workers", "2"))


def test_load_imports_under_the_files_own_name(program_file):
    path = program_file(
        "import dataclasses, sys\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int = 1\n"
        "ran = __name__ == '__main__'\n"
        "here = sys.path[0]\n"
        "def build(): return mpiml.program.Program(__name__)\n",
        "my-prog.v2.py",
    )
    build = load(path)
    module = sys.modules[build.__module__]
    assert build.__module__ == "my-prog_v2"
    assert not module.ran
    assert module.here == str(path.parent)
    assert pickle.loads(pickle.dumps(module.Point(3))) == module.Point(3)
    assert load(path) is build  # once more is the same module, not a second copy


def test_what_the_file_raises_comes_out_and_leaves_no_half_module(program_file):
    path = program_file("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        load(path)
    assert "prog" not in sys.modules


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("numpy.py", "numpy"),
        ("wave.py", "standard library"),
        ("pip.py", "pip"),
        ("sys.py", "built into"),
    ],
)
def test_a_file_with_the_name_of_another_module_is_refused(program_file, name, owner):
    with pytest.raises(UsageError, match=f"is taken .*{owner}.*Rename the file"):
        load(program_file("", name))


def test_load_says_what_is_wrong(program_file, tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load(tmp_path / "absent.py")
    with pytest.raises(UsageError, match="got a folder"):
        load(tmp_path)
    task_script = program_file("from pathlib import Path\ndef main(): pass\ndef work(): pass\n")
    with pytest.raises(UsageError, match=r"it has main, work.*comes with mpiml\.tasks"):
        load(task_script)
    with pytest.raises(UsageError, match=r"no function 'make' \(it has main, work\)\."):
        load(task_script, "make")
    with pytest.raises(UsageError, match="'build' is a int"):
        load(program_file("build = 3\n", "number.py"))


@pytest.mark.parametrize(("value", "hint"), [("None", "forget to return"), ("3", "got int")])
def test_build_must_return_a_program(program_file, value, hint):
    build = load(program_file(f"def build(): return {value}\n"))
    with pytest.raises(UsageError, match=hint):
        call_build(build)


PARAMETERS = """
import dataclasses
from pathlib import Path
from typing import Literal, Optional
@dataclasses.dataclass
class Config:
    rate: float = 0.1
    shards: int = FILL
def build(workers: int = FILL, steps: int = 10, name: str = "x", where: Path = Path("."),
          mode: Literal["a", "b"] = "a", limit: Optional[int] = None, sizes: list[int] = [1, 2],
          config: Config = Config(), fast: bool = False):
    '''Build it.

    Parameters
    ----------
    workers : int
        How many of them.
    '''
    print("building")
    program = mpiml.program.Program("p")
    program.got = locals()
    return program
"""


def test_the_parameters_of_build_are_its_command_line(program_file, capsys):
    build = load(program_file(PARAMETERS))
    got = call_build(build, (
        "--workers", "3", "--steps", "2", "--name", "y", "--where", "/tmp", "--mode", "b",
        "--limit", "5", "--sizes", "7", "8", "9", "--config.rate", "0.5", "--fast",
    )).got  # fmt: skip
    assert (got["workers"], got["steps"], got["name"], got["where"]) == (
        3,
        2,
        "y",
        Path("/tmp"),
    )
    assert (got["mode"], got["limit"], got["sizes"], got["fast"]) == ("b", 5, [7, 8, 9], True)
    assert (got["config"].rate, got["config"].shards) == (0.5, FILL)
    assert capsys.readouterr().out == "building\n"  # the file's output is not swallowed


@pytest.mark.parametrize("args", [(), ("--workers", "FILL"), ("--steps", "3")])
def test_fill_is_a_default_and_a_word(program_file, args):
    got = call_build(load(program_file(PARAMETERS)), args).got
    assert got["workers"] is FILL
    assert got["config"].shards is FILL


def test_help_of_build_shows_types_defaults_and_docs(program_file):
    with pytest.raises(Help) as caught:
        call_build(load(program_file(PARAMETERS)), ("--help",))
    text = str(caught.value)
    assert "usage: mpiml run prog.py" in text
    assert "Build it." in text
    assert "INT|FILL" in text
    assert "How many of them. (default: FILL)" in " ".join(text.split())


@pytest.mark.parametrize("args", [("--bogus", "1"), ("--steps", "many"), ("--workers", "SOME")])
def test_wrong_parameters_show_usage(program_file, args, capsys):
    with pytest.raises(UsageError) as caught:
        call_build(load(program_file(PARAMETERS)), args)
    assert str(caught.value).startswith("usage: mpiml run prog.py")
    assert args[0] in str(caught.value)
    assert capsys.readouterr() == ("", "")  # whoever catches it prints it, once


@pytest.mark.parametrize("args", [("-n", "4"), ("--progress",), ("--grace=3",)])
def test_a_run_option_behind_the_file_is_known_as_one(program_file, args):
    with pytest.raises(UsageError, match=f"{args[0]} is an option of mpiml run"):
        call_build(load(program_file(PARAMETERS)), args)


def test_a_launch_while_the_file_is_loaded_names_the_missing_guard(program_file):
    with pytest.raises(UsageError, match=r"prog\.py calls mpiml\.launch .* __name__"):
        load(program_file("import mpiml\ndef build(): pass\nmpiml.launch(build)\n"))
    assert load(program_file("def build(): pass\n", "other.py"))  # and is forgotten


def test_a_parameter_without_default_is_asked_for(program_file):
    build = load(
        program_file("def build(steps: int): return mpiml.program.Program(str(steps))\n")
    )
    with pytest.raises(UsageError, match="steps"):
        call_build(build)
    assert call_build(build, ("--steps", "3")).name == "3"


def test_tyro_is_imported_only_for_arguments():
    code = (
        "import sys, mpiml.cmdline as c, mpiml.program as p\n"
        "c.call_build(lambda: p.Program('p'))\n"
        "assert 'tyro' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
