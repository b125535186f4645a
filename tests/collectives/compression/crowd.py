"""Members of an exchange as threads of this process, without MPI."""

import threading

import numpy as np

__all__ = ["crowd"]

LIMIT = 10.0  # seconds after which something hangs


class Member:
    """One of them; `log` is what it sent, method by method."""

    def __init__(self, index, board, barrier):
        self.index = index
        self.size = len(board)
        self.names = [f"learner/{i}" for i in range(self.size)]
        self.board = board
        self.barrier = barrier
        self.log = []

    def everyone(self, value):
        """Return what each member brings."""
        self.board[self.index] = value
        self.barrier.wait(LIMIT)
        values = list(self.board)
        self.barrier.wait(LIMIT)
        return values

    def sum(self, array):
        assert array.ndim == 1
        self.log.append(("sum", array.nbytes))
        arrays = self.everyone(array.copy())
        assert {(a.shape, a.dtype) for a in arrays} == {(array.shape, array.dtype)}
        wide = np.float32 if array.dtype.itemsize == 2 else array.dtype
        total = np.zeros(array.shape, wide)
        for other in arrays:
            total += other.astype(wide)
        array[...] = total
        return array

    def gather(self, array, lengths):
        assert array.ndim == 1
        assert array.dtype == np.uint8
        self.log.append(("gather", array.nbytes))
        arrays = self.everyone((array.copy(), tuple(lengths)))
        assert {lengths for _, lengths in arrays} == {tuple(lengths)}
        assert [a.size for a, _ in arrays] == list(lengths)
        return [a for a, _ in arrays]


def crowd(count, function, *lists):
    """Run ``function(member, *items)`` for each of `count` members at once.

    `lists` hold an item for each member. Returns what each returned or, where it raised, the
    exception. A member that hangs fails the test.
    """
    board, barrier = [None] * count, threading.Barrier(count)
    results = [None] * count

    def run(index):
        try:
            results[index] = function(
                Member(index, board, barrier), *[li[index] for li in lists]
            )
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads), "a member hangs"
    return results
