import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpiml
from mpiml.board import Board, BoardClient
from mpiml.errors import DeadlineError, ServiceGoneError, Stopped, UsageError
from tests.playing import both, play


class Asker:
    """Asks a board and remembers what it was answered, in order."""

    def __init__(self):
        self.board = Board()
        self.answers = []

    def __call__(self, operation, *args):
        number = len(self.answers)
        self.answers.append("open")

        def answer(value, failed):
            assert self.answers[number] == "open", "answered twice"
            self.answers[number] = value

        self.board.ask(operation, args, answer)
        return self.answers[number]


def test_values_are_kept():
    ask = Asker()
    assert ask("set", ["a", "b"], [b"1", b"2"]) is None
    assert ask("get", ["b", "a"]) == [b"2", b"1"]
    assert ask("append", "a", b"x") is None
    assert ask("append", "new", b"y") is None
    assert ask("get", ["a", "new"]) == [b"1x", b"y"]
    assert ask("check", ["a", "c"]) is False
    assert ask("check", ["a", "b"]) is True
    assert ask("count") == 3
    assert ask("delete", "a") is True
    assert ask("delete", "a") is False
    assert ask("count") == 2


def test_add_counts_and_says_what_it_cannot_count():
    ask = Asker()
    assert ask("add", "n", 2) == 2
    assert ask("add", "n", -5) == -3
    assert ask("get", ["n"]) == [b"-3"]
    ask("set", ["w"], [b"word"])
    error = ask("add", "w", 1)
    assert isinstance(error, UsageError)
    assert "b'word'" in str(error)
    assert ask("get", ["w"]) == [b"word"]


@pytest.mark.parametrize(
    ("old", "expected", "answer", "new"),
    [
        (None, b"", b"d", b"d"),
        (None, b"e", b"e", None),
        (b"o", b"o", b"d", b"d"),
        (b"o", b"e", b"o", b"o"),
        (b"o", b"", b"o", b"o"),
        (b"", b"", b"d", b"d"),
    ],
)
def test_compare_set(old, expected, answer, new):
    ask = Asker()
    if old is not None:
        ask("set", ["k"], [old])
    assert ask("compare_set", "k", expected, b"d") == answer
    assert ask("check", ["k"]) is (new is not None)
    if new is not None:
        assert ask("get", ["k"]) == [new]


def test_a_question_waits_until_all_its_keys_are_there_at_once():
    ask = Asker()
    assert ask("get", ["a", "b"]) == "open"
    assert ask("wait", ["b"]) == "open"
    ask("set", ["a"], [b"1"])
    ask("delete", "a")
    ask("add", "b", 7)
    assert ask.answers[:2] == ["open", None]
    ask("compare_set", "a", b"", b"2")
    assert ask.answers[0] == [b"2", b"7"]


@pytest.mark.parametrize("operation", ["when_there", "appeared", "ask", "nothing"])
def test_what_is_no_operation_is_refused(operation):
    error = Asker()(operation, ["a"])
    assert isinstance(error, UsageError)
    assert (
        f"expected get, wait, set, append, add, compare_set, check, delete, count, leave, got {operation!r}"
        in str(error)
    )


def test_a_question_that_is_forgotten_is_not_answered():
    board, answers = Board(), []
    for ticket in (1, 2):
        board.ask("wait", (["a"],), lambda *_, ticket=ticket: answers.append(ticket), ticket)
    board.forget(1)
    assert board.waiting == 1
    board.ask("set", (["a"], [b"1"]), lambda *_: None)
    assert (answers, board.waiting) == ([2], 0)


KEYS = st.sampled_from("abcd")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.lists(KEYS, min_size=1, max_size=2)),
        st.tuples(st.just("delete"), KEYS),
        st.tuples(st.just("wait"), st.lists(KEYS, min_size=1, max_size=3)),
    ),
    max_size=30,
)


@given(STEPS)
def test_nobody_waits_for_what_is_there(steps):
    ask, there, waiting = Asker(), set(), {}
    for number, (operation, keys) in enumerate(steps):
        if operation == "set":
            ask("set", keys, [b"x"] * len(keys))
            there |= set(keys)
        elif operation == "delete":
            assert ask("delete", keys) is (keys in there)
            there.discard(keys)
        else:
            ask("wait", keys)
            waiting[number] = set(keys)
        for place in [n for n, wanted in waiting.items() if wanted <= there]:
            assert ask.answers[place] is None
            del waiting[place]
        assert all(ask.answers[n] == "open" for n in waiting)


def client(number=0):
    node = mpiml.context()._node
    return BoardClient(node.runtime, node, number)


def boards():
    return mpiml.context()._node.runtime.boards


class Member:
    """One of a role that meets at its board."""

    def meet(self, number=0):
        me, board = mpiml.context(), client(number)
        board.ask("set", [f"{me.index}"], [b"%d" % me.index])
        found = board.ask("get", [f"{i}" for i in range(me.replicas)], timeout=20)
        return [int(value) for value in found], board.ask("add", "n", 1)

    def leave(self, number=0):
        client(number).ask("leave")

    def count(self):
        return len(boards())

    def large(self):
        value = bytes(1 << 20)
        client().ask("set", ["large"], [value])
        return client().ask("get", ["large"])[0] == value


@both
def test_methods_that_hold_every_turn_meet_at_the_board(mode):
    def body(member):
        met = mpiml.gather(list(member.futures.meet()))
        assert [m[0] for m in met] == [[0, 1]] * 2
        assert sorted(m[1] for m in met) == [1, 2]
        assert member.large() == [True, True]
        assert member.count()[0] == 1
        mpiml.gather(list(member.futures.meet(5)))  # another board
        assert member.count()[0] == 2
        member.leave(5)
        assert member.count()[0] == 1

    play(mode, body, member=Member, replicas={"member": 2})


@both
def test_a_wait_ends_with_its_timeout(mode):
    def body(one):
        with pytest.raises(DeadlineError, match=r"about 'never' within 0\.01 s"):
            one.wait()

    class One:
        def wait(self):
            board = client()
            try:
                board.ask("wait", ["never"], timeout=0.01)
            finally:
                board.ask("count")  # comes after what tells that nobody waits any more
                assert boards().waiting == 0

    play(mode, body, one=One)


@both
def test_a_body_that_waits_hears_of_the_stop(mode):
    ended = []

    class Waiter:
        def run(self):
            try:
                client().ask("wait", ["never"])
            except Stopped:
                ended.append("stopped")
                raise

    def body(waiter):
        mpiml.context().stop()

    play(mode, body, waiter=Waiter)
    if mode == "threads":
        assert ended == ["stopped"]


@both
def test_a_method_that_waits_hears_of_a_failure(mode):
    waiting, seen = threading.Event(), []

    class Waiter:
        def wait(self):
            try:
                waiting.set()
                client().ask("wait", ["never"])
            except ServiceGoneError as error:
                seen.append(str(error))
                raise

    class Odd:
        def fail(self):
            waiting.wait(2)  # another process has another event: nobody sets it
            raise SystemExit(3)

    def body(waiter, odd):
        held = waiter.futures.wait()
        with pytest.raises(ServiceGoneError):
            odd.fail()
        held.result()

    with pytest.raises(SystemExit, match="3"):
        play(mode, body, waiter=Waiter, odd=Odd)
    if mode == "threads":
        assert "board.wait" in seen[0]
