"""One round of averaging among n members, as an immutable value.

Member i replaces its x by the sum of ``W[i, j] * x_j`` over the members j that it hears from,
itself among them. Rows of W that sum to 1 make this an average; columns that sum to 1 keep the
sum over all members, which is what push-sum needs; both together make repeated rounds converge
to the mean (Xiao and Boyd 2004; Lian et al. 2017, D-PSGD; Assran et al. 2019, SGP).

BlueFog writes the transpose: there the weight from i to j is in row i.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpiml.errors import UsageError
from mpiml.topology.checks import TOLERANCE, cut_off, number, spectral_gap, two_sides

__all__ = ["Stochastic", "Topology", "from_matrix"]

Stochastic = Literal["row", "column", "doubly"]
_ADVICE = {
    "row": "Divide each row by its sum.",
    "column": "Weights of `push_sum` are, for any directed graph.",
    "doubly": "Weights of `metropolis` are, for any undirected graph.",
}


class Topology:
    """Who hears from whom in a round, and with what weight. Immutable.

    Local: nothing here communicates.

    Parameters
    ----------
    rows : sequence of mapping of int to float
        For each member, the members it receives from and the weights, >= 0; its own weight
        under its own number. What is missing is 0.
    name : str
        For messages and the `repr`; two topologies of other names may be equal.
    allow_disconnected : bool
        Whether there may be members that never hear of others: a step of a schedule.

    Raises
    ------
    UsageError
        A weight is negative or not finite; neither all rows nor all columns sum to 1 within
        1e-9; the graph is not strongly connected.

    Attributes
    ----------
    n : int
        Number of members.
    name : str
    """

    n: int
    name: str
    _rows: tuple[tuple[tuple[int, float], ...], ...]

    def __init__(
        self,
        rows: Sequence[Mapping[int, float]],
        name: str = "",
        *,
        allow_disconnected: bool = False,
    ) -> None:
        where = f"topology {name}" if name else "topology"
        number(len(rows), 1, None, where, "number of members")
        checked = tuple(_row(i, row, len(rows), where) for i, row in enumerate(rows))
        self.__dict__.update(n=len(rows), name=name, _rows=checked)
        if not (self.row_stochastic or self.column_stochastic):
            raise UsageError(
                f"{where}: expected all rows, or all columns, to sum to 1 within {TOLERANCE}; "
                f"{self._off('row')}, and {self._off('column')}. Divide each row by its sum to "
                f"average, or each column for push-sum."
            )
        if not allow_disconnected:
            self.require_connected(where)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a Topology cannot be changed; make another to set {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Topology cannot be changed, got del of {name}")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return self._rows == other._rows

    def __hash__(self) -> int:
        return hash(self._rows)

    def __reduce__(self) -> tuple[Any, ...]:
        # not what has been looked at: ranks compare what they pickle
        return _restore, (self._rows, self.name)

    def __repr__(self) -> str:
        counts = sorted({len(self.receives(i)) for i in range(self.n)})
        least, most = counts[0], counts[-1]
        heard = f"each hears {most}" if least == most else f"each hears {least} to {most}"
        kind = "row" if self.row_stochastic else "column"
        kind = "doubly " if self.doubly_stochastic else f"{kind}-"
        apart = "" if self.connected else ", disconnected"
        return f"<{self.name or 'topology'}: n={self.n}, {heard}, {kind}stochastic{apart}>"

    # -- edges and weights ---------------------------------------------------------------------

    def own(self, member: int) -> float:
        """Return the weight that a member gives to its own value."""
        return dict(self._rows[self._member(member, "own")]).get(member, 0.0)

    def receives(self, member: int) -> dict[int, float]:
        """Return whom a member hears from, ascending, and with what weight; not itself."""
        row = self._rows[self._member(member, "receives")]
        return {source: weight for source, weight in row if source != member}

    def sends(self, member: int) -> dict[int, float]:
        """Return who hears from a member, ascending, and with what weight; not itself."""
        column = self._columns[self._member(member, "sends")]
        return {target: weight for target, weight in column if target != member}

    def matrix(self) -> NDArray[np.float64]:
        """Return W, (n, n) float64, of which row i is what member i receives: x <- W x."""
        matrix = np.zeros((self.n, self.n))
        for member, row in enumerate(self._rows):
            for source, weight in row:
                matrix[member, source] = weight
        return matrix

    # -- what it is ----------------------------------------------------------------------------

    @property
    def row_stochastic(self) -> bool:
        """Whether each member computes an average: rows sum to 1 within 1e-9."""
        return bool(np.abs(self._sums[0] - 1).max() <= TOLERANCE)

    @property
    def column_stochastic(self) -> bool:
        """Whether the sum over all members stays: columns sum to 1 within 1e-9."""
        return bool(np.abs(self._sums[1] - 1).max() <= TOLERANCE)

    @property
    def doubly_stochastic(self) -> bool:
        """Whether it is row- and column-stochastic."""
        return self.row_stochastic and self.column_stochastic

    @cached_property
    def connected(self) -> bool:
        """Whether what a member has reaches all others in the end (strongly connected)."""
        return self._apart is None

    @cached_property
    def is_bipartite(self) -> bool:
        """Whether the members fall into two sides without an edge inside one."""
        return two_sides(self.neighbors)[1] is None

    @cached_property
    def spectral_gap(self) -> float:
        """1 minus the second largest magnitude of an eigenvalue of W; the larger the faster.

        0 where repeated rounds do not converge: disconnected, or going round in circles as a
        directed ring does without own weights. Takes n³ operations, once.
        """
        return spectral_gap(self.matrix())

    @cached_property
    def neighbors(self) -> tuple[tuple[int, ...], ...]:
        """For each member those that it hears from or that hear from it, ascending."""
        return tuple(
            tuple(sorted(self.receives(i).keys() | self.sends(i).keys())) for i in range(self.n)
        )

    # -- what an algorithm needs ---------------------------------------------------------------

    def require(self, kind: Stochastic, where: str) -> None:
        """Refuse weights that do not sum to 1 as an algorithm needs.

        Parameters
        ----------
        kind : {"row", "column", "doubly"}
        where : str
            Who needs it, for the message.

        Raises
        ------
        UsageError
            Names a row or column and its sum.
        """
        wrong = next(
            (k for k in ("row", "column") if kind in (k, "doubly") and self._off(k)), ""
        )
        if wrong:
            raise UsageError(
                f"{where}: expected {kind}{' ' if kind == 'doubly' else '-'}stochastic weights, "
                f"got {self!r}: {self._off(wrong)}. {_ADVICE[kind]}"
            )

    def require_connected(self, where: str) -> None:
        """Refuse a topology in which a member never hears of another.

        Raises
        ------
        UsageError
            Says which.
        """
        if self._apart is not None:
            raise UsageError(
                f"{where}: expected all members to be connected; {self._apart}. Add edges, or "
                f"if it is a step of a schedule pass allow_disconnected=True."
            )

    # -- computed once -------------------------------------------------------------------------

    @cached_property
    def _columns(self) -> tuple[tuple[tuple[int, float], ...], ...]:
        columns: list[list[tuple[int, float]]] = [[] for _ in range(self.n)]
        for member, row in enumerate(self._rows):
            for source, weight in row:
                columns[source].append((member, weight))
        return tuple(map(tuple, columns))

    @cached_property
    def _sums(self) -> NDArray[np.float64]:
        """Sums of rows and of columns, (2, n)."""
        both = (self._rows, self._columns)
        return np.array([[math.fsum(w for _, w in line) for line in lines] for lines in both])

    @cached_property
    def _apart(self) -> str | None:
        return cut_off([[source for source, _ in row] for row in self._rows])

    def _off(self, kind: str) -> str:
        """Name the first row or column that does not sum to 1, or nothing."""
        sums = self._sums[("row", "column").index(kind)]
        off = np.flatnonzero(np.abs(sums - 1) > TOLERANCE)
        return f"{kind} {off[0]} sums to {float(sums[off[0]])!r}" if off.size else ""

    def _member(self, member: int, where: str) -> int:
        return number(member, 0, self.n, f"{where} of {self.name or 'a topology'}", "member")


def from_matrix(
    matrix: ArrayLike, name: str = "", *, allow_disconnected: bool = False
) -> Topology:
    """Return the topology of a matrix: x <- W x.

    Local: nothing communicates.

    Parameters
    ----------
    matrix : array_like, shape (n, n), real
        Entry (i, j) is the weight that member i gives to what it receives from member j. Of
        float64: thirds of float32 do not sum to 1 within 1e-9.
    name : str
        For messages and the `repr`.
    allow_disconnected : bool
        Whether there may be members that never hear of others: a step of a schedule.

    Raises
    ------
    UsageError
        As of `Topology`, or the shape or dtype is another.
    """
    where = f"topology {name}" if name else "from_matrix"
    try:
        array = np.asarray(matrix)
    except ValueError as error:
        raise UsageError(f"{where}: expected a matrix of shape (n, n): {error}") from None
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not array.size:
        raise UsageError(f"{where}: expected shape (n, n) with n >= 1, got {array.shape}")
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{where}: expected real numbers, got dtype {array.dtype}")
    rows = [{int(j): float(row[j]) for j in np.flatnonzero(row)} for row in array]
    return Topology(rows, name, allow_disconnected=allow_disconnected)


def _row(
    member: int, row: Mapping[int, float], n: int, where: str
) -> tuple[tuple[int, float], ...]:
    """Return what a member receives, ascending, without zeros."""
    found = []
    for source, weight in row.items():
        source = number(source, 0, n, f"{where}, row {member}", "member")
        try:
            value = float(weight)
        except (TypeError, ValueError):
            value = math.nan
        if not 0 <= value < math.inf:
            raise UsageError(
                f"{where}: expected weights >= 0 and finite, got W[{member}, {source}] = "
                f"{weight!r}, what member {member} gives to what comes from {source}"
            )
        if value > 0:
            found.append((source, value))
    return tuple(sorted(found))


def _restore(rows: tuple[tuple[tuple[int, float], ...], ...], name: str) -> Topology:
    return Topology([dict(row) for row in rows], name, allow_disconnected=True)
