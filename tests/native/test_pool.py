"""take(): no two live blocks share memory, and a loop gets the same pages again."""

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mpiml._native import Block, pool_statistics, set_pool_limit, take

MIB = 1 << 20
DEFAULT_LIMIT = 128 * MIB


@pytest.fixture(autouse=True)
def empty_pool():
    gc.collect()
    set_pool_limit(0)
    set_pool_limit(DEFAULT_LIMIT)
    yield
    set_pool_limit(DEFAULT_LIMIT)


def address(block):
    return np.frombuffer(block, np.uint8).ctypes.data


def rounded(nbytes):
    unit = 4096 if nbytes < 2 * MIB else 2 * MIB
    return -(-nbytes // unit) * unit


def test_a_block_is_writable_bytes():
    block = take(5000)
    view = memoryview(block)
    assert isinstance(block, Block)
    assert (len(block), view.format, view.shape, view.readonly) == (5000, "B", (5000,), False)
    view[:] = bytes(k % 256 for k in range(5000))
    assert bytes(block) == bytes(k % 256 for k in range(5000))


def test_no_bytes():
    before = pool_statistics()
    block = take(0)
    assert (len(block), bytes(block)) == (0, b"")
    assert np.ndarray((0, 3), np.float32, buffer=block).size == 0
    del block
    assert pool_statistics() == before


@pytest.mark.parametrize("nbytes", [1, 4096, 100_000, 16 * MIB, 16 * MIB + 1])
def test_a_loop_gets_the_same_pages_again(nbytes):
    at = {address(take(nbytes)) for _ in range(20)}
    s = pool_statistics()
    assert len(at) == 1
    assert s["cached_bytes"] == rounded(nbytes)


def test_the_newest_block_comes_back_first():
    blocks = [take(4096) for _ in range(3)]
    at = [address(b) for b in blocks]
    for _ in range(3):
        del blocks[0]
    assert [address(b) for b in [take(4096), take(4096), take(4096)]] == at[::-1]


def test_large_blocks_are_aligned_for_huge_pages():
    blocks = [take(n * MIB + 1) for n in (1, 2, 3, 5)]
    assert [address(b) % (2 * MIB) for b in blocks[1:]] == [0, 0, 0]


@pytest.mark.parametrize("wrap", [memoryview, lambda b: np.ndarray((512,), ">f8", buffer=b)])
def test_views_keep_the_memory(wrap):
    before = pool_statistics()["in_use_bytes"]
    view = wrap(take(4096))[8:16]
    gc.collect()
    assert pool_statistics()["in_use_bytes"] == before + 4096
    del view
    assert pool_statistics()["in_use_bytes"] == before


def test_bad_sizes():
    with pytest.raises(ValueError, match="expected nbytes >= 0, got -1"):
        take(-1)
    with pytest.raises(ValueError, match="expected nbytes >= 0, got -1"):
        set_pool_limit(-1)
    before = pool_statistics()["in_use_bytes"]
    for nbytes in (1 << 62, 2**63 - 1):
        with pytest.raises(MemoryError, match=f"no {nbytes} bytes"):
            take(nbytes)
    assert pool_statistics()["in_use_bytes"] == before
    with pytest.raises(TypeError):
        Block()  # only take() makes blocks


def test_threads_never_share_a_block():
    def work(tag):
        for _ in range(100):
            a = np.frombuffer(take(128 * 1024), np.uint8)
            a.fill(tag)  # numpy drops the GIL here
            if a.min() != tag or a.max() != tag:
                return False
        return True

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


class PoolMachine(RuleBasedStateMachine):
    """Against a list of free sizes, oldest first."""

    def __init__(self):
        super().__init__()
        gc.collect()
        set_pool_limit(0)
        self.limit, self.free, self.tag = 0, [], 0
        self.start = pool_statistics()
        self.live = {}
        self.hits = 0

    blocks = Bundle("blocks")
    sizes = st.sampled_from([0, 1, 4096, 4097, 60_000, 2 * MIB - 1, 2 * MIB, 3 * MIB, 4 * MIB])

    @rule(target=blocks, nbytes=sizes)
    def take(self, nbytes):
        block = take(nbytes)
        self.tag = (self.tag + 1) % 256
        np.ndarray((nbytes,), np.uint8, buffer=block)[::1024] = self.tag
        self.live[self.tag] = block
        if nbytes and rounded(nbytes) in self.free:
            self.hits += 1
            newest = len(self.free) - 1 - self.free[::-1].index(rounded(nbytes))
            del self.free[newest]
        return self.tag

    @rule(tag=consumes(blocks))
    def drop(self, tag):
        block = self.live.pop(tag)
        nbytes = len(block)
        a = np.ndarray((nbytes,), np.uint8, buffer=block)[::1024]
        assert (a == tag).all()  # nobody else wrote to it
        del a, block
        if nbytes and rounded(nbytes) <= self.limit:
            self._evict(self.limit - rounded(nbytes))
            self.free.append(rounded(nbytes))

    @rule(limit=st.sampled_from([0, 4096, 100_000, 4 * MIB, 7 * MIB]))
    def set_limit(self, limit):
        set_pool_limit(limit)
        self.limit = limit
        self._evict(limit)

    def _evict(self, room):
        while sum(self.free) > room:
            del self.free[0]

    @invariant()
    def agrees(self):
        s = pool_statistics()
        in_use = sum(rounded(len(b)) for b in self.live.values())
        assert s["in_use_bytes"] == self.start["in_use_bytes"] + in_use
        assert s["cached_bytes"] == sum(self.free) <= s["limit_bytes"] == self.limit
        assert s["hits"] == self.start["hits"] + self.hits

    def teardown(self):
        self.live.clear()
        set_pool_limit(DEFAULT_LIMIT)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
