"""Which libraries of arrays this process has loaded, and whose an array is.

None of them is ever imported here: a library that made an array is in ``sys.modules`` already,
so where none is, no value can be an array, and NumPy need not be loaded to find that out.
"""

import sys

from mpiml.errors import UsageError

__all__ = ["MissingLibraryError", "arrays_possible", "family", "foreign_loaded"]

# Class name of an array, by the first word of its module.
_FAMILIES = {
    ("torch", "Tensor"): "torch",
    ("jax", "ArrayImpl"): "jax",
    ("jaxlib", "ArrayImpl"): "jax",
    ("cupy", "ndarray"): "cupy",
}


class MissingLibraryError(UsageError, ImportError):
    """An optional library is not installed, or does not load.

    Parameters
    ----------
    module
        The part of mpiml that needs it.
    library
        Its name.
    extra
        The extra of mpiml's own installation that brings it.
    error
        What importing it raised.
    """

    def __init__(self, module: str, library: str, extra: str, error: ImportError) -> None:
        super().__init__(
            f"{module}: expected {library} to be installed, got {error!r}. "
            f"Run `{sys.executable} -m pip install 'mpiml[{extra}]'`."
        )


def family(cls: type) -> str | None:
    """Return "torch", "jax" or "cupy" if `cls` is the array class of that library."""
    root = cls.__module__.partition(".")[0]
    return _FAMILIES.get((root, cls.__name__))


def foreign_loaded() -> bool:
    """Tell whether arrays other than NumPy's can exist in this process."""
    modules = sys.modules
    return "torch" in modules or "jax" in modules or "cupy" in modules


def arrays_possible() -> bool:
    """Tell whether arrays of any library can exist in this process."""
    return "numpy" in sys.modules or foreign_loaded()
