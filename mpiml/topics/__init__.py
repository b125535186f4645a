"""Topics: what publishers put goes to the subscribers that chose them, directly."""

__all__: list[str] = []
