"""What a program has a say in, in the collectives of its nodes.

Where collectives are rounds of the agreed stop, what ends a wait, and what is said of one that
lasts. Whether a replica will ever come is asked of its rank once a wait has lasted, and told
when it leaves, so a program whose replicas come in time sends nothing.
"""

import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from mpiml.driver import Sleeper
from mpiml.errors import ServiceGoneError, Stopped, UsageError
from mpiml.hosting import FAILED, RUNS, STOPPED, HostedNode
from mpiml.scope import Scope, scope_here
from mpiml.survey import stack_above, thread_frames, where
from mpiml.waits import Wait

__all__ = ["RoleHooks", "State"]

_ASK = 0.1  # s, that a wait lasts until the missing are asked whether they will come
_SURE = 0.7  # s, that one who has left is waited for, where it may have come before
_CAUSE = 5.0  # s, that the error of a failed one is waited for
_FRESH = 1.0  # s since the last look, until a wait counts as over


class State(NamedTuple):
    """What the rank of a replica has said of it."""

    how: int
    rounds: int
    since: float


class _Look:
    """One wait, between its looks."""

    __slots__ = ("asked", "at", "label", "missing", "said", "seen", "since", "text")

    def __init__(self, label: Any, since: float) -> None:
        self.label = label
        self.since = since
        self.at = since
        self.text = str(label)  # says where the call stands, so it is made on its thread
        self.missing: Sequence[int] = ()
        self.seen: set[int] = set()  # who was missing after it had been known to have left
        self.asked = 0.0
        self.said = False


class RoleHooks:
    """What a program has a say in, in the collectives of one of its nodes.

    Local; called by the node's team, on the threads that wait.

    Parameters
    ----------
    teams
        Of the rank.
    node
        The member.
    members
        The vertices of its role.
    """

    def __init__(self, teams: Any, node: HostedNode, members: Sequence[Any]) -> None:
        self._teams = teams
        self._runtime = teams.runtime
        self._node = node
        self._agreement = node.agreement
        self._next = node.agreement.next
        self._members = members
        self._asked: set[int | None] = set()  # by vertex; None: about all
        self._looks: dict[int, _Look] = {}  # by thread
        self._given: dict[int, Scope] = {}  # methods that wait, and have given their turn up

    # -- rounds of the agreed stop -------------------------------------------------------------

    def begin(self, label: Any) -> None:
        """Enter a collective: a round of the agreed stop, if a body does.

        Raises
        ------
        Stopped
            In a body whose role has agreed to stop before this round.
        """
        scope = scope_here()
        if scope is not None and scope.nested:
            return  # methods run to their end
        number = self._next()
        if self._agreement.alert:
            self._stopping(scope or self._node.scope, number)

    def _stopping(self, scope: Scope, number: int) -> None:
        node = self._node
        if scope.halt:
            alone = len(self._members) == 1 and not node.broken
            if alone and not self._agreement.is_over(number):
                return  # as it would be with more
        else:
            if node.agreed:
                return  # an on_stop callback
            self._runtime.engine.wait(self._agreement.decided, None, None)
            node.resume()
            if not node.agreed and not self._agreement.is_over(number):
                return
            node.release()
        raise Stopped("the program is stopping")

    def end(self) -> None:
        """Leave it; `stopping` is true from now on if the role stops after this round."""
        if self._looks:
            thread = threading.get_ident()
            self._looks.pop(thread, None)
            given = self._given.pop(thread, None)
            if given is not None:
                given.resume()
        if self._agreement.ending and not self._node.agreed:
            scope = scope_here()
            if (scope is None or not scope.nested) and self._over_now():
                self._node.release()

    def _over_now(self) -> bool:
        return self._agreement.is_over(self._agreement.rounds + 1)

    # -- a wait that lasts ---------------------------------------------------------------------

    def waiting(self, seconds: float, missing: Sequence[int], label: Any) -> None:
        """Look around, every 50 ms or so, while members are missing; none: nobody knows who.

        Raises
        ------
        Stopped, ServiceGoneError
            A member has failed, or the program has been given up.
        UsageError
            A member has returned and will never come.
        """
        scope = scope_here()
        method = scope is not None and scope.nested
        thread = threading.get_ident()
        if scope is not None and method and thread not in self._given and scope.suspend():
            self._given[thread] = scope  # others may run meanwhile
        look = self._look(thread, seconds, missing, label)
        self._end_early(look, method)
        if seconds >= _ASK and not method and not self._node.calling_back:
            gone = self._gone(look)
            if gone is not None:
                self._end_for(look, *gone)
        limit = self._runtime.settings.stall_warning
        if limit > 0 and seconds >= limit and not look.said:
            self._warn(look, seconds, method)

    def _look(self, thread: int, seconds: float, missing: Sequence[int], label: Any) -> _Look:
        now = time.monotonic()
        look = self._looks.get(thread)
        if look is None or look.label is not label or now - seconds > look.since + 0.01:
            look = self._looks[thread] = _Look(label, now - seconds)
        look.at = now
        look.missing = tuple(missing)
        return look

    def _end_early(self, look: _Look, method: bool) -> None:
        """Raise if nobody waits for anything here any more."""
        runtime = self._runtime
        if runtime.done or runtime.engine.closed:
            raise ServiceGoneError(f"{look.text}: the program has ended")
        node = self._node
        alone = node.agreed and not self._agreement.rounds  # stopped without counting rounds
        if not node.broken and not runtime.ending.abandoned and not alone:
            return
        if not method:
            raise Stopped("the program is stopping")
        gone = ServiceGoneError(f"{look.text}: a member of the role has failed")
        gone.__cause__ = runtime.error_of(runtime.ending.note)
        raise gone

    def _gone(self, look: _Look) -> tuple[Any, State] | None:
        """Return who will never come, and how it has left."""
        known = bool(look.missing)
        rounds = self._agreement.rounds
        if not known and None not in self._asked:
            self._asked.add(None)
            self._teams.ask(self._node, None)
        for member in look.missing or range(len(self._members)):
            spec = self._members[member]
            if spec.id == self._node.vertex:
                continue
            state = self._teams.states.get(spec.id)
            if state is None:
                if known and spec.id not in self._asked:
                    self._asked.add(spec.id)
                    self._teams.ask(self._node, spec.id)
                continue
            if state.how == RUNS:
                continue
            # It may have come and gone: seen as missing after it had left, or at an earlier
            # round, it cannot.
            lasted = look.at - max(state.since, look.since) > _SURE
            sure = member in look.seen if known else state.rounds < rounds or lasted
            if sure:
                return spec, state
            look.seen.add(member)
        return None

    def _end_for(self, look: _Look, spec: Any, state: State) -> None:
        """Raise what ends a wait for one who has left."""
        who = f"{spec.title} (rank {self._runtime.ranks[spec.id]})"
        if self._runtime.ending.failed:
            raise Stopped("the program is stopping")  # it has left because of that
        if state.how == FAILED:
            if look.at - state.since < _CAUSE:
                return  # its error is on the way
            raise ServiceGoneError(f"{look.text}: {who} has failed and will never come")
        how = "was stopped" if state.how == STOPPED else "has returned"
        raise UsageError(
            f"{look.text}: {who} {how} and will never come; {self._node.title} (rank "
            f"{self._runtime.engine.rank}) waits for it. Every replica of a role makes the same "
            "collective calls: look for a loop of another length, or a return under a condition."
        )

    # -- what is shown -------------------------------------------------------------------------

    def _warn(self, look: _Look, seconds: float, method: bool) -> None:
        """Say once who is missing; of those that wait only the first one speaks."""
        if not look.asked:
            look.asked = look.at
            for spec in self._members:
                self._teams.ask(self._node, spec.id)
        if look.at - look.asked < 2 * _ASK:
            return
        look.said = True
        ranks = self._runtime.ranks
        # Who is missing at a meeting may itself wait for others there: rounds tell.
        missing = ([] if method else self._behind(look.asked)) or look.missing
        here = self._runtime.engine.rank
        waits = [i for i in range(len(self._members)) if i not in missing]
        if not missing:
            waits = [i for i in waits if ranks[self._members[i].id] == here]
        if waits and waits[0] != self._node.spec.index:
            return
        specs = [self._members[i] for i in missing]
        names = [f"{spec.title} (rank {ranks[spec.id]})" for spec in specs]
        self._runtime.say(
            f"mpiml: {self._runtime.name}: {self._node.title} (rank {here}) "
            f"has waited {seconds:.0f} s for {_few(names)} in {look.text}\n"
        )

    def _behind(self, since: float) -> list[int]:
        """Return who has begun fewer rounds than this member, of those known since a time."""
        rounds = self._agreement.rounds
        found = []
        for i, spec in enumerate(self._members):
            state = self._teams.states.get(spec.id)
            if state is not None and (state.how != RUNS or state.since >= since):
                found += [i] if state.rounds < rounds else []
        return found

    def awaited(self) -> list[list[int]]:
        """Return, for each wait of now, the vertices that are missing; all, if nobody knows who."""
        now = time.monotonic()
        looks = [look for look in list(self._looks.values()) if now - look.at <= _FRESH]
        everybody = range(len(self._members))
        return [[self._members[i].id for i in look.missing or everybody] for look in looks]

    def sleepers(self) -> list[Sleeper]:
        """Return the threads of this node that wait in collectives now."""
        now = time.monotonic()
        frames = thread_frames()
        found = []
        for thread, look in list(self._looks.items()):
            if now - look.at > _FRESH or thread not in frames:
                continue
            if where(frames[thread]) == "no user code":  # it works for requests
                thread = self._node.thread
                if not _waits_for_request(frames.get(thread)):
                    continue
            names = [s.title for s in (self._members[i] for i in look.missing)]
            head = getattr(look.label, "head", look.text)
            wait = Wait(f"{_few(names)} in collective {head}")
            sleeper = Sleeper(wait, self._node.scope, None)
            sleeper.since, sleeper.thread = look.since, thread
            found.append(sleeper)
        return found


def _waits_for_request(frame: FrameType | None) -> bool:
    """Tell whether a thread waits for a collective that goes on in the background."""
    from mpiml.collectives.requests import Request

    return any(each.f_code is Request.wait.__code__ for each in stack_above(frame))


def _few(names: list[str]) -> str:
    """Return names in a row, not more than a line takes."""
    if not names:
        return "other members"
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more
