"""Whose collective a call is: the role of the node that calls, or the ranks of a communicator."""

import functools
import os
from collections.abc import Callable
from typing import Any

from mpiml.collectives.room import Room
from mpiml.collectives.team import PlainHooks, Team
from mpiml.config import Config
from mpiml.errors import UsageError
from mpiml.hosts import cores_available, local_facts
from mpiml.scope import current_scope, owners

__all__ = ["team_of"]


def team_of(comm: Any, where: str) -> Team:
    """Return the team of a communicator's ranks, or of the role of the node that calls.

    Collective over the members, the first time. The team of a communicator is freed with it.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, Team or None
        None: the role of the node whose code this is.
    where : str
        Opens the message of an error.

    Raises
    ------
    UsageError
        `comm` is no intracommunicator; or it is None, outside of a node.
    """
    if isinstance(comm, Team):
        return comm
    if comm is None:
        scope = current_scope(required=bool(owners))  # it says why, beside a program
        if scope is None:
            raise UsageError(
                f"{where}: comm=None means the role of a node, and this code belongs to "
                "none. Pass an mpi4py communicator: comm=MPI.COMM_WORLD."
            )
        own: Team = scope.owner.team()
        return own
    team: Team = _attached()(comm, _PlainTeam, where)
    return team


@functools.cache  # an import statement takes as long as the rest of a small allreduce
def _attached() -> Callable[..., Any]:
    """Return what finds the team of a communicator; MPI comes along with it."""
    from mpi4py import MPI

    from mpiml.world import attached

    def find(comm: Any, make: Callable[[Any], Team], where: str) -> Any:
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise UsageError(
                f"{where}: comm: expected an mpi4py intracommunicator, or None for the role of "
                f"a node, got {comm!r}"
            )
        return attached(comm, make)

    return find


class _PlainTeam(Team):
    """One member for each rank; owns its communicator."""

    def __init__(self, comm: Any) -> None:
        from mpiml import world

        world.check_threads()
        config = Config.read()
        own = world.own_duplicate(comm, f"mpiml team of {comm.name or 'a communicator'}")
        hosts = world.ranks_by_host(own, config.host_size)
        mine = local_facts(config)
        pids, cores = zip(*own.allgather((os.getpid(), mine.cores)), strict=True)
        names = [f"rank {i}" for i in range(own.size)]
        here = [i for i in range(own.size) if hosts[i] == hosts[own.rank]]
        known = [pid if i in here else 0 for i, pid in enumerate(pids)]
        together = len(frozenset().union(*[cores[i] for i in here]))
        crowded = len(here) > cores_available(together, mine.quota)
        super().__init__(
            own.rank,
            range(own.size),
            hosts,
            own,
            Room(1),
            names,
            f"{comm.name or 'a communicator'} of {own.size} ranks",
            PlainHooks(names, known, config.stall_warning),
            spin_us=0 if crowded else 20,
        )

    def close(self) -> None:
        """Close what belongs to the team, and free its communicator. Collective."""
        from mpi4py import MPI

        super().close()
        if self.comm is not None and not MPI.Is_finalized():
            self.comm.Free()
            self.comm = None
