"""The rows of several shards as one block, for tests."""

import numpy as np

from mpiml.datasets import CSR

__all__ = ["joined"]


def joined(parts):
    """Return the rows of all `parts`, in their order, with the largest number of features."""
    qid = None
    if any(p.qid is not None for p in parts):
        qid = np.concatenate([np.full(len(p), -1) if p.qid is None else p.qid for p in parts])
    lengths = np.concatenate([np.diff(p.indptr) for p in parts])
    return CSR(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("indices", "values")),
        np.concatenate([p.labels for p in parts]),
        (len(lengths), max(p.shape[1] for p in parts)),
        qid,
    )
