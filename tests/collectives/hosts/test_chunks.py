"""How an operation between hosts is cut up: everything once, in step, by a rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.collectives.hosts.chunks import (
    by_mpi,
    choose,
    host_spans,
    pieces,
    schedule,
    split_op,
)
from mpiml.collectives.regions import Leaf, Regions, stripe

DTYPES = ["float32", "float64", "float16", "int8"]
layouts = st.lists(
    st.tuples(st.integers(0, 900), st.sampled_from(DTYPES)), min_size=1, max_size=5
).map(lambda leaves: Regions([Leaf(str(i), (n,), t) for i, (n, t) in enumerate(leaves)]))


def covered(regions, found):
    """Which byte of the block is in how many pieces, as lists of 1."""
    count = [0] * regions.nbytes
    for piece in found:
        assert piece.region in regions.regions
        for i in range(piece.at, piece.at + piece.nbytes):
            count[i] += 1
    return set(count) <= {1}


@given(layouts, st.integers(64, 5000))
def test_pieces_are_the_block(regions, chunk):
    found = pieces(regions, chunk)
    assert covered(regions, found)
    assert all(0 < piece.nbytes <= chunk for piece in found)
    assert [p.at for p in found] == sorted(p.at for p in found)


@given(layouts, st.integers(1, 7))
def test_parts_of_a_piece_are_the_piece(regions, size):
    for piece in pieces(regions, 1000):
        parts = [piece.part(i, size) for i in range(size)]
        assert sum(part.count for part in parts) == piece.count
        at = piece.at
        for part in parts:
            assert not part.count or part.at == at
            at += part.nbytes


@given(layouts, st.lists(st.integers(0, 3), min_size=2, max_size=7), st.integers(64, 3000))
def test_spans_of_hosts_are_the_stripes_of_their_members(regions, hosts, chunk):
    rounds = host_spans(regions, hosts, chunk)
    everything = [entry for entries in rounds for entry in entries]
    assert covered(regions, [piece for _, piece in everything])
    for member, piece in everything:
        low, high = stripe(piece.region.count, piece.region.itemsize, member, len(hosts))
        start = (piece.at - piece.region.offset) // piece.region.itemsize
        assert low <= start
        assert start + piece.count <= high
    room = max(chunk // len(set(hosts)), 8)
    for entries in rounds:
        for host in set(hosts):
            assert sum(p.nbytes for m, p in entries if hosts[m] == host) <= room


@given(st.integers(0, 30), st.integers(1, 5))
def test_every_chunk_is_begun_and_then_finished_in_order(count, window):
    steps = list(schedule(count, window))
    assert [new for new, _ in steps if new is not None] == list(range(count))
    assert [old for _, old in steps if old is not None] == list(range(count))
    flying = 0
    for new, old in steps:  # the old one has come before the new one is sent
        flying -= old is not None
        flying += new is not None
        assert 0 <= flying <= window


@pytest.mark.parametrize(
    ("hosts", "ranks", "nbytes", "asked", "crowded", "senders", "reason"),
    [
        ([0, 0, 1, 1], [0, 1, 2, 3], 1 << 30, "auto", False, "stripes", "1,073,741,824 bytes"),
        ([0, 0, 1, 1], [0, 1, 2, 3], 1 << 30, "auto", True, "leaders", "members share cores"),
        ([0, 0, 1, 1], [0, 1, 2, 3], 1 << 10, "auto", False, "leaders", "1,024 bytes"),
        ([0, 0, 1, 1], [0, 1, 2, 3], 1 << 10, "stripes", True, "stripes", "MPIML_BETWEEN says"),
        ([0, 0, 1, 1], [0, 1, 2, 3], 1 << 30, "leaders", False, "leaders", "MPIML_BETWEEN says"),
        ([0, 0, 1], [0, 1, 2], 1 << 30, "auto", False, "leaders", "not a process for each"),
        ([0, 0, 1], [0, 1, 2], 1 << 30, "stripes", False, "leaders", "stripes are not possible"),
        ([0, 0, 1, 1], [0, 0, 1, 1], 1 << 30, "auto", False, "leaders", "not a process for each"),
        ([0, 1, 2], [0, 1, 2], 1 << 30, "stripes", False, "leaders", "stripes are not possible"),
    ],
)  # fmt: skip
def test_who_sends(hosts, ranks, nbytes, asked, crowded, senders, reason):
    choice = choose(hosts, ranks, nbytes, asked, crowded=crowded)
    assert choice.senders == senders
    assert reason in str(choice)


def test_size_of_chunks():
    assert choose([0, 0, 1, 1], range(4), 1 << 30).chunk == 1 << 20
    assert choose([0, 1], range(2), 1 << 40).chunk == 1 << 30  # nothing to overlap with
    assert choose([0, 1], range(2), 1 << 40, chunk=1000).chunk == 960  # whole cache lines
    assert choose([0, 1], range(2), 1 << 40, chunk=1).chunk == 64


def test_a_mean_is_divided_once_but_for_16_bits():
    assert split_op("mean", "float32", 6, 2) == ("sum", 1.0, "mean", 6.0)
    assert split_op("mean", "float16", 6, 2) == ("mean", 3.0, "mean", 2.0)
    assert split_op("max", "float16", 6, 2) == ("max", 1.0, "max", 1.0)


def test_what_mpi_reduces_as_we_do():
    assert by_mpi("sum", "float32")
    assert by_mpi("max", "int8")
    assert by_mpi("prod", "complex64")
    assert not by_mpi("sum", "bfloat16")
    assert not by_mpi("min", "float64")  # MPI does not hand on NaN
