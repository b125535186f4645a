"""The other side of arrays.f90: looks at each array, and returns it with every element plus 1."""

import numpy as np

import mpiml

CASES = [
    ("float64", ()),
    ("float32", (5,)),
    ("int32", (4, 3)),
    ("int64", (2, 3, 4)),
    ("complex64", (2, 2, 2, 2)),
    ("complex128", (3, 2)),
    ("float64", (6, 4)),
    ("float64", (6, 4), np.s_[::2]),
    ("float64", (6, 4), np.s_[::-1, 1:3]),
    ("float64", (0, 3)),
    ("int8", (3,)),
    ("int16", (2,)),
    ("bool", (2,)),
    ("float64", (400, 300)),
    ("float64", (6, 4), np.s_[1]),
]


def counted(dtype, shape, cut=()):
    """i1 + 10*i2 + 100*i3 + 1000*i4, from 1: what stands in the Fortran program."""
    if dtype == "bool":
        return np.array([True, False])
    x = np.array(1.0)
    if shape:
        x = sum(10.0**d * (i + 1) for d, i in enumerate(np.indices(shape)))
    return (x - 1j if "complex" in dtype else x).astype(dtype)[cut]


class Checker:
    def __init__(self):
        self.seen = []

    def check(self, number, x):
        expected = counted(*CASES[number])
        assert x.dtype == expected.dtype, (number, x.dtype)
        np.testing.assert_array_equal(x, expected, strict=True)
        self.seen.append(int(number))
        return ~x if x.dtype == bool else (x + 1).astype(x.dtype, order="CF"[number % 2])

    def fail(self):
        raise ValueError("on purpose")

    def one(self):
        return np.ones(5)

    def done(self):
        print("all seen:", sorted(self.seen) == list(range(len(CASES))))


def talk(up, down):
    field = up.get()
    np.testing.assert_array_equal(
        field, counted("float64", (6, 4), np.s_[::2, 1:]), strict=True
    )
    down.put(counted("float64", (3, 4)))


def build():
    program = mpiml.Program("arrays")
    up, down = program.topic("up", mpiml.Keep(2)), program.topic("down")
    checker = program.add_node(mpiml.ServiceNode(Checker), label="checker")
    program.add_node(mpiml.PyNode(talk, up.subscriber(), down.publisher()), label="talker")
    tree = {"w": counted("float64", (6, 4)), "b": np.zeros(5, "float32")}
    server = mpiml.ParameterServerNode(tree, mpiml.optim.SGD(0.5), "async")
    calls = [checker, program.add_node(server, label="params")]
    solver = mpiml.ExternalNode(
        publishes={up: mpiml.Array("float64", (None, None))}, subscribes=down, calls=calls
    )
    program.add_node(solver, label="solver")
    return program
