"""What the four ends of filtered messages have in common: how entries become a message, and back."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpiml.filters import Compressed, Filter, KeyCaching, ZeroSuppression
from mpiml.roles.parameter_server.filtering.rules import check_filters
from mpiml.roles.parameter_server.filtering.stages import Coder, Stage, nonzero, stages_of
from mpiml.roles.parameter_server.filtering.wire import (
    Entries,
    Lists,
    Statistics,
    out_of_step,
    places_nbytes,
    read,
    write,
)

__all__ = ["Decoder", "Encoder", "End"]

_WHERE = "ParameterServerNode: filters"


class End:
    """What all four have in common.

    Parameters
    ----------
    filters : sequence of Filter
        The same at both ends.
    sizes, dtypes : sequence
        Of the pieces that the server holds: entries; float32 or float64.
    stream : int
        A number of its own for each pair of worker and server, so that no two draw the same
        random numbers; the same at both ends.
    """

    _pull = False

    def __init__(
        self,
        filters: Sequence[Filter],
        sizes: Sequence[int],
        dtypes: Sequence[Any],
        *,
        stream: int = 0,
    ) -> None:
        self._what = "pull" if self._pull else "push"
        self._filters = check_filters(filters, _WHERE, self._pull)
        self._sizes = [int(size) for size in sizes]
        self._dtypes = [np.dtype(dtype) for dtype in dtypes]
        self._numbers = [0] * len(self._sizes)  # messages so far, by piece
        self._coder: Coder | None = None
        self._lists: list[Lists] | None = None
        for each in self._filters:
            if isinstance(each, Compressed):
                self._coder = Coder(each.compressor, _WHERE, self._what, stream)
            elif isinstance(each, KeyCaching):
                self._lists = [Lists(each.lists) for _ in self._sizes]
        self._begin(stream)

    def _begin(self, stream: int) -> None:
        """Set up what an end has of its own."""

    def _has(self, *kinds: type[Filter]) -> bool:
        return any(isinstance(each, kinds) for each in self._filters)


class Encoder(End):
    """Writes entries as messages, and counts."""

    def _begin(self, stream: int) -> None:
        self._stages: list[tuple[str, Stage]] = stages_of(
            self._filters, self._sizes, self._dtypes, self._what, stream
        )
        self._suppresses = self._has(ZeroSuppression)
        names = [type(each).__name__ for each in self._filters]
        self._counts = {name: Statistics() for name in [*names, "all"]}

    def statistics(self) -> dict[str, Statistics]:
        """Return what was sent so far by name of the filter, and under ``"all"`` by all together.

        Those of `KeyCaching` are of the lists of places alone, those of `Compressed` of the
        values alone. Local. Without filters nothing is counted.
        """
        return dict(self._counts)

    def _count(self, name: str, seen: int, sent: int, before: int, after: int) -> None:
        old = self._counts[name]
        added = zip(old, (seen, sent, before, after), strict=True)
        self._counts[name] = Statistics(*[a + b for a, b in added])

    def _nbytes(self, piece: int, entries: Entries) -> int:
        count = len(entries.values)
        places = 0 if entries.indices is None else places_nbytes(self._sizes[piece], count)
        return places + entries.values.nbytes

    def _filtered(self, piece: int, entries: Entries, known: Any) -> Entries:
        """Return what the filters choose, one after the other."""
        for name, stage in self._stages:
            choose = stage.pull if self._pull else stage.push
            chosen = choose(piece, entries, known)
            self._choice(name, piece, entries, chosen)
            entries = chosen
        return entries

    def _choice(self, name: str, piece: int, entries: Entries, chosen: Entries) -> None:
        """Count what a filter has let through."""
        before, after = self._nbytes(piece, entries), self._nbytes(piece, chosen)
        self._count(name, len(entries.values), len(chosen.values), before, after)

    def _suppressed(self, piece: int, entries: Entries, coded: bool) -> Entries:
        """Return the entries that are not zero, if a message of them is smaller."""
        if not self._suppresses or entries.indices is not None:
            return entries
        dtype, count = entries.values.dtype, len(entries.values)

        def nbytes(many: int) -> int:
            if coded and self._coder is not None:
                return self._coder.nbytes(many, dtype) if many else 0
            return many * dtype.itemsize

        chosen = nonzero(entries.values)
        many = int(np.count_nonzero(chosen))
        smaller = places_nbytes(count, many) + nbytes(many) < nbytes(count)
        left = entries.kept(chosen) if smaller else entries
        self._choice("ZeroSuppression", piece, entries, left)
        return left

    def _message(
        self, piece: int, form: str, entries: Entries, payload: Sequence[NDArray[Any]] | None
    ) -> tuple[Any, ...]:
        """Return the tuple that travels."""
        number, sent = self._numbers[piece], 0
        self._numbers[piece] += 1
        places: Any = None
        count = len(entries.values)
        if entries.indices is not None:
            places = write(entries.indices, self._sizes[piece])
            before = sent = places.nbytes
            if self._lists is not None:
                if places.nbytes > 8:  # else the hash is no shorter
                    form += "k"
                    name, known = self._lists[piece].find(places)
                    if known:
                        places, sent = name, 8
                listed = count if sent == before else 0
                self._count("KeyCaching", count, listed, before, sent)
        arrays = (entries.values,) if payload is None else tuple(payload)
        nbytes = sum(array.nbytes for array in arrays)
        if payload is not None:
            self._count("Compressed", count, count, entries.values.nbytes, nbytes)
        self._count("all", 0, count, 0, sent + nbytes)
        return (number, form if payload is None else form[:1] + "c" + form[1:], places, *arrays)


class Decoder(End):
    """Reads messages."""

    def _read(self, piece: int, message: Any) -> tuple[str, Any, NDArray[Any]]:
        """Return form, indices (None: all) and values of a message.

        Raises
        ------
        UsageError
            It is not the next one of this piece.
        """
        number, form, places, *arrays = message
        if number != self._numbers[piece]:
            raise out_of_step(
                f"message {self._numbers[piece]} of piece {piece}, got message {number}"
            )
        size, dtype, indices = self._sizes[piece], self._dtypes[piece], None
        if form[0] != "d":
            if "k" in form:
                if self._lists is None:
                    raise out_of_step("the same filters at both ends, got KeyCaching at one")
                places = self._lists[piece].take(places)
            indices = read(places, size)
        values = arrays[0]
        if "c" in form:
            if self._coder is None:
                raise out_of_step("the same filters at both ends, got Compressed at one")
            like = np.broadcast_to(dtype.type(0), size if indices is None else len(indices))
            values = self._coder.decode(piece, number, tuple(arrays), like)
        self._numbers[piece] += 1
        return form, indices, values
