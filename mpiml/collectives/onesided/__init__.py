"""One-sided memory: models and windows that members read and write without each other's help."""

__all__: list[str] = []
