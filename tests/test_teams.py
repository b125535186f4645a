"""Whether a replica will come: asked before it leaves, as it does, and after it has."""

import types

import pytest

from mpiml.agree import Agreement
from mpiml.hosting import FAILED, RETURNED, RUNS
from mpiml.teams import Teams
from mpiml.wire import MEMBER_ASK, MEMBER_STATE, Frame


def frame(kind, source, target, id=0, aux=0, encoding=0):
    return Frame(kind, encoding, 0, source, target, id, aux, b"", b"", ())


class Ranks:
    """Two ranks with a node each; frames are handed over when `deliver` is called."""

    def __init__(self):
        self.wire = []
        self.nodes = [self.node(i) for i in range(2)]
        self.teams = [Teams(self.runtime(i)) for i in range(2)]

    def node(self, i):
        spec = types.SimpleNamespace(role_index=0, index=i, replicas=2)
        agreement = Agreement(f"a/{i}")
        return types.SimpleNamespace(vertex=i, how=RUNS, agreement=agreement, spec=spec)

    def runtime(self, i):
        def transmit(rank, kind, source, target, id=0, aux=0, encoding=0):
            self.wire.append((i, rank, frame(kind, source, target, id, aux, encoding)))

        engine = types.SimpleNamespace(handlers={}, transmit=transmit, rank=i)
        vertices = types.SimpleNamespace(ids_of=lambda role: range(2))
        return types.SimpleNamespace(
            nodes=[self.nodes[i]], engine=engine, ranks=[0, 1], done=False, vertices=vertices
        )

    def deliver(self):
        while self.wire:
            source, rank, what = self.wire.pop(0)
            self.teams[rank].runtime.engine.handlers[what.kind](source, what, ())

    def leaves(self, how):
        self.nodes[1].how = how
        self.teams[1].left(self.nodes[1])

    def known(self):
        state = self.teams[0].states.get(1)
        return state and (state.how, state.rounds)


@pytest.fixture
def ranks():
    return Ranks()


def test_who_has_not_been_asked_about_tells_nobody(ranks):
    ranks.leaves(RETURNED)
    assert not ranks.wire


def test_who_asks_is_answered_and_told_later(ranks):
    ranks.nodes[1].agreement.next()
    ranks.teams[0].ask(ranks.nodes[0], 1)
    ranks.deliver()
    assert ranks.known() == (RUNS, 1)
    ranks.nodes[1].agreement.next()
    ranks.leaves(FAILED)
    ranks.deliver()
    assert ranks.known() == (FAILED, 2)


def test_who_asks_too_late_is_told_at_once(ranks):
    ranks.leaves(RETURNED)
    ranks.teams[0].ask(ranks.nodes[0], 1)
    ranks.deliver()
    assert ranks.known() == (RETURNED, 0)


def test_an_old_answer_does_not_undo_the_news(ranks):
    handler = ranks.teams[0].runtime.engine.handlers[MEMBER_STATE]
    ranks.teams[0].ask(ranks.nodes[0], 1)
    handler(1, frame(MEMBER_STATE, 1, 0, 3, 1, RETURNED), ())
    handler(1, frame(MEMBER_STATE, 1, 0, 2, 1, RUNS), ())
    assert ranks.known() == (RETURNED, 3)


def test_a_question_about_all_is_answered_by_who_leaves(ranks):
    ranks.teams[0].ask(ranks.nodes[0], None)
    ranks.deliver()
    assert ranks.known() is None
    ranks.leaves(FAILED)
    ranks.deliver()
    assert ranks.known() == (FAILED, 0)


def test_nothing_is_asked_after_the_program(ranks):
    ranks.teams[0].runtime.done = True
    ranks.teams[0].ask(ranks.nodes[0], 1)
    assert not ranks.wire


def test_a_question_is_one_small_frame(ranks):
    ranks.teams[0].ask(ranks.nodes[0], 1)
    assert [what.kind for _, _, what in ranks.wire] == [MEMBER_ASK]
