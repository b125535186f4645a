"""Start and end travel along trees: no rank sends or takes more than its share, however many."""

from collections import Counter, deque

import pytest

from mpiml.agree import Branch
from mpiml.control import FAILED, FANOUT, FINISHED, REQUESTED, Note, children, parent
from mpiml.ending import Ending
from mpiml.waves import Waves
from mpiml.wire import (
    AGREE_COUNT,
    AGREE_REST,
    AGREE_TARGET,
    STATUS,
    STOP,
    STOP_ASK,
    STOP_REQUEST,
    STOP_TOLD,
    Frame,
)

SIZES = (1, 2, 3, 8, 9, 64, 1000)


class Rank:
    """An engine without MPI."""

    def __init__(self, rank, size, post):
        self.rank, self.size, self.post = rank, size, post
        self.handlers = {}

    def transmit(self, rank, kind, source, target, id=0, aux=0, *, body=b"", **_):
        self.post(self.rank, rank, Frame(kind, 0, 0, source, target, id, aux, b"", body, ()))

    def fulfil(self, wait):
        wait.ready = True

    def interrupt(self):
        pass


class Job:
    """Ranks whose frames arrive in the order in which they were sent, and are counted."""

    def __init__(self, size):
        self.queue = deque()
        self.sent, self.taken = Counter(), Counter()  # by rank and kind
        self.engines = [Rank(rank, size, self.post) for rank in range(size)]

    def post(self, sender, receiver, frame):
        assert sender != receiver
        self.sent[sender, frame.kind] += 1
        self.taken[receiver, frame.kind] += 1
        self.queue.append((sender, receiver, frame))

    def run(self):
        while self.queue:
            sender, receiver, frame = self.queue.popleft()
            self.engines[receiver].handlers[frame.kind](sender, frame, ())

    def most(self, *kinds):
        """The most frames of these kinds that one rank has sent, and taken in."""
        return tuple(
            max((sum(c[rank.rank, kind] for kind in kinds) for rank in self.engines), default=0)
            for c in (self.sent, self.taken)
        )

    def forget(self):
        self.sent.clear()
        self.taken.clear()


def program(size, bodies=1):
    job = Job(size)
    endings = [Ending(engine, size * bodies, lambda note: None) for engine in job.engines]
    for ending in endings:
        ending.start(bodies)
    job.run()
    return job, endings


@pytest.mark.parametrize("size", SIZES)
def test_the_tree_is_one(size):
    above = {rank: parent(rank) for rank in range(size)}
    assert [rank for rank, up in above.items() if up < 0] == [0]
    for rank in range(size):
        below = children(rank, size)
        assert len(below) <= FANOUT
        assert all(above[child] == rank for child in below)
        steps = 0
        while rank:
            rank, steps = above[rank], steps + 1
        assert FANOUT**steps <= max(1, size) * FANOUT  # logarithmic


@pytest.mark.parametrize("size", SIZES)
def test_a_program_that_is_done_ends_along_the_tree(size):
    job, endings = program(size)
    assert job.most(STATUS) == ((1, min(FANOUT, size - 1)) if size > 1 else (0, 0))
    job.forget()
    for ending in reversed(endings):  # from the leaves, as where all take equally long
        ending.body(-1)
        job.run()
    assert all(ending.note.reason == FINISHED for ending in endings)
    sent, taken = job.most(STOP)
    assert sent <= FANOUT
    assert taken <= 1


@pytest.mark.parametrize("size", SIZES)
def test_the_top_does_not_hear_of_each_body(size):
    job, endings = program(size, bodies=3)
    job.forget()
    for _ in range(3):
        for ending in reversed(endings):
            ending.body(-1)
            job.run()
    assert all(ending.note.reason == FINISHED for ending in endings)
    sent, taken = job.most(STATUS)
    assert sent <= 1
    assert taken <= FANOUT


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("reason", [REQUESTED, FAILED])
def test_where_all_ask_for_the_end_no_rank_hears_all(size, reason):
    job, endings = program(size)
    job.forget()
    for rank, ending in enumerate(endings):
        ending.request(Note(reason, 1, 0, rank, "why"))
    job.run()
    assert all(ending.note.reason == reason for ending in endings)
    sent, taken = job.most(STOP_REQUEST)
    assert sent <= 1
    assert taken <= FANOUT
    assert job.most(STOP)[0] <= FANOUT


@pytest.mark.parametrize("size", SIZES)
def test_a_question_to_all_ranks_is_passed_on_and_the_answers_are_joined(size):
    for top in {0, size - 1, size // 2}:
        job = Job(size)
        waves = [
            Waves(engine, STOP_ASK, STOP_TOLD, lambda rank=rank: (1, rank),
                  lambda a, b: (a[0] + b[0], max(a[1], b[1])))
            for rank, engine in enumerate(job.engines)
        ]  # fmt: skip
        told = []
        waves[top].ask(told.append)
        job.run()
        assert told == [(size, size - 1)]
        assert not any(wave._open for wave in waves)
        assert max(job.most(STOP_ASK, STOP_TOLD)) <= FANOUT + 1
        assert [w.sent for w in waves] == [
            sum(n for (r, _), n in job.sent.items() if r == rank) for rank in range(size)
        ]
        assert sum(w.received for w in waves) == 2 * (size - 1)


def test_questions_of_many_at_once_do_not_mix():
    job = Job(20)
    waves = [
        Waves(engine, STOP_ASK, STOP_TOLD, lambda rank=rank: (rank,), lambda a, b: (a[0] + b[0],))
        for rank, engine in enumerate(job.engines)
    ]  # fmt: skip
    told = []
    for wave in waves:
        for _ in range(3):
            wave.ask(told.append)
    job.run()
    assert told == [(190,)] * 60


@pytest.mark.parametrize("size", SIZES)
def test_a_role_agrees_along_its_tree(size):
    branches = [Branch(index, size) for index in range(size)]
    sent, taken = Counter(), Counter()
    queue, decided = deque(), {}

    def post(index, messages):
        for kind, to, number in messages:
            if to == index:
                decided[index] = number
                continue
            sent[index, kind] += 1
            taken[to, kind] += 1
            queue.append((index, kind, to, number))

    def run():
        while queue:
            source, kind, to, number = queue.popleft()
            branch = branches[to]
            if kind == AGREE_COUNT:
                post(to, branch.count(source, number))
            elif kind == AGREE_REST:
                post(to, branch.rest(source, bool(number)))
            else:
                post(to, branch.decide(number))

    for index, branch in enumerate(branches):
        post(index, branch.count(index, index % 7))
    run()
    assert decided == dict.fromkeys(
        range(size), max(i % 7 for i in range(size)) + 1 if size > 1 else 0
    )
    for index, branch in enumerate(branches):
        post(index, branch.rest(index, True))
    run()
    assert set(decided.values()) == {0}
    for kind, most in ((AGREE_COUNT, 1), (AGREE_REST, 1), (AGREE_TARGET, 2 * FANOUT)):
        assert max((n for (_, k), n in sent.items() if k == kind), default=0) <= most
    for kind, most in ((AGREE_COUNT, FANOUT), (AGREE_REST, FANOUT), (AGREE_TARGET, 2)):
        assert max((n for (_, k), n in taken.items() if k == kind), default=0) <= most
