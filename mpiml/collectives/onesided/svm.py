"""The sparse support vector machine of Hogwild! and HogWild++: steps of it, and how good it is.

The problem, with d_j the number of rows that have a column j (F. Niu, B. Recht, C. Ré,
S. Wright, "HOGWILD!", NIPS 2011, section 2, with mu = 2 lambda)::

    sum over rows i of  max(1 - y_i <w, x_i>, 0)  +  mu / 2 |w|^2
    = sum over rows i of ( max(1 - y_i <w, x_i>, 0)  +  mu / 2 sum over j in x_i of w_j^2 / d_j )

so that a row's step touches its own columns only.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mpiml._native import hogwild_svm_rows
from mpiml.collectives.onesided.adding import Adder, index_array
from mpiml.collectives.onesided.ring_member import RingMember
from mpiml.datasets.csr import CSR
from mpiml.errors import UsageError

__all__ = ["SVMEpoch", "SVMScore", "svm_epoch", "svm_score"]

_HOWS: Final = ("atomic", "racy", "spinlock", "mutex")
_GATHERED: Final = 4096  # rows that are copied at a time where turns come between them


class SVMEpoch(NamedTuple):
    """What `svm_epoch` saw of its rows, each at the moment of its step."""

    active: int  #: rows within the margin
    loss: float  #: the sum of their hinge losses


class SVMScore(NamedTuple):
    """How good a model is."""

    objective: float  #: hinge + mu / 2 |w|^2
    hinge: float  #: the sum over rows of max(1 - y <w, x>, 0)
    accuracy: float  #: the part of the rows with y <w, x> > 0


class _Model(Protocol):
    def _direct(self, call: str) -> tuple[Adder, RingMember | None]: ...


class _Task(NamedTuple):
    """An epoch, checked, as arrays that the kernel takes."""

    adder: Adder
    number: int
    rows: CSR
    degrees: NDArray[Any]
    eta: float
    mu: float
    how: str

    def run(self, rows: CSR, order: NDArray[Any] | None) -> SVMEpoch:
        """Do the step of each row, or of those in `order`."""
        adder, block = self.adder, self.adder.block
        adder.before()
        try:
            seen = hogwild_svm_rows(
                block.leaves[self.number],
                rows.indptr, rows.indices, rows.values, rows.labels,
                self.degrees, self.eta, self.mu, order, self.how, block.lock, block.gate,
            )  # fmt: skip
        except TimeoutError as error:
            raise block.stuck(error, "svm_epoch") from None
        except (ValueError, BufferError) as error:
            raise UsageError(str(error).replace("hogwild_svm_rows", "svm_epoch")) from None
        adder.after(len(rows) if order is None else len(order))
        return SVMEpoch(*seen)


def svm_epoch(
    model: _Model,
    name: Any,
    rows: CSR,
    eta: float,
    mu: float,
    degrees: Any,
    order: Any = None,
    how: str = "atomic",
) -> SVMEpoch:
    """Do a step of the sparse SVM for each row, on a model that other members change as well.

    Local: no lock is taken (but see `how`), and no other member takes part. The step of a row x
    with the label y is ``if y <w, x> < 1: w += eta y x``, and then ``w_j *= 1 - eta mu / d_j``
    for each of its columns j. Each row is one update. It is the published step of HogWild++
    (H. Zhang, C.-J. Hsieh, V. Akella, ICDM 2016), and that of Hogwild!'s own code. Many rows in
    one call cost what memory costs.

    On a RingModel turns are had between rows, when they are due.

    Parameters
    ----------
    model : SharedModel or RingModel
        In the memory of this host: a RingModel is, a SharedModel on its home's.
    name
        Which of its arrays, as for `SharedModel.add_at`; it counts as one axis of features.
    rows : mpiml.datasets.CSR
        This member's, labels 1 and -1. Values of another dtype than the array's are converted,
        anew in each call.
    eta : float
        The step size, > 0.
    mu : float
        The regularisation, >= 0, with ``eta * mu <= 1``.
    degrees : array
        (features,), d_j: in how many rows of the whole data a column occurs, as of
        `CSR.degrees`, summed over the members. Where `mu` is 0 it does not matter.
    order : array of int, optional
        Which rows, one after another; all as they come by default.
    how : {"atomic", "racy", "spinlock", "mutex"}
        For comparison: "racy" changes a component by load and store, and loses what another
        member writes between them; "spinlock" and "mutex" make a whole update under one lock,
        which only those who do the same respect.

    Returns
    -------
    active : int
        Rows that were within the margin when it was their turn.
    loss : float
        The sum of the hinge losses that they had then.

    Raises
    ------
    UsageError
        The model is on another host; arguments do not fit. Of the first rows up to 4096, or to
        a turn of the ring, all or none have been done when an error is about a row.
    RankFailedError
        A member has died within an update.

    Examples
    --------
    ::

        data = sparse_svm(20_000, 47_236, rank=model.index, size=model.size).data
        degrees = allreduce(data.degrees(), "sum")
        for epoch in range(10):
            svm_epoch(model, "w", data, 0.5 * 0.8**epoch, 1e-4, degrees, rng.permutation(len(data)))
    """
    adder, ring = model._direct("svm_epoch")
    task = _task(adder, name, rows, eta, mu, degrees, how)
    visits = None if order is None else _visits(order, len(rows))
    if ring is None:
        return task.run(task.rows, visits)
    active, loss = 0, 0.0
    for block in _blocks(task.rows, visits):
        begin = 0
        while begin < len(block):
            end = min(len(block), begin + ring.room)
            seen = task.run(_part(block, begin, end), None)
            ring.count(end - begin)
            active, loss, begin = active + seen.active, loss + seen.loss, end
    return SVMEpoch(active, loss)


def svm_score(w: Any, rows: CSR, mu: float) -> SVMScore:
    """Return the regularised hinge loss of a model, and how many rows it labels right.

    Local: plain NumPy, in float64.

    Parameters
    ----------
    w : array
        (features,).
    rows : mpiml.datasets.CSR
        With labels 1 and -1.
    mu : float
        The regularisation, as `svm_epoch` has it.

    Returns
    -------
    SVMScore
        Sums over the rows; of none, an accuracy of 1.
    """
    w = np.asarray(w, np.float64).reshape(-1)
    margins = rows.labels * rows.dot(w)
    hinge = float(np.maximum(1 - margins, 0).sum())
    accuracy = float((margins > 0).mean()) if len(rows) else 1.0
    return SVMScore(hinge + mu / 2 * float(w @ w), hinge, accuracy)


# -- what a call says --------------------------------------------------------------------------


def _task(
    adder: Adder, name: Any, rows: CSR, eta: float, mu: float, degrees: Any, how: str
) -> _Task:
    where = "svm_epoch"
    number = adder.layout.number(name, where)
    leaf = adder.block.leaves[number]
    if not isinstance(rows, CSR):
        raise UsageError(
            f"{where}: rows: expected a mpiml.datasets.CSR, which has labels, got "
            f"{type(rows).__name__}"
        )
    if rows.shape[1] != leaf.size:
        raise UsageError(
            f"{where}: rows: expected {leaf.size} features, as the array has elements, got "
            f"{rows.shape[1]}. CSR.with_features sets their number."
        )
    if how not in _HOWS:
        raise UsageError(f"{where}: how: expected one of {', '.join(_HOWS)}, got {how!r}")
    if not (eta > 0 and mu >= 0 and eta * mu <= 1):
        raise UsageError(
            f"{where}: expected eta > 0, mu >= 0 and eta * mu <= 1, beyond which a step turns "
            f"the sign of rare components, got eta={eta!r}, mu={mu!r}. Lower eta."
        )
    found = np.ascontiguousarray(degrees, leaf.dtype).reshape(-1)
    if found.size != leaf.size:
        raise UsageError(
            f"{where}: degrees: expected {leaf.size}, one for each feature, got {found.size}"
        )
    if rows.values.dtype != leaf.dtype:
        rows = CSR(
            rows.indptr, rows.indices,
            rows.values.astype(leaf.dtype), rows.labels.astype(leaf.dtype), rows.shape,
        )  # fmt: skip
    return _Task(adder, number, rows, found, float(eta), float(mu), how)


def _visits(order: Any, rows: int) -> NDArray[Any]:
    found = np.ascontiguousarray(order)
    if found.size == 0:
        return np.empty(0, np.int64)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise UsageError(
            f"svm_epoch: order: expected whole numbers on one axis, got {found.dtype} of shape "
            f"{found.shape}"
        )
    if found.min() < 0 or found.max() >= rows:
        raise UsageError(
            f"svm_epoch: order: expected 0 to {rows - 1}, got {found.min()} to {found.max()}"
        )
    return index_array(found)


# -- rows that turns come between --------------------------------------------------------------


def _blocks(rows: CSR, visits: NDArray[Any] | None) -> Iterator[CSR]:
    """Yield the rows in the order of their visits, so many at a time."""
    if visits is None:
        yield rows
        return
    for begin in range(0, len(visits), _GATHERED):
        own = visits[begin : begin + _GATHERED]
        starts = rows.indptr[own]
        lengths = rows.indptr[own + 1] - starts
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(indptr[-1]) + np.repeat(starts - indptr[:-1], lengths)
        yield CSR(
            indptr, rows.indices[at], rows.values[at], rows.labels[own],
            (len(own), rows.shape[1]),
        )  # fmt: skip


def _part(rows: CSR, begin: int, end: int) -> CSR:
    return rows if end - begin == len(rows) else rows.rows(begin, end)
