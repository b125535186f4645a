"""Hosts of one rank each, some with slow cards.

On one machine the cores limit what two servers can take in. Here the servers' cards pass so few
bits per second each way that these are the limit, as where many machines are workers.
"""

from collections.abc import Iterator

from mpiml.bench.several_hosts import CARD, SeveralHosts
from mpiml.bench.spawn import Ranks

__all__ = ["SlowLinks"]

#: A burst holds the largest packet; the queue so much that none is dropped.
SHAPE = "tbf rate {mbit}mbit burst 256kb limit 16mb"


class SlowLinks(SeveralHosts):
    """Network namespaces of this machine with a rank each, taken down again on leaving.

    Local: starts child processes; no MPI in this process.

    Parameters
    ----------
    ranks
        Says how ranks are started.
    count
        How many.
    slow
        How many of the first have slow cards.
    mbit
        What these pass in a second, each way, in 10^6 bits.
    """

    def __init__(self, ranks: Ranks, count: int, slow: int, mbit: int) -> None:
        super().__init__(ranks, [1] * count, programs=True)
        self._slow = slow
        self._shape = SHAPE.format(mbit=mbit)

    def _making(self) -> Iterator[str]:
        yield from super()._making()
        for i, name in enumerate(self.names[: self._slow]):
            yield f"ip netns exec {self._hub} tc qdisc add dev port{i} root {self._shape}"
            yield f"ip netns exec {name} tc qdisc add dev {CARD} root {self._shape}"
