"""Who of a role has left, and who wants to know: asked and told along the tree of its members.

A member that waits in a collective asks whether those it misses will ever come. Were each asked
directly, one that is late would hear of all others, and where nobody knows who is late, all of
all. So a question goes from member to member towards the one that is meant, and where one is on
its way already, it is joined. Whoever has asked hears when that one leaves.

A question about `ANY` goes to all. Then of those that leave only the one that has come the least
far is told of, for each way of leaving: that is enough to know that a wait is in vain.
"""

from typing import NamedTuple

from mpiml.control import children, parent

__all__ = ["ANY", "RUNS", "News", "Post"]

ANY = 0xFFFFFFFF
RUNS = 0
"""How a member stands that has not left; other numbers say how one has."""


class News(NamedTuple):
    """What one member tells the next; to itself, what it has learned.

    Attributes
    ----------
    to
        Index of the member that is meant.
    asks
        Whether it is a question.
    subject
        Index of the member it is about, or `ANY`.
    how, rounds
        How that one stands, and how many rounds it has begun.
    """

    to: int
    asks: bool
    subject: int
    how: int = RUNS
    rounds: int = 0


class Post:
    """One member's place in the tree. Pure state: what to send is returned.

    Parameters
    ----------
    index, replicas
        Which member of how many.
    """

    __slots__ = ("_asked", "_beside", "_index", "_least", "_left", "_waiting", "_watching")

    def __init__(self, index: int, replicas: int) -> None:
        self._index = index
        above = [parent(index)] if index else []
        self._beside = (*above, *children(index, replicas))
        self._waiting: dict[int, set[int]] = {}  # by subject: whom the next answer is for
        self._watching: dict[int, set[int]] = {}  # by subject: who hears when it leaves
        self._asked: set[int] = set()  # members beside that know of our interest in any
        self._left: dict[int, tuple[int, int]] = {}
        self._least: dict[int, News] = {}  # by way of leaving: the one that came least far

    def ask(self, source: int, subject: int, rounds: int) -> list[News]:
        """Take in a question of a member beside, or of this one; `rounds` it has begun itself."""
        if subject == ANY:
            return self._ask_all(source)
        if subject in self._left:
            return [News(source, False, subject, *self._left[subject])]
        self._watching.setdefault(subject, set()).add(source)
        if subject == self._index:
            return [News(source, False, subject, RUNS, rounds)]
        waiting = self._waiting.setdefault(subject, set())
        waiting.add(source)
        return [News(self._towards(subject), True, subject)] if len(waiting) == 1 else []

    def _ask_all(self, source: int) -> list[News]:
        self._watching.setdefault(ANY, set()).add(source)
        fresh = [to for to in self._beside if to != source and to not in self._asked]
        self._asked.update(fresh)
        known = [news._replace(to=source) for news in self._least.values()]
        return [*(News(to, True, ANY) for to in fresh), *known]

    def hear(self, source: int, subject: int, how: int, rounds: int) -> list[News]:
        """Take in how a member stands, from one beside; from itself, when it leaves."""
        if how == RUNS and subject in self._left:  # an answer that the news has overtaken
            how, rounds = self._left[subject]
        told = self._waiting.pop(subject, set())
        if how != RUNS:
            new = subject not in self._left
            self._left[subject] = how, rounds
            told |= self._watching.pop(subject, set())
            least = self._least.get(how)
            if new and (least is None or rounds < least.rounds):
                self._least[how] = News(0, False, subject, how, rounds)
                told |= self._watching.get(ANY, set())
        return [News(to, False, subject, how, rounds) for to in sorted(told - {source})]

    def leave(self, how: int, rounds: int) -> list[News]:
        """Note that this member has left."""
        return [
            n for n in self.hear(self._index, self._index, how, rounds) if n.to != self._index
        ]

    def _towards(self, subject: int) -> int:
        """Return the next member on the way to another."""
        step = subject
        while step > self._index:
            above = parent(step)
            if above == self._index:
                return step
            step = above
        return parent(self._index)
