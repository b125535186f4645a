"""Two hosts made of one: network namespaces joined by a pair of virtual cards, 2 ranks on each.

``MPI_COMM_TYPE_SHARED`` splits by host there, as on a cluster, since each has a host name of its
own. What passes between them is counted by the card. Needs root, ``ip`` and ``unshare``.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mpiml.bench.spawn import Ranks
from mpiml.doctor.check import Outcome, attempt

__all__ = ["CARD", "TwoHosts", "link_bytes"]

#: The name of the card on either host.
CARD = "mpiml0"
ADDRESSES = ("10.213.77.1", "10.213.77.2")
#: Stands in for ssh: drops options, and runs the rest on the host of that address.
AGENT = """#!/bin/sh
while :; do case "$1" in -*) shift ;; *) break ;; esac; done
case "$1" in {cases} esac
shift
exec unshare --uts ip netns exec $name sh -c "hostname $name; $*"
"""


def link_bytes() -> int:
    """Return the bytes that have passed this host's card, both ways. Local: reads /proc."""
    with open("/proc/self/net/dev") as lines:
        for line in lines:
            name, _, rest = line.strip().partition(":")
            if name == CARD:
                words = rest.split()
                return int(words[0]) + int(words[8])  # received, sent
    raise LookupError(f"no card {CARD} here: expected to run on one of two hosts")


def _end_all_of(name: str) -> None:
    """End what still runs in a network namespace: a job past its time leaves ranks there."""
    for pid in attempt(["ip", "netns", "pids", name], 20.0).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


class TwoHosts:
    """Two network namespaces of this machine, taken down again on leaving.

    Local: starts child processes; no MPI in this process.

    Parameters
    ----------
    ranks
        Says how ranks are started.
    programs
        Whether mpiml's programs run there, which receive from any source: by UCX, MPICH loses some
        of these messages where a host has several ranks (docs/sharp-bits.md).
    """

    def __init__(self, ranks: Ranks, programs: bool = False) -> None:
        self.ranks = ranks
        self._programs = programs
        self.names = [f"mpiml{os.getpid()}{side}" for side in "ab"]
        self._addresses: Sequence[str] = ADDRESSES
        self._slots = 2  # ranks of each
        self._folder = tempfile.TemporaryDirectory(prefix="mpiml-hosts-")

    def why_not(self) -> str:
        """Return why there are no two hosts here; empty if there are.

        Call it inside of the ``with`` block: it tries to make them.
        """
        if self.ranks.launcher.mpi.kind not in ("openmpi", "mpich"):
            return f"{self.ranks.launcher.mpi} is not started on two hosts here"
        if os.geteuid() != 0:
            return "only root may make network namespaces"
        missing = [name for name in ("ip", "unshare") if shutil.which(name) is None]
        if missing:
            return f"no {' or '.join(missing)} on this machine (iproute2, util-linux)"
        for line in self._making():
            outcome = attempt(line.split(), 20.0)
            if outcome.status != 0:
                return f"`{line}`: {outcome.why()}"
        return "" if all(map(self._is_up, self.names)) else "the virtual cards did not come up"

    def _is_up(self, name: str) -> bool:
        """Wait until a card says so: the kernel takes its time, and MPI leaves out others."""
        limit = time.monotonic() + 10
        while time.monotonic() < limit:
            found = attempt(["ip", "-n", name, "-br", "link", "show", "dev", CARD], 20.0)
            if " UP " in found.stdout:
                return True
            time.sleep(0.01)
        return False

    def __enter__(self) -> "TwoHosts":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if shutil.which("ip") is not None:
            for name in self.names:
                _end_all_of(name)
                attempt(["ip", "netns", "del", name], 20.0)
        self._folder.cleanup()

    def scenario(self, where: str, plan: dict[str, Any]) -> dict[str, Any]:
        """Run ``module:function`` of this package on all ranks; return what rank 0 found.

        Raises
        ------
        BenchError
            They ended with another status than 0, or not in time.
        """
        return self.ranks.scenario(where, self._size, plan, **self._how())

    def run(self, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Outcome:
        """Run ``python ARGV`` on all ranks, with `environ` set besides.

        Raises
        ------
        BenchError
            They ended with another status than 0, or not in time.
        """
        how = self._how()
        return self.ranks.run(
            self._size, argv, **how | {"environ": how["environ"] | dict(environ or {})}
        )

    @property
    def _size(self) -> int:
        return self._slots * len(self.names)

    def _how(self) -> dict[str, Any]:
        here = self.names[0]
        return {
            "before": ("unshare", "--uts", "ip", "netns", "exec", here,
                       "sh", "-c", f'hostname {here}; exec "$0" "$@"'),
            "options": self._options(),
            "environ": self._environ(),
        }  # fmt: skip

    def _making(self) -> list[str]:
        a, b = self.names
        lines = [f"ip netns add {name}" for name in self.names]
        lines.append(f"ip link add {CARD} netns {a} type veth peer name {CARD} netns {b}")
        for name, address in zip(self.names, self._addresses, strict=True):
            lines += [
                f"ip -n {name} addr add {address}/24 dev {CARD}",
                f"ip -n {name} link set {CARD} up",
                f"ip -n {name} link set lo up",
            ]
        return lines

    def _options(self) -> Sequence[str]:
        folder, slots = Path(self._folder.name), self._slots
        where = zip(self.names, self._addresses, strict=True)
        cases = " ".join(f"{address}) name={name} ;;" for name, address in where)
        agent = folder / "agent"
        agent.write_text(AGENT.format(cases=cases))
        agent.chmod(0o755)
        if self.ranks.launcher.mpi.kind == "mpich":
            places = ",".join(f"{address}:{slots}" for address in self._addresses)
            return ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", places]
        places = "".join(f"{address} slots={slots}\n" for address in self._addresses)
        (folder / "hosts").write_text(places)
        old = self.ranks.launcher.mpi.version[:1] < (5,)
        name = ["--mca", "plm_rsh_agent"] if old else ["--prtemca", "plm_ssh_agent"]
        dealt = ["--map-by", f"ppr:{slots}:node:OVERSUBSCRIBE"]
        return [*name, str(agent), "--hostfile", str(folder / "hosts"), *dealt]

    def _environ(self) -> dict[str, str]:
        # UCX sees one machine and would go through its memory, past the card.
        if self.ranks.launcher.mpi.kind != "mpich":
            return {}
        if self._programs:
            return {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
        return {"UCX_TLS": "self,tcp", "UCX_NET_DEVICES": CARD}
