"""A compressed allreduce as a whole: results, feedback, errors on all, state, counts."""

import threading

import ml_dtypes
import numpy as np
import pytest

from mpiml.collectives.compression import (
    QSGD,
    Cast,
    EFSign,
    ErrorFeedback,
    NoFeedback,
    OneBit,
    PowerSGD,
    RandomK,
    SignMajority,
    TernGrad,
    TopK,
    reducer_of,
)
from mpiml.errors import MpimlError, RemoteError, UsageError
from tests.collectives.compression.crowd import crowd

SHAPES = {"w": (40, 30), "b": (30,), "s": ()}


class Half:
    """A user's codec of two methods: float16, gathered."""

    def encode(self, array):
        return array.astype(np.float16)

    def decode(self, payload, shape, dtype):
        return payload.astype(dtype)


class Threshold:
    """A user's codec whose payload depends on the numbers; biased."""

    biased = True

    def encode(self, array):
        where = np.flatnonzero(np.abs(array) > 1)
        return where, array.reshape(-1)[where], np.float32(0)

    def decode(self, payload, shape, dtype):
        where, values, _ = payload
        array = np.zeros(shape, dtype)
        array.reshape(-1)[where] = values
        return array


class Whole:
    """A user's codec whose payload is the array itself, summed."""

    reducible = True

    def encode(self, array):
        return array

    def decode(self, payload, shape, dtype):
        return payload


class Dither:
    """A user's codec that draws."""

    draws = "own"
    seed = 5

    def encode(self, array, rng):
        return np.floor(array * 8 + rng.random(array.shape)).astype(np.int8)

    def decode(self, payload, shape, dtype):
        return payload.astype(dtype) / 8


MAKERS = [
    lambda: Cast("bfloat16"), lambda: Cast("float16"), lambda: TopK(0.1), lambda: TopK(k=3),
    lambda: RandomK(0.1), lambda: RandomK(0.5, unbiased=True), lambda: QSGD(),
    lambda: QSGD(bits=3, norm="l2"), lambda: TernGrad(), SignMajority, EFSign, OneBit,
    lambda: PowerSGD(2), lambda: ErrorFeedback(QSGD()), lambda: NoFeedback(TopK(0.1)),
    Half, Threshold, Whole, Dither, lambda: ErrorFeedback(Half()), lambda: ErrorFeedback(Whole()),
]  # fmt: skip
every = pytest.mark.parametrize(
    "make", MAKERS, ids=[f"{n}-{getattr(reducer_of(m(), ''), '_shown', 'PowerSGD')}" for n, m in enumerate(MAKERS)]
)  # fmt: skip


def gradient(member, step, dtype=np.float32):
    rng = np.random.default_rng([member, step])
    return {k: np.asarray(rng.standard_normal(s)).astype(dtype) for k, s in SHAPES.items()}


def reduce_all(member, codec, trees, op="sum", **more):
    """Reduce trees one after the other; return the results."""
    results = []
    for tree in trees:
        got = {name: np.full_like(array, np.nan) for name, array in tree.items()}
        reducer = reducer_of(codec, "test")
        before = [array.copy() for array in tree.values()]
        reducer.reduce(member, list(tree.values()), list(got.values()), list(tree), op, **more)
        for array, copy in zip(tree.values(), before, strict=True):
            np.testing.assert_array_equal(array, copy)
        results.append(got)
    return results


def steps(codecs, count, op="sum", first=0, dtype=np.float32, **more):
    """Let members reduce gradients; return their results, which are the same for all."""
    trees = [[gradient(m, s, dtype) for s in range(first, count)] for m in range(len(codecs))]
    got = crowd(len(codecs), lambda *a: reduce_all(*a, op=op, **more), codecs, trees)
    for member in got:
        if isinstance(member, Exception):
            raise member
        assert bits(member) == bits(got[0])
    return got[0], trees


def bits(results):
    return [(k, v.dtype, v.tobytes()) for tree in results for k, v in tree.items()]


def memory(codec, member):
    return reducer_of(codec, "").state_dict()["members"][str(member)]


# -- results -----------------------------------------------------------------------------------


@every
@pytest.mark.parametrize("members", [1, 3])
def test_members_get_the_same_to_the_last_bit_and_runs_repeat(make, members):
    runs = [steps([make() for _ in range(members)], 3)[0] for _ in range(2)]
    assert bits(runs[0]) == bits(runs[1])
    assert all(np.isfinite(v).all() for tree in runs[0] for v in tree.values())


@every
def test_the_mean_is_the_sum_divided(make):
    sums, means = (steps([make() for _ in range(3)], 1, op)[0][0] for op in ("sum", "mean"))
    for name in SHAPES:
        np.testing.assert_array_equal(means[name], sums[name] / np.float32(3))


@every
def test_members_may_stand_for_several(make):
    sums, means = (
        steps([make() for _ in range(2)], 1, op, members=6)[0][0] for op in ("sum", "mean")
    )
    for name in SHAPES:
        np.testing.assert_array_equal(means[name], sums[name] / np.float32(6))
        if make is SignMajority:
            assert set(np.abs(np.unique(sums[name]))) <= {0, 6}


@every
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64], ids=str)
def test_other_dtypes_keep_theirs(make, dtype):
    got, _ = steps([make() for _ in range(2)], 2, dtype=dtype)
    assert {v.dtype for tree in got for v in tree.values()} == {np.dtype(dtype)}
    ours, _ = steps([make() for _ in range(2)], 2, dtype=np.float64)
    if dtype != np.float64:  # computed in float32, and much the same
        for name in SHAPES:
            a, b = got[0][name].astype(np.float64), ours[0][name]
            assert np.mean(np.abs(a - b) > 0.02 * (1 + np.abs(b))) < 0.15


@every
def test_results_may_be_the_sources(make):
    expected, trees = steps([make() for _ in range(2)], 1)

    def body(member, codec, tree):
        arrays = [array.copy() for array in tree[0].values()]
        reducer_of(codec, "").reduce(member, arrays, arrays, list(SHAPES))
        return dict(zip(SHAPES, arrays, strict=True))

    for got in crowd(2, body, [make() for _ in range(2)], trees):
        assert bits([got]) == bits(expected)


@every
def test_strided_sources_and_results(make):
    expected, trees = steps([make()], 1)

    def body(member, codec, tree):
        wide = {k: np.zeros((*v.shape, 2), v.dtype) for k, v in tree[0].items()}
        out = {k: np.zeros_like(v) for k, v in wide.items()}
        for name, array in tree[0].items():
            wide[name][..., 0] = array
        pair = [[w[name][..., 0] for name in SHAPES] for w in (wide, out)]
        pair[0][0] = np.asfortranarray(pair[0][0])
        reducer_of(codec, "").reduce(member, *pair, list(SHAPES))
        assert all((v[..., 1] == 0).all() for v in out.values())
        return {k: v[..., 0].copy() for k, v in out.items()}

    got = crowd(1, body, [make()], trees)[0]
    assert bits([got]) == bits(expected)


def test_plain_arithmetic():
    expected, trees = steps([Whole() for _ in range(3)], 1)
    for name in SHAPES:
        total = trees[0][0][name] + trees[1][0][name] + trees[2][0][name]
        np.testing.assert_array_equal(expected[0][name], total)
    cast, _ = steps([Cast() for _ in range(3)], 1)
    small = [tree[0]["b"].astype(ml_dtypes.bfloat16).astype(np.float32) for tree in trees]
    total = (small[0] + small[1] + small[2]).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(cast[0]["b"], total)


@pytest.mark.parametrize("make", [Whole, lambda: ErrorFeedback(Whole())], ids=range(2))
def test_a_payload_may_be_the_array_itself(make):
    trees = [[{"w": np.float32([1, 2])}] * 2, [{"w": np.float32([3, 4])}] * 2]
    for got in crowd(2, reduce_all, [make(), make()], trees):
        assert [tree["w"].tolist() for tree in got] == [[4, 6], [4, 6]]


def test_a_gathered_sum_is_that_of_what_is_decoded_in_order():
    codecs = [Threshold() for _ in range(3)]
    got, trees = steps(codecs, 1)
    total = np.zeros((40, 30), np.float32)
    for tree in trees:
        total += np.where(np.abs(tree[0]["w"]) > 1, tree[0]["w"], 0)
    np.testing.assert_array_equal(got[0]["w"], total)


# -- error feedback ----------------------------------------------------------------------------

FEEDBACK = [
    lambda: TopK(0.1), lambda: RandomK(0.1), EFSign, OneBit, Threshold, lambda: PowerSGD(1),
    lambda: ErrorFeedback(QSGD()), lambda: ErrorFeedback(Cast()), lambda: ErrorFeedback(Half()),
    lambda: ErrorFeedback(SignMajority()),
]  # fmt: skip


@pytest.mark.parametrize("make", FEEDBACK, ids=range(len(FEEDBACK)))
def test_what_was_sent_and_what_was_kept_are_all_there_was(make):
    codec = make()
    got, trees = steps([codec], 8, dtype=np.float64)
    for name in SHAPES:
        sent = sum(tree[name] for tree in got)
        kept = memory(codec, 0)[name].get("residual", 0)
        np.testing.assert_allclose(sent + kept, sum(t[name] for t in trees[0]), atol=1e-9)
    assert np.any(memory(codec, 0)["w"]["residual"])


@pytest.mark.parametrize(
    "make", [lambda: TopK(0.1), lambda: RandomK(0.1), EFSign, OneBit], ids=range(4)
)
def test_each_member_keeps_what_it_did_not_send_itself(make):
    codecs = [make() for _ in range(3)]
    got, trees = steps(codecs, 5, dtype=np.float64)
    sent = sum(tree["w"] for tree in got)
    kept = sum(memory(codec, m)["w"]["residual"] for m, codec in enumerate(codecs))
    np.testing.assert_allclose(
        sent + kept, sum(t["w"] for mine in trees for t in mine), atol=1e-9
    )


def test_the_biased_have_feedback_and_others_have_not():
    for codec in (TopK(0.1), RandomK(0.1), EFSign(), OneBit(), PowerSGD(), Threshold()):
        assert reducer_of(codec, "").feedback
    for codec in (
        Cast(),
        RandomK(0.1, unbiased=True),
        QSGD(),
        TernGrad(),
        SignMajority(),
        Half(),
    ):
        assert not reducer_of(codec, "").feedback


def test_no_feedback_sends_the_same_again():
    array = np.float32([3, 1, 2])
    for make, expected in [
        (lambda: TopK(k=1), [[3, 0, 0], [0, 0, 4]]),  # 3 1 2 -> 0 1 2 -> 3 2 4
        (lambda: NoFeedback(TopK(k=1)), [[3, 0, 0], [3, 0, 0]]),
    ]:
        got = crowd(1, reduce_all, [make()], [[{"w": array}] * 2])[0]
        assert [tree["w"].tolist() for tree in got] == expected


# -- errors, the same on all members -----------------------------------------------------------


def failing(codecs, trees, op="sum", names=None):
    """The errors of all members; it is one."""

    def body(member, codec, tree):
        before = {k: v.copy() for k, v in tree.items()}
        out = [np.zeros_like(v) for v in tree.values()]
        try:
            reducer_of(codec, "here").reduce(
                member, list(tree.values()), out, names or list(tree), op, where="allreduce"
            )
        finally:
            for name, array in tree.items():
                np.testing.assert_array_equal(array, before[name])

    errors = crowd(len(trees), body, codecs, trees)
    assert {type(error) for error in errors} <= {UsageError, RemoteError}, errors
    assert len({(type(error), str(error)) for error in errors}) == 1, errors
    return errors


CHECKED = [m for m in MAKERS if m not in (Half, Whole, Dither)][2:]


@pytest.mark.parametrize("make", CHECKED, ids=range(len(CHECKED)))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_is_one_error_on_all_members(make, bad):
    codecs = [make() for _ in range(3)]
    steps(codecs, 1)
    before = [reducer_of(c, "").state_dict() for c in codecs]
    trees = [gradient(m, 1) for m in range(3)]
    trees[1]["b"][4] = bad
    error = failing(codecs, trees)[0]
    what = "NaN" if np.isnan(bad) else "infinity"
    assert f"{what} in b: expected finite numbers, got 1 of 30" in str(error)
    assert str(error).startswith("allreduce: learner/1: op='sum', compress=")
    assert "the first at (4,)" in str(error)
    assert type(error) is UsageError
    # nothing has changed: the next step is as if this one had not been
    after = [reducer_of(c, "").state_dict() for c in codecs]
    np.testing.assert_equal(after, before)
    expected = steps([make() for _ in range(3)], 2)[0][1]
    assert bits(steps(codecs, 2, first=1)[0]) == bits([expected])


def test_casts_let_nan_pass_as_a_plain_allreduce_does():
    trees = [[{"w": np.float32([1, np.nan, np.inf])}], [{"w": np.float32([1, 1, 1])}]]
    for got in crowd(2, reduce_all, [Cast(), Cast()], trees):
        np.testing.assert_array_equal(got[0]["w"], [2, np.nan, np.inf])


@pytest.mark.parametrize("op", ["min", "max", "prod", "median"])
def test_other_operations_are_refused(op):
    error = failing([EFSign(), EFSign()], [gradient(m, 0) for m in range(2)], op)[0]
    assert "op: expected 'sum' or 'mean' with compress=" in str(error)


@pytest.mark.parametrize(
    ("dtype", "cure"),
    [
        (np.int32, "Leave it out of the tree"),
        (bool, "Leave it out"),
        (np.complex64, r"x.view('float32')"),
        (np.complex128, r"x.view('float64')"),
    ],
)
@pytest.mark.parametrize("make", [EFSign, lambda: PowerSGD(1), Half], ids=range(3))
def test_other_dtypes_are_refused_with_a_cure(make, dtype, cure):
    tree = {"w": np.zeros(3, np.float32), "n": np.zeros(3, dtype)}
    error = failing([make(), make()], [tree, tree])[0]
    assert "n: expected one of the dtypes bfloat16, float16, float32, float64" in str(error)
    assert cure in str(error)


def test_members_that_differ_are_told_so():
    a, b = gradient(0, 0), gradient(1, 0)
    error = failing([TopK(0.1), TopK(0.2)], [a, b])[0]
    assert "TopK(ratio=0.1)" in str(error)
    assert "TopK(ratio=0.2)" in str(error)
    error = failing([TopK(0.1), EFSign()], [a, b])[0]
    assert "EFSign()" in str(error)
    error = failing([TopK(0.1), TopK(0.1)], [a, {**b, "b": np.zeros(31, np.float32)}])[0]
    assert "leaf 1: b (30,) float32" in str(error)
    assert "b (31,) float32" in str(error)
    error = failing([Cast(), Cast()], [a, {"w": a["w"]}])[0]
    assert "no such leaf" in str(error)


def test_members_at_different_steps_are_told_so():
    codecs = [RandomK(0.1), RandomK(0.1)]
    steps(codecs, 2)
    codecs[1].reset()
    error = failing(codecs, [gradient(m, 2) for m in range(2)])[0]
    assert "w (40, 30) float32, step 2" in str(error)
    assert "w (40, 30) float32, step 0" in str(error)


def test_a_state_of_another_member_is_refused_on_all():
    codecs = [EFSign(), EFSign()]
    steps(codecs, 1)
    codecs[1].load_state_dict(codecs[0].state_dict())
    error = failing(codecs, [gradient(m, 1) for m in range(2)])[0]
    assert "learner/1" in str(error)
    assert "this codec was given the state of member 0" in str(error)


def test_one_codec_for_arrays_of_different_shapes_wants_names():
    codec = TopK(0.1)
    crowd(1, reduce_all, [codec], [[{"": np.ones(3)}]])
    error = failing([codec], [{"": np.ones(4)}])[0]
    assert "array: this codec holds the residual of another array under this name" in str(error)
    assert "name=" in str(error)


def test_two_arrays_of_one_name_are_refused():
    tree = {"w": np.ones(3), "v": np.ones(3)}
    assert "got 'w' twice" in str(failing([EFSign()], [tree], names=["w", "w"])[0])


class Broken(Half):
    """Fails on a member whose array is 1 somewhere."""

    def encode(self, array):
        if (array == 1).any():
            raise LookupError("no table")
        return super().encode(array)


def test_the_users_exception_is_raised_on_all_and_is_a_cause_where_it_was():
    trees = [{"w": np.zeros(3)}, {"w": np.ones(3)}]
    errors = failing([Broken(), Broken()], trees)
    assert str(errors[0]) == (
        "allreduce: learner/1: op='sum', compress=Broken(): LookupError: no table"
    )
    assert isinstance(errors[0], RemoteError)
    assert isinstance(errors[1].__cause__, LookupError)
    assert errors[0].__cause__ is None


class Returns:
    """A user's codec that returns what it is told to."""

    def __init__(self, encoded=None, decoded=None):
        self.encoded = encoded
        self.decoded = decoded

    def encode(self, array):
        return array if self.encoded is None else self.encoded

    def decode(self, payload, shape, dtype):
        return payload if self.decoded is None else self.decoded


@pytest.mark.parametrize(
    ("codec", "said"),
    [
        (Returns([1]), "encode: expected it to return an ndarray or a tuple"),
        (Returns(([1], 2)), "got a tuple of list, int"),
        (Returns(np.array([None])), "encode: expected arrays of the dtypes"),
        (Returns(np.zeros(3, "f4,f4")), "encode: expected arrays of the dtypes"),
        (Returns(np.zeros(3, "M8[s]")), "view('uint8')"),
        (
            Returns(decoded=np.zeros(4, np.float32)),
            "expected it to return an array (3,) float32",
        ),
        (Returns(decoded=np.zeros(3)), "got an array (3,) float64"),
        (Returns(decoded=[0, 0, 0]), "got list"),
    ],
)
def test_what_a_users_codec_may_not_return(codec, said):
    tree = {"w": np.ones(3, np.float32)}
    error = failing([codec, Returns()], [tree, tree])[0]
    assert said in str(error)
    assert "learner/0" in str(error)


def test_a_users_codec_may_not_write_into_the_array():
    class Greedy(Half):
        def encode(self, array):
            array[:] = 0
            return array

    errors = failing([Greedy()], [{"w": np.ones(3)}])
    assert "read-only" in str(errors[0])


# -- what `compress=` takes --------------------------------------------------------------------


def test_what_compress_takes():
    codec, own = TopK(0.1), Half()
    assert reducer_of(codec, "") is reducer_of(codec, "")
    assert reducer_of(own, "") is reducer_of(own, "")
    assert reducer_of(own, "") is not reducer_of(Half(), "")
    wrapped = ErrorFeedback(codec)
    assert reducer_of(wrapped, "") is wrapped


class Slotted(Half):
    __slots__ = ()


class Bare:
    __slots__ = ()
    encode = Half.encode
    decode = Half.decode


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (TopK, "the class TopK itself"),
        (Half, r"Half\(\.\.\.\)"),
        (PowerSGD, "the class PowerSGD itself"),
        ("bfloat16", "got str"),
        (object(), "got object"),
        (Bare(), r"ErrorFeedback\(Bare\(\.\.\.\)\)"),
    ],
)
def test_what_compress_does_not_take(wrong, said):
    with pytest.raises(UsageError, match=said):
        reducer_of(wrong, "allreduce")


@pytest.mark.parametrize("kind", [ErrorFeedback, NoFeedback])
def test_what_wrappers_do_not_take(kind):
    with pytest.raises(UsageError, match="the class Half itself"):
        kind(Half)
    with pytest.raises(UsageError, match="with the methods encode"):
        kind(3)
    with pytest.raises(UsageError, match="with the methods encode"):
        kind(PowerSGD())

    class Odd(Half):
        draws = "sometimes"

    with pytest.raises(UsageError, match="draws: expected None, 'own' or 'shared'"):
        kind(Odd())


# -- state and counts --------------------------------------------------------------------------


@every
def test_a_state_goes_on_bitwise(make):
    whole = steps([make() for _ in range(2)], 5)[0]
    first, second = ([make() for _ in range(2)] for _ in range(2))
    steps(first, 2)
    for old, new in zip(first, second, strict=True):
        reducer_of(new, "").load_state_dict(reducer_of(old, "").state_dict())
    assert bits(steps(second, 5, first=2)[0]) == bits(whole[2:])


@every
def test_threads_may_share_one_object(make):
    shared = make()
    assert bits(steps([shared] * 3, 3)[0]) == bits(steps([make() for _ in range(3)], 3)[0])
    assert sorted(reducer_of(shared, "").state_dict()["members"]) == ["0", "1", "2"]


def test_codecs_begin_differently_in_each_step_and_array():
    codec = RandomK(0.1)
    ones = {k: np.ones((40, 30), np.float32) for k in ("v", "w")}
    ((a, b),) = crowd(1, reduce_all, [NoFeedback(codec)], [[ones, ones]])
    places = {np.flatnonzero(tree[k]).tobytes() for tree in (a, b) for k in tree}
    assert len(places) == 4


def test_members_draw_differently_and_from_their_seed():
    tree = {"w": np.full((40, 30), 0.3, np.float32)}
    tree["w"][0] = 1
    sums = [
        crowd(2, reduce_all, [QSGD(1, seed=s), QSGD(1, seed=s)], [[tree]] * 2)[0][0]["w"][1:]
        for s in (0, 0, 1)
    ]
    assert 1 in sums[0]  # one member up and the other not
    np.testing.assert_array_equal(sums[0], sums[1])
    assert (sums[0] != sums[2]).any()


@every
def test_bytes_counted_are_those_declared(make):
    codecs = [make() for _ in range(2)]
    reducers = [reducer_of(codec, "") for codec in codecs]
    _, trees = steps(codecs, 3)
    raw = sum(array.nbytes for array in trees[0][0].values())
    counts = reducers[0].statistics()
    assert counts[:3] == (3, 9, 3 * raw)
    assert counts.ratio == 3 * raw / counts.bytes_sent
    if isinstance(codecs[0], Threshold):
        return  # depends on the numbers
    declared = sum(reducers[0].nbytes(shape, np.float32) for shape in SHAPES.values())
    assert counts.bytes_sent == 3 * declared
    assert reducers[0].nbytes(SHAPES["b"], "bfloat16") == reducers[0].nbytes(SHAPES["b"], "f4")


@every
def test_bytes_counted_are_those_sent(make):
    codec = make()

    def body(member, own, trees):
        reduce_all(member, own, trees)
        return sum(nbytes for _, nbytes in member.log)

    sent = crowd(2, body, [codec, make()], [[gradient(m, 0)] for m in range(2)])[0]
    counts = reducer_of(codec, "").statistics()
    assert sent == counts.bytes_sent + counts.bytes_overhead
    assert counts.bytes_overhead < 24 + 3 * 100


def test_a_users_bytes_may_be_declared():
    class Declares(Threshold):
        def nbytes(self, shape, dtype):
            return 17

    assert ErrorFeedback(Declares()).nbytes((3,), np.float32) == 17
    assert ErrorFeedback(Threshold()).nbytes((3,), np.float32) == 4  # of zeros: none, and a 0


def test_all_errors_are_of_the_tree():
    for error in failing([Broken()], [{"w": np.ones(1)}]):
        assert isinstance(error, MpimlError)
    assert threading.active_count() < 10
