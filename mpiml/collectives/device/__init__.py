"""Collectives on arrays of CUDA devices."""

__all__: list[str] = []
