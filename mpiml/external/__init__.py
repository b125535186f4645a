"""Ranks of C, C++ and Fortran programs as nodes; see docs/design/0008-external.md."""

__all__: list[str] = []
