"""`accepts` says yes only where `inspect` does, and to all that is plain."""

import functools
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.signatures import accepts


def f0(): ...
def f1(a): ...
def f2(a, b=1): ...
def f3(a, /, b, *, c, d=1): ...
def f4(*args, c=1): ...
def f5(a, /, b=2, *args, c, **more): ...
def f6(a=0, /, *, c=1): ...


class Plain:
    pass


class Made:
    def __init__(self, a, b=1): ...


class Heir(Made):
    pass


class Meta(type):
    def __call__(cls, *args):
        return super().__call__(1)


class OfMeta(Made, metaclass=Meta):
    pass


class New:
    def __new__(cls, a):
        return object.__new__(cls)


class Says(Made):
    __signature__ = inspect.Signature()


@functools.wraps(f1)
def wrapped(*args, **kwargs): ...


FUNCTIONS = [f0, f1, f2, f3, f4, f5, f6, Plain, Made, Heir, OfMeta, New, Says, wrapped, len]
FUNCTIONS += [functools.partial(f3, 1), Made(1).__init__, functools.cache(f2)]


def binds(function, args, names):
    try:
        inspect.signature(function).bind(*args, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


@given(
    st.sampled_from(FUNCTIONS),
    st.lists(st.none(), max_size=4),
    st.sets(st.sampled_from(["a", "b", "c", "d", "self", "args"]), max_size=3),
)
def test_a_yes_is_a_yes_of_inspect(function, args, names):
    if accepts(function, args, names):
        assert binds(function, args, names)


@pytest.mark.parametrize(
    ("function", "args", "names"),
    [
        (f0, (), ()),
        (f1, (1,), ()),
        (f1, (), ("a",)),
        (f2, (1,), ("b",)),
        (f3, (1, 2), ("c",)),
        (f4, (1, 2, 3), ("c",)),
        (f6, (), ()),
        (Plain, (), ()),
        (Made, (1,), ("b",)),
        (Heir, (1, 2), ()),
    ],
)
def test_plain_ones_are_decided(function, args, names):
    assert accepts(function, args, names)


@pytest.mark.parametrize("function", [OfMeta, New, Says, wrapped, len])
def test_others_are_left_to_inspect(function):
    assert not any(accepts(function, (1,) * count, ()) for count in range(4))
