"""When a step is complete, who may be how far ahead, and what messages say: no messages here."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml.collectives.stragglers import Backup, Cyclic, FractionalRepetition, Verdict
from mpiml.collectives.stragglers.blocks import Blocks
from mpiml.collectives.stragglers.records import Kind, Record, mask, members_of
from mpiml.collectives.stragglers.rules import CodedSteps, FirstSteps, Pace
from mpiml.errors import UsageError
from tests.collectives.stragglers.held import check, gradient, like

TAKE, LAST, LATE = Verdict.TAKE, Verdict.LAST, Verdict.LATE


def test_a_coded_step_is_complete_when_it_can_be_decoded():
    rule = CodedSteps(Cyclic(4, 2), 3)
    assert [rule.offer(2, 3), rule.offer(0, 3)] == [TAKE, LAST]
    assert (rule.step, rule.arrived) == (4, ())
    assert rule.offer(1, 3) is LATE
    assert rule.offer(1, 4) is TAKE
    assert rule.arrived == (1,)
    for member, step in ((1, 4), (2, 5)):
        with pytest.raises(UsageError, match=f"member {member} .* another of step {step}"):
            rule.offer(member, step)
    assert rule.arrived == (1,)


def test_of_a_repetition_one_of_each_group_is_used():
    rule = CodedSteps(FractionalRepetition(4, 1), 0)  # groups 0, 2 and 1, 3
    assert [rule.offer(2, 0), rule.offer(0, 0), rule.offer(3, 0)] == [TAKE, TAKE, LAST]
    assert rule.used((2, 0, 3)) == (0, 3)
    assert rule.enough([1, 2])
    assert not rule.enough([1, 3])


def test_the_first_n_are_the_mean():
    rule = FirstSteps(Backup(2, 1))
    assert [rule.offer(2, 0), rule.offer(1, 0), rule.offer(0, 0)] == [TAKE, LAST, LATE]
    assert rule.used((2, 1)) == (1, 2)
    assert (rule.enough([0, 2]), rule.enough([1])) == (True, False)
    found = rule.combine({2: gradient(2, 0), 1: gradient(1, 0)})
    check(found, {"w": gradient(1.5, 0)["w"], "b": [np.array(1.5)]})


def test_narrow_numbers_are_added_in_float32():
    rule = FirstSteps(Backup(4, 0))
    big = {i: np.full(3, 60000, "f2") for i in range(4)}  # their sum is beyond float16
    assert rule.combine(big).tolist() == [60000] * 3
    assert rule.combine(big).dtype == "f2"


def test_a_result_waits_for_who_is_behind_unless_it_has_left():
    pace = Pace(3, 2, 5)
    assert pace.behind(6) == ()
    assert pace.behind(7) == (0, 1, 2)
    pace.took(0, 5)
    pace.took(1, 6)
    pace.took(1, 5)  # what is older says nothing
    assert pace.behind(7) == (2,)
    assert pace.behind(8) == (0, 2)
    pace.leave(2, "broken")
    pace.leave(2, "again")
    assert (pace.live, pace.gone) == ((0, 1), {2: "broken"})
    assert pace.behind(7) == ()


@settings(deadline=None)
@given(st.sets(st.integers(0, 300)))
def test_members_as_bits(members):
    assert members_of(mask(members)) == tuple(sorted(members))


@settings(deadline=None)
@given(st.sampled_from(Kind), st.integers(-1, 1 << 40), st.integers(-1, 1 << 20), st.text())
def test_records_there_and_back(kind, step, member, text):
    record = Record(kind, step, member, text.encode("utf-8", "replace"))
    assert Record.unpack(record.pack()) == record
    assert Record.unpack(record.pack()).text == record.more.decode()


def test_blocks_are_the_tree():
    blocks = Blocks(like(), "here")
    assert blocks.nbytes == 2 * 64
    block = blocks.empty()
    blocks.fill(gradient(3, 2), block, "here")
    check(blocks.tree(block), gradient(3, 2))
    blocks.tree(block)["w"][0, 0] = -1
    assert blocks.tree(memoryview(block))["w"][0, 0] == -1  # views


def test_blocks_of_several_dtypes():
    tree = [np.arange(3.0), np.arange(5, dtype="f4"), np.zeros((0, 2)), np.array(7.0)]
    blocks = Blocks(tree, "here")
    block = blocks.empty()
    blocks.fill(tree, block, "here")
    for got, wanted in zip(blocks.tree(block), tree, strict=True):
        np.testing.assert_array_equal(got, wanted, strict=True)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_blocks_of_nothing(shape):
    blocks = Blocks([np.zeros(shape)], "here")
    assert blocks.nbytes == 0
    block = blocks.empty()
    blocks.fill([np.zeros(shape)], block, "here")
    assert blocks.tree(block)[0].shape == shape


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"w": np.zeros((2, 3))}, "expected a tree like that"),
        ({"w": np.zeros((3, 2)), "b": [np.array(0.0)]}, r"there\['w'\]: expected .* \(2, 3\)"),
        ({"w": np.zeros((2, 3), "f4"), "b": [np.array(0.0)]}, "dtype float64, as given"),
    ],
)
def test_trees_that_do_not_fit(tree, text):
    blocks = Blocks(like(), "here")
    with pytest.raises(UsageError, match=text):
        blocks.fill(tree, blocks.empty(), "there")


def test_what_is_no_array_of_numpy():
    with pytest.raises(UsageError, match=r"here: leaf .*: expected an array, got the number 3"):
        Blocks([3], "here")
