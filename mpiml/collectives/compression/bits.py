"""Small numbers packed into bytes, and back.

Element i of 8 takes bits ``i * width`` to ``(i + 1) * width - 1`` of a little-endian word, so
eight elements take `width` bytes and no bit is wasted between them.
"""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack", "pack_signs", "packed_size", "signs", "unpack"]

_Bytes = NDArray[np.uint8]
_WORD: Final = np.dtype("<u8")
#: byte -> the signs of 8 elements
_SIGNS: Final = (
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") * 2.0
    - 1.0
)


def packed_size(count: int, width: int) -> int:
    """Return the bytes that `count` elements of `width` bits take."""
    return -(-count * width // 8)


def pack(codes: _Bytes, width: int) -> _Bytes:
    """Pack whole numbers below ``2 ** width``.

    Parameters
    ----------
    codes : ndarray of uint8, shape (n,)
        The numbers; larger ones spoil their neighbours.
    width : int
        Bits of each, 1 to 8.

    Returns
    -------
    ndarray of uint8, shape (packed_size(n, width),)
    """
    size = packed_size(codes.size, width)
    if width == 8:
        return codes.copy()
    if width == 1:
        return np.packbits(codes, bitorder="little")
    padded = np.zeros(-(-codes.size // 8) * 8, np.uint8)
    padded[: codes.size] = codes
    packed: _Bytes
    if width == 4:
        pair = padded.view("<u2")
        packed = (pair | pair >> 4).astype(np.uint8)
    elif width == 2:
        four = padded.view("<u4")
        packed = (four | four >> 6 | four >> 12 | four >> 18).astype(np.uint8)
    else:
        word = padded.view(_WORD)
        # the fields of a word close ranks: 8 of 8 bits -> 4 of 16 -> 2 of 32 -> 1 of 64
        word = _closer(word, 0x00FF00FF00FF00FF, 8 - width)
        word = _closer(word, 0x0000FFFF0000FFFF, 16 - 2 * width)
        word = _closer(word, 0x00000000FFFFFFFF, 32 - 4 * width)
        packed = word.view(np.uint8).reshape(-1, 8)[:, :width].reshape(-1)  # (words, width)
    return packed[:size]


def unpack(packed: _Bytes, width: int, count: int) -> _Bytes:
    """Return the `count` numbers that `pack` packed.

    Parameters
    ----------
    packed : ndarray of uint8
        May be longer than `count` numbers need.

    Returns
    -------
    ndarray of uint8, shape (count,)
    """
    packed = packed[: packed_size(count, width)]
    if width == 8:
        return packed
    if width == 1:
        return np.unpackbits(packed, count=count, bitorder="little")
    codes: NDArray[Any]
    if width == 4:
        pair = packed.astype("<u2")
        codes = (pair | pair << 4) & 0x0F0F
    elif width == 2:
        four = packed.astype("<u4")
        four = (four | four << 12) & 0x000F000F
        codes = (four | four << 6) & 0x03030303
    else:
        filled = np.zeros(-(-count // 8) * width, np.uint8)
        filled[: packed.size] = packed
        word = np.zeros((filled.size // width, 8), np.uint8)
        word[:, :width] = filled.reshape(-1, width)
        codes = word.reshape(-1).view(_WORD)
        codes = _wider(codes, (1 << 4 * width) - 1, 32 - 4 * width)
        codes = _wider(codes, ((1 << 2 * width) - 1) * 0x0000000100000001, 16 - 2 * width)
        codes = _wider(codes, ((1 << width) - 1) * 0x0001000100010001, 8 - width)
    return codes.view(np.uint8)[:count]


def pack_signs(array: NDArray[Any]) -> _Bytes:
    """Return one bit for each element: 1 where it is 0 or more.

    Parameters
    ----------
    array : ndarray of a real dtype, shape (n,)

    Returns
    -------
    ndarray of uint8, shape (packed_size(n, 1),)
    """
    return np.packbits(array >= 0, bitorder="little")


def signs(packed: _Bytes, count: int, scale: Any, dtype: Any) -> NDArray[Any]:
    """Return `scale` where `pack_signs` saw 0 or more, and ``-scale`` elsewhere.

    Returns
    -------
    ndarray of `dtype`, shape (count,)
    """
    table = _SIGNS.astype(dtype) * np.asarray(scale, dtype)
    return np.take(table, packed, axis=0).reshape(-1)[:count]  # (bytes, 8) -> (count,)


def _closer(word: NDArray[np.uint64], low: int, by: int) -> NDArray[np.uint64]:
    """Move the upper half of each pair of fields down, next to the lower one."""
    mask = np.uint64(low)
    upper = word & ~mask
    upper >>= np.uint64(by)
    upper |= word & mask
    return upper


def _wider(word: NDArray[np.uint64], low: int, by: int) -> NDArray[np.uint64]:
    """Undo `_closer`; `low` selects what stays."""
    mask = np.uint64(low)
    upper = word & ~mask
    upper <<= np.uint64(by)
    upper |= word & mask
    return upper
