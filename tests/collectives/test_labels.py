"""What is compared, what is only shown, and how a difference reads."""

import subprocess
import sys

import numpy as np
import pytest

from mpiml.collectives.labels import Label, call_site, mismatch
from mpiml.errors import UsageError

BASE = {
    "kind": "allreduce",
    "op": "sum",
    "name": "grads",
    "leaves": "x (3,) float32",
    "more": "compress=None",
}


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "Bucket.allreduce"},
        {"op": "mean"},
        {"name": None},
        {"name": "other"},
        {"leaves": "x (4,) float32"},
        {"leaves": "x (3,) float64"},
        {"more": "compress='topk'"},
    ],
)
def test_all_but_the_place_is_compared(change):
    label = Label(**BASE, site=("a.py", 1))
    assert label.hash == Label(**BASE, site=("b.py", 2)).hash
    assert label.hash != Label(**{**BASE, **change}).hash
    assert 0 < label.hash < 2**64


def test_the_hash_is_the_same_in_every_process():
    code = f"from mpiml.collectives.labels import Label; print(Label(**{BASE!r}).hash)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(ended.stdout) == Label(**BASE).hash


def test_text_of_the_call():
    assert Label(**BASE).head == "allreduce(op='sum', compress=None, name='grads')"
    assert Label("Bucket.broadcast", more="root=0").head == "Bucket.broadcast(root=0)"
    assert Label("Bucket.allgather").head == "Bucket.allgather()"
    assert Label("a", name="x\ny\udcff").hash  # any text can be a name
    assert Label("a", name="x\ny").text().split("\n")[0] == r"a(name='x\ny')"


def test_the_place_is_the_users():
    path, line = call_site()
    assert path == __file__
    assert line == sys._getframe().f_lineno - 2
    # from inside of a library that calls back
    seen = np.apply_along_axis(lambda x: call_site()[1], 0, np.zeros(1))
    assert seen == sys._getframe().f_lineno - 1


def test_the_place_is_told_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Label("a", site=(str(tmp_path / "b.py"), 3)).place() == "b.py:3"
    assert Label("a", site=("/else/b.py", 3)).place() == "/else/b.py:3"


def test_without_a_place_it_is_that_of_the_call_being_made():
    label = Label("a", "sum", leaves="x")
    line = sys._getframe().f_lineno
    assert label.place().endswith(f"test_labels.py:{line + 1}")
    kept = label.here()
    assert kept.place().endswith(f"test_labels.py:{line + 2}")
    assert str(kept) == f"a(op='sum') at {kept.place()}"
    assert (kept.hash, kept.op, kept.text().split("\n")[2]) == (label.hash, "sum", "x")
    assert label.site is None


def text(kind="allreduce", site=("a.py", 1), leaves="x (3,) float32", **more):
    return Label(kind, "sum", site=site, leaves=leaves, **more).text()


def test_different_calls():
    texts = [text(site=("a.py", 1)), text("Bucket.allreduce", ("a.py", 5), "x\ny"), text()]
    error = mismatch(texts, "role learner", 2)
    assert isinstance(error, UsageError)
    assert str(error) == (
        "role learner: expected the same operation on all 3 members, got allreduce(op='sum') "
        "of x (3,) float32 at a.py:1 (members 0, 2); Bucket.allreduce(op='sum') of 2 arrays "
        "at a.py:5 (member 1). This is member 2. Every member must make the same collective "
        "calls in the same order: look for one under a condition, or in a loop of another "
        "length."
    )


def test_different_names():
    said = str(mismatch([text(name="a"), text(name="b")], "role learner"))
    assert "allreduce(op='sum', name='a') of x (3,) float32 at a.py:1 (member 0)" in said
    assert "allreduce(op='sum', name='b')" in said
    assert "This is" not in said


def test_different_arrays():
    leaves = ["['v'] () int8\n['w'] (3,) float32", "['v'] () int8\n['w'] (4,) float32"]
    texts = [text(leaves=leaf, site=("a.py", 1)) for leaf in (*leaves, leaves[1])]
    assert str(mismatch(texts, "role learner", 0)) == (
        "role learner: expected the same operation on all 3 members, got allreduce(op='sum') "
        "at a.py:1 with other arrays: leaf 1: ['w'] (3,) float32 (member 0), ['w'] (4,) "
        "float32 (members 1-2). This is member 0. Give the same tree, shapes and dtypes on "
        "every member."
    )


def test_many_places_are_not_all_told():
    texts = [text(site=("a.py", n)) for n in range(9)]
    said = str(mismatch([*texts, text("other")], "here"))
    assert "at a.py:0, a.py:1, a.py:2, ... (members 0-8)" in said
