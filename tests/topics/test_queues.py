"""Links of a topic through random interleavings: order, bounds, nothing lost unseen."""

from hypothesis import given
from hypothesis import strategies as st

from mpiml.topics.policy import Keep
from mpiml.topics.queues import Inbox, Order, Outbox

policies = st.one_of(
    st.just("latest"),
    st.builds(Keep, st.integers(1, 9), st.sampled_from(["block", "drop_oldest"])),
)


class Link:
    """Publishers and one subscriber, with wires between that keep the order of each link."""

    def __init__(self, policy, links):
        self.outboxes = [Outbox(policy) for _ in range(links)]
        self.inbox = Inbox(policy, links)
        self.wires = [[] for _ in range(links)]
        self.acks = [0] * links
        self.put_ = [0] * links
        self.taken = []
        self.most = 0

    def put(self, link):
        if self.outboxes[link].room:
            self.put_[link] += 1
            self.outboxes[link].add(self.put_[link])
            self.send(link)
            self.outboxes[link].trim()
            return True
        return False

    def send(self, link):
        while self.outboxes[link].ready:
            self.wires[link].append(self.outboxes[link].send())

    def deliver(self, link):
        if self.wires[link]:
            self.acks[link] += self.inbox.arrive(link, *self.wires[link].pop(0))
        elif self.acks[link]:
            count, self.acks[link] = self.acks[link], 0
            self.outboxes[link].acknowledged(count)
            self.send(link)
        else:
            return False
        return True

    def take(self):
        found = self.inbox.take()
        if found is None:
            return False
        taken, acks = found
        assert taken.number == taken.message
        self.taken.append((taken.link, taken.number))
        self.acks[taken.link] += acks
        return True

    def step(self, choice):
        link = choice % len(self.outboxes)
        (self.put, self.deliver, lambda _: self.take())[choice // 7 % 3](link)
        self.most = max(self.most, len(self.inbox) + sum(map(len, self.wires)))

    def settle_wires(self):
        while any([self.deliver(link) for link in range(len(self.outboxes))]):
            pass

    def settle(self, taking=True):
        links = range(len(self.outboxes))
        while any([self.deliver(link) for link in links]) or (taking and self.take()):
            pass
        for link in links:
            if taking:
                assert self.outboxes[link].idle
            self.inbox.end(link, self.put_[link])

    def numbers(self, link):
        return [number for each, number in self.taken if each == link]


choices = st.lists(st.integers(0, 104), max_size=200)


@given(policies, st.integers(1, 3), choices)
def test_each_message_is_taken_once_in_order_or_counted_as_dropped(policy, links, choices):
    link = Link(policy, links)
    for choice in choices:
        link.step(choice)
    link.settle()
    assert link.inbox.over
    for i in range(links):
        numbers = link.numbers(i)
        assert numbers == sorted(set(numbers))
        assert len(numbers) + link.inbox.dropped[i] == link.put_[i]
        assert link.outboxes[i].dropped <= link.inbox.dropped[i]


@given(st.integers(1, 9), st.integers(1, 3), choices)
def test_nothing_is_lost_where_publishers_block(n, links, choices):
    link = Link(Keep(n), links)
    for choice in choices:
        link.step(choice)
    link.settle()
    assert link.inbox.dropped == [0] * links
    for i in range(links):
        assert link.numbers(i) == list(range(1, link.put_[i] + 1))


@given(policies, st.integers(1, 3), choices)
def test_memory_is_bounded_whatever_the_subscriber_does(policy, links, choices):
    n = policy.n if isinstance(policy, Keep) else 1
    link = Link(policy, links)
    for choice in choices:
        link.step(choice)
    assert link.most <= 2 * n * links
    assert len(link.inbox._order) <= 2 * n * links + 9
    for outbox in link.outboxes:
        assert len(outbox._waiting) <= n


@given(policies, st.integers(1, 3), choices)
def test_the_newest_message_is_never_dropped(policy, links, choices):
    link = Link(policy, links)
    for choice in choices:
        link.step(choice)
    link.settle()
    for i in range(links):
        assert link.numbers(i)[-1:] == ([link.put_[i]] if link.put_[i] else [])


@given(st.integers(1, 40))
def test_a_blocked_publisher_goes_on_once_the_subscriber_takes(n):
    link = Link(Keep(n), 1)
    for _ in range(n):
        assert link.put(0)
    assert not link.put(0)
    link.settle(taking=False)
    assert not link.put(0)
    while link.take():
        pass
    link.settle()
    assert link.put(0)


runs = st.tuples(st.integers(0, 7), st.integers(1, 20))


@given(st.integers(1, 64), st.integers(1, 3), st.lists(runs, max_size=40))
def test_less_than_n_untaken_leave_room_once_all_has_come(n, links, runs):
    link = Link(Keep(n), links)
    for _ in range(n):
        link.put(0)
    for kind, count in runs:
        for _ in range(count):
            link.step(7 * (kind // 2) + kind % 2)
        link.settle_wires()
        for i, outbox in enumerate(link.outboxes):
            untaken = link.put_[i] - len(link.numbers(i))
            assert untaken <= n
            assert outbox.room == (untaken < n)


@given(policies, choices)
def test_what_was_let_go_is_not_taken(policy, choices):
    link = Link(policy, 2)
    for choice in choices:
        link.step(choice)
    settled = [link.inbox.settled(i) for i in range(2)]
    link.inbox.clear()
    assert not len(link.inbox)
    assert link.inbox.take() is None
    if isinstance(policy, Keep) and policy.on_full == "block":
        assert settled == [len(link.numbers(i)) for i in range(2)]


def test_messages_of_several_publishers_come_in_the_order_of_arrival():
    inbox = Inbox(Keep(2, "drop_oldest"), 2)
    for link, number in [(0, 1), (1, 1), (0, 2), (0, 3), (1, 2)]:
        inbox.arrive(link, number, None)
    got = [inbox.take()[0][:2] for _ in range(4)]
    assert got == [(1, 1), (0, 2), (0, 3), (1, 2)]
    assert inbox.take() is None
    assert inbox.dropped == [1, 0]


@given(policies, choices)
def test_what_goes_at_once_is_what_would_have_been_ready(policy, choices):
    straight, through = Outbox(policy), Outbox(policy)
    for choice in choices:
        if choice % 2 and straight.number > straight.dropped and straight._open:
            for outbox in (straight, through):
                outbox.acknowledged(1)
                while outbox.ready:
                    outbox.send()
        elif straight.room:
            number = straight.next_at_once
            if number:
                straight.sent_at_once()
            else:
                straight.add(None)
                straight.trim()
            through.add(None)
            sent = through.send().number if through.ready else 0
            through.trim()
            assert number == sent
        assert (straight.number, straight.dropped) == (through.number, through.dropped)


@given(st.permutations(range(1, 8)))
def test_what_comes_on_several_ways_is_put_in_order(turns):
    order, got, seen = Order(), [], set()
    for turn in turns:
        seen.add(turn)
        got += order.arrive(turn, turn)
        assert got == [t for t in range(1, 8) if set(range(1, t + 1)) <= seen]
