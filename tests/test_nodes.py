import pytest

from mpiml.errors import UsageError
from mpiml.nodes import (
    Colocation,
    PyClassNode,
    PyNode,
    ServiceNode,
    public_methods,
    served_methods,
)


class Base:
    limit = 3

    def inherited(self):
        pass


class Service(Base):
    Config = dict

    def __init__(self, start, *, scale=1):
        pass

    def add(self, n):
        pass

    @staticmethod
    def fixed():
        pass

    @classmethod
    def made(cls):
        pass

    @property
    def total(self):
        return 1

    def run(self):
        pass

    def state_dict(self):
        pass

    def load_state_dict(self, state):
        pass

    def _private(self):
        pass


def body(counter, steps=1):
    pass


def test_public_methods():
    assert list(public_methods(Service)) == ["add", "fixed", "inherited", "made"]
    assert public_methods(Service)["add"] is Service.add


def test_allow_restricts():
    assert list(served_methods(Service, ["made", "add"])) == ["add", "made"]
    with pytest.raises(
        UsageError, match=r"allow= names 'run', which is no public method of Service"
    ):
        served_methods(Service, ["run"])


@pytest.mark.parametrize("name", ["futures", "stream", "with_options"])
def test_reserved_names(name):
    cls = type("Bad", (), {name: lambda self: None})
    with pytest.raises(UsageError, match=f"node 'x': Bad has a method '{name}'"):
        served_methods(cls, where="node 'x'")


def test_a_property_of_a_reserved_name_is_no_method():
    cls = type("Fine", (), {"stream": property(lambda self: 1)})
    assert served_methods(cls) == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: PyNode(body(1)),
            r"PyNode: expected a function, got an object of type NoneType",
        ),
        (lambda: PyClassNode(body), r"PyClassNode: expected a class, got the function body"),
        (lambda: PyClassNode(Base), r"Base has no run\(\) method"),
        (lambda: ServiceNode(body), r"ServiceNode: expected a class, got the function body"),
        (lambda: ServiceNode(Base()), r"expected a class, got an object of type Base"),
        (lambda: Colocation([]), "at least one node"),
        (lambda: Colocation(PyNode(body)), "expected a list of nodes"),
        (lambda: Colocation([PyNode(body), body]), "item 1 is the function body"),
    ],
)
def test_wrong_callables_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (
            PyNode(body),
            r"body takes \(counter, steps=1\), got 0 positional: missing.*'counter'",
        ),
        (PyNode(body, 1, 2, 3), "got 3 positional: too many positional arguments"),
        (PyNode(body, 1, other=2), r"got 1 positional, other=: got an unexpected keyword"),
        (ServiceNode(Service), r"Service takes \(start, \*, scale=1\)"),
        (ServiceNode(Base, 1), "too many positional"),
    ],
)
def test_arguments_that_do_not_fit(node, message):
    with pytest.raises(UsageError, match=message):
        node.check_arguments()


@pytest.mark.parametrize(
    "node",
    [PyNode(body, 1), PyNode(print, 1, 2), PyNode(dict), ServiceNode(Service, 1, scale=2)],
)
def test_arguments_that_fit(node):
    node.check_arguments()


@pytest.mark.parametrize("wrap", [lambda f: f, staticmethod, classmethod])
def test_run_takes_no_arguments(wrap):
    def run(self, steps):
        pass

    cls = type("Runner", (), {"run": wrap(run)})
    for node in (PyClassNode(cls), ServiceNode(cls)):
        with pytest.raises(UsageError, match=r"Runner\.run takes"):
            node.check_arguments()
    taken = {staticmethod: lambda: None}.get(wrap, lambda self: None)
    PyClassNode(type("Runner", (), {"run": wrap(taken)})).check_arguments()


def test_configure_replaces_the_arguments_once():
    node = PyNode(body)
    node.configure(1, steps=2)
    assert (node.args, node.kwargs) == ((1,), {"steps": 2})
    with pytest.raises(UsageError, match="configured already"):
        node.configure(2)


def test_nodes_say_what_they_are():
    assert repr(ServiceNode(Service, 1)) == "ServiceNode(Service)"
    assert [
        node.kind for node in (PyNode(body), PyClassNode(Service), ServiceNode(Service))
    ] == [
        "PyNode",
        "PyClassNode",
        "ServiceNode",
    ]
    assert repr(Colocation([PyNode(body)])) == "Colocation([PyNode(body)])"
