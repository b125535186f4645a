"""What is remembered: by member and array, copied out and in."""

import pickle

import numpy as np
import pytest

from mpiml.collectives.compression import EFSign, ErrorFeedback, NoFeedback, TopK
from mpiml.collectives.compression.state import Memory, Slot, Statistics
from mpiml.errors import UsageError


def memory(kind="TopK"):
    kept = Memory(kind)
    slots = kept.of(1, "learner/1")
    assert slots == {}
    kept.commit(1, {"w": Slot(3, {"residual": np.arange(3.0)})}, Statistics(1, 1, 24, 8, 40))
    return kept


def test_a_state_is_a_copy_of_plain_dicts_and_arrays():
    kept = memory()
    state = kept.state_dict()
    assert state["codec"] == "TopK"
    assert list(state["members"]) == ["1"]
    assert state["members"]["1"]["w"]["step"] == 3
    state["members"]["1"]["w"]["residual"][:] = 7
    again = kept.state_dict()["members"]["1"]["w"]["residual"]
    np.testing.assert_array_equal(again, [0, 1, 2])


def test_a_loaded_state_is_a_copy_too():
    state = memory().state_dict()
    other = Memory("TopK")
    other.load_state_dict(state)
    state["members"]["1"]["w"]["residual"][:] = 7
    slot = other.of(1, "learner/1")["w"]
    assert slot.step == 3
    np.testing.assert_array_equal(slot.arrays["residual"], [0, 1, 2])


def test_a_member_refuses_the_state_of_another():
    other = Memory("TopK")
    other.load_state_dict(memory().state_dict())
    with pytest.raises(
        UsageError, match=r"state of member 1, and this is member 0 \(learner/0"
    ):
        other.of(0, "learner/0")
    other.reset()
    assert other.of(0, "learner/0") == {}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"codec": "EFSign", "members": {}}, "that of a EFSign"),
        ({}, "got dict"),
        (3, "got int"),
        ({"codec": "TopK"}, "KeyError"),
        ({"codec": "TopK", "members": {"1": {"w": {}}}}, "KeyError"),
        ({"codec": "TopK", "members": {"a": {}}}, "ValueError"),
        ({"codec": "TopK", "members": [1]}, "AttributeError"),
    ],
)
def test_what_is_no_state_is_refused_and_changes_nothing(state, said):
    kept = memory()
    with pytest.raises(UsageError, match=said):
        kept.load_state_dict(state)
    assert kept.of(1, "")["w"].step == 3


def test_counts_are_those_of_all_members():
    kept = memory()
    kept.of(0, "learner/0")
    kept.commit(0, {}, Statistics(2, 2, 48, 8, 48))
    assert kept.statistics() == Statistics(3, 3, 72, 16, 88)
    assert kept.statistics().ratio == 4.5
    kept.reset()
    assert kept.statistics().calls == 3
    assert np.isnan(Statistics().ratio)


def test_a_residual_of_another_shape_is_refused():
    slot = Slot(1, {"residual": np.zeros(3)})
    with pytest.raises(UsageError, match=r"expected \(4,\) float64, got \(3,\) float64"):
        slot.get("residual", (4,), np.float64, "w")
    assert slot.get("q", (4,), np.float64, "w") is None


def test_memory_for_residuals_is_used_again():
    slot = Slot()
    first = slot.buffer((3,), np.float32)
    assert slot.buffer((3,), np.float32) is first
    assert slot.buffer((3,), np.float64) is not first


def test_names_tell_whose_state_it_is():
    kinds = [c.state_dict()["codec"] for c in (TopK(k=1), ErrorFeedback(TopK(k=1)))]
    kinds += [NoFeedback(EFSign()).state_dict()["codec"]]
    assert kinds == ["TopK", "ErrorFeedback(TopK)", "NoFeedback(EFSign)"]


def test_a_codec_is_pickled_with_its_state():
    codec = EFSign()
    codec.load_state_dict({"codec": "EFSign", "members": {"0": {"w": {"step": 2}}}})
    again = pickle.loads(pickle.dumps(codec))
    assert again.state_dict() == codec.state_dict()
