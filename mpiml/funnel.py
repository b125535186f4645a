"""Programs whose rank calls MPI on one thread only: what others send waits in a queue for it.

That thread, *home*, drives: in every wait of its own, and in `mpiml.poll`. Other threads put
what they send into the queue of the link (`mpiml.transport.FunneledLink`), ring, and wait until
home hands out what they want.
"""

import threading
from typing import Any

__all__ = ["DRIVERS", "drive"]

#: drivers of the programs that run on home now, the innermost last: while it waits for one of
#: them, or for other ranks in a collective, the others go on too
DRIVERS: list[Any] = []


def drive(beside: Any = None) -> bool:
    """Make a turn in every program of home, on home; whether anything was done.

    Local; for waits that are not the engine's own, as in collectives. On any other thread, and
    where MPI has full thread support, it does nothing.

    Parameters
    ----------
    beside
        The driver that turns anyway.
    """
    moved = False
    here = threading.get_ident()
    for driver in DRIVERS.copy():
        if driver is not beside and driver.home == here:
            moved = driver.poll() or moved
    return moved
