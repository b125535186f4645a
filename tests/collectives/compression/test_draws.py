"""Random numbers depend on seed, kind, name, step and member, and on nothing else."""

import numpy as np

from mpiml.collectives.compression.draws import generator, uniform


def first(*place):
    return generator(*place).random(4).tolist()


def test_the_same_place_gives_the_same_numbers():
    assert first(1, "k", "w", 3, 2) == first(1, "k", "w", 3, 2)


def test_every_part_of_the_place_matters():
    place = (1, "k", "w", 3, 2)
    others = [(2, *place[1:]), (1, "j", "w", 3, 2), (1, "k", "v", 3, 2), (1, "k", "w", 4, 2)]
    others += [(1, "k", "w", 3, 1), (1, "k", "w", 3, None), (1, "k", "w", 2, 3)]
    drawn = [first(*other) for other in (place, *others)]
    assert len({tuple(numbers) for numbers in drawn}) == len(drawn)


def test_streams_of_two_steps_do_not_overlap():
    a, b = (generator(0, "k", "w", step, 0).random(1000) for step in (0, 1))
    assert not np.intersect1d(a, b).size


def test_uniform_is_between_zero_and_one_and_even():
    u = uniform(generator(0, "k", "w", 0, 0), 200_001)
    assert u.shape == (200_001,)
    assert u.dtype == np.float32
    assert u.min() > 0
    assert u.max() < 1
    assert (u.astype(np.float64) * 2**24 % 2 == 1).all()  # midpoints of 2**23 intervals
    counts, _ = np.histogram(u, 20, (0, 1))
    # a count is 10000 give or take 97; one seed, so it passes for ever or never
    assert np.abs(counts - 10_000).max() < 400
    assert abs(u.mean(dtype=np.float64) - 0.5) < 3 * np.sqrt(1 / 12 / u.size)


def test_uniform_takes_other_generators_too():
    assert uniform(np.random.default_rng(0), 3).shape == (3,)
    assert uniform(np.random.default_rng(0), 0).shape == (0,)
