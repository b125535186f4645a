"""libmpiml's bytes against those of the Python side, and against bytes that are none."""

import ctypes
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpiml
from mpiml import wire
from mpiml.control import REQUESTED, Note
from mpiml.external.crowd import Crowd
from mpiml.external.encoding import Named, decode, encode
from mpiml.external.manifest import manifest
from tests.external.building import plain
from tests.external.test_c_arrays import DTYPES, Array, Spec, counted, described

VERSION, ATTACH = 5, 7
size_t, pointer, u32, u64 = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64


class Frame(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("kind", "encoding", "flags")),
        *((name, u32) for name in ("source", "target", "aux")),
        ("id", u64),
        ("name", pointer),
        ("name_size", size_t),
        ("body", pointer),
        ("body_size", size_t),
        ("buffers", ctypes.c_int),
        ("raw", pointer),
    ]


class Entry(ctypes.Structure):
    _fields_ = [
        ("spec", Spec),
        ("bytes", size_t),
        ("name", pointer),
        ("name_size", size_t),
        ("array", ctypes.POINTER(Array)),
        ("elements", pointer),
        ("apart", ctypes.c_bool),
    ]


class Way(ctypes.Structure):
    _fields_ = [
        ("vertex", u32), ("aux", u32), ("rank", ctypes.c_int), ("number", u64), ("open", u32),
        ("waiting", u32), ("oldest", pointer), ("newest", pointer), ("gone", ctypes.c_bool),
    ]  # fmt: skip


class Heard(ctypes.Structure):
    _fields_ = [
        ("vertex", u32), ("aux", u32), ("rank", ctypes.c_int), ("number", u64), ("came", u64),
    ]  # fmt: skip


class Topic(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("number", u32), ("window", u32), ("policy", ctypes.c_int),
        ("round_robin", ctypes.c_bool), ("publishes", ctypes.c_bool), ("hears", ctypes.c_bool),
        ("expected", Spec), ("nways", ctypes.c_int), ("nheard", ctypes.c_int),
        ("ways", ctypes.POINTER(Way)), ("heard", ctypes.POINTER(Heard)), ("turn", ctypes.c_int),
        ("kept", pointer), ("version", u64),
    ]  # fmt: skip


class Method(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("stream", ctypes.c_bool)]


class Replica(ctypes.Structure):
    _fields_ = [("vertex", u32), ("rank", ctypes.c_int)]


class Service(ctypes.Structure):
    _fields_ = [
        ("label", ctypes.c_char_p), ("allowed", ctypes.c_bool), ("nreplicas", ctypes.c_int),
        ("nmethods", ctypes.c_int), ("replicas", ctypes.POINTER(Replica)),
        ("methods", ctypes.POINTER(Method)),
    ]  # fmt: skip


class Server(ctypes.Structure):
    _fields_ = [("label", ctypes.c_char_p), ("allowed", ctypes.c_bool)]


class Bell(ctypes.Structure):
    _fields_ = [
        ("host", ctypes.c_char_p), ("path", ctypes.c_char_p), ("nlines", ctypes.c_int),
        ("ranks", ctypes.POINTER(ctypes.c_int)), ("lines", ctypes.POINTER(u32)),
    ]  # fmt: skip


class Manifest(ctypes.Structure):
    _fields_ = [
        ("vertex", u32), ("guests", ctypes.c_int), ("npython", ctypes.c_int),
        ("python", ctypes.POINTER(ctypes.c_int)), ("title", ctypes.c_char_p),
        ("ntopics", ctypes.c_int), ("nservices", ctypes.c_int), ("nservers", ctypes.c_int),
        ("nbells", ctypes.c_int), ("topics", ctypes.POINTER(Topic)),
        ("services", ctypes.POINTER(Service)), ("servers", ctypes.POINTER(Server)),
        ("bells", ctypes.POINTER(Bell)),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def lib():
    sources = ["array.c", "copy.c", "errors.c", "wire.c", "manifest.c"]
    lib = ctypes.CDLL(str(plain("libwire.so", sources)))
    for name in ("mi_frame_write", "mi_body_write", "mi_note_write", "mi_frame_length"):
        getattr(lib, name).restype = size_t
    lib.mi_frame_read.restype = ctypes.c_bool
    lib.mi_frame_read.argtypes = [pointer, size_t, pointer]
    lib.mi_body_write.argtypes = [pointer, size_t, ctypes.c_int, ctypes.c_int, pointer]
    lib.mi_manifest_read.argtypes = [pointer, pointer, size_t, ctypes.c_char_p, ctypes.c_int]
    lib.mpiml_error.restype = ctypes.c_char_p
    return lib


def copied(data):
    """The bytes in memory of exactly their size, so that sanitizers see what is read beyond."""
    return np.frombuffer(data, np.uint8).copy() if data else np.empty(0, np.uint8)


def frame_of(lib, data):
    memory = copied(data)
    frame = Frame()
    good = lib.mi_frame_read(memory.ctypes.data, len(memory), ctypes.byref(frame))
    frame.memory = memory
    return frame if good else None


def test_frames_are_those_of_python(lib):
    name, body, lengths = b"method", b"body of it", (1 << 40, 0, 7)
    message = wire.join(
        wire.REQUEST, 3, 1 << 31, 1 << 60, 77, encoding=2, flags=wire.FLAG_NESTED, name=name,
        body=body, lengths=lengths,
    )  # fmt: skip
    frame = frame_of(lib, message)
    numbers = (frame.kind, frame.encoding, frame.flags, frame.source, frame.target, frame.aux)
    assert numbers == (wire.REQUEST, 2, wire.FLAG_NESTED, 3, 1 << 31, 77)
    assert frame.id == 1 << 60
    assert ctypes.string_at(frame.name, frame.name_size) == name
    assert ctypes.string_at(frame.body, frame.body_size) == body
    assert [lib.mi_frame_length(ctypes.byref(frame), i) for i in range(3)] == list(lengths)
    slot = np.full(32768, 99, np.uint8)
    size = lib.mi_frame_write(
        slot.ctypes.data_as(pointer), ctypes.byref(frame), (size_t * 3)(*lengths)
    )
    assert slot[:size].tobytes() == message
    frame.body_size = 32768  # with the header it does not fit
    assert lib.mi_frame_write(slot.ctypes.data_as(pointer), ctypes.byref(frame), None) == 0
    for cut in range(len(message)):
        assert frame_of(lib, message[:cut]) is None
    assert frame_of(lib, message + b"x") is None
    assert frame_of(lib, b"\2" + message[1:]) is None


def written(lib, form, arrays, names=None, limit=24576):
    """What libmpiml writes for arrays, and its buffers."""
    entries = (Entry * 32)()
    kept = []
    for i, x in enumerate(arrays):
        kept.append(described(x))
        lib.mi_spec_of.restype = Spec
        name = ctypes.create_string_buffer((names[i] if names else "").encode())
        kept.append(name)
        entries[i] = Entry(
            spec=lib.mi_spec_of(ctypes.byref(kept[-2])), bytes=x.nbytes,
            name=ctypes.addressof(name), name_size=len(name) - 1,
            array=ctypes.pointer(kept[-2]),
        )  # fmt: skip
    body = np.full(limit, 99, np.uint8)
    size = lib.mi_body_write(body.ctypes.data, limit, form, len(arrays), entries)
    buffers = []
    for i, x in enumerate(arrays):
        if entries[i].apart:
            buffers.append(bytearray(x.tobytes("A" if entries[i].spec.order == b"F" else "C")))
    return bytes(body[:size]), buffers


def test_bodies_are_read_by_python(lib):
    arrays = [counted(dtype, (2, 3), order) for dtype in DTYPES for order in "CF"]
    body, buffers = written(lib, 2, arrays)
    assert not buffers
    for array, expected in zip(decode(body, ()), arrays, strict=True):
        np.testing.assert_array_equal(array, expected)
        assert array.dtype == expected.dtype
        assert array.flags.f_contiguous == expected.flags.f_contiguous
    large = [
        counted("float64", (50, 60), "F"),
        counted("int8", (16379,)),
        counted("int8", (5, 1)),
    ]
    body, buffers = written(lib, 3, [*large, large[0][::-2]], ["w", "é", "x" * 255, "t"])
    assert [len(b) for b in buffers] == [24000, 12000]  # the other two share what may be inline
    found = decode(body, buffers) if len(buffers) == 2 else None
    assert list(found) == ["w", "é", "x" * 255, "t"]
    np.testing.assert_array_equal(found["w"], large[0])
    np.testing.assert_array_equal(found["t"], large[0][::-2])


def test_a_body_that_does_not_fit_is_not_written(lib):
    arrays = [counted("float64", (100,))]
    assert written(lib, 1, arrays, limit=816)[0] == b""
    assert len(written(lib, 1, arrays, limit=824)[0]) == 824


def read(lib, value):
    """What libmpiml reads of a value that Python encodes: form, and specs, names, elements."""
    encoding, body, buffers = encode(value, "test")
    message = wire.join(
        wire.REPLY, 0, 0, 1, encoding=encoding, body=body, lengths=tuple(map(len, buffers))
    )
    frame = frame_of(lib, message)
    form, entries = ctypes.c_int(), (Entry * 32)()
    count = lib.mi_body_read(ctypes.byref(frame), ctypes.byref(form), entries)
    found = []
    for entry in entries[: max(count, 0)]:
        shape = tuple(entry.spec.shape[: entry.spec.ndim])
        data = (
            bytes(buffers.pop(0))
            if entry.apart
            else ctypes.string_at(entry.elements, entry.bytes)
            if entry.bytes
            else b""
        )
        name = ctypes.string_at(entry.name, entry.name_size).decode()
        found.append((name, entry.spec.dtype, entry.spec.order.decode(), shape, data))
    return count, form.value, found


def test_bodies_of_python_are_read(lib):
    assert read(lib, None) == (0, 0, [])
    assert read(lib, ()) == (0, 2, [])
    assert read(lib, 2.5) == (1, 1, [("", 12, "C", (), np.float64(2.5).tobytes())])
    x, y = counted("complex128", (40, 50), "F"), counted("bool", (0, 3))
    assert read(lib, (x, y, True)) == (
        3, 2,
        [("", 14, "F", (40, 50), x.tobytes("F")), ("", 1, "C", (0, 3), b""),
         ("", 1, "C", (), b"\1")],
    )  # fmt: skip
    named = Named({"layers/0/w": None, "é": np.int16(3)})
    assert read(lib, named) == (
        2, 3, [("layers/0/w", 0, "C", (), b""), ("é", 3, "C", (), b"\3\0")]
    )  # fmt: skip


bodies = [
    encode((np.arange(3.0), counted("int8", (2, 2), "F")), "test")[1],
    encode(Named({"a": None, "b": np.zeros(5)}), "test")[1],
]


def tried(lib, body, lengths=()):
    frame = frame_of(lib, wire.join(wire.REPLY, 0, 0, encoding=2, body=body, lengths=lengths))
    form, entries = ctypes.c_int(), (Entry * 32)()
    return lib.mi_body_read(ctypes.byref(frame), ctypes.byref(form), entries)


def test_what_is_no_body_is_refused(lib):
    for body in bodies:
        assert tried(lib, body) == 2
        assert tried(lib, body, (8,)) == -1  # a buffer too many
        for cut in range(len(body)):
            assert tried(lib, body[:cut]) == -1
        assert tried(lib, body + bytes(8)) == -1


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_changed_bytes_never_lead_astray(lib, data):
    body = bytearray(data.draw(st.sampled_from(bodies)))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    assert -1 <= tried(lib, bytes(body)) <= 32


def test_notes_are_those_of_python(lib):
    note = np.zeros(4200, np.uint8)
    text = "mpiml_stop() was called"
    size = lib.mi_note_write(
        note.ctypes.data_as(pointer), REQUESTED, -1, u32(5), u32(6), text.encode()
    )
    assert note[:size].tobytes() == Note(REQUESTED, -1, 5, 6, text).pack()


class Net:
    def step(self, x):
        return x

    def walk(self):
        yield 1


@functools.cache
def graph():
    """Bytes of a program with all that a manifest has."""
    program = mpiml.Program("graph")
    fields = program.topic("fields", policy=mpiml.Keep(4), deliver="round_robin")
    params = program.topic("params")
    alone = program.topic("alone", policy=mpiml.Keep(2, on_full="drop_oldest"))
    net = program.add_node(mpiml.ServiceNode(Net), label="net", replicas=2)
    other = program.add_node(mpiml.ServiceNode(Net), label="other")
    server = mpiml.ParameterServerNode(np.zeros(3), mpiml.optim.SGD(0.1), "async")
    server = program.add_node(server, label="ps")
    node = mpiml.PyNode(print, fields.subscriber(), params.publisher(), alone.subscriber())
    program.add_node(node, label="trainer", replicas=3)
    solver = mpiml.ExternalNode(
        publishes={fields: mpiml.Array("f4", (None, 7))}, subscribes=params, calls=[net, server]
    )
    program.add_node(solver, label="solver", replicas=2)
    one = mpiml.ExternalNode(publishes=alone, calls=other)
    program.add_node(one, label="one", replicas=1)
    vertices = program.expand([unit.replicas for unit in program.units])
    # ranks of the whole: Python is 0, 3, 4; guests are 1 (solver), 2 (one), 5 (solver)
    crowd = Crowd(("solver", "one", "solver"), (1, 2, 5), (0, 3, 4))
    ranks = [0, 1, 2, 0, 0, 1, 2, 3, 5, 4]
    bells = [("here", "/dev/shm/bell", [(0, 0), (3, 1)])]
    return manifest("graph", vertices, ranks, crowd, bells), vertices


def read_manifest(lib, data, label, index):
    memory, found = copied(data), Manifest()
    code = lib.mi_manifest_read(
        ctypes.byref(found), memory.ctypes.data, len(memory), label.encode(), index
    )
    return code, found


def test_a_manifest_tells_a_guest_its_place(lib):
    data, vertices = graph()
    first = next(v.id for v in vertices if v.role == "solver")
    trainers = [v.id for v in vertices if v.role == "trainer"]
    code, found = read_manifest(lib, data, "solver", 1)
    assert code == 0, lib.mpiml_error()
    assert found.vertex == first + 1
    assert (found.guests, found.python[: found.npython]) == (3, [0, 3, 4])
    assert found.title == b"graph"
    topics = {t.name.decode(): t for t in found.topics[: found.ntopics]}
    fields, params, alone = topics["fields"], topics["params"], topics["alone"]
    assert (fields.policy, fields.window, fields.round_robin) == (1, 4, True)
    assert (params.policy, params.window, alone.policy, alone.window) == (0, 1, 2, 2)
    assert (fields.publishes, fields.hears) == (True, False)
    assert (params.publishes, params.hears) == (False, True)
    assert (alone.publishes, alone.hears, alone.nways) == (False, False, 0)
    assert fields.expected.dtype == DTYPES["float32"]
    assert fields.expected.shape[: fields.expected.ndim] == [-1, 7]
    assert (params.expected.dtype, params.expected.ndim) == (0, -1)
    places = dict(zip(trainers, (0, 3, 4), strict=True))
    assert {w.vertex: w.rank for w in fields.ways[: fields.nways]} == places
    assert {h.vertex: h.rank for h in params.heard[: params.nheard]} == places
    assert {w.aux >> 16 for w in fields.ways[: fields.nways]} == {fields.number}
    services = {s.label.decode(): s for s in found.services[: found.nservices]}
    net, other = services["net"], services["other"]
    assert (net.allowed, other.allowed) == (True, False)
    assert [(r.vertex, r.rank) for r in net.replicas[: net.nreplicas]] == [(0, 0), (1, 3)]
    methods = {m.name.decode(): m.stream for m in net.methods[: net.nmethods]}
    assert methods == {"step": False, "walk": True}
    assert [(s.label, s.allowed) for s in found.servers[: found.nservers]] == [(b"ps", True)]
    bell = found.bells[0]
    assert (found.nbells, bell.host, bell.path) == (1, b"here", b"/dev/shm/bell")
    assert list(zip(bell.ranks[:2], bell.lines[:2], strict=True)) == [(0, 0), (3, 1)]
    lib.mi_manifest_clear(ctypes.byref(found))
    code, found = read_manifest(lib, data, "one", 0)
    topics = {t.name.decode(): t for t in found.topics[: found.ntopics]}
    assert topics["alone"].nways == 3
    assert (topics["fields"].nways, topics["fields"].publishes) == (0, False)
    assert topics["params"].nheard == 0
    lib.mi_manifest_clear(ctypes.byref(found))


def test_what_is_no_manifest_is_refused(lib):
    data, _ = graph()
    assert read_manifest(lib, data, "solver", 2)[0] == ATTACH
    assert read_manifest(lib, data, "nobody", 0)[0] == ATTACH
    for cut in range(len(data)):
        assert read_manifest(lib, data[:cut], "solver", 0)[0] == VERSION
    assert read_manifest(lib, data + b"x", "solver", 0)[0] == VERSION
    assert read_manifest(lib, b"\2" + data[1:], "solver", 0)[0] == VERSION


@settings(max_examples=200, deadline=None)
@given(at=st.integers(0, 10_000), value=st.integers(0, 255))
def test_changed_manifests_never_lead_astray(lib, at, value):
    data = bytearray(graph()[0])
    data[at % len(data)] = value
    code, found = read_manifest(lib, bytes(data), "solver", 0)
    assert code in (0, VERSION, ATTACH)
    lib.mi_manifest_clear(ctypes.byref(found))
