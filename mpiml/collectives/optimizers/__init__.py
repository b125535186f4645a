"""Optimizers whose state or parameters the members divide among them."""

__all__: list[str] = []
