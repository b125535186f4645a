"""Tensors in the memory of a bucket, and tensors of any dtype as bytes on their way to others."""

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from mpiml.collectives.bucket import Bucket

__all__ = ["Courier", "physical", "tensor_in"]

_ALIGN: Final = 64  # bytes; of every tensor on its way


def physical(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a tensor as it lies in memory, and the permutation back to its own shape.

    A tensor of another memory format (``channels_last``) is a permuted array without gaps;
    one with gaps or overlaps counts as if it were contiguous.

    Returns
    -------
    laid : torch.Tensor
        A view of `tensor`, permuted.
    back : tuple of int
        A contiguous array of the shape of `laid`, permuted so, has the shape of `tensor`, and
        its strides if it has no gaps.
    """
    strides: tuple[int, ...] = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    if not tensor.permute(order).is_contiguous():
        order = list(range(tensor.dim()))
    back = tuple(sorted(range(len(order)), key=order.__getitem__))
    return tensor.detach().permute(order), back


def tensor_in(array: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return an array of a bucket as a tensor of the same memory.

    Parameters
    ----------
    array : numpy.ndarray or cupy.ndarray
        Contiguous, any shape.
    dtype
        What its numbers are for torch; NumPy's bfloat16 is unknown to it.
    """
    if dtype is torch.bfloat16:
        array = array.view(np.int16)
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array).view(dtype)
    there: torch.Tensor = torch.as_tensor(array, device=f"cuda:{array.device.id}")
    return there.view(dtype)


class Courier:
    """Carries tensors from one member to all others, in pieces of shared memory.

    Collective over the members: making it, and `send`. Tensors of any dtype and device, since
    they travel as bytes.

    Parameters
    ----------
    comm
        As for `Bucket`.
    tensors : sequence of torch.Tensor
        Shapes and dtypes, the same on all members.
    limit : int
        Bytes of a piece, unless one tensor is larger.
    name : str
        What messages call it.
    fallback : bool
        As for `Bucket`.
    """

    def __init__(
        self, comm: Any, tensors: Sequence[torch.Tensor], limit: int, name: str, fallback: bool
    ) -> None:
        self._pieces: list[list[tuple[int, int]]] = []  # (number of a tensor, offset)
        sizes = [-(-t.numel() * t.element_size() // _ALIGN) * _ALIGN for t in tensors]
        end = largest = 0
        for number, size in enumerate(sizes):
            if not self._pieces or end + size > limit:
                self._pieces.append([])
                end = 0
            self._pieces[-1].append((number, end))
            end += size
            largest = max(largest, end)
        self.bucket = Bucket(
            comm, np.empty(max(largest, _ALIGN), np.uint8), name=name, fallback=fallback
        )
        self._memory = torch.from_numpy(self.bucket.tree)

    def send(self, tensors: Sequence[torch.Tensor], root: int) -> None:
        """Give every member the values of member `root`, in place.

        The tensors keep their version counters: it is no change that autograd has to hear of.
        """
        mine = self.bucket.index == root
        for piece in self._pieces:
            if mine:
                for number, offset in piece:
                    self._place(tensors[number], offset).copy_(tensors[number].data)
            self.bucket.ibroadcast(root).wait()
            if not mine:
                for number, offset in piece:
                    tensors[number].data.copy_(self._place(tensors[number], offset))

    def close(self) -> None:
        """Let go of the shared memory. Local."""
        self.bucket.close()

    def _place(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        nbytes = math.prod(tensor.shape) * tensor.element_size()
        return self._memory[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape)
