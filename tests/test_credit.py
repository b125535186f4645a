"""Credit, as a state machine: never below zero, never beyond the window, nobody forgotten."""

import threading

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mpiml.credit import Peer

WINDOW, BYTES = 6, 1000
sizes = st.integers(0, 1500)


class Accounts(RuleBasedStateMachine):
    """One caller, one service; `wire` holds what has been sent and not started."""

    def __init__(self):
        super().__init__()
        self.caller = Peer(WINDOW, BYTES)
        self.service = Peer(WINDOW, BYTES)
        self.wire = []
        self.owed = 0  # started, but not told to the caller yet
        self.returning = []
        self.blocked = []

    @rule(size=sizes)
    def send(self, size):
        ticket = self.caller.take(size)
        if ticket is None:
            self.wire.append(size)
        else:
            assert len(self.wire) + self.under_way() >= 1  # somebody will wake it
            self.blocked.append(ticket)

    def under_way(self):
        return self.owed + sum(self.returning)

    @precondition(lambda self: self.wire)
    @rule()
    def start(self):
        self.wire.pop(0)
        self.owed += 1
        due = self.service.owe()
        if due:
            assert due == self.owed
            self.owed = 0
            self.returning.append(due)

    @rule()
    def reply(self):
        due = self.service.settle()
        assert due == self.owed
        self.owed = 0
        if due:
            self.returning.append(due)

    @precondition(lambda self: self.returning)
    @rule()
    def arrive(self):
        woken = self.caller.restore(self.returning.pop(0))
        assert list(woken) == self.blocked  # all of them look again
        self.blocked.clear()

    @invariant()
    def bounds_are_kept(self):
        out = len(self.wire) + self.under_way()
        assert self.caller.under_way == out
        assert 0 <= out <= WINDOW
        assert self.caller._free == WINDOW - out
        assert self.owed < WINDOW  # the debt is paid before the caller stands still

    @invariant()
    def bytes_are_kept(self):
        # one message larger than all of the window passes alone
        assert self.caller._bytes + sum(self.caller._sizes) == BYTES
        assert self.caller._bytes >= 0 or len(self.caller._sizes) == 1


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_message_larger_than_the_window_passes_when_it_is_alone():
    peer = Peer(4, 100)
    assert peer.take(1000) is None
    assert peer.take(0) is not None
    peer.restore(1)
    assert peer.take(100) is None
    assert peer.take(1) is not None


def test_too_much_credit_does_no_harm():
    peer = Peer(2, 100)
    peer.restore(50)
    assert peer.take(1) is None
    assert peer.take(1) is None
    assert peer.take(1) is not None


def test_threads_never_get_more_than_the_window():
    peer = Peer(16, 1 << 40)
    got = []

    def work():
        got.extend(1 for _ in range(500) if peer.take(1) is None)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 16
