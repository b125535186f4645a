"""The record of the handshake, and what two disagreeing ranks are told; MPI is a fake here."""

import threading

import pytest

from mpiml import handshake
from mpiml.errors import GraphMismatchError, RemoteError, UsageError
from mpiml.handshake import SIZE, Record, alone, exchange

LINES = [("file main.py", "10 bytes"), ("role 0", "worker"), ("argument 0 of worker", "3")]


class Fake:
    """A communicator of threads: every rank's bytes, once all have come."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size)
        self.slots = [None] * size
        self.calls = 0

    def rank_of(self, rank):
        view = FakeRank()
        view.rank, view.size, view.shared = rank, self.size, self
        return view


class FakeRank:
    def give(self, data):
        shared = self.shared
        shared.slots[self.rank] = bytes(data)
        shared.barrier.wait(10)
        answer = list(shared.slots)
        shared.barrier.wait(10)
        shared.calls += self.rank == 0
        return answer


@pytest.fixture
def together(monkeypatch):
    """Return a function that runs `exchange` on ranks with these lines and errors."""

    class World:
        exchange_record = staticmethod(lambda comm, data: comm.give(data))
        exchange_text = exchange_record
        spread = staticmethod(lambda comm, data, root: comm.give(data)[root])
        library = staticmethod(lambda: "Some MPI v1")

    monkeypatch.setattr(handshake, "_world", lambda: World)

    def run(lines, errors=None, attached=None):
        fake = Fake(len(lines))
        out = [None] * len(lines)

        def one(rank):
            try:
                out[rank] = exchange(
                    fake.rank_of(rank), lines[rank],
                    errors[rank] if errors else None,
                    attached[rank] if attached else None,
                )  # fmt: skip
            except BaseException as error:
                out[rank] = error

        threads = [threading.Thread(target=one, args=(r,)) for r in range(len(lines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        return out, fake.calls

    return run


def changed(index, text):
    return [*LINES[:index], (LINES[index][0], text), *LINES[index + 1 :]]


def test_a_record_survives_its_bytes():
    record = alone(3)._replace(state=2, status=-7, digest=bytes(range(32)), level=1)
    data = record.pack()
    assert len(data) == SIZE
    assert Record.unpack(data) == record
    assert Record.unpack(alone(None).pack()).attached is None
    assert alone(None).token != alone(None).token


def test_the_layout_is_fixed():
    data = alone(5)._replace(state=1, status=3, digest=b"d" * 32, token=b"t" * 8).pack()
    assert data[:4] == b"\x01\x01\x01\x03"  # version, state, attached, thread level
    assert data[4:12] == b"\x03\0\0\0\x05\0\0\0"
    assert data[12:52] == b"d" * 32 + b"t" * 8


def test_a_control_record_is_never_pickle(monkeypatch):
    import pickle

    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("unpickled"))
    Record.unpack(alone(1).pack())


def test_another_version_says_so():
    data = b"\x02" + alone(None).pack()[1:]
    with pytest.raises(UsageError, match="version 1 on all ranks, got 2 from rank 4"):
        Record.unpack(data, 4)


def test_equal_programs_cost_one_collective(together):
    out, calls = together([LINES] * 4, attached=[None, 1, None, 0])
    assert [[r.attached for r in records] for records in out] == [[None, 1, None, 0]] * 4
    assert calls == 1


@pytest.mark.parametrize("odd", [0, 2])
def test_a_difference_is_named_with_the_odd_rank_on_every_rank(together, odd):
    lines = [changed(2, "4") if rank == odd else LINES for rank in range(4)]
    out, _ = together(lines)
    for error in out:
        assert type(error) is GraphMismatchError
        assert f'"argument 0 of worker" is 4 on rank {odd}, and 3 on' in str(error)


def test_the_content_of_the_file_counts(together):
    out, _ = together([LINES, changed(0, "11 bytes")])
    assert all("file main.py" in str(error) for error in out)


def test_a_module_that_only_some_have_imported_is_no_difference(together):
    out, _ = together([LINES, [LINES[0], ("file late.py", "5 bytes"), *LINES[1:]]])
    assert all(isinstance(records, list) for records in out)


def test_a_module_of_two_contents_is_a_difference(together):
    late = [[LINES[0], ("file late.py", f"{n} bytes"), *LINES[1:]] for n in (5, 6)]
    out, _ = together(late)
    assert all("file late.py" in str(error) for error in out)


def test_of_many_ranks_one_for_each_program_tells_its_lines(together, monkeypatch):
    told = []
    give = FakeRank.give

    def listen(self, data):
        told.append(len(data))
        return give(self, data)

    monkeypatch.setattr(FakeRank, "give", listen)
    out, _ = together([changed(2, "4") if rank % 3 else LINES for rank in range(9)])
    assert "is 3 on ranks 0, 3, 6, and 4 on the other 6 ranks" in str(out[5])
    assert sorted(n > 0 for n in told if n != SIZE) == [False] * 7 + [True] * 2


def test_facts_of_ranks_that_are_alike_are_kept_once(together):
    (records, *_), _ = together([LINES] * 6)
    assert len({id(record.facts) for record in records}) == 1
    assert len({id(record.digest) for record in records}) == 1
    assert len({record.token for record in records}) == 6


def test_text_that_is_no_utf8_is_compared_too(together):
    out, _ = together([changed(2, "'\udcff'"), LINES])
    assert all(type(error) is GraphMismatchError for error in out)


def test_an_error_of_one_rank_is_raised_on_all(together):
    error = FileNotFoundError(2, "No such file", "data.npz")
    out, _ = together([LINES, [], LINES], [None, error, None])
    assert out[1] is error
    for other in (out[0], out[2]):
        assert type(other) is FileNotFoundError
        assert other.filename == "data.npz"
        assert isinstance(other.__cause__, RemoteError)
        assert "built on rank 1" in str(other.__cause__)
    assert [e.mpiml_rank for e in out] == [1, 1, 1]


def test_of_two_errors_each_keeps_its_own_and_the_lowest_speaks(together):
    errors = [None, ValueError("one"), KeyError("two")]
    out, _ = together([LINES, [], []], errors)
    assert out[1] is errors[1]
    assert out[2] is errors[2]
    assert (type(out[0]), str(out[0])) == (ValueError, "one")
    assert [e.mpiml_rank for e in out] == [1, 1, 1]


def test_an_error_that_cannot_be_pickled_arrives_all_the_same(together):
    class Local(Exception):
        def __reduce__(self):
            raise TypeError("no")

    out, _ = together([LINES, []], [None, Local("why")])
    assert "why" in str(out[0])
    assert "Local: why" in str(out[0].__cause__)


def test_an_error_that_holds_much_is_cut_for_the_others(together, monkeypatch):
    monkeypatch.setattr(handshake, "_MOST", 1000)
    own = ValueError("x" * 5000)
    (here, there), _ = together([LINES, LINES], errors=[own, None])
    assert here is own
    assert isinstance(there, RemoteError)
    assert str(there) == "ValueError: " + "x" * 1000
    assert len(str(there.__cause__)) < 1100


def test_versions_stand_in_the_module():
    assert handshake.VERSION == 1
