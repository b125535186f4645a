"""Which node a thread belongs to: what a stop does to a body's coroutines."""

import asyncio
import types

from mpiml.scope import BodyScope


def test_a_stop_passes_over_loops_that_are_closed():
    scope = BodyScope(types.SimpleNamespace(title="node/0"))
    loop, closed = asyncio.new_event_loop(), asyncio.new_event_loop()
    scope.awaiting = [closed.create_future(), loop.create_future()]
    closed.close()
    scope.stop()
    loop.call_soon(loop.stop)
    loop.run_forever()
    try:
        assert scope.halt
        assert "Stopped" in repr(scope.awaiting[1].exception())
    finally:
        loop.close()
