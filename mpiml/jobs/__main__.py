"""``python -m mpiml.jobs``."""

import sys

from mpiml.jobs.command import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
