"""What a rank does once, when its bodies are over: methods are told not to wait for any more.

It is done by the main thread, on its way to the end. That thread may be in a method, on a rank of
which the only node is a service: one that waits for just this would keep it away for ever. So there
it is done beside it, by a thread.
"""

import threading
import time
from typing import Any

from mpiml.waits import Wait

__all__ = ["Parting"]


class Parting:
    """The end of the bodies of one rank. Local.

    Parameters
    ----------
    runtime
        The program on this rank.

    Attributes
    ----------
    bodies : Wait
        Ready once all bodies here have returned.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self.bodies = Wait("the bodies of this rank")
        self._lock = threading.Lock()
        self._begun = False
        self._done = False

    def await_bodies(self) -> None:
        """Wait until the bodies here are over, or the program is given up."""
        runtime = self._runtime
        while not self.bodies.ready and not runtime.ending.abandoned:
            runtime.engine.wait(self.bodies, time.monotonic() + 0.1, None)

    def tell(self) -> None:
        """Call what nodes have in `at_end`, and end topics of services; the first time only.

        When it returns that is done, whichever thread does it.
        """
        runtime = self._runtime
        with self._lock:
            if self._done:
                return
            self._done = True
            for node in runtime.nodes:
                for end in node.at_end:
                    end()
                if not node.body:  # methods must not wait for bodies that take or put no more
                    runtime.topics.leave(node.vertex, cut=True, late=True)

    def beside(self) -> None:
        """Do so on a thread: the main one is in a method. A second call does nothing."""
        with self._lock:
            begun, self._begun = self._begun, True
        if not begun:
            threading.Thread(target=self._beside, name="mpiml-parting", daemon=True).start()

    def _beside(self) -> None:
        try:
            self.await_bodies()
            self.tell()
        except Exception as error:  # the main thread may wait for what has not been told
            self._runtime.engine.on_broken(error)
