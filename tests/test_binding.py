"""Ranks that are bound too tightly, GPUs that are missing, hosts that are odd: what is said."""

import os

import pytest

from mpiml import cores, machine
from mpiml.binding import binding_notes
from mpiml.config import Config
from mpiml.cores import keeping_cores
from mpiml.digest import first_difference
from mpiml.errors import PlacementError
from mpiml.gpus import why_too_few
from mpiml.hosts import Facts
from mpiml.layout import lay_out
from mpiml.machine import GONE
from mpiml.nodes import PyNode
from mpiml.program import Program
from mpiml.settings import FILL
from mpiml.whereabouts import only_there, place_of, whole_hosts
from tests.mpi import environment, mpiexec

ALL = frozenset(range(8))


def rank(core=None, threads=0, name="a", **more):
    cores = ALL if core is None else frozenset(core if isinstance(core, range) else {core})
    return Facts(name, cores, threads=threads, around=8, **more)


@pytest.mark.parametrize(
    ("facts", "ours", "words"),
    [
        ([rank(0), rank(1)], False, "each rank is bound to 1 core, of 8"),
        ([rank(0, 1), rank(1, 1)], True, "each rank is bound to 1 core, of 8"),
        ([rank(3)], False, "the rank is bound to 1 core, of 8"),
        ([rank(0, 4), rank(1, 4)], False, "OMP_NUM_THREADS=4, but a rank may use 1 core, of 8"),
        ([rank(range(2), 4)], False, "OMP_NUM_THREADS=4, but a rank may use 2 cores"),
        ([Facts("a", frozenset({0}), threads=4)], False, "may use 1 core: its threads"),
        ([rank(0, 1)] * 3, True, "3 ranks are bound to the same core, of 8"),
        ([rank(0, 1)] * 2 + [rank(1, 1)], False, "2 ranks are bound to the same core"),
    ],
)
def test_what_is_said_of_ranks_bound_too_tightly(facts, ours, words):
    [note] = binding_notes(facts, "openmpi", ours)
    assert note.startswith("host a: ")
    assert words in note
    assert "mpirun --bind-to none" in note


@pytest.mark.parametrize(
    ("facts", "ours"),
    [
        ([rank(), rank()], False),
        ([rank(threads=8)], False),
        ([rank(core) for core in range(8)], True),  # a rank for each core
        ([rank(core) for core in range(5)], True),  # unbound, each would have one too
        ([rank(0, 1), rank(1, 1)], False),  # the user says that one is enough
        ([rank(0, given=1), rank(1, given=1)], False),  # so does who asks Slurm for one
        ([rank(range(4)), rank(range(4, 8))], False),
        ([Facts("a", frozenset({0}))] * 4, False),  # a machine of one core, or a container's
        ([rank(0, quota=1.5)], False),
        ([rank(range(2), 4)], True),  # settled once the hosts are known
    ],
)
def test_nothing_is_said_of(facts, ours):
    assert binding_notes(facts, "openmpi", ours) == []


def test_ranks_of_a_part_are_not_told_of_cores_that_the_rest_may_have():
    facts = [rank(0), rank(1)]
    assert binding_notes(facts, whole=False) == []
    assert len(binding_notes([rank(0), rank(0)], whole=False)) == 1


def test_hosts_alike_have_one_note_and_others_their_own():
    alike = [rank(core, name=name) for name in "abc" for core in (0, 1)]
    other = [rank(0, 4, name="d")]
    three, one = binding_notes(alike + other)
    assert three.startswith("3 hosts (a, ...): each rank")
    assert one.startswith("host d: OMP_NUM_THREADS=4")


@pytest.mark.parametrize(
    ("launcher", "cure"),
    [
        ("openmpi", "--map-by slot:PE=4"),
        ("mpich", "-bind-to core:4"),
        ("slurm", "srun --cpus-per-task=4"),
        (None, "taskset"),
    ],
)
def test_the_cure_is_the_launchers(launcher, cure):
    assert cure in binding_notes([rank(0), rank(1)], launcher)[0]
    assert cure in binding_notes([rank(0, 4)], launcher)[0]


def test_a_mask_that_an_import_took_is_put_back(monkeypatch, capsys):
    mask = [frozenset(range(4))]
    monkeypatch.setattr(cores, "affinity", lambda: mask[0])
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, new: mask.__setitem__(0, new))
    monkeypatch.setattr(cores, "read_text", lambda path: "7f00 /x/libgomp-a34b.so.1.0.0\n")

    def load():
        mask[0] = frozenset({0})
        return 5

    assert keeping_cores(load, Config(rank_hint=1))() == 5
    assert mask[0] == frozenset(range(4))
    assert capsys.readouterr().err == ""
    keeping_cores(load, Config(rank_hint=0))()
    assert "bound it to 1 core of 4 (libgomp" in capsys.readouterr().err
    # the user asked for it: OpenMP's threads have the others
    keeping_cores(load, Config(omp_bind=True))()
    assert mask[0] == frozenset({0})
    assert machine.affinity() == frozenset(range(4))
    machine._assumed.clear()
    # the program did it itself
    mask[0] = frozenset(range(4))
    monkeypatch.setattr(cores, "read_text", lambda path: "")
    keeping_cores(load, Config())()
    assert mask[0] == frozenset({0})


def test_binding_by_openmp_is_asked_for_by_three_variables():
    assert not Config.read({"OMP_PROC_BIND": "FALSE"}).omp_bind
    for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"):
        assert Config.read({name: "close"}).omp_bind
    assert Config.read({"OMP_NUM_THREADS": "4,2"}).omp_threads == 4
    assert Config.read({"OMP_NUM_THREADS": "many"}).omp_threads is None


PROGRAM = """
import mpiml
def build():
    p = mpiml.Program("p")
    p.add_node(mpiml.PyNode(print, "ran"), label="w", replicas=mpiml.FILL)
    return p
"""
BOUND = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.execv(sys.executable, [sys.executable, "-m", "mpiml.run", sys.argv[1]])
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core binds all")
def test_ranks_of_a_real_launcher_on_one_core_are_told(mpi_launcher, tmp_path):
    file = tmp_path / "bound_program.py"
    file.write_text(PROGRAM)
    ended = mpiexec(2, "-c", BOUND, file, env=environment(OMP_NUM_THREADS=None)).check()
    assert ended.stderr.count("2 ranks are bound to the same core") == 1, ended
    assert "-bind-to none" in ended.stderr
    ended = mpiexec(2, "-m", "mpiml.run", file, env=environment(OMP_NUM_THREADS=None)).check()
    assert ended.stderr == ""


GPU = "Host a "


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([rank(), rank()], "has no NVIDIA device"),
        ([rank(gpus_hidden=True)] * 2, "CUDA_VISIBLE_DEVICES shows none"),
        ([rank(gpus=(0, 1)), rank()], "no device to 1 of its 2 ranks"),
        ([rank(gpus=(3,))] * 2, "gives 2 ranks the same 1 device"),
        ([rank(gpus=(0, 1))] * 3, "has 2 devices for 3 ranks"),
        ([rank(gpus=(0,))], ""),
        ([rank(gpus=(0,), gpus_private=True)] * 2, ""),
        ([rank(gpus=(0,)), rank(gpus=(1,))], ""),
    ],
)
def test_why_gpus_are_missing(facts, words):
    said = why_too_few(facts)
    assert words in said
    assert bool(said) is bool(words)
    assert said.startswith(GPU if words else "")


def test_a_program_that_asks_for_gpus_is_told_what_its_hosts_lack():
    program = Program("p")
    program.add_node(PyNode(print), label="w", replicas=FILL, placement={"num_gpus": 1})
    with pytest.raises(PlacementError, match=r"num_gpus=1.*Host a has no NVIDIA device"):
        lay_out(program, [rank(), rank()], [None, None])
    with pytest.raises(PlacementError, match=r"gives 2 ranks the same 1 device"):
        lay_out(program, [rank(gpus=(0,))] * 2, [None, None])
    plan, _ = lay_out(program, [rank(gpus=(0, 1))] * 2, [None, None])
    assert plan.gpus == {(0, 0): (0,), (0, 1): (1,)}
    program = Program("q")
    program.add_node(PyNode(print), label="w", placement={"host": "z"})
    with pytest.raises(PlacementError) as caught:
        lay_out(program, [rank()], [None])
    assert "NVIDIA" not in str(caught.value), "a refusal for another reason"


NAMES = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("ranks", "hosts"), [([2, 3], ["b"]), ([2], []), ([1, 2, 3], []), ([0, 1, 2, 3], [])]
)
def test_odd_ranks_that_are_whole_hosts(ranks, hosts):
    assert whole_hosts(ranks, NAMES) == hosts
    assert place_of(ranks, NAMES).endswith("(host b)") is bool(hosts)


def test_a_difference_between_hosts_names_them():
    lines = [[("file m.py", "1 byte")]] * 2 + [[("file m.py", "2 bytes")]] * 2
    assert "2 bytes on ranks 2, 3 (host b), and 1 byte on" in first_difference(lines, NAMES)
    assert "(host" not in first_difference(lines, ["a"] * 4)


def places(*folders, names=NAMES):
    return [
        Facts(name, ALL, folder=folder) for name, folder in zip(names, folders, strict=True)
    ]


def test_what_sets_the_ranks_apart_that_could_not_build():
    assert only_there([0, 1, 2, 3], places(5, 5, 5, 5)) == ""
    assert only_there([], places(5, 5, 5, 5)) == ""
    text = only_there([2, 3], places(5, 5, 5, 5))
    assert "on ranks 2 and 3 (host b) of 4 ranks" in text
    assert "where all hosts see it" in text
    assert "another folder than the others: srun" in only_there([2, 3], places(5, 5, 7, 7))
    assert "srun" not in only_there([2], places(5, 5, 7, 5)), "a part of a host"
    assert "working folder is missing on rank 3:" in only_there([2, 3], places(5, 5, 7, GONE))
    assert "folder" not in only_there([2, 3], places(5, 5, 0, 0)), "it is not known"
    assert "folder" not in only_there([2], places(5, 6, 7, 8)), "each has its own"
    assert "folder" not in only_there([2, 3], places(5, 6, 7, 7)), "each has its own"
    assert only_there([2, 3], places(5, 5, 7, 7), files=False).endswith("not on the others.")
    one = only_there([2], places(5, 5, 5, 5))
    assert one.endswith("on rank 2 of 4 ranks, not on the others.")


def test_a_file_that_one_rank_lacks_is_said_with_its_place(mpi_launcher, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "far_program.py").write_text(PROGRAM)
    code = (
        "import os, sys\n"
        "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ.get('PMI_RANK'))\n"
        "os.chdir(sys.argv[1 + rank])\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'mpiml.run', 'far_program.py'])\n"
    )
    ended = mpiexec(2, "-c", code, tmp_path / "there", tmp_path, env=environment())
    assert ended.rc == 2
    assert f"far_program.py: there is no such file (looked in {tmp_path})" in ended.stderr
    assert "It is so on rank 1 of 2 ranks" in ended.stderr
    assert "They work in another folder" in ended.stderr
    assert "ran" not in ended.stdout
