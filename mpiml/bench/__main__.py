"""``python -m mpiml.bench``."""

import sys

from mpiml.bench.command import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
