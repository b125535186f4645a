"""``mpiml jobs``: templates of job scripts, filled in, and what their machine must have.

The templates are the files of the folder ``jobs`` at the top of the repository; a wheel brings
them along. A user may as well copy one and edit its top.
"""

from mpiml.jobs.command import main

__all__ = ["main"]
