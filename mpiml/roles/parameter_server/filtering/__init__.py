"""Filters of a parameter server's messages: what of them is sent, and how it is written.

`mpiml.filters` is what users say; `links` is what servers and workers use.
"""

__all__: list[str] = []
