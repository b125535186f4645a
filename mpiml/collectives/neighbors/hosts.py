"""The mean in each host, and a neighbour average between hosts."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from mpiml.collectives.alike import refuse
from mpiml.collectives.allreducing import allreduce
from mpiml.collectives.labels import Label
from mpiml.collectives.loose import loose_of
from mpiml.collectives.mail import mail_of
from mpiml.collectives.members import team_of
from mpiml.collectives.neighbors.edges import Edges, edges_of, topology_at
from mpiml.collectives.neighbors.exchange import exchange_of
from mpiml.collectives.neighbors.leaves import Leaves
from mpiml.collectives.neighbors.reducing import meeting_of, mixed
from mpiml.collectives.notes import drain
from mpiml.collectives.room import Room
from mpiml.collectives.team import Hooks, Team
from mpiml.errors import MpimlError, ServiceGoneError, UsageError
from mpiml.topology import Schedule, Topology

__all__ = ["hierarchical_neighbor_allreduce"]

_WHERE = "hierarchical_neighbor_allreduce"
_KEY = "home of neighbours"
_CLOSING = 10.0  # s, that the other processes of the host have to come to its end
_PLANS = 256  # topologies whose edges a home keeps
_RESULT, _ERROR, _GONE = b"\0", b"\1", b"\2"


def hierarchical_neighbor_allreduce(
    x: Any,
    topology: Any,
    comm: Any = None,
    *,
    step: int | None = None,
    out: Any = None,
    name: str | None = None,
) -> Any:
    """Return the weighted mean over hosts of the means in the hosts.

    Collective over the members of a host and of its neighbours. Members of a host take their
    mean; the first one of each host averages it with those of its neighbours, by the weights
    of `topology`, and gives the result to the others (BlueFog's
    ``hierarchical_neighbor_allreduce``). Between hosts goes one message for each edge, not
    one for each pair of members. Hosts count alike, whatever the number of their members.

    Parameters
    ----------
    x, comm, step, out, name
        As for `neighbor_allreduce`.
    topology : Topology, Schedule, or function
        Of the hosts, in the order of their first members; or a function that returns one,
        given their number: ``mpiml.topology.ring``. With one host the result is the mean.

    Returns
    -------
    array or tree of arrays
        The same bits on all members of a host.

    Raises
    ------
    UsageError
        As of `neighbor_allreduce`; on all members of the host.
    """
    team = team_of(comm, _WHERE)
    home = _home_of(team)
    edges: Edges | None = None
    wrong: Exception | None = None
    try:
        edges = home.edges(topology, step)
    except Exception as caught:  # of one member, perhaps: the others of the host must hear
        wrong = caught
    label = Label(_WHERE, name=name, more="" if edges is None else edges.text)
    with team.round(label):
        leaves, error = _taken_apart(x, out)
        error = wrong or error
        mean = x
        if home.team is not None:
            try:
                mean = home.mean(home.team, x, error, name, label)
            except UsageError as caught:
                error = error or caught
        if not home.leads:
            home.exchange.skip()
            return home.take(leaves, error, label)
        if error is not None or leaves is None or edges is None:
            assert error is not None
            if edges is None:
                home.exchange.skip()  # whom to tell outside of the host is not known
            else:
                refuse(team, _WHERE, error, meeting_of(home.exchange, edges))
            raise error
        try:
            found = mixed(team, home.exchange, edges, mean, out, name, _WHERE)
            result = Leaves(found, None, _WHERE)
        except BaseException as caught:
            home.give_up(caught)
            raise
        home.give(result, label)
        return found


def _taken_apart(x: Any, out: Any) -> tuple[Leaves | None, Exception | None]:
    try:
        return Leaves(x, out, _WHERE), None
    except Exception as error:
        return None, error


def _told(error: Exception | None) -> MpimlError | None:
    if error is None or isinstance(error, MpimlError):
        return error
    return UsageError(f"{type(error).__name__}: {error}")


class _HostHooks:
    """Those of the whole team, for the members of one host; the rounds are the whole team's."""

    def __init__(self, hooks: Hooks, local: Sequence[int]) -> None:
        self._hooks = hooks
        self._local = local

    def begin(self, label: Any) -> None:
        """Nothing: the call around it has."""

    def end(self) -> None:
        """Nothing."""

    def waiting(self, seconds: float, missing: Sequence[int], label: Any) -> None:
        """Look around, by the numbers of the whole team."""
        self._hooks.waiting(seconds, [self._local[i] for i in missing], label)


class _Home:
    """The host of one member: its members as a team, and how results are handed to them."""

    def __init__(self, team: Team) -> None:
        self.whole = team
        self.exchange = exchange_of(team)
        self._channel = mail_of(team).open("results in a host")
        self._hosts = sorted(set(team.hosts))
        firsts = {host: team.hosts.index(host) for host in self._hosts}
        self._leaders = [firsts[host] for host in self._hosts]
        self._own = self._hosts.index(team.hosts[team.index])
        self.leads = team.index == team.local[0]
        self._plans: dict[tuple[str, Topology], Edges] = {}
        self.team: Team | None = _host_team(team)

    def edges(self, topology: Any, step: int | None) -> Edges:
        """Return the edges of this host, between the first members of hosts."""
        hosts = len(self._hosts)
        if callable(topology) and not isinstance(topology, Schedule | Topology):
            topology = topology(hosts)
        try:
            found = topology_at(topology, step, hosts, _WHERE)
        except UsageError as error:
            raise UsageError(f"{error} (members are hosts here: {hosts})") from None
        key = found.name, found  # by value: a function makes another one each time
        known = self._plans.get(key)
        if known is None:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            known = self._plans[key] = self._edges_of(found)
        return known

    def _edges_of(self, topology: Topology) -> Edges:
        edges = edges_of(topology, self._own, "row", _WHERE)
        receives = {self._leaders[h]: weight for h, weight in edges.receives.items()}
        sends = {self._leaders[h]: factor for h, factor in edges.sends.items()}
        return Edges(edges.own, receives, sends, f"{edges.text[:-1]}, hosts)")

    def mean(
        self, team: Team, x: Any, error: Exception | None, name: str | None, label: Label
    ) -> Any:
        """Return the mean in the host, of which `team` is; `x` where this member has an error.

        Collective over the members of the host.

        Raises
        ------
        UsageError
            Another member has an error, or they differ.
        """
        if not loose_of(team, label).checks:
            team.agree(_told(error), label)
        elif error is not None:  # the others hear of it where they reduce
            refuse(team, _WHERE, error, lambda said: loose_of(team, said))
            return x
        return allreduce(x, "mean", team, name=name)

    def give(self, leaves: Leaves, label: Label) -> None:
        """Hand the result to the other members of the host, and wait until they have it."""
        block = leaves.scratch()
        for sending in [self._channel.send(i, _RESULT, block) for i in self._others()]:
            sending.wait(label)

    def give_up(self, error: BaseException) -> None:
        """Tell the other members of the host, who wait for a result, why none will come."""
        kind = "" if isinstance(error, UsageError) else f"{type(error).__name__}: "
        head = _ERROR if isinstance(error, UsageError) else _GONE
        for i in self._others():
            with suppress(Exception):  # the error itself is what counts
                self._channel.send(i, head + f"{kind}{error}".encode())

    def _others(self) -> list[int]:
        return [i for i in self.whole.local if i != self.whole.index]

    def take(self, leaves: Leaves | None, error: Exception | None, label: Label) -> Any:
        """Return the result of the host, or raise what has gone wrong."""
        if error is not None or leaves is None:  # the first member has found it too
            assert error is not None
            raise error
        block = leaves.result()
        first = self.whole.local[0]

        def into(source: int, head: bytes, nbytes: int) -> Any:
            return block if head == _RESULT else None

        head = self._channel.receive(first, into).wait(label).head
        if head != _RESULT:
            kind = UsageError if head[:1] == _ERROR else ServiceGoneError
            raise kind(f"{head[1:].decode()} (on {self.whole.names[first]})")
        return leaves.finish(block)


def _home_of(team: Team) -> _Home:
    """Return the home of a member, made once. Collective over the members, the first time."""
    found: _Home | None = team.kept.get(_KEY)
    if found is None:
        exchange_of(team)
        with team.making:
            found = team.kept.get(_KEY)
            if found is None:
                found = team.kept[_KEY] = _Home(team)
    return found


class _Lease:
    """The communicator of a host, and the room of one process in it."""

    def __init__(self, team: Team) -> None:
        self._lock = threading.Lock()
        self._users = len(team.housemates)
        self.room = Room(self._users)
        self.comm: Any = None
        if team.comm is not None and team.comm.size > 1:
            from mpi4py import MPI

            self.comm = team.comm.Split(team.hosts[team.index], team.rank)
            self.comm.Set_name(f"mpiml host of {team.title}")
            self.comm.Set_errhandler(MPI.ERRORS_RETURN)

    def give_back(self, host: Team, spoiled: bool) -> None:
        """Free the communicator, unless members of this process still have it."""
        with self._lock:
            self._users -= 1
            if self._users or self.comm is None:
                return
            from mpi4py import MPI

            if not spoiled and not MPI.Is_finalized() and drain(host, _CLOSING):
                self.comm.Free()


def _host_team(team: Team) -> Team | None:
    """Return a team of the members of this host; None: there is one. Collective."""
    lease: _Lease = team.share(b"", lambda _: _Lease(team), f"making hosts of {team.title}")
    local = team.local
    ranks = sorted({team.ranks[i] for i in local})
    host = Team(
        local.index(team.index),
        [ranks.index(team.ranks[i]) for i in local],
        [0] * len(local),
        lease.comm,
        lease.room,
        [team.names[i] for i in local],
        f"the host of {team.names[local[0]]} in {team.title}",
        _HostHooks(team.hooks, local),
        team.spin_us,
        team.yield_us,
    )

    def close() -> None:
        host.spoiled = team.spoiled
        host.close()
        lease.give_back(host, team.spoiled)

    team.closes(close)
    return host if len(local) > 1 else None
