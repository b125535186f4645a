"""Ready-made services as plain classes, and the policies they rest on.

Names are loaded when they are first used: placing a program needs none of them.
"""

from typing import TYPE_CHECKING

from mpiml.lazily import lazily

if TYPE_CHECKING:
    from mpiml.roles.barrier import Barrier
    from mpiml.roles.counter import Counter
    from mpiml.roles.reservoir import Reservoir

__all__ = ["Barrier", "Counter", "Reservoir"]

_HOME = {"Barrier": "barrier", "Counter": "counter", "Reservoir": "reservoir"}

__getattr__, __dir__ = lazily(__name__, _HOME)
