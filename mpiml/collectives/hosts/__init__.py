"""Collectives among hosts: memory inside of each, messages between them."""

__all__: list[str] = []
