"""How ways are timed in turn: who is slowest, what is checked; two hosts of one machine."""

import os
from pathlib import Path

import numpy as np
import pytest

from mpiml.bench.allreduce_rounds import VALUES, Way, expected, fill_value, in_turn, way_of


class Alone:
    """A communicator of one."""

    rank = 0
    size = 1


def test_values_differ_from_rank_to_rank_and_sums_are_exact_in_float16():
    for size in (1, 2, 8, 64):
        for i in range(2 * VALUES):
            values = [fill_value(i, rank) for rank in range(size)]
            assert len(set(values)) == size
            assert expected(i, size) == sum(values)
    assert np.float16(expected(VALUES - 1, 50)) == expected(VALUES - 1, 50)


@pytest.mark.parametrize(("place", "whole"), [(0, False), (-1, False), (2, True)])
def test_a_wrong_result_is_an_error(place, whole):
    mine = np.zeros(5, np.float32)
    way = way_of("sum", Alone(), mine, lambda: None, lambda: mine)
    way.refill(3)
    way.check(3, True)
    mine[place] += 1
    if place == 2:
        way.check(3, False)  # only the ends
    with pytest.raises(AssertionError, match="sum, rank 0, repetition 3: expected 4 every"):
        way.check(3, whole)


@pytest.mark.mpi(min_size=2)
def test_a_repetition_lasts_as_long_as_on_the_slowest_rank(monkeypatch):
    from mpi4py import MPI

    from mpiml.bench import allreduce_rounds

    comm = MPI.COMM_WORLD
    ticks = [0]

    def clock():
        """Rank r takes r + 1 seconds from one look to the next."""
        ticks[0] += comm.rank + 1
        return float(ticks[0])

    monkeypatch.setattr(allreduce_rounds, "perf_counter", clock)
    calls = []

    def way(name):
        return Way(
            lambda i: calls.append(i),
            lambda: calls.append(name),
            lambda i, whole: calls.append(whole),
        )

    took = in_turn(comm, {"a": way("a"), "b": way("b")}, rounds=2, repeats=2, warm=1)
    assert took == {"a": [comm.size] * 4, "b": [comm.size] * 4}
    block = [0, "name", False, 1, "name", False, 2, "name", True]
    assert calls == [name if item == "name" else item for name in "abba" for item in block]


def test_arrays_of_a_bucket_of_many_have_the_bytes_of_one():
    from mpiml.bench.allreduce_inside import ARRAYS, many_like

    like = many_like(1 << 18)
    sizes = [leaf.size for leaf in like.values()]
    assert len(sizes) == ARRAYS
    assert sum(sizes) == 1 << 18
    assert min(sizes) >= 1
    assert len(set(sizes)) > 10


def test_of_the_memory_only_arenas_count():
    from mpiml.bench.allreduce_inside import arena_bytes

    smaps = """\
7f00-7f10 rw-s 00000000 00:1c 7    /dev/shm/mpiml-0a1b (deleted)
Rss:                1024 kB
Pss:                 512 kB
VmFlags: rd wr sh
7f10-7f20 rw-p 00000000 00:00 0
Pss:                  99 kB
7f20-7f30 rw-s 00000000 00:1c 8    /dev/shm/mpiml-77ff (deleted)
Pss:                   4 kB
7f30-7f40 rw-s 00000000 00:1c 9    /dev/shm/vader_segment
Pss:                   8 kB
"""
    assert arena_bytes(smaps.splitlines()) == (512 + 4) << 10


def test_a_size_that_does_not_fit_is_left_out():
    from mpiml.bench.allreduce_sizes import fits, needed

    assert needed(100, 2) == (500, 1500)
    assert fits(8, 2)
    assert not fits(1 << 60, 2)


class Launched:
    """Ranks that are never started."""

    def __init__(self, kind, version=(5, 0)):
        from mpiml.mpiexec import Launcher, Mpi

        self.launcher = Launcher(Path("/bin/mpiexec"), Mpi(kind, version))
        self.calls = []

    def scenario(self, where, n, plan, **how):
        self.calls.append((where, n, how))
        return {}


@pytest.mark.parametrize(
    ("kind", "version", "option"),
    [
        ("openmpi", (5, 0), "plm_ssh_agent"),
        ("openmpi", (4, 1), "plm_rsh_agent"),
        ("mpich", (5, 0), "-launcher-exec"),
    ],
)
def test_each_mpi_is_told_how_to_reach_the_other_host(kind, version, option):
    from mpiml.bench.two_hosts import TwoHosts

    ranks = Launched(kind, version)
    with TwoHosts(ranks) as two:
        assert two.scenario("m:f", {}) == {}
        ((where, n, how),) = ranks.calls
        assert (where, n) == ("m:f", 4)
        assert how["before"][:5] == ("unshare", "--uts", "ip", "netns", "exec")
        agent = how["options"][how["options"].index(option) + 1]
        assert os.access(agent, os.X_OK)
        assert two.names[1] in Path(agent).read_text()
    assert not os.path.exists(agent)


def test_why_there_are_no_two_hosts_is_said(monkeypatch):
    from mpiml.bench import several_hosts

    def why(kind="openmpi"):
        with several_hosts.SeveralHosts(Launched(kind)) as two:
            return two.why_not()

    assert "Intel MPI 5.0 is not started on several hosts" in why("intel")
    monkeypatch.setattr(several_hosts.os, "geteuid", lambda: 1000)
    assert why() == "only root may make network namespaces"
    monkeypatch.setattr(several_hosts.os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        several_hosts.shutil, "which", lambda name: None if name == "ip" else name
    )
    assert why() == "no ip on this machine (iproute2, util-linux)"


def test_the_card_is_only_looked_for_where_there_is_one():
    from mpiml.bench.several_hosts import link_bytes

    with pytest.raises(LookupError, match="expected to run on one of several hosts"):
        link_bytes()


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_a_step_that_went_wrong_is_an_error(name):
    from mpiml.bench.allreduce_steps import OPTIMIZERS, Reference

    optimizer = OPTIMIZERS[name](0.01)
    param, grad = np.zeros(7, np.float32), np.full(7, 2.5, np.float32)
    state = optimizer.init(param)
    reference = Reference(optimizer, param)
    for step in (1, 2):
        optimizer.apply(param, grad, state, step)
        reference.check(2.5, True)
    optimizer.apply(param, grad, state, 3)
    param[3] += 1e-6
    with pytest.raises(AssertionError, match=rf"{optimizer.name}, step 3: expected .*-0.0"):
        reference.check(2.5, True)
