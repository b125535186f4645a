"""LIBSVM text to arrays, whole blocks at a time; and what is wrong with a line, if one is.

A block is parsed without a loop over its tokens: the positions of the tokens, colons and ends
of lines are found as masks over the bytes, which gives the grammar and the rows, and one call
of numpy.fromstring reads all numbers. Only a block that is not well formed is looked at again
line by line, to say where and why.
"""

import re
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpiml.datasets.csr import MOST_FEATURES

__all__ = ["Malformed", "Part", "Style", "parse", "without_comments"]

_SENTINEL: Final = -1.2345678901234567e301  # read last: then nothing stopped before
_COMMENT: Final = re.compile(rb"#[^\n]*")
_QID: Final = re.compile(rb"([ \t]*[^\s#:]+[ \t]+)qid:(-?[0-9]{1,18})(?!\S)")


class Style(NamedTuple):
    """How a file's text is meant."""

    base: int
    """The index of the first feature: 0 or 1."""
    features: int | None
    dtype: np.dtype[Any]
    allow_nan: bool


class Part(NamedTuple):
    """The rows of a block."""

    counts: NDArray[np.int64]
    """Nonzeros of each row, shape (rows,)."""
    indices: NDArray[np.int32]
    values: NDArray[Any]
    labels: NDArray[Any]
    qid: NDArray[np.int64] | None


class Malformed(Exception):
    """A line of a block, counted from 0, is not what it should be, and why."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(why)
        self.line = line


def parse(block: bytes, style: Style) -> Part:
    """Return the rows of some whole lines.

    Parameters
    ----------
    block : bytes
        Ends with the end of a line, but perhaps where the file ends.
    style : Style

    Raises
    ------
    Malformed
        The first line that is wrong.
    """
    text = without_comments(block if block.endswith(b"\n") else block + b"\n")
    text, qid = _take_qids(text)
    counts = _grammar(text)
    numbers = None if counts is None else _numbers(text, counts)
    part = None if counts is None or numbers is None else _part(counts, numbers, style)
    if part is None:
        raise _diagnosed(block, style)
    return part._replace(qid=qid)


def without_comments(text: bytes) -> bytes:
    """Return the text with the same lines, each ending where a # begins."""
    return _COMMENT.sub(b"", text) if b"#" in text else text


def _take_qids(text: bytes) -> tuple[bytes, NDArray[np.int64] | None]:
    """Return the text without them, and one for each row that has something to read."""
    if b"qid:" not in text:
        return text, None
    qids: list[int] = []
    rows = []
    for line in text.split(b"\n"):
        found = _QID.match(line)
        if line.strip():
            qids.append(int(found[2]) if found else -1)
        rows.append(found[1] + line[found.end() :] if found else line)
    return b"\n".join(rows), np.array(qids, np.int64)


def _grammar(text: bytes) -> NDArray[np.int64] | None:
    """Return the nonzeros of each row; None where a line is not ``label index:value ...``."""
    data = np.frombuffer(text, np.uint8)
    solid = data > 32
    begins = solid.copy()
    begins[1:] &= ~solid[:-1]
    at = np.flatnonzero(begins | (data == 58) | (data == 10))
    byte = data[at]
    colon, end = byte == 58, byte == 10
    token = ~(colon | end)
    first = np.concatenate(([True], end[:-1]))  # of its line
    after_token = np.concatenate(([False], token[:-1]))
    before_colon = np.concatenate((colon[1:], [False]))
    # the label has no colon, every other token has one, and nothing else has any
    wrong = (token & (first == before_colon)) | (colon & ~after_token)
    colons = at[colon]
    gaps = ~(solid[colons - 1] & solid[colons + 1])
    if wrong.any() or gaps.any():
        return None
    marks = np.diff(np.flatnonzero(end), prepend=-1)  # in each line: its end, and two a pair
    counts: NDArray[np.int64] = ((marks[marks > 1] - 2) // 2).astype(np.int64)
    return counts


def _numbers(text: bytes, counts: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Return every label, index and value in order; None where one is no number."""
    plain = text.replace(b":", b" ") + b" %r" % _SENTINEL
    try:
        numbers: NDArray[np.float64] = np.fromstring(plain, np.float64, sep=" ")
    except (ValueError, DeprecationWarning):  # the latter where NumPy is older
        return None
    expected = counts.size + 2 * int(counts.sum())
    if numbers.size != expected + 1 or numbers[-1] != _SENTINEL:
        return None
    return numbers[:-1]


def _part(counts: NDArray[np.int64], numbers: NDArray[np.float64], style: Style) -> Part | None:
    """Take the numbers apart; None where one is out of range."""
    begins = np.cumsum(counts) - counts  # (rows,)
    at = begins * 2 + np.arange(counts.size)  # of the labels
    others = np.ones(numbers.size, bool)
    others[at] = False
    pairs = numbers[others].reshape(-1, 2)  # (nonzeros, 2)
    with np.errstate(invalid="ignore", over="ignore"):
        raw = pairs[:, 0].astype(np.int64)
        values = pairs[:, 1].astype(style.dtype)
        labels = numbers[at].astype(style.dtype)
    most = _most(style)
    rising = np.ones(raw.size + 1, bool)
    rising[1:-1] = raw[1:] > raw[:-1]
    rising[begins] = True  # where a row begins; past the end where the last ones are empty
    fine = (
        rising.all()
        and (raw.size == 0 or (raw.min() >= style.base and raw.max() <= most))
        and (raw == pairs[:, 0]).all()
        and np.isfinite(labels).all()
        and (style.allow_nan or np.isfinite(values).all())
    )
    if not fine:
        return None
    return Part(counts, (raw - style.base).astype(np.int32), values, labels, None)


def _most(style: Style) -> int:
    """Return the largest index that may stand in the file."""
    return (style.features or MOST_FEATURES) - 1 + style.base


def _diagnosed(block: bytes, style: Style) -> Malformed:
    for number, line in enumerate(block.split(b"\n")):
        why = _problem(line, style)
        if why is not None:
            return Malformed(number, why)
    return Malformed(0, "expected lines `label index:value ...`, got others from here on")


def _problem(line: bytes, style: Style) -> str | None:
    """Return what is wrong with a line, or None."""
    tokens = line.partition(b"#")[0].split()
    if not tokens:
        return None
    label = _number(tokens[0], style.dtype)
    if label is None or not np.isfinite(label):
        return f"{_shown(tokens[0])}: expected a label, one finite number, as the first column"
    last = None
    for place, token in enumerate(tokens[1:]):
        if place == 0 and token.startswith(b"qid:"):
            if _QID.match(line.partition(b"#")[0]) is None:
                return f"{_shown(token)}: expected qid: and an integer of at most 18 digits"
            continue
        index, why = _pair(token, style)
        if why is None and last is not None and index <= last:
            why = f"expected an index above the one before, {last}. Sort each row's columns"
        if why is not None:
            return f"{_shown(token)}: {why}"
        last = index
    return None


def _pair(token: bytes, style: Style) -> tuple[int, str | None]:
    """Return the index of a column, and what is wrong with it or its value, or None."""
    parts = token.split(b":")
    index = _number(parts[0], np.dtype(np.float64))
    if len(parts) != 2 or index is None or not float(index).is_integer():
        return 0, "expected index:value, the index an integer"
    value = _number(parts[1], style.dtype)
    if value is None:
        return 0, "expected index:value, the value a number"
    if index < style.base:
        cure = "Pass zero_based=True" if index == 0 else "Correct the file"
        return 0, f"expected an index of {style.base} or more. {cure}"
    if index > _most(style):
        given = f"as features={style.features}" if style.features else "as an int32 holds it"
        return 0, f"expected an index of at most {_most(style)}, {given}"
    if not (style.allow_nan or np.isfinite(value)):
        return 0, f"expected a finite {style.dtype}. Pass allow_nan=True to take what is none"
    return int(index), None


def _number(text: bytes, dtype: np.dtype[Any]) -> Any:
    """Return a scalar, or None."""
    if b"_" in text:  # Python's own way of grouping digits
        return None
    try:
        with np.errstate(over="ignore"):
            return dtype.type(float(text))
    except ValueError:
        return None


def _shown(token: bytes) -> str:
    text = token.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= 40 else text[:37] + "...")
