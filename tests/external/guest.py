"""A rank of "another program" in pure Python: speaks what libmpiml speaks, written from the protocol.

    guest = Guest(MPI.COMM_WORLD, "solver")     # the handshake and the manifest
    guest.publish("fields", array)
    result = guest.call("surrogate", "predict", array)
    guest.leave()

It takes its words from docs/design/0008-external.md, and nothing from mpiml but the encoding of
arrays, which has tests of its own.
"""

import socket
import struct
import time
from collections import deque

from mpiml.external.encoding import Named, decode, encode

HEADER = struct.Struct("<BBBBIIIQQII")
REQUEST, REPLY, ERROR, TOPIC, TOPIC_END, STOP_REQUEST, STOP, TOPIC_ACK, LEAVE, GONE = (
    1, 2, 3, 9, 10, 18, 19, 29, 48, 49,
)  # fmt: skip
CHUNK = 1 << 29


class GuestError(Exception):
    """What the library would return: a code, and its text."""

    def __init__(self, code, text):
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text


class Reader:
    """Takes a manifest apart."""

    def __init__(self, data):
        self.data = data
        self.at = 0

    def take(self, form):
        form = struct.Struct("<" + form)
        values = form.unpack_from(self.data, self.at)
        self.at += form.size
        return values if len(values) != 1 else values[0]

    def text(self):
        size = self.take("H")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def many(self, one):
        return [one() for _ in range(self.take("I"))]

    def ranges(self):
        return self.many(lambda: self.take("II"))


def inside(ranges, number):
    return any(first <= number <= last for first, last in ranges)


class Link:
    """The way to one subscriber."""

    def __init__(self, vertex, rank, aux):
        self.vertex, self.rank, self.aux = vertex, rank, aux
        self.open = self.number = 0
        self.waiting = deque()


class Guest:
    """One guest, from its attaching to its leaving."""

    def __init__(self, comm, label, version="0.1.0", library=None):
        from mpi4py import MPI  # here: a plain run of the tests collects this file, too

        self.record = self._record(label, version, library)
        self.comm = comm
        everything = bytearray(512 * comm.size)
        comm.Allgather([self.record, MPI.BYTE], [everything, MPI.BYTE])
        records = [bytes(everything[512 * r : 512 * r + 512]) for r in range(comm.size)]
        self._check(records)
        self.rank = comm.rank
        self.link = comm.Split(0, comm.rank)
        guests = [r for r, record in enumerate(records) if record[1] == 3]
        labels = list(dict.fromkeys(records[r][468:512] for r in guests))
        self.own = comm.Split(1 + labels.index(self.record[468:512]), comm.rank)
        pythons = [r for r in range(comm.size) if r not in guests]
        self.keeper = pythons[guests.index(comm.rank) * len(pythons) // len(guests)]
        self._take_verdict(pythons[0], label)
        self.notes, self.replies, self.sends = [], {}, []
        self.next_id, self.gone, self.partners = 1, set(), set()
        self.inboxes = {name: [] for name in self.topics}
        self.taken = {}  # (publisher, aux) -> how many were taken

    def _record(self, label, version, library):
        from mpi4py import MPI

        library = library or MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0 ")
        host = socket.gethostname().encode()[:64]
        facts = struct.pack("<BBB29x64s", 1, 0, len(host), host).ljust(360, b"\0")
        tail = struct.pack(
            "<16s40s44s", version.encode(), library[:39].encode(), label.encode()
        )
        return struct.pack("<BBBxiI32s8s", 1, 3, 0, 0, 0, b"", b"") + facts + tail

    def _check(self, records):
        if all(record[1] == 3 for record in records):
            raise GuestError(7, "no Python rank")
        for code, start, stop in ((5, 412, 428), (6, 428, 468)):
            if len({record[start:stop] for record in records}) > 1:
                raise GuestError(code, "ranks differ")

    def _take_verdict(self, root, label):
        from mpi4py import MPI

        head = bytearray(16)
        self.link.Bcast([head, MPI.BYTE], root)
        _, code, length = struct.unpack("<B3xiQ", head)
        data = bytearray(length)
        if length:
            self.link.Bcast([data, MPI.BYTE], root)
        if code:
            raise GuestError(code, data.decode())
        self._read(Reader(bytes(data)), label)
        failed = bytearray(4)
        self.link.Allreduce(MPI.IN_PLACE, [failed, MPI.INT], MPI.MAX)
        assert not any(failed)

    def _read(self, r, label):
        version, _, _, _, _, slot = r.take("BBHIII")
        assert (version, slot) == (1, 32768)
        r.ranges()
        for name, first, _count, title in r.many(lambda: (r.text(), *r.take("II"), r.text())):
            if name == label:
                self.vertex, self.title = first + self.own.rank, title
        self.index = self.own.rank
        self.topics = {}
        for topic in r.many(lambda: self._read_topic(r)):
            self.topics[topic["name"]] = topic
        self.services = {
            name: (callers, places, dict(methods))
            for name, callers, places, methods in r.many(
                lambda: (
                    r.text(),
                    r.ranges(),
                    r.many(lambda: r.take("II")),
                    r.many(lambda: (r.text(), r.take("B"))),
                )
            )
        }
        self.servers = dict(r.many(lambda: (r.text(), r.ranges())))
        self.bells = r.many(lambda: (r.text(), r.text(), r.many(lambda: r.take("II"))))
        assert r.at == len(r.data)

    def _read_topic(self, r):
        topic = {"name": r.text()}
        topic["number"], topic["policy"], topic["deliver"], _, topic["n"] = r.take("IBBHI")
        code, ndim = r.take("BB")
        topic["dtype"] = code
        topic["shape"] = None if ndim == 255 else [r.take("q") for _ in range(ndim)]
        publishers = r.ranges()
        topic["links"] = [
            Link(vertex, rank, aux)
            for vertex, rank, aux, heard in r.many(lambda: (*r.take("III"), r.ranges()))
            if inside(heard, self.vertex)
        ]
        hearing = r.many(lambda: (*r.take("III"), r.ranges()))
        mine = [entry for entry in hearing if entry[0] <= self.vertex <= entry[1]]
        topic["publishes"] = inside(publishers, self.vertex)
        speakers = dict(r.many(lambda: r.take("II")))
        topic["hears"] = [
            (aux, vertex, rank)
            for _, _, aux, heard in mine
            for vertex, rank in speakers.items()
            if inside(heard, vertex)
        ]
        return topic

    # -- messages ------------------------------------------------------------------------------

    def send(
        self,
        rank,
        kind,
        target,
        id=0,
        aux=0,
        encoding=0,
        name=b"",
        body=b"",
        buffers=(),
        flags=0,
    ):
        from mpi4py import MPI

        head = HEADER.pack(
            1, kind, encoding, flags, self.vertex, target, len(buffers), id, len(body), len(name),
            aux,
        )  # fmt: skip
        lengths = b"".join(struct.pack("<Q", len(b)) for b in buffers)
        message = head + name + body + lengths
        assert len(message) <= 32768
        self.sends.append((self.link.Isend([message, MPI.BYTE], rank, 1), message))
        for buffer in buffers:
            for at in range(0, len(buffer), CHUNK):
                part = memoryview(buffer)[at : at + CHUNK]
                self.sends.append((self.link.Isend([part, MPI.BYTE], rank, 2), part))

    def poll(self):
        from mpi4py import MPI

        self.sends = [pair for pair in self.sends if not pair[0].Test()]
        status = MPI.Status()
        if not self.link.Iprobe(MPI.ANY_SOURCE, 1, status):
            return False
        rank, data = status.Get_source(), bytearray(status.Get_count(MPI.BYTE))
        self.link.Recv([data, MPI.BYTE], rank, 1)
        fields = HEADER.unpack_from(data)
        _, kind, encoding, _, source, _, count, id, size, length, aux = fields
        at = HEADER.size + length
        body, buffers = bytes(data[at : at + size]), []
        for k in range(count):
            (nbytes,) = struct.unpack_from("<Q", data, at + size + 8 * k)
            memory = bytearray(nbytes)
            for start in range(0, nbytes, CHUNK):
                self.link.Recv([memoryview(memory)[start : start + CHUNK], MPI.BYTE], rank, 2)
            buffers.append(memory)
        self._handle(rank, kind, encoding, source, id, aux, body, buffers)
        return True

    def _handle(self, rank, kind, encoding, source, id, aux, body, buffers):
        if kind in (REPLY, ERROR):
            self.replies[id] = (kind, encoding, body, buffers)
        elif kind == STOP:
            reason, _, status, _, _, length = struct.unpack_from("<BBiIII", body)
            self.notes.append((reason, status, body[18 : 18 + length].decode()))
        elif kind == TOPIC:
            topic = next(t for t in self.topics.values() if t["number"] == aux >> 16)
            self.inboxes[topic["name"]].append((source, id, decode(body, buffers)))
            self.taken[source, aux] = self.taken.get((source, aux), 0) + 1
            self.send(rank, TOPIC_ACK, source, 1, aux)
        elif kind == TOPIC_ACK:
            for topic in self.topics.values():
                for link in topic["links"]:
                    if (link.vertex, link.aux) == (source, aux):
                        link.open -= id or link.open
                        self.flush(topic, link)
        elif kind == GONE:
            self.gone.add(rank)
        else:
            assert kind == TOPIC_END, kind

    def until(self, done, seconds=30):
        end = time.monotonic() + seconds
        while not done():
            if not self.poll():
                time.sleep(0)
            assert time.monotonic() < end, "nothing came"

    # -- what a program does -------------------------------------------------------------------

    def publish(self, name, x):
        topic = self.topics[name]
        assert topic["publishes"]
        encoding, body, buffers = encode(x, name)
        for link in topic["links"]:
            if topic["policy"] == 1:
                self.until(lambda link=link: link.open < topic["n"] or self.notes)
            link.number += 1
            link.waiting.append((link.number, encoding, body, buffers))
            while topic["policy"] != 1 and len(link.waiting) > topic["n"]:
                link.waiting.popleft()
            self.flush(topic, link)
        self.poll()

    def flush(self, topic, link):
        while link.waiting and link.open < topic["n"]:
            number, encoding, body, buffers = link.waiting.popleft()
            link.open += 1
            self.send(
                link.rank, TOPIC, link.vertex, number, link.aux, encoding, b"", body, buffers
            )

    def take(self, name):
        self.until(lambda: self.inboxes[name] or self.notes)
        return self.inboxes[name].pop(0) if self.inboxes[name] else None

    def request(self, rank, vertex, method, value):
        encoding, body, buffers = encode(value, method)
        id = self.next_id
        self.next_id += 1
        self.partners.add(rank)
        self.send(rank, REQUEST, vertex, id, 0, encoding, method.encode(), body, buffers, 1)
        self.until(lambda: id in self.replies)
        kind, encoding, body, buffers = self.replies.pop(id)
        if kind == ERROR:
            assert encoding == 5
            code, length = struct.unpack_from("<iI", body)
            raise GuestError(code, body[8 : 8 + length].decode())
        return decode(body, buffers) if encoding else None

    def call(self, service, method, *args):
        _callers, places, _methods = self.services[service]
        vertex, rank = places[self.index % len(places)]
        return self.request(rank, vertex, method, args)

    def pull(self, server, *names):
        found = self.request(
            self.keeper, self.vertex, f"pull:{server}", Named(dict.fromkeys(names))
        )
        return found, int(found.pop("@version"))

    def push(self, server, version, **gradients):
        import numpy as np

        named = Named({"@version": np.int64(version), **gradients})
        return bool(self.request(self.keeper, self.vertex, f"push:{server}", named))

    def stop(self, reason=1, text="", status=0):
        data = text.encode()
        note = struct.pack("<BBiIII", reason, 0, status, self.vertex, self.rank, len(data))
        self.send(self.keeper, STOP_REQUEST, 0, body=note + data)

    def wait_for_stop(self):
        self.until(lambda: self.notes)
        return self.notes[-1]

    def leave(self, how=None):
        how = (1 if self.notes else 0) if how is None else how
        for topic in self.topics.values():
            for link in topic["links"]:
                self.until(lambda link=link: not link.waiting or self.notes)
                self.send(
                    link.rank, TOPIC_END, link.vertex, link.number, link.aux, int(how > 0)
                )
                self.partners.add(link.rank)
            for aux, vertex, rank in topic["hears"]:
                taken = self.taken.get((vertex, aux), 0)
                self.send(rank, TOPIC_ACK, vertex, 0, aux, body=b"%d" % taken)
                self.partners.add(rank)
        for rank in [*sorted(self.partners - {self.keeper}), self.keeper]:
            self.send(rank, LEAVE, 0, body=bytes((how,)))
            self.until(lambda rank=rank: rank in self.gone)
        self.until(lambda: not self.sends)
        self.link.Free()
