"""Filters as values, and which of them are refused."""

import pickle

import numpy as np
import pytest

from mpiml.collectives.compression import (
    QSGD,
    Cast,
    EFSign,
    ErrorFeedback,
    PowerSGD,
    SignMajority,
    TopK,
)
from mpiml.errors import UsageError
from mpiml.filters import (
    KKT,
    Compressed,
    KeyCaching,
    RandomSkip,
    SignificantlyModified,
    ZeroSuppression,
)
from mpiml.roles.parameter_server.filtering.coders import PullEncoder, PushEncoder
from mpiml.roles.parameter_server.filtering.rules import check_filters

ALL = (
    KKT(1, 0.25),
    SignificantlyModified(1e-3),
    RandomSkip(0.5, seed=3),
    ZeroSuppression(),
    KeyCaching(),
    Compressed(QSGD()),
)


def test_filters_are_values():
    assert SignificantlyModified(1) == SignificantlyModified(1.0)
    assert KeyCaching() == KeyCaching(8) != KeyCaching(9)
    for each in ALL[:-1]:
        assert pickle.loads(pickle.dumps(each)) == each
        assert hash(each) == hash(pickle.loads(pickle.dumps(each)))
    checked = check_filters(ALL, "here", False)
    assert repr(pickle.loads(pickle.dumps(checked))) == repr(ALL)
    with pytest.raises(AttributeError):
        ALL[0].lam = 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SignificantlyModified(-1), "threshold: expected a finite number >= 0, got -1"),
        (lambda: SignificantlyModified(float("nan")), "got nan"),
        (lambda: SignificantlyModified(True), "got True"),
        (lambda: SignificantlyModified("1"), "got '1'"),
        (lambda: SignificantlyModified(None), "got None"),
        (lambda: RandomSkip(1), r"in \[0, 1\), got 1.0"),
        (lambda: RandomSkip(-0.5), "got -0.5"),
        (lambda: RandomSkip(0.5, 1.5), "seed"),
        (lambda: KKT(1, 1), "Take a smaller delta"),
        (lambda: KKT(0), "expected 0 <= delta < lam"),
        (lambda: KKT(float("inf")), "lam"),
        (lambda: KeyCaching(0), "lists"),
        (lambda: Compressed(TopK), "TopK"),
        (lambda: Compressed("topk"), "with the methods encode and decode, got 'topk'"),
    ],
)
def test_wrong_settings_are_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()


class Half:
    def encode(self, array):
        return array[::2].copy()

    def decode(self, payload, shape, dtype):
        return payload


@pytest.mark.parametrize(
    ("filters", "pull", "said"),
    [
        (KeyCaching(), False, "expected a tuple"),
        (None, False, "expected a tuple"),
        ((KeyCaching,), False, "expected filters of mpiml.filters"),
        (("kkt",), False, "got 'kkt'"),
        ((KKT(1),), True, "Give it for pushes only"),
        ((Compressed(TopK(0.1)), Compressed(QSGD())), False, "Compressed twice.*Keep one"),
        ((Compressed(TopK(0.1)), SignificantlyModified(1)), True,
         r"Write \(SignificantlyModified\(...\), Compressed\(...\),\)"),
        ((Compressed(TopK(0.1)), ZeroSuppression()), False, "ZeroSuppression before Compressed"),
        ((KeyCaching(), RandomSkip(0.1)), True, "RandomSkip before KeyCaching"),
        ((ZeroSuppression(), SignificantlyModified(0)), False, "entries are chosen before"),
        ((SignificantlyModified(1), KKT(1)), False, "it needs the gradient as it is"),
        ((Compressed(PowerSGD()),), False, "needs those of all. Take TopK"),
        ((Compressed(SignMajority()),), True, "needs those of all"),
        ((Compressed(Half()),), False, "decode: expected it to return an array"),
    ],
)  # fmt: skip
def test_senseless_filters_are_refused(filters, pull, said):
    with pytest.raises(UsageError, match=f"^here.*{said}|Half.*{said}"):
        check_filters(filters, "here", pull)
    with pytest.raises(UsageError):
        (PullEncoder if pull else PushEncoder)(filters, [3], ["f4"])


def test_what_makes_sense_is_let_through():
    assert check_filters([], "here", True) == ()
    assert check_filters(list(ALL), "here", False) == ALL
    check_filters(ALL[1:], "here", True)
    check_filters((RandomSkip(0.5), SignificantlyModified(1)), "here", True)
    check_filters((Compressed(ErrorFeedback(Cast())), KeyCaching()), "here", True)
    check_filters((KeyCaching(), Compressed(EFSign())), "here", False)


def test_kkt_needs_parameters():
    encoder = PushEncoder((KKT(1),), [3], ["f4"])
    assert encoder.needs_parameters
    assert not PushEncoder(ALL[1:], [3], ["f4"]).needs_parameters
    with pytest.raises(UsageError, match=r"pull\(\) first"):
        encoder.encode(0, np.ones(3, "f4"))
