"""What arrives of filtered gradients and parameters."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpiml.collectives.compression import (
    QSGD,
    Cast,
    EFSign,
    ErrorFeedback,
    NoFeedback,
    OneBit,
    RandomK,
    TernGrad,
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
from mpiml.roles.parameter_server.filtering.coders import (
    PullDecoder,
    PullEncoder,
    PushDecoder,
    PushEncoder,
)
from mpiml.roles.parameter_server.store import Sparse

dtypes = st.sampled_from([np.dtype("f4"), np.dtype("f8")])
#: multiples of 1/8, so that sums are exact
eighths = st.integers(-40, 40).map(lambda n: n / 8)


@st.composite
def arrays(draw, count, zeros=True):
    """Some arrays of one length and dtype, of which many numbers are zero."""
    dtype, size = draw(dtypes), draw(st.integers(0, 40))
    fill = st.just(0.0) if zeros else None
    return [draw(hnp.arrays(dtype, size, elements=eighths, fill=fill)) for _ in range(count)]


@st.composite
def gradients(draw, count=6):
    """Size, dtype, and dense ones, sparse ones and none in a row."""
    made = draw(arrays(count))
    size, dtype = len(made[0]), made[0].dtype
    for i, array in enumerate(made):
        kind = draw(st.sampled_from(["dense", "sparse", "none"] if size else ["dense", "none"]))
        if kind == "none":
            made[i] = None
        elif kind == "sparse":
            indices = draw(st.lists(st.integers(0, size - 1), max_size=size))
            made[i] = Sparse(np.array(indices, np.int64), array[: len(indices)])
    return size, dtype, made


def dense(gradient, size, dtype):
    """What a gradient is as an array."""
    full = np.zeros(size, dtype)
    if isinstance(gradient, Sparse):
        np.add.at(full, gradient.indices, gradient.values)
    elif gradient is not None:
        full += gradient
    return full


def travelled(message):
    """A message as it comes out of a pickle; only plain things may be in it."""
    parts = message if isinstance(message, tuple) else () if message is None else (message,)
    assert all(type(p) in (int, str, type(None)) or isinstance(p, np.ndarray) for p in parts)
    return pickle.loads(pickle.dumps(message))


def pushed(filters, size, dtype, **kwargs):
    """Return a function: gradient → what the server gets."""
    sender = PushEncoder(filters, [size], [dtype], **kwargs)
    receiver = PushDecoder(filters, [size], [dtype], **kwargs)

    def push(gradient, parameters=None):
        before = pickle.dumps(gradient)
        message = travelled(sender.encode(0, gradient, parameters))
        assert pickle.dumps(gradient) == before
        return receiver.decode(0, message)

    push.sender = sender
    return push


def pulled(filters, size, dtype, **kwargs):
    """Return a function: parameters → what the worker gets."""
    sender = PullEncoder(filters, [size], [dtype], **kwargs)
    receiver = PullDecoder(filters, [size], [dtype], **kwargs)

    def pull(values):
        before = values.copy()
        got = receiver.decode(0, travelled(sender.encode(0, values)))
        assert (values.view("u1") == before.view("u1")).all()
        assert got.dtype == dtype
        assert got.shape == (size,)
        kept = got.copy()
        got[:] = 99  # what the caller does with it changes nothing
        return kept

    pull.sender = sender
    return pull


LOSSLESS = [(ZeroSuppression(),), (KeyCaching(1),), (ZeroSuppression(), KeyCaching(2))]


@pytest.mark.parametrize("filters", [(), *LOSSLESS], ids=str)
@settings(max_examples=60, deadline=None)
@given(gradients())
def test_lossless_filters_bring_gradients_as_they_are(filters, given_):
    size, dtype, grads = given_
    push = pushed(filters, size, dtype)
    for gradient in grads:
        got = push(gradient)
        # an optimizer steps all entries of an array, and only those of index/value
        assert type(got) is type(gradient) or (isinstance(gradient, Sparse) and got is None)
        if isinstance(got, Sparse) and filters:
            assert (got.indices == np.unique(gradient.indices)).all()
        assert (dense(got, size, dtype) == dense(gradient, size, dtype)).all()


@pytest.mark.parametrize("filters", [(), *LOSSLESS, (SignificantlyModified(0),)], ids=str)
@settings(max_examples=60, deadline=None)
@given(arrays(5))
def test_lossless_filters_bring_parameters_as_they_are(filters, values):
    pull = pulled(filters, len(values[0]), values[0].dtype)
    for array in values:
        assert (pull(array) == array).all()


def test_zeros_with_a_sign_keep_it():
    array = np.array([0.0, -0.0, 0, 0, 0, 0, 0, 1], "f4")
    got = pushed((ZeroSuppression(),), 8, "f4")(array)
    assert (got.view("u4") == array.view("u4")).all()


def test_no_filters_are_no_work():
    array, sparse = np.ones(3, "f4"), Sparse(np.array([1]), np.ones(1, "f4"))
    for x in (array, sparse, None):
        assert PushEncoder((), [3], ["f4"]).encode(0, x) is x
        assert PushDecoder((), [3], ["f4"]).decode(0, x) is x
    assert PullEncoder((), [3], ["f4"]).encode(0, array) is array
    assert PullDecoder((), [3], ["f4"]).decode(0, array) is array


def test_zeros_are_left_out_only_where_that_is_smaller():
    encoder = PushEncoder((ZeroSuppression(),), [64, 64], ["f4", "f4"])
    few, many = np.zeros(64, "f4"), np.ones(64, "f4")
    few[[3, 60]] = 1
    _, form, places, values = encoder.encode(0, few)
    assert (form, places.nbytes + values.nbytes) == ("z", 4 + 8)
    assert encoder.encode(1, many)[1] == "d"
    assert encoder.statistics()["ZeroSuppression"] == (128, 66, 512, 12 + 256)
    assert encoder.statistics()["all"] == (128, 66, 512, 12 + 256)


@settings(max_examples=60, deadline=None)
@given(gradients(), st.integers(0, 24).map(lambda n: n / 8))
def test_significant_changes_lose_nothing(given_, threshold):
    size, dtype, grads = given_
    push = pushed((SignificantlyModified(threshold),), size, dtype)
    came, went = np.zeros(size, dtype), np.zeros(size, dtype)
    for gradient in grads:
        rest = came - went + dense(gradient, size, dtype)
        got = dense(push(gradient), size, dtype)
        came += dense(gradient, size, dtype)
        went += got
        assert (np.abs(came - went) <= threshold).all()
        # exactly those beyond the threshold, and all of them
        assert (got == np.where(np.abs(rest) > threshold, rest, 0)).all()


@settings(max_examples=60, deadline=None)
@given(arrays(6), st.integers(0, 24).map(lambda n: n / 8))
def test_significant_changes_keep_the_copy_near(values, threshold):
    pull = pulled((SignificantlyModified(threshold),), len(values[0]), values[0].dtype)
    have = values[0]
    for number, array in enumerate(values):
        got = pull(array)
        far = np.abs(array - have) > threshold
        assert (got == (np.where(far, array, have) if number else array)).all()
        have = got


def test_lost_training_is_seen_by_the_worker():
    bad = np.array([1, np.nan, np.inf, 2], "f4")
    for filters in [(SignificantlyModified(0.5),), (Compressed(EFSign()),)]:
        pull = pulled(filters, 4, "f4")
        pull(np.ones(4, "f4"))
        assert (np.isnan(pull(bad)) == np.isnan(bad)).all()
        assert pull(bad)[2] == np.inf


@settings(max_examples=60, deadline=None)
@given(gradients(), st.sampled_from([0, 0.25, 0.5, 0.75]), st.integers(0, 3))
def test_random_skips_are_right_on_average_by_construction(given_, probability, seed):
    size, dtype, grads = given_
    push = pushed((RandomSkip(probability, seed),), size, dtype)
    for gradient in grads:
        got = push(gradient)
        full = dense(gradient, size, dtype)
        if isinstance(got, Sparse):
            kept = got.indices
        else:
            kept = np.arange(size) if got is not None else np.arange(0)
        scaled = dense(got, size, dtype)[kept] * dtype.type(1 - probability)
        np.testing.assert_allclose(scaled, full[kept], rtol=1e-6)


def test_random_skips_skip_as_often_as_was_asked():
    push, other = [pushed((RandomSkip(0.25),), 20_000, "f4", stream=s) for s in (0, 1)]
    ones = np.ones(20_000, "f4")
    first, second, third = push(ones), push(ones), other(ones)
    for got in (first, second, third):
        assert abs(len(got.indices) - 15_000) < 400  # 6 standard deviations
    assert not np.array_equal(first.indices, second.indices)
    assert not np.array_equal(first.indices, third.indices)
    assert push.sender.statistics()["RandomSkip"].entries_seen == 40_000
    again = pushed((RandomSkip(0.25),), 20_000, "f4")(ones)
    assert np.array_equal(first.indices, again.indices)


@settings(max_examples=60, deadline=None)
@given(arrays(5))
def test_random_skips_keep_older_parameters(values):
    pull = pulled((RandomSkip(0.5),), len(values[0]), values[0].dtype)
    have = pull(values[0])
    assert (have == values[0]).all()
    for array in values[1:]:
        got = pull(array)
        assert ((got == array) | (got == have)).all()
        have = got


@settings(max_examples=60, deadline=None)
@given(gradients(), st.data())
def test_kkt_skips_exactly_by_definition(given_, data):
    size, dtype, grads = given_
    push = pushed((KKT(2, 0.5),), size, dtype)
    for gradient in grads:
        w = data.draw(hnp.arrays(dtype, size, elements=st.sampled_from([0, 0, 1])))
        got = push(gradient, w)
        full = dense(gradient, size, dtype)
        skipped = (w == 0) & (np.abs(full) < 1.5)
        assert (dense(got, size, dtype) == np.where(skipped, 0, full)).all()
        if isinstance(got, Sparse):
            assert not skipped[got.indices].any()
        assert (got is None) == (gradient is None or bool(_seen(gradient, skipped).all()))


def _seen(gradient, skipped):
    """Of each entry that was given: whether it is skipped; a piece of no entries is sent."""
    if isinstance(gradient, Sparse):
        return skipped[gradient.indices]
    return skipped if len(skipped) else np.zeros(1, bool)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.lists(st.tuples(st.integers(0, 1), st.integers(0, 5)), max_size=40)
)
def test_key_caches_never_disagree(lists, sequence):
    filters = (KeyCaching(lists),)
    sender = PushEncoder(filters, [2000, 3000], ["f4", "f8"])
    receiver = PushDecoder(filters, [2000, 3000], ["f4", "f8"])
    kinds = [np.arange(n, 1000 + n, 60) for n in range(6)]
    hashes = 0
    for piece, kind in sequence:
        values = np.arange(len(kinds[kind]), dtype=("f4", "f8")[piece]) + kind
        message = travelled(sender.encode(piece, Sparse(kinds[kind], values)))
        hashes += isinstance(message[2], int)
        got = receiver.decode(piece, message)
        assert (got.indices == kinds[kind]).all()
        assert (got.values == values).all()
    counted = sender.statistics()["KeyCaching"]
    assert counted.entries_seen - counted.entries_sent == 17 * hashes
    assert counted.bytes_before - counted.bytes_after == (34 - 8) * hashes


def test_a_list_that_comes_again_is_a_hash():
    push = pushed((KeyCaching(),), 10_000, "f8")
    sparse = Sparse(np.arange(0, 10_000, 100), np.ones(100))
    for _ in range(3):
        got = push(sparse)
        assert (got.indices == sparse.indices).all()
    assert push.sender.statistics()["all"] == (300, 300, 3 * 1000, 200 + 8 + 8 + 2400)


CODECS = [
    TopK(0.3),
    QSGD(bits=4, bucket=8),
    TernGrad(),
    EFSign(),
    OneBit(),
    RandomK(0.5),
    RandomK(0.5, unbiased=True),
    Cast("float16"),
    ErrorFeedback(QSGD(bits=3)),
    NoFeedback(EFSign()),
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=15, deadline=None)
@given(gradients())
def test_error_feedback_loses_nothing(codec, given_):
    size, dtype, grads = given_
    push = pushed((Compressed(codec),), size, dtype)
    came, went = np.zeros(size), np.zeros(size)
    for gradient in grads:
        got = push(gradient)
        assert type(got) is type(gradient) or got is None
        came += dense(gradient, size, dtype)
        went += dense(got, size, dtype)
    kept = push.sender._coder._residuals.get(0, np.zeros(size))
    if push.sender._coder.feedback:
        np.testing.assert_allclose(came - went, kept, atol=1e-4)
    else:
        assert not kept.any()


def test_error_feedback_is_that_of_the_codec():
    push, residual = pushed((Compressed(EFSign()),), 4, "f8"), np.zeros(4)
    for gradient in np.random.default_rng(0).standard_normal((5, 4)):
        a = gradient + residual
        sent = np.abs(a).mean() * np.where(a >= 0, 1, -1)
        residual = a - sent
        np.testing.assert_allclose(push(gradient), sent)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@settings(max_examples=15, deadline=None)
@given(arrays(4))
def test_both_ends_hold_the_same_copy(codec, values):
    pull = pulled((ZeroSuppression(), Compressed(codec)), len(values[0]), values[0].dtype)
    for number, array in enumerate(values):
        got = pull(array)
        assert (got == pull.sender._sent[0]).all()
        assert number or (got == array).all()


@pytest.mark.parametrize("codec", [TopK(0.3), EFSign(), Cast("float16"), QSGD()], ids=repr)
def test_later_pulls_make_errors_good(codec):
    pull = pulled((Compressed(codec),), 50, "f4")
    rng = np.random.default_rng(1)
    pull(rng.standard_normal(50).astype("f4"))
    goal = rng.standard_normal(50).astype("f4")
    far = [np.abs(pull(goal) - goal).max() for _ in range(60)]
    assert far[-1] < min(0.15, far[0])


@settings(max_examples=60, deadline=None)
@given(gradients(), st.integers(0, 8).map(lambda n: n / 8))
def test_filters_go_together_on_a_push(given_, threshold):
    size, dtype, grads = given_
    filters = (
        KKT(0.5),
        SignificantlyModified(threshold),
        ZeroSuppression(),
        KeyCaching(1),
        Compressed(TopK(0.5)),
    )
    push = pushed(filters, size, dtype)
    came, went = np.zeros(size), np.zeros(size)
    for gradient in grads:
        went += dense(push(gradient, np.ones(size, dtype)), size, dtype)
        came += dense(gradient, size, dtype)
    kept = push.sender._coder._residuals.get(0, np.zeros(size))
    assert (np.abs(came - went - kept) <= threshold + 1e-5).all()


@settings(max_examples=60, deadline=None)
@given(arrays(6), st.booleans())
def test_filters_go_together_on_a_pull(values, last):
    filters = (RandomSkip(0.5), SignificantlyModified(0.5), ZeroSuppression(), KeyCaching(1))
    filters += (Compressed(QSGD()),) if last else ()
    pull = pulled(filters, len(values[0]), values[0].dtype)
    for array in values:
        assert (pull(array) == pull.sender._sent[0]).all()
    for _ in range(60):  # what is skipped is sent another time
        got = pull(values[-1])
    assert (np.abs(got - values[-1]) <= 0.5).all()


def test_zeros_that_are_left_out_replace_older_parameters():
    pull = pulled((SignificantlyModified(0), ZeroSuppression()), 64, "f4")
    pull(np.ones(64, "f4"))
    few = np.zeros(64, "f4")
    few[5] = 2
    assert (pull(few) == few).all()
    assert pull.sender.statistics()["all"].bytes_after == 256 + 2 + 4


def test_a_list_no_longer_than_a_hash_is_sent():
    sender = PushEncoder((KeyCaching(),), [1000], ["f4"])
    sparse = Sparse(np.arange(4), np.ones(4, "f4"))
    for _ in range(2):
        assert isinstance(sender.encode(0, sparse)[2], np.ndarray)


def test_messages_own_their_arrays():
    filters = (SignificantlyModified(0.5),)
    sender, ones = PushEncoder(filters, [4], ["f4"]), np.ones(4, "f4")
    message = sender.encode(0, ones)
    sender.encode(0, ones)
    assert (message[3] == 1).all()


def test_a_lost_message_is_noticed():
    for make, read in [(PushEncoder, PushDecoder), (PullEncoder, PullDecoder)]:
        filters = (SignificantlyModified(0),)
        sender, receiver = make(filters, [3], ["f4"]), read(filters, [3], ["f4"])
        sender.encode(0, np.ones(3, "f4"))
        second = sender.encode(0, np.full(3, 2, "f4"))
        with pytest.raises(UsageError, match="expected message 0 of piece 0, got message 1"):
            receiver.decode(0, second)
    with pytest.raises(UsageError, match="all of piece 0 first, got an empty one"):
        receiver.decode(0, None)


def test_other_filters_at_the_other_end_are_noticed():
    sparse = Sparse(np.arange(0, 1000, 10), np.ones(100, "f4"))
    for filters in [(KeyCaching(),), (Compressed(TopK(0.1)),)]:
        message = PushEncoder(filters, [1000], ["f4"]).encode(0, sparse)
        with pytest.raises(UsageError, match="the same filters at both ends"):
            PushDecoder((ZeroSuppression(),), [1000], ["f4"]).decode(0, message)
