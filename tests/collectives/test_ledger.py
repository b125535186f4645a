"""Members that wait for each other in different operations: the protocol, and all of it."""

import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpiml
from mpiml.collectives import Bucket, allreduce, messages
from mpiml.collectives.ledger import Ledger, Post, out_of_step
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives.everywhere import everywhere, modes
from tests.collectives.together import outcomes

# -- the protocol ----------------------------------------------------------------------------------


def post(operation, of=1, wait=0, made=0):
    return Post(operation, operation + made, of, wait)


def test_what_is_out_of_step():
    assert out_of_step([post(3), post(3, of=2)]) == 3
    assert out_of_step([post(3, made=1), post(3, of=2)]) == 3
    assert not out_of_step([post(3), post(3)])
    assert not out_of_step([post(3), post(4, of=2)])  # only late
    assert out_of_step([post(3), Post(0, 3, 9, 0)]) == 3
    assert not out_of_step([post(3), Post(0, 4, 9, 0)])


class Machine:
    """Members that go through lists of operations, in processes, with messages between.

    A member in an operation looks whether all others have come, and only then, perhaps much
    later, says what it has found: in between it may be kept from running.
    """

    def __init__(self, processes, plans):
        self.processes = processes
        self.home = {m: p for p, members in enumerate(processes) for m in members}
        self.plans = plans
        self.at = dict.fromkeys(self.home, 0)
        self.inside = dict.fromkeys(self.home)  # the wait it is in
        self.found = dict.fromkeys(self.home)  # that it has found not to have ended
        self.come = {}  # object -> [member -> how often it has come]
        self.waits = 0
        self.clock = 0.0
        self.wire = {}
        self.errors = {}
        self.ledgers = [
            Ledger(processes, p, lambda texts, number: f"{number}: {'; '.join(texts)}")
            for p in range(len(processes))
        ]

    def send(self, source, messages):
        for target, message in messages:
            self.wire.setdefault((source, target), []).append(message)

    def deliver(self, link):
        source, target = link
        if self.wire[link]:
            message = self.wire[link].pop(0)
            self.send(target, self.ledgers[target].receive(source, message))

    def over(self, member):
        return member in self.errors or self.at[member] == len(self.plans[member])

    def step(self, member):
        """Come, look or say, whatever is next for it."""
        self.clock += 0.01
        if self.over(member):
            return
        of = self.plans[member][self.at[member]]
        counts = self.come.setdefault(of, dict.fromkeys(self.home, 0))
        if self.inside[member] is None:
            counts[member] += 1
            self.waits += 1
            self.inside[member] = post(self.at[member] + 1, of, self.waits)
        elif self.found[member] is None:
            if all(count >= counts[member] for count in counts.values()):
                self.at[member] += 1
                self.inside[member] = None
            else:
                self.found[member] = self.inside[member]
        else:
            said, self.found[member] = self.found[member], None
            home = self.home[member]
            self.send(
                home, self.ledgers[home].look(member, said, f"{member} in {of}", self.clock)
            )
            ended = self.ledgers[home].ended(said)
            if ended:
                self.errors[member] = ended[0]

    def end(self):
        """Let everything happen, fairly; return whether everybody has come to an end."""
        for _ in range(400):
            for member in self.home:
                self.step(member)
            for link in list(self.wire):
                self.deliver(link)
            if all(map(self.over, self.home)):
                return True
        return False


SPLITS = st.sampled_from(
    [[[0, 1]], [[0], [1]], [[0, 1, 2]], [[0, 2], [1]], [[0], [1], [2], [3]]]
)


def run(machine, choices):
    members = list(machine.home)
    for choice in choices:
        links = list(machine.wire)
        if choice < 100 or not links:
            machine.step(members[choice % len(members)])
        else:
            machine.deliver(links[choice % len(links)])


@settings(max_examples=150, deadline=None)
@given(
    SPLITS, st.lists(st.integers(1, 3), max_size=6), st.lists(st.integers(0, 160), max_size=300)
)
def test_members_in_step_get_no_error_however_late_they_are(processes, plan, choices):
    machine = Machine(processes, {m: plan for members in processes for m in members})
    run(machine, choices)
    assert machine.end()
    assert not machine.errors


@settings(max_examples=150, deadline=None)
@given(
    SPLITS,
    st.lists(st.integers(1, 3), max_size=4),
    st.lists(st.integers(1, 3), max_size=4),
    st.integers(0, 3),
    st.lists(st.integers(0, 160), max_size=300),
)
def test_members_out_of_step_get_one_error(processes, before, after, odd, choices):
    plans = {m: [*before, 4, *after] for members in processes for m in members}
    odd = sorted(plans)[odd % len(plans)]
    plans[odd] = [*before, 5, *after]
    machine = Machine(processes, plans)
    run(machine, choices)
    assert machine.end()
    assert len(machine.errors) == len(plans)
    (text,) = set(machine.errors.values())
    assert text.startswith(f"{len(before) + 1}: ")
    assert f"{odd} in 5" in text


@settings(max_examples=150, deadline=None)
@given(
    SPLITS,
    st.integers(1, 3),
    st.lists(st.integers(1, 2), min_size=1, max_size=6),
    st.lists(st.integers(0, 160), max_size=300),
)
def test_numbers_that_drifted_give_no_error_while_members_move(processes, drift, plan, choices):
    """A member counts differently, and yet does the same: never all wait at once."""
    machine = Machine(processes, {m: plan for members in processes for m in members})
    odd = max(machine.home)
    machine.at[odd] = drift
    machine.plans[odd] = [0] * drift + plan
    run(machine, choices)
    assert machine.end()
    assert not machine.errors


def test_a_member_that_computes_answers_nothing():
    first, second = (Ledger([[0], [1]], p, lambda texts, number: "error") for p in (0, 1))
    ((_, question),) = first.look(0, post(1), "a", 0.0)
    assert not second.receive(0, question)
    assert not second.look(1, post(1, of=2, wait=5), "b", 0.1)
    ((to, _),) = second.look(1, post(1, of=2, wait=5), "b", 0.2)
    assert to == 0
    for i in range(50):  # it is asked once only, however long it takes
        assert not first.look(0, post(1), "a", 0.3 + i)


# -- all of it -------------------------------------------------------------------------------------

LASTING = 0.2  # s, after which a wait looks around here; a second for users
LATE = LASTING + 0.8  # long enough for a wrong error


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(messages, "_LASTING", LASTING)


KINDS = {
    "buckets": (
        lambda a, b, comm: a.allreduce(),
        lambda a, b, comm: b.allreduce(),
        "in bucket",
    ),
    "loose": (
        lambda a, b, comm: a.allreduce(),
        lambda a, b, comm: allreduce(np.ones(3), comm=comm),
        r"allreduce\(op='sum'\) of the array",
    ),
    "making": (
        lambda a, b, comm: a.allreduce(),
        lambda a, b, comm: Bucket(comm, np.ones(3)),
        r"Bucket\(result",
    ),
    "loose and making": (
        lambda a, b, comm: allreduce(np.ones(3), comm=comm),
        lambda a, b, comm: Bucket(comm, np.ones(3)),
        r"Bucket\(result.*allreduce\(op|allreduce\(op.*Bucket\(result",
    ),
    "requests": (
        lambda a, b, comm: a.iallreduce().wait(),
        lambda a, b, comm: b.iallreduce().wait(),
        "in bucket 1 .*in bucket 2|in bucket 2 .*in bucket 1",
    ),
}


def where(comm):
    """Return the member, and how many there are, of a team, a communicator or this node."""
    if comm is None:
        me = mpiml.context()
        return me.index, me.replicas
    return getattr(comm, "index", None) or getattr(comm, "rank", 0), comm.size


def differ(comm, kind):
    first, second, text = KINDS[kind]
    index, size = where(comm)
    like = np.zeros(4)
    with Bucket(comm, like) as a, Bucket(comm, like) as b:
        if kind == "loose and making":
            _warm(comm)
        a.allreduce()
        with pytest.raises(UsageError, match=text) as caught:
            (second if index == size - 1 else first)(a, b, comm)
        assert "Every member must make the same collective calls" in str(caught.value)
        assert "test_ledger.py" in str(caught.value)
        return str(caught.value)


def _warm(comm):
    assert (allreduce(np.ones(2), comm=comm) == where(comm)[1]).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [2, 3])
def test_members_that_never_meet_all_get_one_error(kind, size):
    found = outcomes(size, lambda team: differ(team, kind))
    assert all(isinstance(text, str) for text in found), found
    assert len(set(found)) == 1
    assert "as number" in found[0]


@modes
@pytest.mark.parametrize("kind", KINDS)
def test_they_do_so_in_nodes_and_on_ranks(mode, kind):
    if mode == 1:
        pytest.skip("nobody else is there")
    said = []

    def body(comm):
        text = differ(_own(comm), kind)
        said.append(text)

    everywhere(mode, body)
    assert len(set(said)) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2])
def test_they_do_so_on_several_hosts(monkeypatch, kind, size):
    monkeypatch.setenv("MPIML_HOST_SIZE", str(size))
    everywhere("mpi", lambda comm: differ(_own(comm), kind))


@pytest.mark.mpi(min_size=2)
def test_who_is_late_on_another_host_is_waited_for(monkeypatch):
    monkeypatch.setenv("MPIML_HOST_SIZE", "1")

    def body(comm):
        own = _own(comm)
        late(own)
        own.Free()  # with a question that was not answered

    everywhere("mpi", body)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("folded", [False, True])
def test_they_do_so_in_nodes_on_ranks(kind, folded):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    replicas = comm.size + 1 if folded else comm.size
    program = mpiml.Program("different")
    program.add_node(mpiml.PyNode(differ, None, kind), label="member", replicas=replicas)
    result = mpiml.launch(program, comm)
    if comm.rank == 0:
        assert len(result["member"]) == replicas
        assert len(set(result["member"])) == 1


def _own(comm):
    return None if comm is None else comm.Dup()  # whose team nothing has been made for


@pytest.mark.parametrize("size", [2, 3])
def test_the_first_arrays_and_a_bucket_meet_and_differ(size):
    def body(team):
        make = (lambda: Bucket(team, np.ones(3))) if team.index else (lambda: _warm(team))
        with pytest.raises(UsageError, match=r"Bucket\(result.*\(member|allreduce"):
            make()
        _warm(team)  # in step again
        return True

    assert outcomes(size, body) == [True] * size


def late(comm):
    index, size = where(comm)
    with Bucket(comm, np.zeros(4)) as a, Bucket(comm, np.zeros(4)) as b:
        a.tree[:] = b.tree[:] = 1
        if index == size - 1:
            time.sleep(LATE)
        a.allreduce()
        b.iallreduce().wait()
        assert (a.tree == size).all()
        assert (b.tree == size).all()
        if index == 0:
            time.sleep(LATE)
        _warm(comm)
        Bucket(comm, np.zeros(2)).close()


@pytest.mark.parametrize("mode", [2, 3, pytest.param("mpi", marks=pytest.mark.mpi(min_size=2))])
def test_a_member_that_is_only_late_is_waited_for(mode):
    everywhere(mode, lambda comm: late(_own(comm)))


def test_an_operation_under_way_and_making_go_on_side_by_side():
    """Two threads of a member wait; the other one is late for both."""

    def body(team):
        with Bucket(team, np.zeros(4)) as a:
            a.tree[:] = 1
            if team.index == 1:
                time.sleep(LATE)
            request = a.iallreduce()
            with Bucket(team, np.zeros(2)) as b:
                b.allreduce()
            request.wait()
            return a.tree.tolist()

    assert outcomes(2, body) == [[2.0] * 4] * 2


def test_what_is_usable_after_it():
    def body(team):
        with Bucket(team, np.zeros(4)) as a, Bucket(team, np.zeros(4)) as b:
            with Bucket(team, np.zeros(4)) as c:
                with pytest.raises(UsageError):
                    (a if team.index else b).allreduce()
                with pytest.raises(ServiceGoneError, match="ended early"):
                    (a if team.index else b).allreduce()
                c.allreduce()
            with Bucket(team, np.zeros(4)) as d:
                with pytest.raises(UsageError):
                    d.allreduce() if team.index else Bucket(team, np.zeros(1))
            with pytest.raises(ServiceGoneError, match="out of step before"):
                Bucket(team, np.zeros(1))
        return True

    assert outcomes(2, body) == [True, True]


def test_no_check_no_error(monkeypatch):
    monkeypatch.setenv("MPIML_CHECK", "off")
    ended = threading.Event()

    def body(team):
        with Bucket(team, np.zeros(4)) as a, Bucket(team, np.zeros(4)) as b:
            if team.index:
                assert not ended.wait(LATE)
                b.allreduce()
                a.allreduce()
                return True
            b_later = b.iallreduce  # in the order of the other, but late
            a_request = None
            try:
                b_later().wait()
                a_request = a.iallreduce()
                a_request.wait()
            except UsageError:
                ended.set()
                raise
            return True

    assert outcomes(2, body) == [True, True]
