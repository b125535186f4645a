"""What of a parameter server's messages is sent: filters of gradients and parameters.

Each is a value to give, in a tuple, to `mpiml.ParameterServerNode`; first those that choose
entries, then those that write what was chosen in fewer bytes. What they do is in
`mpiml.roles.parameter_server.filtering`. Sources: Li et al., "Scaling Distributed Machine Learning
with the Parameter Server", OSDI 2014, section 5 ("user-defined filters"); Li et al.,
"Communication Efficient Distributed Machine Learning with the Parameter Server", NIPS 2014.
"""

from dataclasses import dataclass
from typing import Any

from mpiml.errors import UsageError
from mpiml.real import finite_number
from mpiml.whole import whole_number

__all__ = [
    "KKT",
    "Compressed",
    "Filter",
    "KeyCaching",
    "RandomSkip",
    "SignificantlyModified",
    "ZeroSuppression",
]


@dataclass(frozen=True)
class Filter:
    """What all have in common; use one of those derived from it."""


@dataclass(frozen=True)
class SignificantlyModified(Filter):
    """Send an entry only once it has changed by more than a threshold.

    Push: gradients add up at the worker, entry by entry; a sum beyond the threshold is sent and
    begins at zero again. So nothing is lost, it comes later. Pull: the server knows what each
    worker has been sent, and sends the entries that differ from that by more.

    Parameters
    ----------
    threshold : float
        >= 0. 0 sends whatever is not zero, or has changed.
    """

    threshold: float

    def __post_init__(self) -> None:
        value = _number("SignificantlyModified: threshold", self.threshold)
        object.__setattr__(self, "threshold", value)


@dataclass(frozen=True)
class RandomSkip(Filter):
    """Leave out entries at random.

    Push: those that are sent are divided by ``1 - probability``, so that the mean is right; the
    others are lost. Pull: the worker keeps the older values of those that are not sent; the
    first pull is whole.

    Parameters
    ----------
    probability : float
        With which an entry is left out, in [0, 1).
    seed : int
        Of the random numbers; every worker and server draws its own.
    """

    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        value = _number("RandomSkip: probability", self.probability)
        if value >= 1:
            raise UsageError(
                f"RandomSkip: probability: expected a number in [0, 1), got {value!r}. With 1 "
                "nothing would ever be sent."
            )
        object.__setattr__(self, "probability", value)
        object.__setattr__(self, "seed", whole_number("RandomSkip: seed", self.seed))


@dataclass(frozen=True)
class KKT(Filter):
    """For an l1 penalty: do not send gradients that would leave a zero parameter at zero.

    Entry k is left out if ``w_k == 0`` and ``abs(g_k) < lam - delta``, where w is what the worker
    pulled last: the optimality condition of ``loss + lam * abs(w)`` at zero is
    ``abs(g_k) <= lam``. Push only; the first filter.

    Parameters
    ----------
    lam : float
        λ of the penalty, > 0, in the units of the gradient that is pushed.
    delta : float
        The margin, since a worker knows the gradient of its own data only: 0 <= delta < lam.
    """

    lam: float
    delta: float = 0.0

    def __post_init__(self) -> None:
        lam, delta = _number("KKT: lam", self.lam), _number("KKT: delta", self.delta)
        if delta >= lam:
            raise UsageError(
                f"KKT: expected 0 <= delta < lam, got lam={lam!r}, delta={delta!r}: this would "
                "leave out nothing. Take a smaller delta."
            )
        object.__setattr__(self, "lam", lam)
        object.__setattr__(self, "delta", delta)


@dataclass(frozen=True)
class ZeroSuppression(Filter):
    """Send dense arrays with many zeros as places and values, where that takes fewer bytes.

    Lossless: the same bits arrive, and an array stays a dense one.
    """


@dataclass(frozen=True)
class KeyCaching(Filter):
    """Send a list of places once, and a hash of 8 bytes for it when it comes again.

    Lossless. Both sides keep the lists that were used last.

    Parameters
    ----------
    lists : int
        How many are kept for each piece of an array, 1 or more.
    """

    lists: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "lists", whole_number("KeyCaching: lists", self.lists, 1))


@dataclass(frozen=True)
class Compressed(Filter):
    """Compress the values by a codec of the collectives.

    Push: with error feedback where the codec asks for it: what was not sent is added to the next
    gradient that is sent for the same entry. Pull: what is compressed is the difference between
    the parameters and the worker's copy of them, so every error is made good by later pulls;
    the first pull is whole.

    Parameters
    ----------
    compressor : codec
        What an allreduce takes as ``compress=``: one of `mpiml.collectives.compression`, or an
        object with `encode` and `decode`. Of a codec only the arithmetic is used: it may be
        given to several nodes. Not `PowerSGD` and `SignMajority`, which need all workers.
    """

    compressor: Any

    def __post_init__(self) -> None:
        given = self.compressor
        made = not isinstance(given, type) and (
            hasattr(given, "state_dict")
            or (hasattr(given, "encode") and hasattr(given, "decode"))
        )
        if not made:
            raise UsageError(
                "Compressed: compressor: expected an object of mpiml.collectives.compression such "
                f"as TopK(0.01), or one with the methods encode and decode, got {given!r}"
            )


def _number(where: str, value: Any) -> float:
    return finite_number(where, value, "a finite number >= 0", 0)
