"""Coded and backup gradients: results by hand, whoever is held back, wherever members live."""

import itertools
from contextlib import suppress

import numpy as np
import pytest

import mpiml
from mpiml.collectives.mail import mail_of
from mpiml.collectives.members import team_of
from mpiml.collectives.stragglers import (
    BackupGradient,
    CodedGradient,
    Cyclic,
    FractionalRepetition,
)
from mpiml.errors import DeadlineError, RankFailedError, ServiceGoneError, UsageError
from tests.collectives.everywhere import everywhere
from tests.collectives.neighbors.crowd import places, played
from tests.collectives.stragglers.held import Latch, check, gradient, like, raw, total
from tests.collectives.together import Impatient, outcomes, together

CODES = [Cyclic(4, 1), Cyclic(4, 2), Cyclic(4, 3), FractionalRepetition(4, 1),
         FractionalRepetition(4, 3), Cyclic(3, 1), Cyclic(5, 2)]  # fmt: skip
ROUNDING = {"f4": 1e-6, "f8": 2e-14}


def subsets(code):
    """Every choice of members that are held back, none to s."""
    for count in range(code.s + 1):
        yield from itertools.combinations(range(code.n), count)


def code_for(size):
    return FractionalRepetition(size, 1) if size % 2 == 0 else Cyclic(size, min(1, size - 1))


def bound(code, dtype="f8"):
    return 0.0 if isinstance(code, FractionalRepetition) else ROUNDING[dtype]


# -- gradient coding ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("code", CODES, ids=repr)
def test_the_serial_gradient_for_every_choice_of_dropped_members(code, dtype):
    """In step k those of choice k are held back until the others have the result."""
    choices = list(subsets(code))
    latches = [Latch(code.n - len(held)) for held in choices]

    def body(team):
        coded = CodedGradient(code, team, like=like(dtype), slack=1)
        results, used = [], []
        for step, held in enumerate(choices):
            if team.index in held:
                latches[step].wait()
            results.append(coded.sum(lambda part, step=step: gradient(part, step, dtype)))
            used.append(coded.used)
            if team.index not in held:
                latches[step].down()
        statistics = coded.statistics()
        coded.close()
        return [raw(r) for r in results], results, used, statistics

    found = together(code.n, body)
    for step, held in enumerate(choices):
        for bits, results, used, _ in found:
            check(results[step], total(range(code.n), step, dtype), bound(code, dtype))
            assert results[step]["w"].dtype == dtype
            assert bits[step] == found[0][0][step]
            assert used[step] == found[0][2][step]
            assert not set(held) & set(used[step])
    for index, (_, _, used, statistics) in enumerate(found):
        assert statistics["skipped"] >= sum(index in held for held in choices)
        assert statistics["unused"] == tuple(
            sum(m not in u for u in used) for m in range(code.n)
        )
        counted = sum(index in u for u in used)
        assert statistics["used"] == counted
        assert counted + statistics["dropped"] + statistics["skipped"] == len(choices)


@pytest.mark.parametrize("code", [FractionalRepetition(4, 1), Cyclic(4, 1)], ids=repr)
@pytest.mark.parametrize("held", range(4))
@pytest.mark.parametrize("at", [0, 3])
def test_a_member_held_back_for_several_steps_catches_up(code, held, at):
    latch, computed = Latch(3), []

    def body(team):
        with CodedGradient(code, team, like=like(), at=at) as coded:
            results = []
            for step in range(6):
                if team.index == held and step == 1:
                    latch.wait()
                    assert coded.late

                def one(part, step=step):
                    if team.index == held:
                        computed.append(step)
                    return gradient(part, step)

                results.append(coded.sum(one))
                if step == 4 and team.index != held:
                    latch.down()
            return [raw(r) for r in results], results, coded.statistics()

    found = together(4, body)
    for bits, results, _ in found:
        assert bits == found[0][0]
        for step, result in enumerate(results):
            check(result, total(range(4), step), bound(code))
    statistics = found[held][2]
    assert statistics["skipped"] >= 4  # steps 1 to 4
    assert not set(computed) & {1, 2, 3, 4}
    assert statistics["unused"][held] >= 4
    gradients = statistics["steps"] - statistics["skipped"]
    if held != at:
        assert statistics["bytes"] == gradients * BLOCK
        assert statistics["messages"] >= gradients + 6  # each result is acknowledged
    else:
        assert statistics["bytes"] == (gradients + 6 * 4) * BLOCK


BLOCK = 2 * 64  # bytes: an array of one number, and one of six, each on a cache line of its own


@pytest.mark.parametrize("form", ["function", "list", "mapping"])
def test_gradients_in_each_form(form):
    code = FractionalRepetition(4, 1)

    def body(team):
        coded = CodedGradient(code, team, like=like(), step=7)
        assert coded.partitions == code.assignment(team.index)
        trees = {part: gradient(part, 7) for part in coded.partitions}
        given = {
            "function": trees.__getitem__, "list": list(trees.values()), "mapping": trees
        }[form]  # fmt: skip
        result = coded.sum(given)
        assert coded.steps == 8
        result["w"] += 1  # the member's own
        coded.close()
        return result

    for result in together(4, body):
        expected = total(range(4), 7)
        expected["w"] = expected["w"] + 1
        check(result, expected)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([gradient(0, 0)], r"a tree for each of the partitions \[0, 1\], got 1 trees"),
        (3, "expected a function of the partition"),
        (
            {0: gradient(0, 0), 2: gradient(0, 0)},
            r"holds the partitions \[0, 1\], got .*\[0, 2\]",
        ),
        (
            [gradient(0, 0, "f4")] * 2,
            r"\['b'\]\[0\]: expected .* dtype float64, .* got .* float32",
        ),
        ([np.zeros(3)] * 2, "expected a tree like that given at construction"),
    ],
)
def test_a_wrong_gradient_is_this_members_error_and_nobody_elses(given, text):
    latch = Latch()

    def body(team):
        coded = CodedGradient(FractionalRepetition(4, 1), team, like=like())
        if team.index == 0:
            with pytest.raises(UsageError, match=text):
                coded.sum(given)
            latch.down()
        latch.wait()
        result = coded.sum(lambda part: gradient(part, 0))
        coded.close()
        return result

    for result in together(4, body):
        check(result, total(range(4), 0))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda t: CodedGradient(Cyclic(4, 1, seed=t.index // 3), t, like=like()),
         "seed=1.*This is member"),
        (lambda t: CodedGradient(Twisted(4, 1, t.index == 2), t, like=like()), "the matrix B="),
        (lambda t: CodedGradient(Cyclic(3, 1), t, like=like()), "4 members .* got Cyclic"),
        (lambda t: CodedGradient("cyclic", t, like=like()), "coding: expected"),
        (lambda t: CodedGradient(Cyclic(4, 1), t, like=like("f4" if t.index else "f8")),
         "float32"),
        (lambda t: CodedGradient(Cyclic(4, 1), t, like=np.zeros(2, "i4")), "only adds"),
        (lambda t: CodedGradient(Cyclic(4, 1), t, like=None), "like: expected a tree"),
        (lambda t: CodedGradient(Cyclic(4, 1), t, like=like(), slack=t.index + 1), "slack=2"),
        (lambda t: CodedGradient(Cyclic(4, 1), t, like=like(), slack=0), "slack: expected"),
        (lambda t: CodedGradient(Cyclic(4, 1), t, like=like(), at=4), "at: expected .* 0 to 3"),
        (lambda t: BackupGradient(5, t, like=like()), "n_needed: expected .* 1 to 4, got 5"),
        (lambda t: BackupGradient(0, t, like=like()), "n_needed: expected"),
        (lambda t: BackupGradient(1 + t.index // 2, t, like=like()), "n_needed=1 .*n_needed=2"),
        (lambda t: BackupGradient(2, t, like=np.zeros(2, "i8")), "of which there is a mean"),
    ],
)  # fmt: skip
def test_members_that_cannot_or_differ_hear_of_it_alike(make, text):
    for error in outcomes(4, make):
        assert isinstance(error, UsageError)
        with pytest.raises(UsageError, match=text):
            raise error


class Twisted(Cyclic):
    """Looks the same, and has another matrix on one member."""

    def __init__(self, n, s, twisted):
        self._twisted = twisted
        super().__init__(n, s)

    def _build(self):
        matrix = super()._build()
        return -matrix if self._twisted else matrix


# -- backup workers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c16"])
@pytest.mark.parametrize("needed", [1, 2, 3, 4])
def test_the_mean_of_the_first_n(needed, dtype):
    """In each step other members come first; the rest comes when the result is there."""
    firsts = [set(c) for c in itertools.combinations(range(4), needed)]
    latches = [Latch(needed) for _ in firsts]

    def body(team):
        with BackupGradient(needed, team, like=like(dtype), slack=1) as backup:
            results, used = [], []
            for step, first in enumerate(firsts):
                if team.index not in first:
                    latches[step].wait()
                results.append(backup.mean(lambda step=step: gradient(team.index, step, dtype)))
                used.append(backup.used)
                if team.index in first:
                    latches[step].down()
            return results, used, backup.statistics()

    found = together(4, body)
    for step, first in enumerate(firsts):
        for results, used, _ in found:
            assert used[step] == tuple(sorted(first))
            assert raw(results[step]) == raw(found[0][0][step])
            assert results[step]["w"].dtype == dtype
            mean = {key: value for key, value in total(first, step, "c16").items()}
            expected = {"w": mean["w"] / needed, "b": [mean["b"][0] / needed]}
            check(results[step], expected, {"f2": 1e-4, "f4": 1e-7}.get(dtype, 1e-15))
    for index, (_, used, statistics) in enumerate(found):
        assert statistics["used"] == sum(index in u for u in used)
        assert statistics["skipped"] == len(firsts) - statistics["used"]
        assert statistics["dropped"] == 0


def test_a_gradient_whose_step_is_over_when_it_is_there_is_not_sent():
    """It is computed while the others go on."""
    begun, over = Latch(), Latch(2)

    def body(team):
        with BackupGradient(2, team, like=like()) as backup:
            for step in range(3):

                def one(step=step):
                    if team.index == 2 and step == 1:
                        begun.down()
                        over.wait()
                    return gradient(team.index, step)

                if team.index != 2 and step == 1:
                    begun.wait()
                before = backup.statistics()["skipped"]
                result = backup.mean(one)
                assert len(backup.used) == 2
                check(result, halved(backup.used, step))
                if team.index == 2 and step == 1:  # it looked again before it sent
                    assert backup.statistics()["skipped"] == before + 1
                if team.index != 2 and step == 1:
                    over.down()
            return backup.statistics(), backup.used

    found = together(3, body)
    assert {s["steps"] for s, _ in found} == {3}


def test_what_is_sent_for_a_step_that_is_over_is_counted_as_dropped():
    """The result of step 1 is made of members 0 and 1, but must wait for member 3 (slack)."""
    both, third = Latch(2), Latch()

    def body(team):
        with BackupGradient(2, team, like=like(), slack=1) as backup:
            if team.index == 3:
                third.wait()
            backup.mean(lambda: gradient(team.index, 0))
            if team.index < 3:
                if team.index == 2:
                    both.wait()
                with pytest.raises(DeadlineError, match=r"step 1: .* waits for member 3\."):
                    backup.mean(lambda: gradient(team.index, 1), timeout=0.1)
                (third if team.index == 2 else both).down()
            result = backup.mean(lambda: gradient(team.index, 1))
            assert backup.used == (0, 1)
            return result, backup.statistics()

    found = together(4, body)
    for result, statistics in found:
        check(result, halved((0, 1), 1))
        assert statistics["unused"][2] >= 1
    dropped = [s["dropped"] for _, s in found]
    assert dropped[2] >= 1
    assert found[2][1]["bytes"] == (2 - found[2][1]["skipped"]) * BLOCK


def halved(members, step):
    both = total(members, step)
    return {"w": both["w"] / len(members), "b": [both["b"][0] / len(members)]}


# -- wherever members live -----------------------------------------------------------------------------


@places
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_coded_everywhere(place, big, last, monkeypatch):
    """The last member is held back for three steps: by messages, so in other processes too."""
    shape = (200, 300) if big else (3,)

    def body(comm):
        team = team_of(comm, "the test")
        size, slow = team.size, team.size - 1
        code = code_for(size)
        at = size - 1 if last else 0
        held = size > 1
        told = Told(team)
        with CodedGradient(code, comm, like=np.zeros(shape), at=at) as coded:
            for step in range(5):
                if held and team.index == slow and step == 1:
                    told.wait()
                result = coded.sum(lambda part, step=step: np.full(shape, part + 10.0 * step))
                expected = sum(range(size)) + 10.0 * step * size
                np.testing.assert_allclose(
                    result, expected, rtol=0, atol=1e-11 * (expected + 1)
                )
                if held and team.index != slow and step == 3:
                    told.tell(slow)
            statistics = coded.statistics()
        assert statistics["steps"] == 5
        if held and team.index == slow:
            assert statistics["skipped"] >= 3
            assert statistics["unused"][slow] >= 3

    played(place, body, monkeypatch)


@places
def test_backup_everywhere(place, monkeypatch):
    def body(comm):
        team = team_of(comm, "the test")
        size = team.size
        slow = size - 1
        needed = max(size - 1, 1)
        held = size > 1
        told = Told(team)
        seen = []
        with BackupGradient(needed, comm, like=np.zeros(3000, "f4")) as backup:
            for step in range(5):
                if held and team.index == slow and step == 1:
                    told.wait()
                result = backup.mean(
                    lambda step=step: np.full(3000, team.index + 8.0 * step, "f4")
                )
                expected = sum(backup.used) / needed + 8 * step
                np.testing.assert_allclose(result, expected, rtol=1e-6)
                assert len(backup.used) == needed
                seen.append(f"{backup.used} {result.tobytes().hex()[:8]}")
                if held and team.index != slow and step == 3:
                    told.tell(slow)
            if held:
                assert backup.statistics()["unused"][slow] >= 3
        said = team.exchange("; ".join(seen).encode(), "what was used")
        assert len(set(said)) == 1

    played(place, body, monkeypatch)


class Told:
    """Holds a member back until all others have told it, by messages of their own."""

    def __init__(self, team):
        self._team = team
        self._channel = mail_of(team).open("told")

    def tell(self, who):
        self._channel.send(who, b"")

    def wait(self):
        for _ in range(self._team.size - 1):
            self._channel.receive(None).wait("held back")


@places
def test_two_at_once(place, monkeypatch):
    """Each has its channels; one is used between the steps of the other."""

    def body(comm):
        size = team_of(comm, "the test").size
        with (
            CodedGradient(code_for(size), comm, like=np.zeros(2), at=size - 1) as coded,
            BackupGradient(size, comm, like=np.zeros(700)) as backup,
        ):
            for step in range(3):
                found = coded.sum(lambda part, step=step: np.full(2, part + float(step)))
                np.testing.assert_allclose(found, sum(range(size)) + size * step, atol=1e-12)
                found = backup.mean(np.full(700, float(step)))
                assert set(found.tolist()) == {float(step)}
            assert not coded.late
            assert backup.statistics()["dropped"] == 0

    played(place, body, monkeypatch)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("closed", [True, False])
def test_a_communicator_can_be_freed_and_made_again(closed):
    from mpi4py import MPI

    def body(world):
        for step in range(3):
            comm = world.Dup()
            coded = CodedGradient(code_for(world.size), comm, like=np.zeros(5000), step=step)
            found = coded.sum(lambda part, step=step: np.full(5000, part + float(step)))
            np.testing.assert_allclose(found, sum(range(world.size)) + world.size * step)
            if closed:
                coded.close()
            comm.Free()
            coded.close()

    everywhere("mpi", body)
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size


@places
def test_a_program_that_stops_ends_them_after_the_same_step(place, monkeypatch):
    """One replica asks for the stop while another is steps behind."""
    if isinstance(place, str) and not place.startswith(("nodes", "two")):
        pytest.skip("no program")

    def body(_):
        context = mpiml.context()
        size = context.replicas
        told = Told(team_of(None, "the test"))
        with CodedGradient(code_for(size), like=np.zeros(3000), slack=2) as coded:
            while not context.stopping:
                if coded.steps == 3 and size > 1:
                    if context.index == size - 1:
                        told.wait()
                    else:
                        told.tell(size - 1)
                if coded.steps == 4 and context.index == 0:
                    context.stop()
                coded.sum(lambda part: np.full(3000, float(part)))
            steps = coded.steps
        assert steps > 3
        ends.append(steps)

    ends = []
    played(place, body, monkeypatch)
    everyone = [ends]
    if isinstance(place, str):
        from mpi4py import MPI

        everyone = MPI.COMM_WORLD.allgather(ends)
    assert len({steps for ends in everyone for steps in ends}) == 1


# -- members that are gone -----------------------------------------------------------------------------


def test_members_that_raise_count_as_late_up_to_s():
    def body(team):
        with CodedGradient(Cyclic(4, 2), team, like=like(), slack=1) as coded:
            for step in range(4):
                if step == team.index in (1, 2):
                    raise ZeroDivisionError("broken")
                check(
                    coded.sum(lambda part, step=step: gradient(part, step)),
                    total(range(4), step),
                    ROUNDING["f8"],
                )
            return coded.statistics()

    found = outcomes(4, body)
    assert isinstance(found[1], ZeroDivisionError)
    assert isinstance(found[2], ZeroDivisionError)
    for index in (0, 3):
        assert found[index]["steps"] == 4
        assert found[index]["unused"][1] >= 3
        assert found[index]["unused"][2] >= 2


@places
@pytest.mark.parametrize("big", [False, True])
def test_a_member_that_raises_everywhere(place, big, monkeypatch):
    """The last one raises in step 1, and hears nothing any more; the others do all steps."""
    if isinstance(place, str) and place.startswith(("nodes", "two")):
        pytest.skip("the program ends with its first error")
    shape = (100_000,) if big else (3,)

    def body(comm):
        team = team_of(comm, "the test")
        size = team.size
        try:
            with CodedGradient(
                Cyclic(size, min(1, size - 1)), comm, like=np.zeros(shape), slack=2
            ) as coded:
                for step in range(5):
                    if size > 1 and team.index == size - 1 and step == 1:
                        raise ZeroDivisionError("broken")
                    result = coded.sum(
                        lambda part, step=step: np.full(shape, part + 1.0 * step)
                    )
                    np.testing.assert_allclose(
                        result, sum(range(size)) + size * step, atol=1e-9
                    )
        except ZeroDivisionError:
            assert team.index == size - 1
        else:
            if size > 1:
                assert coded.statistics()["unused"][size - 1] >= 4
        team.exchange(b"", "all have left")

    played(place, body, monkeypatch)


@pytest.mark.parametrize("kind", ["coded", "backup"])
def test_too_few_are_left_is_an_error_that_names_who_is_gone(kind):
    def body(team):
        made = (
            CodedGradient(Cyclic(4, 1), team, like=like())
            if kind == "coded"
            else BackupGradient(3, team, like=like())
        )
        call = made.sum if kind == "coded" else made.mean
        with made:
            for step in range(3):
                if team.index in (1, 2) and step == 1:
                    raise ZeroDivisionError(f"broken {team.index}")
                call(lambda part=team.index, step=step: gradient(part, step))

    found = outcomes(4, body)
    for index in (0, 3):
        assert isinstance(found[index], ServiceGoneError)
        with pytest.raises(
            ServiceGoneError,
            match=r"step 1 needs .* 2 of 4. Gone: member 1: .*broken 1; member 2: .*broken 2",
        ):
            raise found[index]


def test_when_the_collector_is_gone_all_hear_of_it():
    def body(team):
        with BackupGradient(3, team, like=like(), at=1) as backup:
            if team.index == 1:
                raise ZeroDivisionError("broken")
            backup.mean(like)

    found = outcomes(3, body)
    for index in (0, 2):
        with pytest.raises(
            ServiceGoneError, match=r"member 1, which collects, has left: .*broken"
        ):
            raise found[index]


class Mourning(Impatient):
    """Knows that members have died, as the hooks of plain MPI code do."""

    def __init__(self, names, dead):
        super().__init__(names)
        self._dead = dead

    def waiting(self, seconds, missing, label):
        super().waiting(seconds, missing, label)
        for member in missing:
            if member in self._dead:
                raise RankFailedError(f"{label}: member {member} has ended", (member,))


@pytest.mark.parametrize("dead", [{3}, {1, 3}])
def test_a_member_that_dies_without_a_word(dead):
    """Slack would stop the others, but the hooks know that it is dead."""
    died = set()

    def body(team):
        coded = CodedGradient(Cyclic(4, 1), team, like=like(), slack=1)
        for step in range(4):
            if team.index in dead and step == 1:
                died.add(team.index)
                return None
            coded.sum(lambda part, step=step: gradient(part, step))
        coded.close()
        return coded.statistics()

    names = [f"member {i}" for i in range(4)]
    found = outcomes(4, body, Mourning(names, died))
    for index in {0, 2}:
        if len(dead) == 1:
            assert found[index]["unused"][3] >= 3
        else:
            assert isinstance(found[index], ServiceGoneError)
            assert "member 1: " in str(found[index])
            assert "member 3: " in str(found[index])


def test_a_dead_collector_ends_the_wait():
    died = set()

    def body(team):
        coded = CodedGradient(Cyclic(3, 1), team, like=like())
        if team.index == 0:
            died.add(0)
        else:
            coded._talk.collector = None  # as if it were elsewhere
            coded.sum(gradient_of_step_zero)

    for found in outcomes(3, body, Mourning(["a", "b", "c"], died))[1:]:
        assert isinstance(found, RankFailedError)


def gradient_of_step_zero(part):
    return gradient(part, 0)


def test_a_node_that_returns_early_counts_as_late():
    """The program's hooks know that it will never come."""
    seen = []

    def body(_):
        coded = CodedGradient(Cyclic(4, 1), like=like(), slack=1)
        index = team_of(None, "the test").index
        for step in range(4):
            if index == 3 and step == 1:
                return
            check(
                coded.sum(lambda part, step=step: gradient(part, step)),
                total(range(4), step),
                ROUNDING["f8"],
            )
        coded.close()
        seen.append(coded.statistics()["unused"][3])

    program = mpiml.Program("early")
    program.add_node(mpiml.PyNode(body, None), label="member", replicas=4)
    mpiml.launch(program)
    assert len(seen) == 3
    assert min(seen) >= 3


# -- waits, and the end ----------------------------------------------------------------------------------


def test_a_deadline_names_who_is_missing_and_the_step_goes_on():
    latch = Latch(3)

    def body(team):
        with CodedGradient(FractionalRepetition(4, 1), team, like=like()) as coded:
            if team.index in (0, 2):  # a whole group
                latch.wait()
            else:
                with pytest.raises(
                    DeadlineError,
                    match="step 0: no result in time; waits for member 0, member 2",
                ):
                    coded.sum(lambda part: gradient(part, 0), timeout=0.1)
                latch.down()
            if team.index == 1:
                latch.down()
            result = coded.sum(lambda part: gradient(part, 0))
            assert coded.used in ((0, 1), (1, 2))  # one of each group, though 3 was there, too
            sent = coded.statistics()["bytes"]
            return result, sent

    for index, (result, sent) in enumerate(together(4, body)):
        check(result, total(range(4), 0))
        assert sent <= BLOCK + (index == 0) * 4 * BLOCK  # what was brought is not sent again


@pytest.mark.parametrize("timeout", [0, -1.0, "soon", True])
def test_timeouts_that_are_none(timeout):
    def body(team):
        with BackupGradient(1, team, like=like()) as backup:
            backup.mean(like(), timeout=timeout)

    for error in outcomes(1, body):
        assert "timeout: expected seconds > 0" in str(error)


def test_closed_is_closed():
    def body(team):
        backup = BackupGradient(1, team, like=like())
        backup.mean(like())
        backup.close()
        backup.close()
        with pytest.raises(ServiceGoneError, match=r"BackupGradient\.mean: it is closed"):
            backup.mean(like())
        with pytest.raises(ServiceGoneError, match="is closed"):
            _ = backup.late
        return backup.statistics(), repr(backup)

    for statistics, text in together(2, body):
        assert statistics["steps"] == 1
        assert "BackupGradient, step 1" in text


def test_a_member_with_more_steps_than_the_others_hears_who_has_closed():
    def body(team):
        with CodedGradient(Cyclic(3, 1), team, like=like()) as coded:
            for step in range(2 + (team.index == 2)):
                coded.sum(lambda part, step=step: gradient(part, step))

    found = outcomes(3, body)
    assert found[:2] == [None, None]
    assert isinstance(found[2], ServiceGoneError)
    assert "step 2" in str(found[2])
    assert "it has closed" in str(found[2])


@pytest.mark.parametrize("slack", [1, 3])
def test_others_are_ahead_by_slack_and_wait_then(slack):
    """As many results lie with the collector as slack allows, and their memory is used again."""
    latch = Latch(2)

    def body(team):
        with BackupGradient(2, team, like=like(), slack=slack) as backup:
            if team.index == 2:
                latch.wait()
                flying = len(backup._collector._flying)
                assert backup._collector.waits_for() == (2,)
                for _ in range(3 * slack):
                    backup.mean(like)
                return flying, len(backup._collector._free)
            for step in range(3 * slack):
                if step == slack:
                    with pytest.raises(
                        DeadlineError, match=f"step {step}: .* for member 2. It"
                    ):
                        backup.mean(like, timeout=0.1)
                    latch.down()
                backup.mean(like)
            return None

    flying, free = together(3, body)[2]
    assert flying == slack
    assert free <= slack + 1


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_what_ended_by_an_error_leaves_nothing_behind(broken):
    def body(team):
        guests = mail_of(team).office.guests
        errors = (ZeroDivisionError, ServiceGoneError)
        with suppress(*errors), BackupGradient(3, team, like=like(), at=1) as backup:
            if team.index == broken:
                raise ZeroDivisionError("broken")
            backup.mean(like)
        team.exchange(b"", "ended")
        assert not guests
        assert not [key for key in team.room.shared if key[0] == "BackupGradient"]

    together(3, body)
