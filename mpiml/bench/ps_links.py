"""Hosts of one rank each, some with slow cards: network namespaces joined by a bridge.

On one machine the cores limit what two servers can take in. Here the servers' cards pass so few
bits per second each way that these are the limit, as where many machines are workers.
"""

import os
import shutil
from types import TracebackType

from mpiml.bench.spawn import Ranks
from mpiml.bench.two_hosts import CARD, TwoHosts
from mpiml.doctor.check import attempt

__all__ = ["SlowLinks"]

NETWORK = "10.213.78"
#: A burst holds the largest packet; the queue so much that none is dropped.
SHAPE = "tbf rate {mbit}mbit burst 256kb limit 16mb"


class SlowLinks(TwoHosts):
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
        super().__init__(ranks, programs=True)
        stem = f"mpiml{os.getpid()}s"
        self.names = [f"{stem}{i}" for i in range(1, count + 1)]
        self._addresses = [f"{NETWORK}.{i}" for i in range(1, count + 1)]
        self._slots = 1
        self._hub = f"{stem}hub"
        self._slow = slow
        self._shape = SHAPE.format(mbit=mbit)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        if shutil.which("ip") is not None:
            attempt(["ip", "netns", "del", self._hub], 20.0)

    def _making(self) -> list[str]:
        hub = self._hub
        lines = [f"ip netns add {name}" for name in (hub, *self.names)]
        lines += [f"ip -n {hub} link add bridge type bridge", f"ip -n {hub} link set bridge up"]
        where = zip(self.names, self._addresses, strict=True)
        for i, (name, address) in enumerate(where, 1):
            lines += [
                f"ip link add {CARD} netns {name} type veth peer name port{i} netns {hub}",
                f"ip -n {hub} link set port{i} master bridge up",
                f"ip -n {name} addr add {address}/24 dev {CARD}",
                f"ip -n {name} link set {CARD} up",
                f"ip -n {name} link set lo up",
            ]
            if i <= self._slow:
                lines += [
                    f"ip netns exec {hub} tc qdisc add dev port{i} root {self._shape}",
                    f"ip netns exec {name} tc qdisc add dev {CARD} root {self._shape}",
                ]
        return lines
