"""`Wait`, the least that a thread can wait for: a flag that somebody sets."""

__all__ = ["Wait"]


class Wait:
    """Something a thread waits for in the engine: a flag, set once."""

    __slots__ = ("about", "ready")

    def __init__(self, about: str = "") -> None:
        self.ready = False
        self.about = about
