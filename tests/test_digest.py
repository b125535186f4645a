import decimal
import enum
import fractions
import functools
import math
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.digest import describe, digest, first_difference, stable_hash
from mpiml.errors import UsageError
from mpiml.fingerprint import Describer
from mpiml.handles import Deferred
from mpiml.nodes import Colocation, PyNode, ServiceNode
from mpiml.program import FILL, Program

ROOT = Path(__file__).parents[1]


class Counter:
    def __init__(self, start=0):
        self.total = start

    def add(self, n):
        self.total += n


class Colour(enum.Enum):
    RED = 1


@dataclass
class Config:
    rate: float
    names: set


def work(*args, **kwargs):
    pass


def build(*args, label="worker", function=work, replicas=FILL, **settings):
    program = Program("p")
    counter = program.add_node(ServiceNode(Counter, start=5), label="counter")
    program.add_node(
        PyNode(function, counter, *args), label=label, replicas=replicas, **settings
    )
    return program


def difference(first, second):
    lines = [describe(first), describe(second)]
    assert (digest(lines[0]) == digest(lines[1])) == (lines[0] == lines[1])
    return first_difference(lines)


# describe, digest


def test_equal_programs_have_equal_digests():
    lines = describe(build(1, "x", [2.5, {"a": None}]))
    assert lines == describe(build(1, "x", [2.5, {"a": None}]))
    assert len(digest(lines)) == 32
    assert len({name for name, _ in lines}) == len(lines)


def _adds_one(*args):
    return 1


def _adds_two(*args):
    return 2


_adds_two.__qualname__ = "_adds_one"


def _with_constant(constant):
    return lambda *args: constant


@pytest.mark.parametrize("twice", [False, True])
def test_one_subscriber_given_twice_is_not_two(twice):
    def build(twice):
        program = Program("p")
        topic = program.topic("x")
        first = topic.subscriber()
        second = first if twice else topic.subscriber()
        program.add_node(PyNode(work, topic.publisher(), first, second), label="work")
        return program

    assert difference(build(twice), build(twice)) == ""
    assert '"argument 2 of work"' in difference(build(twice), build(not twice))


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        (build(1), build(2), '"argument 1 of worker" is 2 on rank 1, and 1 on rank 0'),
        (build(1), build(1.0), "argument 1 of worker"),
        (build(1), build(True), "argument 1 of worker"),
        (build("a"), build(b"a"), "argument 1 of worker"),
        (build(1), build(1, 2), '"argument 2 of worker" is 2 on rank 1, and absent on rank 0'),
        (build("x" * 9999), build("x" * 9998 + "y"), "argument 1 of worker"),
        (build({1, 2}), build({1, 3}), "argument 1 of worker"),
        (build((1,)), build([1]), "argument 1 of worker"),
        (build(Colour.RED), build(1), "argument 1 of worker"),
        (build(Path("a")), build(Path("b")), "argument 1 of worker"),
        (build(Config(1.0, set())), build(Config(2.0, set())), "argument 1 of worker"),
        (build(Deferred(list)), build(Deferred(dict)), "argument 1 of worker"),
        (build(functools.partial(work, 1)), build(functools.partial(work, 2)), "argument 1"),
        (build(np.zeros(3)), build(np.zeros(4)), r"argument 1 of worker.*\(4,\) float64"),
        (build(np.zeros(3)), build(np.zeros(3, "f4")), "argument 1 of worker.*float32"),
        (build(np.int64(1)), build(np.int64(2)), "argument 1 of worker"),
        (build(), build(label="other"), "role 1"),
        (build(replicas=2), build(replicas=3), "role 1"),
        (build(function=_adds_one), build(function=_adds_two), "code of worker"),
        (
            build(function=_with_constant(1)),
            build(function=_with_constant(2)),
            "code of worker",
        ),
        (build(function=lambda *args: 1), build(function=lambda *args: 2), "code of worker"),
        (build(daemon=True), build(), "settings of worker"),
        (build(placement={"spread": True}), build(), "placement of worker"),
    ],
)
def test_what_differs_is_named(first, second, named):
    import re

    assert re.search(named, difference(first, second))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.zeros(3), np.ones(3)),
        (Counter(1), Counter(2)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (object(), object()),
        (lambda: 1, lambda: 1),
    ],
    ids=["array", "object", "dict order", "address", "function"],
)
def test_what_may_differ(first, second):
    assert difference(build(first), build(second)) == ""


def test_the_edges_count():
    def one(index):
        program = Program("p")
        workers = program.add_node(PyNode(work), label="w", replicas=2)
        program.add_node(PyNode(work, workers[index]), label="x")
        return program

    assert difference(one(0), one(1)).startswith('"argument 0 of x" is handle w/1 on rank 1')


def test_the_code_of_methods_counts():
    def one(step):
        class Local(Counter):
            def add(self, n):
                return super().add(n + step)

        program = Program("p")
        program.add_node(ServiceNode(Local), label="c")
        return program

    assert difference(one(1), one(1)) == ""
    assert "code of c" in difference(one(1), one(2))


def test_a_member_of_a_group_and_of_a_colocation():
    def one(last):
        program = Program("p")
        with program.group("g"):
            program.add_node(PyNode(work, 1))
            program.add_node(PyNode(work, last))
        program.add_node(Colocation([PyNode(work, last)]), label="c")
        return program

    assert '"argument 0 of g (part 1)"' in difference(one(1), one(2))


def test_cycles_end():
    cycle = [1]
    cycle.append(cycle)
    assert Describer().text(cycle) == "list[1, <cycle>]"

    def first():
        return second()

    def second():
        return first()

    assert Describer().callable(first) == Describer().callable(first)


def test_many_functions_that_know_each_other_take_no_time():
    functions = [lambda: functions for _ in range(40)]
    assert Describer().callable(functions[0]).startswith("function ")


def test_nothing_has_an_address():
    values = [
        object(),
        Counter(),
        work,
        Counter.add,
        Counter().add,
        len,
        np,
        iter([]),
        [].append,
    ]
    for value in (values, dict(enumerate(values)), Deferred(Counter, *values)):
        assert "0x" not in Describer().text(value)


SCRIPT = """
import enum, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import helper
from mpiml.digest import describe, digest, stable_hash
from mpiml.nodes import PyNode, ServiceNode
from mpiml.program import Program

class Service:
    kinds = ("a", "b")
    def serve(self, x):
        return x in {"red", "green", "blue"}

def body(service, *args):
    return [y for y in args if y in {"one", "two", "three"}]

program = Program("p")
service = program.add_node(ServiceNode(Service), label="s")
names = {f"name{i}" for i in range(20)}
program.add_node(
    PyNode(body, service, names, frozenset(names), {n: n for n in names}, object(), body, helper.f),
    label="w", replicas=2,
)
program.check()
lines = describe(program, Path(__file__))
print(digest(lines).hex(), stable_hash((names, "text", 1.5)), id(program))
print([name for name, _ in lines if name.startswith("file")])
"""


def _run(folder, seed):
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(folder / "script.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    (tmp_path / "helper.py").write_text("import site_like\ndef f(): return {1, 'x'}\n")
    installed = tmp_path / "venv" / "site-packages"
    installed.mkdir(parents=True)
    (tmp_path / "site_like.py").write_text("")
    return tmp_path


def test_digests_agree_between_processes(folder):
    runs = [_run(folder, seed) for seed in (0, 1, 12345)]
    firsts = {line.rsplit(" ", 1)[0] for line, _ in runs}
    assert len(firsts) == 1
    assert runs[0][1] == "['file script.py', 'file helper.py', 'file site_like.py']"


def test_a_changed_module_changes_the_digest(folder):
    before = _run(folder, 0)[0].split()[0]
    (folder / "site_like.py").write_text("# changed\n")
    assert _run(folder, 0)[0].split()[0] != before


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(OSError, match=r"missing\.py"):
        describe(build(), tmp_path / "missing.py")


def test_a_module_that_has_gone_is_said(tmp_path):
    import types

    (tmp_path / "main.py").write_text("")
    module = types.ModuleType("gone_module")
    module.__file__ = str(tmp_path / "gone.py")
    sys.modules["gone_module"] = module
    try:
        assert ("file gone.py", "cannot be read: No such file or directory") in describe(
            build(), tmp_path / "main.py"
        )
    finally:
        del sys.modules["gone_module"]


# first_difference


def test_no_difference():
    assert first_difference([[("a", "1")]] * 3) == ""
    assert first_difference([]) == ""


def test_the_odd_ranks_are_named():
    same, odd = [("a", "1"), ("b", "2")], [("a", "1"), ("b", "3")]
    assert (
        first_difference([same, odd, same, same])
        == '"b" is 3 on rank 1, and 2 on ranks 0, 2, 3'
    )
    assert first_difference([same] * 9 + [odd]) == (
        '"b" is 3 on rank 9, and 2 on the other 9 ranks'
    )
    assert first_difference([odd] * 7 + [same] * 57).startswith(
        '"b" is 3 on ranks 0, 1, 2, 3, 4 and 2 more, and 2 on the other 57 ranks'
    )


def test_the_lowest_rank_is_right_on_a_tie():
    assert (
        first_difference([[("a", "1")], [("a", "2")]]) == '"a" is 2 on rank 1, and 1 on rank 0'
    )


def test_many_values_are_abbreviated():
    text = first_difference([[("a", str(rank))] for rank in range(64)])
    assert text == (
        '"a" is 1 on rank 1, 2 on rank 2, 3 on rank 3, 60 other values on other ranks, '
        "and 0 on rank 0"
    )


# stable_hash


def test_stable_hash_never_changes():
    # A partition of stored data by it must be the same in the next release.
    assert [stable_hash(x) for x in ("word", 7, None, (1, "a"))] == GOLDEN


GOLDEN = [12981115760592124742, 188701130056857435, 8493733112532773764, 10801203135637609478]


@pytest.mark.parametrize(
    "equal",
    [
        (
            1,
            1.0,
            True,
            np.int32(1),
            np.float64(1),
            fractions.Fraction(1),
            decimal.Decimal(1),
            1 + 0j,
        ),
        (0.5, fractions.Fraction(1, 2), np.float32(0.5)),
        (0.0, -0.0, 0),
        ("a", np.str_("a")),
        (b"a", bytearray(b"a")),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({1, 2}, frozenset([2.0, 1])),
        (math.inf, np.float32(math.inf)),
    ],
)
def test_equal_values_have_equal_hashes(equal):
    assert len({stable_hash(value) for value in equal}) == 1


def test_different_values_have_different_hashes():
    values = [
        None,
        0,
        1,
        -1,
        2**61 - 1,
        2**64,
        0.1,
        "",
        "0",
        b"",
        b"0",
        (),
        [],
        {},
        set(),
        ((),),
    ]
    values += [
        ("a", "b"),
        ("ab",),
        ("a", ("b",)),
        ["a", "b"],
        {"a": "b"},
        {"a", "b"},
        1j,
        math.inf,
    ]
    values += [-math.inf, math.nan, (1, 2), (12,), ("1,2",)]
    assert len({stable_hash(value) for value in values}) == len(values)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple),
    max_leaves=6,
)


@given(PLAIN, PLAIN)
def test_hashes_are_equal_where_values_are(first, second):
    assert (stable_hash(first) == stable_hash(second)) == (first == second)
    assert 0 <= stable_hash(first) < 2**64


@pytest.mark.parametrize("value", [object(), [object()], np.zeros(2), work, Path("a")])
def test_other_values_are_refused(value):
    with pytest.raises(UsageError, match="stable_hash: a value of type"):
        stable_hash(value)


def test_a_value_that_holds_itself_is_refused():
    cycle = []
    cycle.append(cycle)
    with pytest.raises(UsageError, match="holds itself"):
        stable_hash(cycle)


VERSION = """
import sys
from mpiml.digest import _versions
without = dict(_versions())["version of numpy"]
assert "numpy" not in sys.modules
import numpy
assert without == numpy.__version__ == dict(_versions())["version of numpy"], without
"""


def test_the_version_of_numpy_is_the_same_whether_a_rank_has_loaded_it_or_not():
    subprocess.run([sys.executable, "-c", VERSION], check=True, timeout=60)


@pytest.mark.parametrize("text", [None, "", "version = get_versions()"])
def test_a_numpy_whose_file_does_not_tell_is_loaded(tmp_path, text):
    package = tmp_path / "numpy"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '1.2.3'\n")
    if text is not None:
        (package / "version.py").write_text(text)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from mpiml.digest import _versions\n"
        "assert dict(_versions())['version of numpy'] == '1.2.3'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
