import functools
from collections import deque

import numpy as np
import pytest

from mpiml.handles import Deferred, Handle, HandleSequence
from mpiml.hiding import hidden


class Graph:
    name = "g"


COUNTER = Handle(Graph(), "counter", 0, 0)
WORKERS = HandleSequence(COUNTER.program, "worker", 1, None)


class Holder:
    def __init__(self, held):
        self.held = held

    def method(self):
        return self.held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


def closure(held):
    return lambda: held


def default(held):
    def body(x=held, *, y=None):
        return x, y

    return body


def decorated(held):
    inner = closure(held)

    @functools.wraps(inner)
    def wrapper():
        return inner()

    return wrapper


def local_class(held):
    class Local:
        def run(self):
            return held

    return Local


@pytest.mark.parametrize(
    "held", [COUNTER, WORKERS, [1, {"x": COUNTER}]], ids=["one", "many", "deep"]
)
@pytest.mark.parametrize(
    ("hide", "container"),
    [
        (closure, "the closure of closure"),
        (default, "a default argument of default"),
        (decorated, "the closure of closure"),
        (local_class, "the closure of local_class"),
        (lambda held: functools.partial(print, held), "a functools.partial of print"),
        (lambda held: functools.partial(print, x=held), "a functools.partial of print"),
        (Holder, "an attribute of a plain object (Holder)"),
        (Slotted, "an attribute of a plain object (Slotted)"),
        (lambda held: Holder(held).method, "an attribute of a plain object (Holder)"),
        (lambda held: deque([held]), "a deque"),
        (lambda held: np.array([held, None], dtype=object), "a ndarray of objects"),
    ],
    ids=[
        "closure",
        "default",
        "decorated",
        "class",
        "partial",
        "keyword",
        "object",
        "slots",
        "method",
        "deque",
        "array",
    ],
)
def test_hidden_handles_are_found(hide, container, held):
    found = hidden([hide(held)], "argument 0")
    assert len(found) == 1
    assert found[0].container.startswith(container)
    assert found[0].path.startswith("argument 0[0]")


@pytest.mark.parametrize("kind", [set, frozenset])
def test_sets_hide_handles(kind):
    (found,) = hidden(kind([COUNTER]), "argument 0")
    assert found == ("argument 0 member", f"a {kind.__name__}", COUNTER)


def test_the_path_names_the_variable():
    (found,) = hidden(closure(COUNTER), "body")
    assert found.path == "body closure variable 'held'"


def test_a_class_attribute_hides_a_handle():
    cls = type("Worker", (), {"counter": COUNTER})
    (found,) = hidden(cls, "Worker")
    assert found.path == "Worker.counter"


def test_handles_in_containers_are_not_hidden():
    assert hidden([COUNTER, {"x": (COUNTER,)}, Deferred(dict, x=WORKERS)]) == []


def test_ordinary_arguments_are_not_suspected():
    cyclic = Holder(None)
    cyclic.held = cyclic
    assert (
        hidden([cyclic, np.zeros(3), np, print, len, Holder, {1, 2}, closure(7), object()])
        == []
    )


def test_a_cell_that_is_empty_is_passed_over():
    def body():
        return later

    assert hidden(body) == []
    later = 1
    assert body() == later
