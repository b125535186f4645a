"""What FusedOptimizer and ShardedOptimizer share: errors on all members, drift, the end."""

import re

import numpy as np
import pytest

from mpiml import optim
from mpiml.collectives import Bucket, FusedOptimizer, ShardedOptimizer
from mpiml.collectives.labels import Label
from mpiml.collectives.optimizers import shards
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives.everywhere import everywhere, modes

KINDS = pytest.mark.parametrize("kind", [FusedOptimizer, ShardedOptimizer])


class Made:
    """An optimizer of either kind, with its buckets."""

    def __init__(self, kind, comm, optimizer):
        self.gradients = Bucket(comm, like=np.zeros(100))
        self.index, self.size = self.gradients.index, self.gradients.size
        self.params = None
        if kind is FusedOptimizer:
            self.model = kind(self.gradients, np.zeros(100), optimizer, name="net")
        else:
            self.params = Bucket(comm, like=np.zeros(100))
            self.model = kind(self.params, self.gradients, optimizer, name="net")

    @property
    def values(self):
        return self.model.tree if self.params is None else self.params.tree

    @property
    def odd(self):
        return self.index == self.size - 1

    def goes_on(self, steps=0):
        """The next step is as good as ever."""
        before = self.values.copy()
        assert self.model.steps == steps
        self.gradients.tree[:] = 1
        self.model.step("mean")
        assert (self.values < before).all()


@modes
@KINDS
@pytest.mark.parametrize("bad", ["max", "nothing", None, 3])
def test_an_operation_that_one_member_has_wrong_is_an_error_on_all(mode, kind, bad):
    def body(comm):
        made = Made(kind, comm, optim.SGD(0.1))
        own = "op: expected"
        with pytest.raises(
            UsageError, match=own if made.odd else f"could not take part in .*{own}"
        ):
            made.model.step(bad if made.odd else "mean")
        made.goes_on()

    everywhere(mode, body)


@modes
@KINDS
def test_a_learning_rate_that_raises_is_an_error_on_all(mode, kind):
    def body(comm):
        raises = []

        def lr(done):
            if raises:
                raise KeyError("schedule")
            return 0.1

        made = Made(kind, comm, optim.Adam(lr))
        if made.odd:
            raises.append(True)
        with pytest.raises(KeyError if made.odd else UsageError, match="schedule") as caught:
            made.model.step()
        if not made.odd:
            assert re.search(
                rf"could not take part in {kind.__name__}\.step.*: KeyError: .schedule",
                str(caught.value),
            )
        raises.clear()
        made.goes_on()

    everywhere(mode, body)


DRIFTS = {
    "lr": lambda o: setattr(o, "lr", 0.2),
    "betas": lambda o: setattr(o, "betas", (0.8, 0.999)),
    "eps": lambda o: setattr(o, "eps", 1e-7),
    "weight_decay": lambda o: setattr(o, "weight_decay", 0.1),
}


@modes
@KINDS
@pytest.mark.parametrize("name", DRIFTS)
def test_no_hyperparameter_drifts_unnoticed(mode, kind, name):
    def body(comm):
        optimizer = optim.AdamW(0.1)
        made = Made(kind, comm, optimizer)
        if made.size == 1:
            return
        if made.odd:
            DRIFTS[name](optimizer)
        good, bad = (getattr(o, name) for o in (optim.AdamW(0.1), optimizer))
        with pytest.raises(UsageError, match=f"{name}=") as caught:
            made.model.step()
        assert f"{name}={good!r}" in str(caught.value)
        assert not made.odd or f"{name}={bad!r}" in str(caught.value)
        assert made.model.steps == 0

    everywhere(mode, body)


@modes
@KINDS
def test_the_number_of_the_step_does_not_drift_unnoticed(mode, kind):
    def body(comm):
        made = Made(kind, comm, optim.SGD(0.1))
        if made.size == 1:
            return
        if made.odd:
            made.model._shards.steps = 4
        with pytest.raises(UsageError, match=r"(?s)step=1.*step=5"):
            made.model.step()

    everywhere(mode, body)


@modes
@KINDS
def test_a_step_after_close_is_an_error_on_all(mode, kind):
    def body(comm):
        with Made(kind, comm, optim.Adam(0.1)).model as model:
            model.step()
            assert model.statistics()["state"] or model._team.size > 1
        made = Made(kind, comm, optim.Adam(0.1))
        made.goes_on()
        kept = made.values.copy()
        if made.odd:
            made.model.close()
            assert made.model.statistics()["state"] == 0
        error = ServiceGoneError if made.odd else UsageError
        for _ in range(2):
            with pytest.raises(error, match=rf"{kind.__name__}\.step: it is closed"):
                made.model.step()
            with pytest.raises(error, match=rf"{kind.__name__}\.state_dict: it is closed"):
                made.model.state_dict()
            with pytest.raises(error, match="it is closed"):
                made.model.load_state_dict({})
        assert (made.values == kept).all()
        made.gradients.allreduce("max")  # the bucket stays open

    everywhere(mode, body)


@modes
@KINDS
@pytest.mark.parametrize("bad", [None, 7, {"step": 1, "optimizer": 1, "params": 2, "state": 3}])
def test_what_is_no_state_at_all_is_an_error_on_all(mode, kind, bad):
    def body(comm):
        made = Made(kind, comm, optim.SGD(0.1))
        good = made.model.state_dict()
        with pytest.raises(UsageError, match="load_state_dict"):
            made.model.load_state_dict(bad if made.odd else good)
        made.goes_on()

    everywhere(mode, body)


@modes
def test_what_one_member_cannot_make_is_an_error_on_all(mode):
    def body(comm):
        bucket = Bucket(comm, like=np.zeros(9))
        odd = bucket.index == bucket.size - 1
        params = Bucket(comm, like=np.zeros(9))
        for wrong, got in (
            (None, "NoneType"),
            ("adam", "str"),
            (optim.Adam, "the class Adam itself"),
        ):
            given = wrong if odd else optim.SGD(0.1)
            text = rf"optimizer: expected an optimizer of mpiml\.optim, .*, got {got}"
            with pytest.raises(UsageError, match=f"FusedOptimizer: {text}"):
                FusedOptimizer(bucket, np.zeros(9), given)
            with pytest.raises(UsageError, match=f"ShardedOptimizer: {text}"):
                ShardedOptimizer(params, bucket, given)
        with pytest.raises(UsageError, match="Bucket of gradients, got ndarray"):
            FusedOptimizer(np.zeros(9), bucket, optim.SGD(0.1))  # no members to tell
        with pytest.raises(UsageError, match="Bucket of gradients, got ndarray"):
            ShardedOptimizer(bucket, np.zeros(9), optim.SGD(0.1))
        other = Bucket(comm, like=np.zeros(9))
        if odd:
            other.close()
        with pytest.raises((UsageError, ServiceGoneError), match="the bucket is closed"):
            FusedOptimizer(other, np.zeros(9), optim.SGD(0.1))

    everywhere(mode, body)


def test_a_plan_that_cannot_be_written_leaves_none(monkeypatch):
    def body(comm):
        made = Made(FusedOptimizer, comm, optim.SGD(0.1))
        model = made.model
        states = model._shards.states
        model._shards.states = ()
        with pytest.raises(IndexError):
            model.step()
        model._shards.states = states
        made.gradients.tree[:] = 1
        model.step()
        assert (model.tree < 0).all()  # with half a plan nothing is updated

    everywhere(1, body)


class Many:
    """A team of so many members, of which one has something to send."""

    def __init__(self, size):
        self.size = size
        self.most = 0

    def exchange(self, record, label):
        self.most = max(self.most, self.size * (len(record) + 8))
        return [record] + [b""] * (self.size - 1)


@pytest.mark.parametrize("size", [1, 255, 256, 1024])
def test_a_checkpoint_of_many_members_passes_in_parts_that_messages_can_carry(size):
    own = np.arange(3 << 20, dtype="f8")
    whole = np.zeros(len(own) + 5)
    team = Many(size)
    shards._gather(team, whole, 5, own, Label("test"))
    assert team.most < 1 << 31
    assert (whole[5:] == own).all()
