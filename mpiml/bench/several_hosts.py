"""Several hosts made of one: network namespaces joined by a bridge, with ranks on each.

``MPI_COMM_TYPE_SHARED`` splits by host there, as on a cluster, since each has a host name of its
own, and a ``/dev/shm`` of its own, so nothing is shared by mistake. What passes between hosts is
counted by their cards, and a host can be cut off: packets are then lost, and nobody is told.
Needs root, ``ip``, ``mount`` and ``unshare``.
"""

import itertools
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from mpiml.bench.spawn import BenchError, Ranks
from mpiml.doctor.check import Outcome, attempt

__all__ = ["CARD", "SeveralHosts", "link_bytes"]

#: The name of the card on every host.
CARD = "mpiml0"
NETWORK = "10.213.77"  # not of this machine: the bridge has a namespace of its own
TOOLS = ("ip", "mount", "unshare")
_TRIES = 20  # to end all of a host
#: Stands in for ssh: drops options, and runs the rest on the host of that address.
AGENT = """#!/bin/sh
while :; do case "$1" in -*) shift ;; *) break ;; esac; done
case "$1" in {cases} esac
shift
exec unshare --uts ip netns exec $name sh -c "{settle} $*"
"""
#: What makes a namespace a host: `ip netns exec` has given it mounts of its own already.
SETTLE = "hostname {name}; mount -t tmpfs -o mode=1777 mpiml /dev/shm;"

_numbers = itertools.count()  # of those made by this process


def link_bytes() -> int:
    """Return the bytes that have passed this host's card, both ways. Local: reads /proc."""
    with open("/proc/self/net/dev") as lines:
        for line in lines:
            name, _, rest = line.strip().partition(":")
            if name == CARD:
                words = rest.split()
                return int(words[0]) + int(words[8])  # received, sent
    raise LookupError(f"no card {CARD} here: expected to run on one of several hosts")


def _end_all_of(name: str) -> None:
    """Kill what runs in a network namespace: a job past its time leaves ranks there."""
    for _ in range(_TRIES):  # what is being started meanwhile is not on the list
        pids = attempt(["ip", "netns", "pids", name], 20.0).stdout.split()
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.01)


def _clear_away() -> None:
    """Take down what processes have left that were killed inside of the ``with`` block."""
    for name in attempt(["ip", "netns", "list"], 20.0).stdout.split():
        of = re.match(r"mpiml(\d+)-\d", name)
        if of and not os.path.exists(f"/proc/{of[1]}"):
            _end_all_of(name)
            attempt(["ip", "netns", "del", name], 20.0)


class SeveralHosts:
    """Network namespaces of this machine, taken down again on leaving.

    Local: starts child processes; no MPI in this process.

    Parameters
    ----------
    ranks
        Says how ranks are started.
    slots
        How many ranks each host has: ``(2, 1)`` makes two hosts. Ranks are numbered host by host.
    programs
        Whether mpiml's programs run there, which receive from any source: by UCX, MPICH loses some
        of these messages where a host has several ranks (docs/sharp-bits.md).

    Attributes
    ----------
    names : list of str
        The hosts' names, unique on this machine.
    """

    def __init__(
        self, ranks: Ranks, slots: Sequence[int] = (2, 2), programs: bool = False
    ) -> None:
        self.ranks = ranks
        self.slots = tuple(slots)
        self._programs = programs
        stem = f"mpiml{os.getpid()}-{next(_numbers)}"
        self.names = [f"{stem}{chr(ord('a') + i)}" for i in range(len(self.slots))]
        self._hub = f"{stem}hub"
        self._addresses = [f"{NETWORK}.{i}" for i in range(1, len(self.slots) + 1)]
        self._folder = tempfile.TemporaryDirectory(prefix="mpiml-hosts-")

    # -- making hosts, and taking them down ----------------------------------------------------

    def why_not(self) -> str:
        """Return why there are no such hosts here; empty if there are.

        Call it inside of the ``with`` block: it tries to make them.
        """
        if self.ranks.launcher.mpi.kind not in ("openmpi", "mpich"):
            return f"{self.ranks.launcher.mpi} is not started on several hosts here"
        if os.geteuid() != 0:
            return "only root may make network namespaces"
        missing = [name for name in TOOLS if shutil.which(name) is None]
        if missing:
            return f"no {' or '.join(missing)} on this machine (iproute2, util-linux)"
        _clear_away()
        for line in self._making():
            outcome = attempt(line.split(), 20.0)
            if outcome.status != 0:
                return f"`{line}`: {outcome.why()}"
        return "" if all(map(self._is_up, self.names)) else "the virtual cards did not come up"

    def _making(self) -> Iterator[str]:
        hub = self._hub
        yield from (f"ip netns add {name}" for name in (hub, *self.names))
        yield f"ip -n {hub} link add bridge type bridge"
        yield f"ip -n {hub} link set bridge up"
        for i, (name, address) in enumerate(zip(self.names, self._addresses, strict=True)):
            yield f"ip link add {CARD} netns {name} type veth peer name port{i} netns {hub}"
            yield f"ip -n {hub} link set port{i} master bridge up"
            yield f"ip -n {name} addr add {address}/24 dev {CARD}"
            yield f"ip -n {name} link set {CARD} up"
            yield f"ip -n {name} link set lo up"

    def _is_up(self, name: str) -> bool:
        """Wait until a card says so: the kernel takes its time, and MPI leaves out others."""
        limit = time.monotonic() + 10
        while time.monotonic() < limit:
            found = attempt(["ip", "-n", name, "-br", "link", "show", "dev", CARD], 20.0)
            if " UP " in found.stdout:
                return True
            time.sleep(0.01)
        return False

    def __enter__(self) -> "SeveralHosts":
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
            for name in (*self.names, self._hub):
                attempt(["ip", "netns", "del", name], 20.0)
        self._folder.cleanup()

    # -- what happens to hosts -----------------------------------------------------------------

    def end(self, host: str) -> None:
        """Kill whatever runs on a host, as when it loses its power."""
        _end_all_of(host)

    def cut(self, host: str) -> None:
        """Cut a host off: what it sends and what is sent to it is lost, and nobody is told."""
        self._port(host, "nomaster")

    def mend(self, host: str) -> None:
        """Join a host to the others again."""
        self._port(host, "master", "bridge")

    def _port(self, host: str, *how: str) -> None:
        port = f"port{self.names.index(host)}"
        command = ["ip", "-n", self._hub, "link", "set", port, *how]
        outcome = attempt(command, 20.0)
        if outcome.status != 0:
            raise BenchError(f"`{' '.join(command)}`: {outcome.why()}")

    # -- running on them -----------------------------------------------------------------------

    def scenario(self, where: str, plan: dict[str, Any]) -> dict[str, Any]:
        """Run ``module:function`` of this package on all ranks; return what rank 0 found.

        Raises
        ------
        BenchError
            They ended with another status than 0, or not in time.
        """
        return self.ranks.scenario(where, sum(self.slots), plan, **self._how())

    def run(self, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> Outcome:
        """Run ``python ARGV`` on all ranks, with `environ` set besides.

        Raises
        ------
        BenchError
            They ended with another status than 0, or not in time.
        """
        how = self._how()
        return self.ranks.run(
            sum(self.slots), argv, **how | {"environ": how["environ"] | dict(environ or {})}
        )

    def command(self, argv: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs ``python ARGV`` on all ranks, and its environment."""
        how = self._how()
        launcher = [str(self.ranks.launcher.path), *how["options"], "-n", str(sum(self.slots))]
        command = [*how["before"], *launcher, sys.executable, *argv]
        return command, self.ranks.environ | how["environ"]

    def _how(self) -> dict[str, Any]:
        here = self.names[0]
        settle = SETTLE.format(name=here)
        return {
            "before": ("unshare", "--uts", "ip", "netns", "exec", here,
                       "sh", "-c", f'{settle} exec "$0" "$@"'),
            "options": self._options(),
            "environ": self._environ(),
        }  # fmt: skip

    def _options(self) -> Sequence[str]:
        folder, mpi = Path(self._folder.name), self.ranks.launcher.mpi
        where = zip(self.names, self._addresses, strict=True)
        cases = " ".join(f"{address}) name={name} ;;" for name, address in where)
        agent = folder / "agent"
        agent.write_text(AGENT.format(cases=cases, settle=SETTLE.format(name="$name")))
        agent.chmod(0o755)
        places = list(zip(self._addresses, self.slots, strict=True))
        if mpi.kind == "mpich":
            hosts = ",".join(f"{address}:{slots}" for address, slots in places)
            return ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", hosts]
        (folder / "hosts").write_text("".join(f"{a} slots={n}\n" for a, n in places))
        old = mpi.version[:1] < (5,)
        name = ["--mca", "plm_rsh_agent"] if old else ["--prtemca", "plm_ssh_agent"]
        dealt = ["--map-by", "slot:OVERSUBSCRIBE"]
        return [*name, str(agent), "--hostfile", str(folder / "hosts"), *dealt]

    def _environ(self) -> dict[str, str]:
        # UCX sees one machine and would go through its memory, past the card.
        if self.ranks.launcher.mpi.kind != "mpich":
            return {}
        if self._programs:
            return {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
        return {"UCX_TLS": "self,tcp", "UCX_NET_DEVICES": CARD}
