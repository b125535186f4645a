"""Hosts of one rank each, some with slow cards: network namespaces joined by a bridge.

On one machine the cores limit what two servers can take in. Here the servers' cards pass so few
bits per second each way that these are the limit, as where many machines are workers.
"""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mpiml.bench.spawn import Ranks
from mpiml.bench.two_hosts import CARD, TwoHosts
from mpiml.doctor.check import attempt

__all__ = ["SlowLinks"]

NETWORK = "10.213.78"
#: Stands in for ssh: drops options, and runs the rest on the host of that address.
AGENT = """#!/bin/sh
while :; do case "$1" in -*) shift ;; *) break ;; esac; done
name={stem}${{1##*.}}
shift
exec unshare --uts ip netns exec $name sh -c "hostname $name; $*"
"""
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
        self._stem = f"mpiml{os.getpid()}s"
        self.names = [f"{self._stem}{i}" for i in range(1, count + 1)]
        self._hub = f"{self._stem}hub"
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

    def scenario(self, where: str, plan: dict[str, Any]) -> dict[str, Any]:
        """Run ``module:function`` of this package on all; return what rank 0, on the first, found.

        Raises
        ------
        BenchError
            They ended with another status than 0, or not in time.
        """
        return self.ranks.scenario(where, len(self.names), plan, **self._how())

    def _making(self) -> list[str]:
        hub = self._hub
        lines = [f"ip netns add {name}" for name in (hub, *self.names)]
        lines += [f"ip -n {hub} link add bridge type bridge", f"ip -n {hub} link set bridge up"]
        for i, name in enumerate(self.names, 1):
            lines += [
                f"ip link add {CARD} netns {name} type veth peer name port{i} netns {hub}",
                f"ip -n {hub} link set port{i} master bridge up",
                f"ip -n {name} addr add {NETWORK}.{i}/24 dev {CARD}",
                f"ip -n {name} link set {CARD} up",
                f"ip -n {name} link set lo up",
            ]
            if i <= self._slow:
                lines += [
                    f"ip netns exec {hub} tc qdisc add dev port{i} root {self._shape}",
                    f"ip netns exec {name} tc qdisc add dev {CARD} root {self._shape}",
                ]
        return lines

    def _options(self) -> Sequence[str]:
        folder = Path(self._folder.name)
        agent = folder / "agent"
        agent.write_text(AGENT.format(stem=self._stem))
        agent.chmod(0o755)
        addresses = [f"{NETWORK}.{i}" for i in range(1, len(self.names) + 1)]
        if self.ranks.launcher.mpi.kind == "mpich":
            places = ",".join(f"{address}:1" for address in addresses)
            return ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", places]
        (folder / "hosts").write_text("".join(f"{address} slots=1\n" for address in addresses))
        old = self.ranks.launcher.mpi.version[:1] < (5,)
        name = ["--mca", "plm_rsh_agent"] if old else ["--prtemca", "plm_ssh_agent"]
        dealt = ["--map-by", "ppr:1:node:OVERSUBSCRIBE"]
        return [*name, str(agent), "--hostfile", str(folder / "hosts"), *dealt]
