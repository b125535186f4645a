"""Filters of all pieces: at a server those of its workers, at a worker those of its servers.

Whole pulls and all pushes of arrays go through them. Of key ranges `KeyCaching` alone says how
pushes are written; their other messages, and pulls of some parameters only, go as they are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpiml.filters import KeyCaching
from mpiml.roles.parameter_server.filtering.coders import (
    PullDecoder,
    PullEncoder,
    PushDecoder,
    PushEncoder,
)
from mpiml.roles.parameter_server.filtering.wire import Lists
from mpiml.roles.parameter_server.plan import Plan
from mpiml.roles.parameter_server.settings import Settings
from mpiml.roles.parameter_server.store import Sparse

__all__ = ["ServerFilters", "WorkerFilters"]


def _dense(plan: Plan, shard: int) -> list[bool]:
    return [not plan.leaves[piece.leaf].table for piece in plan.pieces[shard]]


def _of(kind: Any, filters: Sequence[Any], plan: Plan, shard: int, worker: int) -> Any:
    """Return one end of the messages between a worker and a server."""
    pieces = plan.pieces[shard]
    dense = _dense(plan, shard)
    sizes = [p.stop - p.start if d else 0 for p, d in zip(pieces, dense, strict=True)]
    dtypes = [plan.leaves[piece.leaf].dtype for piece in pieces]
    return kind(filters, sizes, dtypes, stream=worker * len(plan.pieces) + shard)


class _Rows:
    """How rows of key ranges are written: their keys once, and then the hash of these. Local."""

    def __init__(self, plan: Plan, shard: int, filters: Sequence[Any]) -> None:
        most = [each.lists for each in filters if isinstance(each, KeyCaching)]
        self._lists = {
            number: Lists(most[0])
            for number, dense in enumerate(_dense(plan, shard))
            if most and not dense
        }

    def write(self, piece: int, gradient: Any) -> Any:
        """Return the message for a gradient of a key range."""
        if gradient is None or piece not in self._lists:
            return gradient
        name, known = self._lists[piece].find(gradient.indices)
        return name if known else gradient.indices, gradient.values

    def read(self, piece: int, message: Any) -> Any:
        """Return what `write` has written."""
        if message is None or piece not in self._lists:
            return message
        keys, values = message
        return Sparse(self._lists[piece].take(keys), values)


class ServerFilters:
    """At a server: of each of its workers, made when it is first heard of. Local."""

    def __init__(self, plan: Plan, shard: int, settings: Settings) -> None:
        self._plan, self._shard, self._settings = plan, shard, settings
        self._dense = _dense(plan, shard)
        self._decoders: dict[int, PushDecoder] = {}
        self._encoders: dict[int, PullEncoder] = {}
        self._rows: dict[int, _Rows] = {}
        self.pulls = bool(settings.pull_filters)  #: whether pulls are filtered

    def decode(self, worker: int, messages: Sequence[Any]) -> list[Any]:
        """Return the gradients that a worker has pushed, one for each piece."""
        decoder = self._decoders.get(worker)
        if decoder is None:
            decoder = self._decoders[worker] = _of(
                PushDecoder, self._settings.push_filters, self._plan, self._shard, worker
            )
            self._rows[worker] = _Rows(self._plan, self._shard, self._settings.push_filters)
        rows = self._rows[worker]
        return [
            decoder.decode(piece, message) if dense else rows.read(piece, message)
            for piece, (message, dense) in enumerate(zip(messages, self._dense, strict=True))
        ]

    def encode(self, worker: int, arrays: Sequence[Any]) -> list[Any]:
        """Return the message for a worker that pulls all; `arrays` must not change any more."""
        encoder = self._encoders.get(worker)
        if encoder is None:
            encoder = self._encoders[worker] = _of(
                PullEncoder, self._settings.pull_filters, self._plan, self._shard, worker
            )
        return [encoder.encode(piece, array) for piece, array in enumerate(arrays)]


class WorkerFilters:
    """At a worker: of each server. Not safe from several threads."""

    def __init__(self, plan: Plan, worker: int, settings: Settings) -> None:
        shards = range(len(plan.pieces))
        self._plan = plan
        self._dense = [_dense(plan, shard) for shard in shards]
        self._encoders = [
            _of(PushEncoder, settings.push_filters, plan, shard, worker) for shard in shards
        ]
        self._rows = [_Rows(plan, shard, settings.push_filters) for shard in shards]
        self._decoders = [
            _of(PullDecoder, settings.pull_filters, plan, shard, worker) for shard in shards
        ]
        self._pulls = bool(settings.pull_filters)
        self._known: list[list[Any]] | None = None  # what was pulled last, where it is needed

    def encode(self, parts: Sequence[Sequence[Any]]) -> list[list[Any]]:
        """Return the messages for gradients: for each server, of each of its pieces."""
        found = []
        for shard, (encoder, gradients) in enumerate(zip(self._encoders, parts, strict=True)):
            messages = []
            for piece, gradient in enumerate(gradients):
                known = None if self._known is None else self._known[shard][piece]
                if self._dense[shard][piece]:
                    messages.append(encoder.encode(piece, gradient, known))
                else:
                    messages.append(self._rows[shard].write(piece, gradient))
            found.append(messages)
        return found

    def decode(self, spans: Mapping[int, Any]) -> list[Any]:
        """Return the leaves, of what each server has answered to a whole pull."""
        if not self._pulls:
            return self._plan.joined([spans[shard] for shard in range(len(spans))])
        return self._plan.assembled(
            [
                [decoder.decode(piece, message) for piece, message in enumerate(spans[shard])]
                for shard, decoder in enumerate(self._decoders)
            ]
        )

    def saw(self, leaves: Sequence[Any]) -> None:
        """Remember what has been pulled, for filters of pushes that look at it."""
        if any(encoder.needs_parameters for encoder in self._encoders):
            parts = self._plan.parts(leaves)
            self._known = [[np.array(part) for part in pieces] for pieces in parts]

    def statistics(self) -> dict[str, Any]:
        """Return, by name of the filter, entries seen and sent, and bytes before and after."""
        found: dict[str, dict[str, int]] = {}
        for encoder in self._encoders:
            for name, counts in encoder.statistics().items():
                total = found.setdefault(name, dict.fromkeys(counts._fields, 0))
                for field, count in counts._asdict().items():
                    total[field] += count
        return found
