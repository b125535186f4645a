"""The event loop of a node, without a program."""

import asyncio
import functools
import threading

import pytest

from mpiml.aio import Loop, is_async
from mpiml.errors import Stopped
from mpiml.scope import BodyScope, current_scope


class Owner:
    vertex, title = 0, "svc/0"


@pytest.fixture
def loop():
    loop = Loop("svc/0")
    yield loop
    loop.stop()


async def coroutine():
    return 1


def plain():
    return 1


def test_what_is_async():
    class Service:
        async def method(self):
            pass

        @functools.wraps(coroutine)
        def wrapped(self):
            pass

    assert is_async(coroutine)
    assert is_async(Service().method)
    assert is_async(functools.wraps(coroutine)(lambda: coroutine()))
    assert not is_async(plain)
    assert not is_async(len)


def test_coroutines_share_one_loop_and_know_their_scope(loop):
    scope = BodyScope(Owner())

    async def look():
        return (
            current_scope(required=False),
            threading.current_thread().name,
            id(asyncio.get_running_loop()),
        )

    first, second = loop.run(look(), scope), loop.run(look(), scope)
    assert first == second
    assert first[0] is scope
    assert first[1] == "mpiml loop svc/0"


def test_errors_and_exits_come_out_of_run(loop):
    async def fail(error):
        raise error

    scope = BodyScope(Owner())
    for error in (ValueError("x"), SystemExit(3), Stopped("s")):
        with pytest.raises(type(error)):
            loop.run(fail(error), scope)
    assert loop.run(coroutine(), scope) == 1  # the loop goes on


def test_what_is_under_way_is_cancelled_at_the_end(loop):
    ended = threading.Event()
    box = []

    async def endless():
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    loop.submit(endless(), BodyScope(Owner()), lambda result, error: box.append(error))
    loop.run(coroutine(), BodyScope(Owner()))
    late = endless()
    loop._loop.call_soon_threadsafe(
        lambda: (
            loop._launch(late, BodyScope(Owner()), lambda _, error: box.append(error)),
            [task.cancel() for task in asyncio.all_tasks()],
        )
    )
    loop.stop()
    assert ended.wait(10)
    assert [type(error) for error in box] == [asyncio.CancelledError] * 2
    loop.stop()  # again does nothing


def test_a_loop_that_never_ran_stops():
    Loop("svc/0").stop()


def test_a_loop_that_does_not_tell_counts_as_busy():
    loop = Loop("x")
    assert loop.idle  # there is none yet
    loop._loop = asyncio.new_event_loop()
    try:
        assert loop.idle
        loop._loop.call_later(60, print)
        assert not loop.idle
    finally:
        loop._loop.close()
    loop._loop = object()  # as one of uvloop
    assert not loop.idle
