"""``python -m mpiml.doctor``: what this machine can do, each thing by trying it.

Whatever may crash or hang is tried in a child process with a time limit, so that one broken
part does not hide the others, and each failure comes with its cure.
"""

from mpiml.doctor.report import Check, main

__all__ = ["Check", "main"]
