"""Data for studies of sparse, parallel learning: LIBSVM files by rank, and made problems.

Nothing is downloaded. Names are loaded when they are first used.
"""

from typing import TYPE_CHECKING

from mpiml.lazily import lazily

if TYPE_CHECKING:
    from mpiml.datasets.csr import CSR
    from mpiml.datasets.generator import SparseSVM, rcv1_like, sparse_svm
    from mpiml.datasets.libsvm import read_libsvm
    from mpiml.datasets.measures import Sparsity, sparsity
    from mpiml.datasets.writing import write_libsvm

__all__ = [
    "CSR",
    "SparseSVM",
    "Sparsity",
    "rcv1_like",
    "read_libsvm",
    "sparse_svm",
    "sparsity",
    "write_libsvm",
]

_HOME = {
    "CSR": "csr",
    "SparseSVM": "generator",
    "Sparsity": "measures",
    "rcv1_like": "generator",
    "read_libsvm": "libsvm",
    "sparse_svm": "generator",
    "sparsity": "measures",
    "write_libsvm": "writing",
}

__getattr__, __dir__ = lazily(__name__, _HOME)
