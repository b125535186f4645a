"""The operations of a bucket as its members compare them: labels, checked and kept."""

from typing import Any

from mpiml.collectives.labels import Label
from mpiml.collectives.ops import op_code, op_name
from mpiml.collectives.regions import Regions
from mpiml.errors import UsageError

__all__ = ["Calls"]

_KEPT = 256  # labels; a program with more names makes them anew


class Calls:
    """Makes the labels of a bucket's operations, once for each.

    Local: no MPI.

    Parameters
    ----------
    regions : Regions
        The bucket's layout.
    size : int
        How many members there are.
    name : str, optional
        What the user calls the bucket.
    number : int
        The bucket's, in its team.
    """

    def __init__(self, regions: Regions, size: int, name: str | None, number: int) -> None:
        self._number = number
        self._regions = regions
        self._text = regions.digest_text()
        self._size = size
        self._name = name
        self._labels: dict[Any, Label] = {}
        self.allreduces: dict[Any, Label] = {}  #: by operation and name, uncompressed

    def label(
        self,
        kind: str,
        name: Any,
        op: Any = None,
        root: Any = None,
        compressed: bool = False,
    ) -> Label:
        """Return the label of an operation.

        Raises
        ------
        UsageError
            The operation is not defined here.
        """
        where = f"Bucket.{kind}"
        if not (name is None or isinstance(name, str)):
            raise UsageError(f"{where}: name: expected a str, got {name!r}")
        known = "" if op is None else op_name(op, where)
        if root is not None and not (isinstance(root, int) and 0 <= root < self._size):
            raise UsageError(f"{where}: root: expected 0..{self._size - 1}, got {root!r}")
        key = (kind, known, root, name, compressed)
        label = self._labels.get(key)
        if label is None:
            if known:
                for region in self._regions.regions:
                    op_code(known, region.dtype_name, where)
            title = where if self._name is None else f"{where} of {self._name!r}"
            more = "compressed" if compressed else "" if root is None else f"root={root}"
            label = Label(title, known, name, None, self._text, more, self._number)
            self._keep(key, label)
        return label

    def _keep(self, key: Any, label: Label) -> None:
        if len(self._labels) >= _KEPT:
            self._labels.clear()
            self.allreduces.clear()
        self._labels[key] = label
        kind, known, _, name, compressed = key
        if kind == "allreduce" and not compressed:
            self.allreduces[known, name] = label
