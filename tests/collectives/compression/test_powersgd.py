"""PowerSGD: exact where the rank suffices, and the bookkeeping around it."""

import numpy as np
import pytest

from mpiml.collectives.compression import PowerSGD
from mpiml.errors import UsageError
from tests.collectives.compression.crowd import crowd


def low_rank(n, m, r, seed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, r)) @ rng.standard_normal((r, m))).astype(dtype)


def steps(codecs, gradients, op="mean"):
    """Reduce each member's list of gradients; return for each member results and its log."""

    def body(member, codec, mine):
        results = []
        for gradient in mine:
            results.append(np.empty_like(gradient))
            codec.reduce(member, [gradient], [results[-1]], ["w"], op)
        return results, member.log

    got = crowd(len(codecs), body, codecs, gradients)
    for member in got:
        if isinstance(member, Exception):
            raise member
        for mine, others in zip(member[0], got[0][0], strict=True):
            assert mine.tobytes() == others.tobytes()
    return got


def test_a_sum_of_that_rank_is_exact():
    # two members of rank 1 each: their sum has rank 2
    ones = [low_rank(30, 20, 1, seed) for seed in range(2)]
    got = steps([PowerSGD(2) for _ in ones], [[one] for one in ones], "sum")
    np.testing.assert_allclose(got[0][0][0], ones[0] + ones[1], atol=1e-12)


def test_float32_and_more_than_two_dimensions():
    one = low_rank(24, 45, 2, 0, np.float32).reshape(24, 5, 3, 3)
    ((got,), _), _ = steps([PowerSGD(2) for _ in range(2)], [[one]] * 2)
    np.testing.assert_allclose(got, one, atol=1e-4)


def test_lower_rank_than_asked_for_is_exact_and_recovers():
    first, second = low_rank(30, 20, 1, 0), low_rank(30, 20, 3, 1)
    zero = np.zeros((30, 20))
    ((results, _),) = steps([PowerSGD(3)], [[first, zero, second]])
    for got, expected in zip(results, [first, zero, second], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-11)


def test_two_allreduces_of_r_n_and_r_m():
    codec = PowerSGD(3)
    (_, log), _ = steps([codec, PowerSGD(3)], [[np.ones((30, 20), np.float32)]] * 2)
    assert [kind for kind, _ in log] == ["gather", "sum", "sum"]
    assert [size for _, size in log[1:]] == [4 * 3 * 30, 4 * 3 * 20]
    assert codec.nbytes((30, 20), np.float32) == 4 * 3 * 50 == codec.statistics().bytes_sent


@pytest.mark.parametrize("shape", [(), (7,), (1, 9), (4, 4), (0, 5)])
def test_what_would_not_become_smaller_is_summed_as_it_is(shape):
    array = np.asarray(np.random.default_rng(0).standard_normal(shape))
    codecs = [PowerSGD(2) for _ in range(2)]
    (results, log), _ = steps(codecs, [[array, array]] * 2, "sum")
    np.testing.assert_array_equal(results[0], 2 * array)
    assert codecs[0].nbytes(shape, np.float64) == array.nbytes
    assert sum(size for kind, size in log if kind == "sum") == 2 * array.nbytes
    assert "residual" not in str(codecs[0].state_dict())


def test_warm_start_turns_towards_the_leading_vectors():
    u, _, vt = np.linalg.svd(low_rank(40, 30, 30, 0), full_matrices=False)
    sizes = 0.7 ** np.arange(30)
    matrix = (u * sizes) @ vt
    best = np.linalg.norm(sizes[2:])

    def miss(codec):
        ((results, _),) = steps([codec], [[matrix] * 30])
        return np.linalg.norm(matrix - results[-1])

    assert miss(PowerSGD(2, feedback=False)) < 1.02 * best
    assert miss(PowerSGD(2, feedback=False, warm_start=False)) > 1.1 * best


def test_what_is_not_sent_is_kept():
    gradients = [[low_rank(20, 15, 15, 10 * m + s) for s in range(6)] for m in range(3)]
    codecs = [PowerSGD(1) for _ in gradients]
    got = steps(codecs, gradients, "sum")[0][0]
    kept = [c.state_dict()["members"][str(m)]["w"]["residual"] for m, c in enumerate(codecs)]
    everything = sum(np.sum(mine, axis=0) for mine in gradients)
    np.testing.assert_allclose(
        np.sum(got, axis=0) + np.sum(kept, axis=0), everything, atol=1e-10
    )
    assert np.linalg.norm(kept[0]) > 0.1


def test_no_feedback_keeps_nothing():
    codec = PowerSGD(1, feedback=False, warm_start=False)
    steps([codec], [[low_rank(20, 15, 15, 0)]])
    assert codec.state_dict()["members"]["0"]["w"] == {"step": 1}


def test_a_state_goes_on_bitwise():
    gradients = [[low_rank(20, 15, 15, 10 * m + s) for s in range(5)] for m in range(2)]
    whole = steps([PowerSGD(2) for _ in range(2)], gradients)
    first = [PowerSGD(2) for _ in range(2)]
    steps(first, [mine[:2] for mine in gradients])
    second = [PowerSGD(2) for _ in range(2)]
    for old, new in zip(first, second, strict=True):
        new.load_state_dict(old.state_dict())
    rest = steps(second, [mine[2:] for mine in gradients])
    for expected, got in zip(whole[0][0][2:], rest[0][0], strict=True):
        assert expected.tobytes() == got.tobytes()


def test_small_and_large_gradients():
    for size in (1e-18, 1e15):
        one = (low_rank(30, 20, 2, 0) * size).astype(np.float32)
        ((results, _),) = steps([PowerSGD(2)], [[one] * 3])
        np.testing.assert_allclose(results[-1] / size, one / size, atol=1e-4)


def test_sums_beyond_all_numbers_are_refused_on_all():
    big = np.full((30, 20), 3e38, np.float32)
    with pytest.raises(UsageError, match="w: expected elements whose sums"):
        steps([PowerSGD(1) for _ in range(2)], [[big]] * 2)


def test_another_rank_does_not_fit_a_state():
    old, new = PowerSGD(1), PowerSGD(2)
    steps([old], [[np.ones((30, 20))]])
    new.load_state_dict(old.state_dict())
    with pytest.raises(UsageError, match=r"holds the q of another array"):
        steps([new], [[np.ones((30, 20))]])


@pytest.mark.parametrize("rank", [0, 1.5, True, None])
def test_rank_is_a_whole_number(rank):
    with pytest.raises(UsageError, match="rank: expected a whole number from 1 up"):
        PowerSGD(rank)
