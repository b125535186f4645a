"""Members ask who has left, and hear of it, along a tree: in any order, without a crowd anywhere."""

from collections import Counter, deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.absence import ANY, RUNS, Post
from mpiml.control import FANOUT

RETURNED, FAILED = 1, 3


class Role:
    """The members of a role; what each has learned, and how many messages it has sent and taken."""

    def __init__(self, size):
        self.posts = [Post(index, size) for index in range(size)]
        self.rounds = [0] * size
        self.known = [{} for _ in range(size)]
        self.queue = deque()
        self.sent, self.taken = Counter(), Counter()

    def tell(self, index, news):
        for each in news:
            if each.to == index:
                assert not each.asks
                self.known[index][each.subject] = each.how, each.rounds
            else:
                assert each.to in self.posts[index]._beside
                self.sent[index] += 1
                self.taken[each.to] += 1
                self.queue.append((index, each))

    def ask(self, index, subject):
        self.tell(index, self.posts[index].ask(index, subject, self.rounds[index]))

    def leave(self, index, how=RETURNED):
        self.tell(index, self.posts[index].leave(how, self.rounds[index]))

    def step(self, choose=lambda pairs: pairs[0]):
        pair = choose(list(dict.fromkeys((source, news.to) for source, news in self.queue)))
        entry = next(e for e in self.queue if (e[0], e[1].to) == pair)
        self.queue.remove(entry)
        source, news = entry
        post = self.posts[news.to]
        if news.asks:
            self.tell(news.to, post.ask(source, news.subject, self.rounds[news.to]))
        else:
            self.tell(news.to, post.hear(source, news.subject, news.how, news.rounds))

    def run(self):
        while self.queue:
            source, news = self.queue.popleft()
            self.queue.appendleft((source, news))
            self.step(lambda _, pair=(source, news.to): pair)


@pytest.mark.parametrize(
    ("size", "asker", "subject"), [(2, 0, 1), (9, 8, 3), (100, 99, 41), (3, 1, 1)]
)
def test_an_answer_comes_at_once_and_again_when_one_leaves(size, asker, subject):
    role = Role(size)
    role.rounds[subject] = 4
    role.ask(asker, subject)
    role.run()
    assert role.known[asker] == {subject: (RUNS, 4)}
    role.rounds[subject] = 7
    role.leave(subject)
    role.run()
    if asker != subject:
        assert role.known[asker] == {subject: (RETURNED, 7)}
    assert all(not known for i, known in enumerate(role.known) if i != asker)
    sent = sum(role.sent.values())
    role.ask(asker, subject)  # it is known here by now
    assert sum(role.sent.values()) == sent


@pytest.mark.parametrize("size", [1, 2, 9, 64, 300])
def test_all_may_ask_for_one_that_is_late(size):
    role = Role(size)
    late = size // 2
    for index in range(size):
        role.ask(index, late)
    role.run()
    assert all(known == {late: (RUNS, 0)} for known in role.known)
    role.leave(late, FAILED)
    role.run()
    assert all(k == {late: (FAILED, 0)} for i, k in enumerate(role.known) if i != late)
    assert max(role.taken.values(), default=0) <= 2 * (FANOUT + 1)
    assert max(role.sent.values(), default=0) <= 3 * (FANOUT + 1)


@pytest.mark.parametrize("size", [1, 2, 9, 64, 300])
def test_all_may_ask_for_all_and_all_may_leave(size):
    role = Role(size)
    role.rounds = [5] * size
    role.rounds[size - 1] = 4
    for index in range(size):
        role.ask(index, ANY)
    role.run()
    for index in range(size):
        role.leave(index)
    role.run()
    last = size - 1
    assert all(role.known[i].get(last) == (RETURNED, 4) for i in range(size - 1))
    # of those that have come equally far, one is enough; it may be another one in each part
    assert max(role.taken.values(), default=0) <= 4 * (FANOUT + 1)


@settings(max_examples=30)
@given(st.integers(2, 30), st.data())
def test_who_asks_learns_of_the_one_that_has_come_the_least_far(size, data):
    """Questions, news and departures in any order."""
    role = Role(size)
    role.rounds = [data.draw(st.integers(0, 3)) for _ in range(size)]
    moves = [("ask", i) for i in range(size)] + [("leave", i) for i in range(size)]
    moves = data.draw(st.permutations(moves))
    left, asked = set(), {}
    for what, index in moves:
        if what == "ask":
            subject = data.draw(st.sampled_from([ANY, *range(size)]))
            asked[index] = subject
            role.ask(index, subject)
        elif data.draw(st.booleans()):
            left.add(index)
            role.leave(index)
        for _ in range(data.draw(st.integers(0, 3))):
            if role.queue:
                role.step(lambda pairs: data.draw(st.sampled_from(pairs)))
    while role.queue:
        role.step(lambda pairs: data.draw(st.sampled_from(pairs)))
    for index, subject in asked.items():
        known = role.known[index]
        if subject != ANY:
            how = RETURNED if subject in left else RUNS
            assert known[subject][0] == how or subject == index
        elif left - {index}:
            least = min(role.rounds[i] for i in left - {index})
            found = [rounds for i, (how, rounds) in known.items() if how != RUNS and i != index]
            own = role.rounds[index] if index in left else 9
            assert found or own <= least
            assert min([*found, own]) <= least
