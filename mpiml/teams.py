"""The teams of a program: what makes the replicas of a role members of a collective.

A team is made when a node first needs it. What the program has a say in stands in
`mpiml.membership`; here is answered, for the other ranks, whether a node will ever come.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

from mpiml import threads
from mpiml.absence import ANY, News, Post
from mpiml.driver import Sleeper
from mpiml.errors import ServiceGoneError
from mpiml.hosting import RUNS, HostedNode
from mpiml.membership import RoleHooks, State
from mpiml.wire import MEMBER_ASK, MEMBER_STATE, Frame

__all__ = ["Teams"]

_CLOSING = 2.0  # s, that the other ranks have to come to the end of a team


class Teams:
    """The teams of one rank's nodes. Local, except `of`.

    Parameters
    ----------
    runtime
        The program on this rank.
    """

    def __init__(self, runtime: Any) -> None:
        self.runtime = runtime
        self.states: dict[int, State] = {}  # by vertex
        self._nodes: dict[int, HostedNode] = {node.vertex: node for node in runtime.nodes}
        self._teams: dict[int, Any] = {}
        self.spoiled = False  # messages are left in a communicator: it has to stay
        self._together: dict[int, bool] = {}  # nodes that hear of a stop as a role
        self._rooms: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._joining = {vertex: threading.Lock() for vertex in self._nodes}
        self._posts: dict[int, Post] = {}  # by vertex
        runtime.engine.handlers[MEMBER_ASK] = self._on_ask
        runtime.engine.handlers[MEMBER_STATE] = self._on_state

    # -- making them ---------------------------------------------------------------------------

    def of(self, node: HostedNode) -> Any:
        """Return the team of a node's role, for this node. Collective over the role at first."""
        team = self._teams.get(node.vertex)
        if team is None:
            with self._joining[node.vertex]:
                team = self._teams.get(node.vertex)
                if team is None:
                    team = self._teams[node.vertex] = self._join(node)
        return team

    def _join(self, node: HostedNode) -> Any:
        from mpiml.collectives.room import Room
        from mpiml.collectives.team import Team

        runtime, spec = self.runtime, node.spec
        if runtime.done:
            raise ServiceGoneError(
                f"{node.title}: the program has ended, and its teams with it"
            )
        rank, hosts = runtime.engine.rank, runtime.hosts
        members = runtime.vertices.of_role(spec.role_index)
        ranks = [runtime.ranks[v.id] for v in members]
        holders = {rank: place for place, rank in enumerate(dict.fromkeys(ranks))}
        hooks = RoleHooks(self, node, members)
        comm = None
        if len(holders) > 1:
            threads.check(f"a collective of role {spec.role!r}")
            folded = len(holders) < len(ranks)
            comm = (
                runtime.world.folded[spec.role_index] if folded else self._own_comm(spec, hooks)
            )
        with self._lock:
            room = self._rooms.setdefault(spec.role_index, Room(ranks.count(rank)))
        host = hosts.host_of(rank)
        here = sum(hosts.host_of(r) == host for r in ranks)
        crowded = hosts.oversubscribed(rank) or here > hosts.rows[host].cores
        return Team(
            spec.index,
            [holders[r] for r in ranks],
            [hosts.host_of(r) for r in ranks],
            comm,
            room,
            [v.title for v in members],
            f"role {spec.role!r}",
            hooks,
            spin_us=0 if crowded else 20,
        )

    def _own_comm(self, spec: Any, hooks: RoleHooks) -> Any:
        """Return a duplicate of the role's communicator. Collective over the role."""
        from mpiml.collectives.messages import Waiting, complete

        world, label = self.runtime.world, f"making the team of role {spec.role!r}"
        hooks.begin(label)
        try:
            # Splitting waits in MPI, where nothing ends a wait; after this everybody is there.
            complete(world.roles[spec.role_index].Ibarrier(), Waiting(hooks, label))
            return world.team_comm(spec.role_index)
        finally:
            hooks.end()

    def heard(self, node: HostedNode, stopping: bool) -> bool:
        """Return whether any member of a role knows that a stop is being agreed.

        Collective over the role, in each call of ``agree_stop``, where one thread of a rank makes
        all calls of MPI. It must not wait there for the others' counts while one of them waits
        for it in a call of the user's, where nothing tells it that there is a stop: so all learn
        of it in the same round. Bodies on other threads call no MPI and need none of this.
        """
        together = self._together.get(node.vertex)
        if together is None:
            together = self._together[node.vertex] = self._in_step(node)
        if not together:
            return stopping
        threads.check("agree_stop()")
        from mpi4py import MPI

        from mpiml.collectives.messages import complete

        team = self.of(node)
        said, heard = bytearray([stopping]), bytearray(1)
        request = team.comm.Iallreduce([said, MPI.BYTE], [heard, MPI.BYTE], MPI.BOR)
        complete(request, team.waiting("agree_stop()"))
        if heard[0]:
            self._together[node.vertex] = False  # all know it: no need to ask again
        return bool(heard[0])

    def _in_step(self, node: HostedNode) -> bool:
        """Tell, alike for all members of a role, whether their bodies may call MPI themselves."""
        ranks = self.runtime.ranks
        members = self.runtime.vertices.ids_of(node.spec.role_index)
        held = {ranks[vertex] for vertex in members}
        alone = sum(rank in held for rank in ranks) == len(members)
        return len(members) > 1 and (node.attached or alone)

    def meets_here(self, node: HostedNode) -> bool:
        """Tell whether a node has a team with other nodes of this process."""
        team = self._teams.get(node.vertex)
        return team is not None and team.in_one_process

    def busy(self, node: HostedNode) -> bool:
        """Tell whether a collective of a node is under way."""
        team = self._teams.get(node.vertex)
        return team is not None and team.worker.busy

    def close(self) -> None:
        """Close the teams, once all bodies have ended. Collective; their communicators stay."""
        if not self._teams:
            return
        from mpiml.collectives.notes import drain

        for _, team in sorted(self._teams.items()):
            team.spoiled = self.runtime.ending.failed  # in the midst of a collective, perhaps
            team.close()
            first = team.index == team.housemates[0]
            if first and not team.spoiled and not drain(team, _CLOSING):
                self.spoiled = True

    # -- who is still there --------------------------------------------------------------------

    def ask(self, node: HostedNode, vertex: int | None) -> None:
        """Ask about a replica, for `node`: the answer comes at once, and when it leaves.

        None: about all, and only of some that leave is told; see `mpiml.absence`.
        """
        if not self.runtime.done:
            ids = self.runtime.vertices.ids_of(node.spec.role_index)
            subject = ANY if vertex is None else ids.index(vertex)
            self._ask(node, node.spec.index, subject)

    def left(self, node: HostedNode) -> None:
        """Tell who has asked that a body is over."""
        with self._lock:
            news = self._post(node).leave(node.how, node.agreement.rounds)
        self._tell(node, news)

    def _post(self, node: HostedNode) -> Post:
        post = self._posts.get(node.vertex)
        if post is None:
            post = self._posts[node.vertex] = Post(node.spec.index, node.spec.replicas)
        return post

    def _on_ask(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        node = self._nodes[frame.target]
        ids = self.runtime.vertices.ids_of(node.spec.role_index)
        self._ask(node, ids.index(frame.source), frame.aux)

    def _ask(self, node: HostedNode, source: int, subject: int) -> None:
        with self._lock:
            news = self._post(node).ask(source, subject, node.agreement.rounds)
        self._tell(node, news)

    def _on_state(self, rank: int, frame: Frame, buffers: Sequence[Any]) -> None:
        node = self._nodes[frame.target]
        ids = self.runtime.vertices.ids_of(node.spec.role_index)
        source, how = ids.index(frame.source), frame.encoding
        with self._lock:
            news = self._post(node).hear(source, frame.aux, how, frame.id)
        self._tell(node, news)

    def _tell(self, node: HostedNode, news: Sequence[News]) -> None:
        """Send what is for others, and note what is for this one."""
        runtime = self.runtime
        ids = runtime.vertices.ids_of(node.spec.role_index)
        for each in news:
            to = ids[each.to]
            if to == node.vertex:
                self._note(ids[each.subject], each)
                continue
            kind = MEMBER_ASK if each.asks else MEMBER_STATE
            runtime.engine.transmit(
                runtime.ranks[to], kind, node.vertex, to,
                id=each.rounds, aux=each.subject, encoding=each.how,
            )  # fmt: skip

    def _note(self, vertex: int, news: News) -> None:
        old = self.states.get(vertex)
        if old is None or old.how == RUNS:  # an answer may come after the news
            self.states[vertex] = State(news.how, news.rounds, time.monotonic())

    # -- who waits -----------------------------------------------------------------------------

    def sleepers(self) -> list[Sleeper]:
        """Return the threads of this rank that wait in collectives."""
        teams = list(self._teams.values())
        return [sleeper for team in teams for sleeper in team.hooks.sleepers()]

    def awaited(self) -> list[list[int]]:
        """Return, for each wait in a collective here, the vertices that are waited for."""
        teams = list(self._teams.values())
        return [missing for team in teams for missing in team.hooks.awaited()]
