"""`Alarm`: something to be done in a while, unless it is called off."""

import threading
from collections.abc import Callable

__all__ = ["Alarm"]


class Alarm(threading.Timer):
    """Calls `action` on a thread of its own in so many seconds. Local; it runs at once.

    One that was called off lets go of `action` and all that it holds, though its thread ends a
    little later.
    """

    def __init__(self, seconds: float, action: Callable[[], None], name: str) -> None:
        super().__init__(seconds, action)
        self.name = name
        self.daemon = True
        self.start()

    def cancel(self) -> None:
        """Call it off; from any thread, also once it is over."""
        super().cancel()
        self.function = _nothing


def _nothing() -> None:
    pass
