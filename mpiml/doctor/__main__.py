"""``python -m mpiml.doctor``."""

import sys

from mpiml.doctor.report import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
