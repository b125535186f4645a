"""Gradient compression: objects passed as ``compress=`` to allreduce.

``allreduce(g, "mean", compress=TopK(0.01))``. Make an object once and pass it in every step: it
remembers what it did not send. See docs/compression.md.
"""

from mpiml.collectives.compression.cast import Cast
from mpiml.collectives.compression.codec import Codec, reducer_of
from mpiml.collectives.compression.exchange import Exchange
from mpiml.collectives.compression.feedback import ErrorFeedback, NoFeedback
from mpiml.collectives.compression.onebit import OneBit
from mpiml.collectives.compression.powersgd import PowerSGD
from mpiml.collectives.compression.qsgd import QSGD
from mpiml.collectives.compression.randomk import RandomK
from mpiml.collectives.compression.reducer import Reducer
from mpiml.collectives.compression.sign import EFSign, SignMajority
from mpiml.collectives.compression.state import Statistics
from mpiml.collectives.compression.terngrad import TernGrad
from mpiml.collectives.compression.topk import TopK

__all__ = [
    "QSGD",
    "Cast",
    "Codec",
    "EFSign",
    "ErrorFeedback",
    "Exchange",
    "NoFeedback",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "Reducer",
    "SignMajority",
    "Statistics",
    "TernGrad",
    "TopK",
    "reducer_of",
]
