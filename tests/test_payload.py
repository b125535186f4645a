"""Values as bytes and buffers, without MPI: what arrives, whose memory it is, what is copied."""

import collections
import dataclasses
import functools
import pickle
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given as forall
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpiml import payload_owned
from mpiml.errors import MpimlError, RankFailedError, RemoteError, UsageError
from mpiml.payload import (
    BORROW,
    ENC_ARRAYS,
    ENC_FLAT,
    ENC_NONE,
    ENC_PICKLE,
    ENC_TEXT,
    RESULT,
    SNAPSHOT,
    Packed,
    give,
    pack,
    pack_call,
    pack_error,
    take,
    unpack,
    unpack_call,
    unpack_error,
)

MODES = [BORROW, SNAPSHOT, RESULT]
BIG = 1 << 20


def big(fill=0.0):
    return np.full(BIG // 8, fill)


def aliases(packed, array):
    """Tell whether a buffer of `packed` is the memory of `array`."""
    return any(np.shares_memory(np.frombuffer(b, "u1"), array) for b in packed.buffers)


def arrive(packed):
    """Send it: other memory, writable, as a transport delivers it."""
    return packed.encoding, memoryview(packed.body), [bytearray(b) for b in packed.buffers]


# -- what arrives ------------------------------------------------------------------------


def same(a, b):
    """Equal in type, dtype, shape, order and bytes, all the way down."""
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.hasobject:
            assert a.tolist() == b.tolist()
        else:
            assert a.tobytes() == b.tobytes()
        if a.flags.c_contiguous or a.flags.f_contiguous:
            assert a.flags.c_contiguous == b.flags.c_contiguous
            assert a.flags.f_contiguous == b.flags.f_contiguous
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for x, y in zip(a.values(), b.values(), strict=True):
            same(x, y)
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    else:
        assert a == b or (a != a and b != b)


def leaves(tree):
    if isinstance(tree, np.ndarray):
        yield tree
    elif isinstance(tree, list | tuple):
        for part in tree:
            yield from leaves(part)
    elif isinstance(tree, dict):
        yield from leaves(list(tree.values()))


dtypes = st.one_of(
    hnp.scalar_dtypes(),
    hnp.byte_string_dtypes(),
    hnp.unicode_string_dtypes(),
    hnp.nested_dtypes(max_itemsize=100),
)


@st.composite
def any_array(draw):
    """Arrays of any order and strides, read-only too; some above the size that goes apart."""
    array = draw(hnp.arrays(draw(dtypes), hnp.array_shapes(min_dims=0, min_side=0, max_side=5)))
    if draw(st.booleans()):
        array = np.repeat(array[None], 3000 if array.nbytes < 1000 else 3, 0)
    if draw(st.booleans()):
        array = np.asfortranarray(array)
    if array.ndim and draw(st.booleans()):
        array = array[
            draw(st.sampled_from([np.s_[::2], np.s_[::-1], np.s_[1:], np.s_[..., ::2]]))
        ]
    if draw(st.booleans()):
        array = array.T
    if draw(st.booleans()):
        array = array.view()
        array.flags.writeable = False
    return array


atoms = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters()),
    st.binary(),
    st.binary().map(bytearray),
    st.floats(width=32).map(np.float32),
    st.integers(-9, 9).map(np.int64),
)
trees = st.recursive(
    st.one_of(atoms, any_array()),
    lambda t: st.one_of(
        st.lists(t, max_size=4),
        st.lists(t, max_size=4).map(tuple),
        st.dictionaries(st.text(), t, max_size=4),
    ),
    max_leaves=8,
)


@forall(trees, st.sampled_from(MODES))
def test_any_tree_arrives_equal_writable_and_its_own(tree, mode):
    packed = pack(tree, mode)
    assert isinstance(packed, Packed)
    assert all(b.format == "B" and b.contiguous and b.ndim == 1 for b in packed.buffers)
    arrived = unpack(*arrive(packed))
    same(tree, arrived)
    for array in leaves(arrived):
        assert array.flags.writeable
        assert not any(np.shares_memory(array, source) for source in leaves(tree))


@forall(st.lists(trees, max_size=3).map(tuple), st.dictionaries(st.text(), trees, max_size=2))
def test_any_call_arrives_equal(args, kwargs):
    packed = pack_call(args, kwargs, BORROW)
    same([args, kwargs], list(unpack_call(*arrive(packed))))


@forall(any_array(), st.sampled_from([SNAPSHOT, RESULT]))
def test_a_snapshot_does_not_see_later_changes(source, mode):
    array = source.copy("K")
    before = array.copy("K")
    packed = pack([array, 1], mode)
    memory = array.view()
    if array.size and array.dtype.itemsize and array.flags.c_contiguous:
        memory.reshape(-1).view("u1")[:] ^= 0xFF
    same(before, unpack(*packed)[0])


@pytest.mark.parametrize(
    ("value", "encoding"),
    [
        (None, ENC_NONE),
        ("text", ENC_TEXT),
        ("\ud800", ENC_PICKLE),
        ((1, "a", b"b"), ENC_PICKLE),
        ((), ENC_PICKLE),
        (np.zeros(3), ENC_FLAT),
        (np.float64(3), ENC_FLAT),
        ({"w": np.zeros(3), "n": 1}, ENC_FLAT),
        ([np.zeros(3)], ENC_FLAT),
        ((np.zeros(3), 2), ENC_FLAT),
        (np.zeros((3, 3)).T[1:], ENC_PICKLE),
        ({1: [{}, {2.0, 3}]}, ENC_PICKLE),
    ],
    ids=str,
)
def test_each_value_takes_its_cheapest_way(value, encoding):
    packed = pack(value)
    assert packed.encoding == encoding
    arrived = unpack(*arrive(packed))
    if isinstance(value, np.generic):
        assert (type(arrived), arrived) == (type(value), value)
    else:
        same(value, arrived)


def test_no_arguments_need_no_body():
    assert pack_call((), {}, BORROW) == (ENC_NONE, b"", [])
    assert unpack_call(ENC_NONE, b"", []) == ((), {})


@pytest.mark.parametrize("n", [4, BIG])
def test_an_array_met_twice_is_one_object(n):
    array = np.zeros(n)
    for value in ((array, array), [array, {"deep": array}], {"a": array, "b": array}):
        packed = pack(value)
        assert len(packed.buffers) <= 1
        assert len({id(a) for a in leaves(unpack(*packed))}) == 1
    (a, b), named = unpack_call(*pack_call((array, array), {"c": array}, BORROW))
    assert a is b is named["c"]


@pytest.mark.parametrize(
    "array",
    [
        np.array([{"a": 1}, None], object),
        np.recarray((2,), [("a", "i4")]),
        np.ma.masked_array(np.arange(5000.0), np.arange(5000) % 2 == 0),
        np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
        np.empty((2, 0, 3), "S0"),
        np.array(["a", "bc"], np.dtypes.StringDType())
        if hasattr(np.dtypes, "StringDType")
        else np.zeros(1),
    ],
    ids=lambda a: type(a).__name__ + str(a.dtype),
)
def test_objects_and_subclasses_go_by_their_own_pickle(array):
    arrived = unpack(*arrive(pack({"x": array})))["x"]
    assert type(arrived) is type(array)
    assert arrived.dtype == array.dtype
    assert arrived.tolist() == array.tolist()
    assert arrived.flags.writeable


def test_the_metadata_of_a_dtype_arrives():
    dtype = np.dtype("f8", metadata={"unit": "m"})
    arrived = unpack(*pack((np.zeros(3, dtype),)))[0]
    assert arrived.dtype.metadata == {"unit": "m"}


@dataclasses.dataclass
class Batch:
    x: np.ndarray
    n: int = 0


Pair = collections.namedtuple("Pair", "a b")


def test_arrays_inside_objects_travel_apart_and_keep_their_class():
    x = big(2.0)
    packed = pack(Pair(Batch(x, 3), x[:4]), BORROW)
    assert aliases(packed, x)
    assert len(packed.body) < 1000
    pair = unpack(*arrive(packed))
    assert type(pair) is Pair
    assert type(pair.a) is Batch
    assert np.array_equal(pair.a.x, x)


def test_large_strided_arrays_nested_deep_do_not_go_inside_the_body():
    x = np.zeros((1000, 100))
    packed = pack(Batch([x[:, ::2]]))
    assert len(packed.body) < 1000
    assert packed.buffers[0].nbytes == x.nbytes // 2


def test_a_strided_array_of_the_other_byte_order_keeps_it():
    """NumPy's own pickle makes it native."""
    for n in (10, BIG):
        x = np.arange(n, dtype=">i4")[::2]
        same([[[x]]], unpack(*arrive(pack([[[x]]]))))


class Third:
    """Has a buffer that is not NumPy's, as Arrow's."""

    def __init__(self, memory):
        self.memory = memory

    def __reduce_ex__(self, protocol):
        return Third, (pickle.PickleBuffer(self.memory),)


def test_buffers_of_other_libraries_travel_apart_if_they_are_large():
    for n in (10, BIG):
        memory = bytearray(b"x" * n)
        packed = pack([Third(memory)], SNAPSHOT)
        assert len(packed.buffers) == (n == BIG)
        memory[0] = 0
        assert bytes(unpack(*arrive(packed))[0].memory) == b"x" * n


@pytest.mark.parametrize("n", [0, 5, BIG])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_large_bytes_travel_apart_and_arrive_as_they_were(kind, n):
    value = kind(b"x" * n)
    for packed in (pack(value, BORROW), pack((1, value), BORROW), pack(give(value))):
        assert len(packed.buffers) == (n == BIG)
        assert n < BIG or aliases(packed, np.frombuffer(value, "u1"))
    same(value, unpack(*arrive(pack(value))))
    same((1, value, value), unpack(*arrive(pack((1, value, value)))))
    (a,), kwargs = unpack_call(*arrive(pack_call((value,), {"v": value}, BORROW)))
    same([value, value], [a, kwargs["v"]])


def test_a_large_bytearray_is_captured_and_large_bytes_need_not_be():
    value, fixed = bytearray(BIG), bytes(BIG)
    packed = pack((value, fixed))
    value[0] = 1
    assert unpack(*packed)[0][0] == 0
    assert aliases(packed, np.frombuffer(fixed, "u1"))


@pytest.mark.parametrize("n", [3, 100_000])
def test_a_memoryview_arrives_as_a_writable_one(n):
    source = memoryview(np.arange(n, dtype="i4").tobytes()).cast("i")
    view = unpack(*arrive(pack([source])))[0]
    assert (view.format, view.shape, view.readonly) == ("i", (n,), False)
    assert view == source
    square = memoryview(np.eye(3))
    assert unpack(*pack(square)).tolist() == square.tolist()
    assert unpack(*pack(memoryview(b""))).nbytes == 0
    with pytest.raises(UsageError, match="argument 1"):
        pack_call((memoryview(np.zeros(3, ">f8")),), {}, BORROW)


# -- whose memory ------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
def test_borrowing_copies_no_contiguous_array_and_unpacking_copies_nothing(order):
    x = np.zeros((300, 400), order=order)
    packed = pack_call((x,), {"y": {"deep": x[:, 1:]}}, BORROW)
    assert aliases(packed, x)
    buffers = [bytearray(b) for b in packed.buffers]
    args, kwargs = unpack_call(packed.encoding, packed.body, buffers)
    assert np.shares_memory(args[0], np.frombuffer(buffers[0], "u1"))
    assert np.shares_memory(kwargs["y"]["deep"], np.frombuffer(buffers[1], "u1"))


def test_a_read_only_source_is_borrowed_and_arrives_writable():
    x = big()
    x.flags.writeable = False
    packed = pack(x, BORROW)
    assert aliases(packed, x)
    arrived = unpack(*packed)  # even if a transport passed the very memory on
    arrived[0] = 1
    assert x[0] == 0


def test_more_than_two_gib_are_borrowed_without_touching_them():
    x = np.zeros((2 << 30) + (1 << 28), "u1")
    packed = pack({"x": x}, BORROW)
    assert packed.buffers[0].nbytes == x.nbytes > 1 << 31
    arrived = unpack(packed.encoding, packed.body, packed.buffers)["x"]
    assert arrived.shape == x.shape
    arrived[-1] = 1
    assert x[-1] == 1


def test_a_given_value_is_not_copied_and_arrives_itself():
    x, y = big(1.0), big(2.0)
    for value in (give(x), (give(x), 1), {"k": [give({"w": x})]}, Pair(give(x), 0)):
        packed = pack(value, SNAPSHOT)
        assert aliases(packed, x)
        assert "Given" not in repr(unpack(*packed))
    packed = pack_call((give(x), y), {"z": give([1])}, SNAPSHOT)
    assert aliases(packed, x)
    assert not aliases(packed, y)
    args, kwargs = unpack_call(*packed)
    assert type(args[0]) is np.ndarray
    assert kwargs == {"z": [1]}
    assert unpack(*pack([give(3), [[give("a")]]])) == [3, [["a"]]]
    assert pickle.loads(pickle.dumps(give(3))) == 3
    assert repr(give(3)) == "give(3)"


def test_what_follows_a_given_value_is_copied_again():
    x, y, z = big(), big(), big()
    packed = pack([y, give([x, give(x)]), z], SNAPSHOT)
    assert [aliases(packed, a) for a in (x, y, z)] == [True, False, False]


class Service:
    def __init__(self):
        self.array = big()
        self.tree = {"w": big(), "b": [big()]}
        self.items = (big(),)
        self.cache = weakref.WeakValueDictionary()

    def kept(self):
        return self.array

    def kept_tree(self):
        return self.tree

    def kept_inside(self):
        return {"fresh": big(), "kept": self.array}

    def kept_tuple(self):
        return self.items

    def kept_branch(self):
        return {"b": self.tree["b"]}

    def kept_view(self):
        return self.array[10:]

    def captured(self):
        fresh = big()
        self.later = lambda: fresh
        return fresh

    def watched(self):
        fresh = big()
        self.view = memoryview(fresh)
        return {"w": fresh}

    def viewed(self):
        fresh = big()
        self.view = fresh[5:]
        return fresh

    def weakly(self):
        fresh = big()
        self.cache["x"] = fresh
        return fresh

    def fresh(self):
        return big()

    def fresh_tree(self):
        return {"w": big(), "b": [big(), (big(), {"c": big()})]}

    def fresh_strided(self):
        return [big()]

    def twice(self):
        fresh = big()
        return [fresh, fresh]


def call(method):
    """Do as a server does: the result in one local variable, and nothing else."""
    result = method()
    packed = pack(result, RESULT)
    return packed, [aliases(packed, a) for a in leaves(result)]


@pytest.mark.parametrize(
    "name",
    ["kept", "kept_tree", "kept_tuple", "kept_branch", "kept_view", "captured", "watched",
     "viewed", "weakly"],
)  # fmt: skip
def test_a_result_that_the_service_can_reach_is_copied(name):
    assert not any(call(getattr(Service(), name))[1])


@pytest.mark.parametrize("name", ["fresh", "fresh_tree", "fresh_strided"])
def test_a_result_that_nobody_else_holds_is_not_copied(name):
    service = Service()
    assert all(call(getattr(service, name))[1])


def test_only_what_is_kept_is_copied():
    service = Service()
    assert call(service.kept_inside)[1] == [True, False]
    assert call(service.twice)[1] == [False, False]


def test_a_second_name_in_the_caller_makes_it_copy():
    result = big()
    second = result
    assert not aliases(pack(result, RESULT), second)


def test_the_counts_of_sole_owners_are_those_of_this_python():
    """3: the local variable, the parameter and the argument of getrefcount itself."""
    if payload_owned._ROOT:  # 0 from 3.14 on: everything is copied there
        assert (payload_owned._ROOT, payload_owned._CHILD) == (3, 3)


def test_taken_memory_is_writable_and_of_that_size():
    for n in (0, 1, 1 << 16, BIG + 1):
        memory = memoryview(take(n))
        assert (memory.nbytes, memory.readonly) == (n, False)


# -- code, and what cannot be sent -------------------------------------------------------


def test_lambdas_closures_and_local_classes_go_by_cloudpickle():
    x = big(1.0)

    class Local:
        pass

    packed = pack([lambda n: n + x[0], Local, x], BORROW)
    assert aliases(packed, x)
    f, cls, array = unpack(*arrive(packed))
    assert f(2) == 3
    assert cls.__name__ == "Local"
    assert array.flags.writeable


def test_a_class_of_main_stays_the_same_class_beside_a_lambda(monkeypatch):
    import __main__

    class Main:
        pass

    Main.__module__, Main.__qualname__ = "__main__", "Main"
    monkeypatch.setattr(__main__, "Main", Main, raising=False)
    packed = pack([Main(), lambda: 0])
    assert b"__main__" in packed.body
    assert b"_make_skeleton_class" not in packed.body
    assert type(unpack(*packed)[0]) is Main


def test_the_error_names_the_way_to_the_culprit():
    lock = threading.Lock()
    message = r"argument 2 -> \['a'\] -> \[1\] -> \.x: cannot pickle '_thread.lock' object"
    with pytest.raises(UsageError, match=message) as caught:
        pack_call((1, {"a": [0, Batch(lock)]}), {}, BORROW)
    assert isinstance(caught.value.__cause__, TypeError)
    with pytest.raises(UsageError, match=r"argument 'k' -> \.func -> variable 'lock' of "):
        pack_call((1,), {"k": functools.partial(lambda: lock)}, BORROW)
    with pytest.raises(UsageError, match="the result: cannot pickle"):
        pack(lock, RESULT, "the result")
    with pytest.raises(UsageError, match=r"the result -> \['w'\]: cannot pickle"):
        pack({"w": give(lock)}, RESULT, "the result")


def test_a_cycle_around_a_culprit_ends():
    loop = [threading.Lock()]
    loop.insert(0, loop)
    with pytest.raises(UsageError, match=r"the argument -> \[1\]: "):
        pack(loop)


def test_memory_errors_are_not_called_a_usage_error():
    class Huge:
        def __reduce__(self):
            raise MemoryError("no room")

    with pytest.raises(MemoryError):
        pack([Huge()])


def test_encodings_of_others_are_refused_by_name():
    with pytest.raises(UsageError, match="do not add up"):
        unpack(ENC_ARRAYS, b"", [])
    with pytest.raises(UsageError, match="encoding 9"):
        unpack_call(9, b"", [])


def test_the_pickler_leaves_no_trace_on_other_pickles():
    assert b"mpiml" not in pickle.dumps([np.zeros(3), big()], 5)


# -- exceptions --------------------------------------------------------------------------


class Picky(Exception):
    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")
        self.code = code


class Opaque(Exception):
    def __reduce__(self):
        raise TypeError("no")


class Bomb(Exception):
    def __init__(self, text, fuse=None):
        super().__init__(text)
        self.fuse = fuse

    def __setstate__(self, state):
        raise SystemExit(3)


def travel(error):
    return unpack_error(*arrive(pack_error(error)))


def test_an_exception_arrives_with_class_arguments_attributes_and_notes():
    error = KeyError("k", 3)
    error.add_note("look here")
    error.extra = [1]
    error.__cause__ = ValueError()
    again = travel(error)
    assert (type(again), again.args, again.extra) == (KeyError, ("k", 3), [1])
    assert again.__notes__ == ["look here"]
    assert again.__cause__ is None
    assert travel(RankFailedError("gone", (1, 2))).ranks == (1, 2)
    assert type(travel(KeyboardInterrupt())) is KeyboardInterrupt
    group = travel(ExceptionGroup("g", [ValueError(1), OSError(2, "x")]))
    assert [type(e) for e in group.exceptions] == [ValueError, FileNotFoundError]


def test_an_exception_whose_constructor_wants_more_still_arrives_as_itself():
    again = travel(Picky(7, why="bad"))
    assert (type(again), again.args, again.code) == (Picky, ("7: bad",), 7)


def test_attributes_that_cannot_be_pickled_are_left_behind():
    error = ValueError("v")
    error.lock, error.n = threading.Lock(), 1
    again = travel(error)
    assert (type(again), again.args, again.n) == (ValueError, ("v",), 1)
    assert not hasattr(again, "lock")


def test_an_exception_of_a_local_class_arrives_by_cloudpickle():
    class Local(MpimlError):
        pass

    assert isinstance(travel(Local("x")), MpimlError)


def test_what_cannot_be_rebuilt_arrives_as_a_remote_error_with_name_and_text():
    error = Opaque(threading.Lock())
    error.add_note("note")
    again = travel(error)
    assert type(again) is RemoteError
    assert "Opaque: <unlocked _thread.lock" in str(again)
    assert again.__notes__ == ["note"]
    assert type(travel(Bomb("tick"))) in (Bomb, RemoteError)


def test_reading_an_error_never_raises(monkeypatch):
    packed = pack_error(Picky(7, why="bad"))
    monkeypatch.delitem(globals(), "Picky")
    again = unpack_error(*packed)
    assert type(again) is RemoteError
    assert str(again).endswith("Picky: 7: bad")
    assert type(unpack_error(ENC_PICKLE, b"garbage", [])) is RemoteError


def test_an_exception_with_a_broken_text_arrives():
    class Mute(Exception):
        def __str__(self):
            raise ValueError("mute")

    mute = Mute(threading.Lock())
    assert "its text raised ValueError('mute')" in str(travel(mute))
