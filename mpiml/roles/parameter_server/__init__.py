"""The parameter server: arrays on server ranks, which workers pull from and push to."""

__all__: list[str] = []
