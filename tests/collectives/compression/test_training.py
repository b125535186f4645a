"""Training with each codec reaches what training without compression reaches, within 1 %."""

import numpy as np
import pytest

from mpiml.collectives.compression import (
    QSGD,
    Cast,
    EFSign,
    ErrorFeedback,
    OneBit,
    PowerSGD,
    RandomK,
    SignMajority,
    TernGrad,
    TopK,
    reducer_of,
)
from tests.collectives.compression.crowd import crowd

HIDDEN, BATCH, STEPS = 32, 32, 300


class Levels:
    """A user's codec: 16 steps between the extremes of each array, 4 bits in a byte each."""

    biased = True

    def encode(self, array):
        low, high = array.min(), array.max()
        step = max((high - low) / 15, np.finfo(array.dtype).tiny)
        return np.stack([low, step]), np.rint((array - low) / step).astype(np.uint8)

    def decode(self, payload, shape, dtype):
        (low, step), codes = payload
        return (low + codes * step).astype(dtype)


@pytest.fixture(scope="module")
def digits():
    """Images and labels to train on and to test with."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    return images[:1297], labels[:1297], images[1297:], labels[1297:]


def start():
    """The network at the start: 64 -> 32 -> 10."""
    rng = np.random.default_rng(1)
    return {
        "w1": (rng.standard_normal((64, HIDDEN)) * 0.15).astype(np.float32),
        "b1": np.zeros(HIDDEN, np.float32),
        "w2": (rng.standard_normal((HIDDEN, 10)) * 0.2).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def forward(model, x):
    hidden = np.maximum(x @ model["w1"] + model["b1"], 0)
    return hidden, hidden @ model["w2"] + model["b2"]


def gradient(model, x, y):
    """Of the mean cross-entropy."""
    hidden, logits = forward(model, x)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ model["w2"].T) * (hidden > 0)
    return {"w1": x.T @ back, "b1": back.sum(axis=0), "w2": hidden.T @ p, "b2": p.sum(axis=0)}


def accuracy(model, x, y):
    return float((forward(model, x)[1].argmax(axis=1) == y).mean())


def train(digits, members, codecs, rate):
    """Accuracy after training by `members` members; None instead of a codec: no compression."""
    x, y, x_test, y_test = digits

    def body(member, codec):
        model, rng = start(), np.random.default_rng(2)
        for step in range(STEPS):
            batch = rng.choice(len(y), BATCH * members, replace=False)[member.index :: members]
            mine = gradient(model, x[batch], y[batch])
            if codec is None:
                flat = np.concatenate([g.ravel() for g in mine.values()])
                member.sum(flat)
                ends = np.cumsum([g.size for g in mine.values()])[:-1]
                parts = np.split(flat / members, ends)
                mine = {k: p.reshape(model[k].shape) for k, p in zip(mine, parts, strict=True)}
            else:
                arrays = list(mine.values())
                reducer_of(codec, "").reduce(member, arrays, arrays, list(mine), "mean")
            for name, value in mine.items():
                model[name] -= rate * (1 - step / STEPS) * value
        return model

    models = crowd(members, body, codecs)
    for model in models:
        if isinstance(model, Exception):
            raise model
        for name in model:
            np.testing.assert_array_equal(model[name], models[0][name])
    return accuracy(models[0], x_test, y_test)


@pytest.fixture(scope="module")
def plain(digits):
    """Accuracy without compression, by number of members."""
    return {n: train(digits, n, [None] * n, rate=0.5) for n in (2, 4)}


CASES = {
    "bfloat16": lambda: Cast("bfloat16"),
    "float16": lambda: Cast("float16"),
    "top 5 %": lambda: TopK(0.05),
    "random 10 %": lambda: RandomK(0.1),
    "random half, unbiased": lambda: RandomK(0.5, unbiased=True),
    "QSGD, 4 bits": lambda: QSGD(bits=4),
    "QSGD, 8 bits, l2": lambda: QSGD(bits=8, norm="l2"),
    "TernGrad": TernGrad,
    "EF-sign": EFSign,
    "1-bit": OneBit,
    "PowerSGD": lambda: PowerSGD(2),
    "QSGD, 3 bits, feedback": lambda: ErrorFeedback(QSGD(bits=3)),
    "the user's own": Levels,
}


MANY = ("bfloat16", "top 5 %", "EF-sign", "PowerSGD")  # one of each kind of exchange


@pytest.mark.parametrize(
    ("name", "members"), [*[(name, 2) for name in CASES], *[(name, 4) for name in MANY]]
)
def test_training_reaches_the_same_accuracy(digits, plain, name, members):
    make = CASES[name]
    codecs = [make() for _ in range(members)]
    got = train(digits, members, codecs, rate=0.5)
    assert got >= plain[members] - 0.01
    counts = reducer_of(codecs[0], "").statistics()
    assert counts.ratio > 1.9


@pytest.mark.parametrize("members", [2, 4])
def test_training_by_majority_reaches_the_same_accuracy(digits, plain, members):
    # every element moves by the rate itself, whatever the gradient: so a small one
    codecs = [SignMajority() for _ in range(members)]
    assert train(digits, members, codecs, rate=0.01) >= plain[members] - 0.01
    assert codecs[0].statistics().ratio > 31


def test_without_compression_it_learns(plain):
    assert min(plain.values()) > 0.94
