"""Whose collective a call is: the role of the node that calls, or the ranks of a communicator."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

from mpiml.collectives.desk import leave
from mpiml.collectives.messages import Waiting, complete
from mpiml.collectives.notes import drain
from mpiml.collectives.over import GUESTS, OVER
from mpiml.collectives.requests import end_with_mpi
from mpiml.collectives.room import Room
from mpiml.collectives.team import PlainHooks, Team
from mpiml.config import Config
from mpiml.errors import UsageError
from mpiml.hosts import cores_available, local_facts
from mpiml.scope import current_scope, owners

__all__ = ["team_of"]

_CLOSING = 10.0  # s, that the other ranks have to free the communicator too


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
                f"a node, got {comm!r}{'. Arrays go to like=.' if where == 'Bucket' else ''}"
            )
        return attached(comm, make)

    return find


class _PlainTeam(Team):
    """One member for each rank; owns its communicator."""

    def __init__(self, comm: Any) -> None:
        from mpiml import world

        world.check_threads()
        title = f"{comm.name or 'a communicator'} of {comm.size} ranks"
        config, wrong = _configured()
        waiting = Waiting(
            PlainHooks((), (), config.stall_warning), f"making the team of {title}"
        )
        # Splitting waits in MPI, where nothing ends a wait; after this everybody is there.
        complete(comm.Ibarrier(), waiting)
        own = world.own_duplicate(comm, f"mpiml team of {title}")
        mine = local_facts(config)
        pids, cores, errors = zip(*own.allgather((os.getpid(), mine.cores, wrong)), strict=True)
        if any(errors):
            own.Free()
            who = next(i for i, error in enumerate(errors) if error)
            raise UsageError(f"{errors[who]} (on rank {who})")
        hosts = world.ranks_by_host(own, config.host_size)
        names = [f"rank {i}" for i in range(own.size)]
        here = [i for i in range(own.size) if hosts[i] == hosts[own.rank]]
        known = [pid if i in here else 0 for i, pid in enumerate(pids)]
        together = len(frozenset().union(*[cores[i] for i in here]))
        crowded = len(here) > cores_available(together, mine.quota)
        hooks = PlainHooks(names, known, config.stall_warning)
        super().__init__(
            own.rank, range(own.size), hosts, own, Room(1), names, title, hooks,
            spin_us=0 if crowded else 20,
        )  # fmt: skip
        GUESTS.add(self)
        end_with_mpi()

    def leave_at_end(self) -> None:
        """Tell the other ranks that this process ends, if it is in no program of mpiml. Local."""
        from mpi4py import MPI

        if self.comm is not None and not MPI.Is_finalized():
            with contextlib.suppress(MPI.Exception):  # of peers that have died
                leave(self)

    def close(self) -> None:
        """Close what belongs to the team, and free its communicator. Collective."""
        from mpi4py import MPI

        if OVER:  # MPICH ends what stands on COMM_WORLD in MPI_Finalize: others may not come
            self.closed = True
            return
        super().close()
        if self.comm is not None and not MPI.Is_finalized():
            if drain(self, _CLOSING):
                self.comm.Free()
            self.comm = None


def _configured() -> tuple[Config, str]:
    """Return the settings, and what is wrong with the environment: for all ranks to hear."""
    try:
        return Config.read(), ""
    except UsageError as error:
        return Config.read_foreign(), str(error)
