"""`CacherNode`: who asks the target, how often, and what readers get."""

import math
import threading
import time

import numpy as np
import pytest

import mpiml
from mpiml.roles.cacher import _Cacher
from tests.playing import LIMIT, Gate, both, launched

HOUR = 3600.0


class Source(Gate):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.weights = np.arange(5000.0)

    def pull(self, scale=1.0, *, names=()):
        self.calls += 1
        return {"w": self.weights * scale, "names": list(names)}

    def count(self):
        self.calls += 1
        return self.calls

    def held(self, tag):
        self.calls += 1
        return self.hold(tag)

    def fails(self, key):
        self.calls += 1
        raise KeyError(key)

    def unreadable(self):
        self.calls += 1
        return Unreadable()

    def set(self, value):
        """Change it."""
        self.weights[:] = value

    def made(self):
        return self.calls

    def items(self, n):
        yield from range(n)

    async def later(self):
        self.calls += 1
        return "later"

    def state_dict(self):
        return {}


class Unreadable:
    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise OSError("cannot be read here")


READS = ("pull", "count", "held", "fails", "unreadable", "later")


def cached(mode, body, readers=1, concurrency=1, **settings):
    """Run ``body(cache, source)`` on `readers` nodes; their results on rank 0."""
    settings = {"stale": HOUR, "methods": READS} | settings
    program = mpiml.Program("cached")
    source = program.add_node(mpiml.ServiceNode(Source), label="source", concurrency=2)
    cache = program.add_node(
        mpiml.CacherNode(source, **settings), label="cache", concurrency=concurrency
    )
    program.add_node(mpiml.PyNode(body, cache, source), label="body", replicas=readers)
    result = launched(mode, program)
    return None if result is None else result["body"]


@both
def test_equal_reads_ask_once_and_each_gets_its_own(mode):
    def body(cache, source):
        assert dir(cache) == dir(source)
        first, second = cache.pull(2.0, names=["w"]), cache.pull(2.0, names=["w"])
        assert (first["w"] == np.arange(5000.0) * 2.0).all()
        first["w"][:] = -1.0  # the receiver's own
        assert second["w"][1] == 2.0
        assert cache.pull(2.0, names=["w"])["w"][1] == 2.0
        assert source.made() == 1
        assert cache.pull(3.0)["w"][1] == 3.0
        assert cache.pull(3.0, names=())["w"][1] == 3.0  # other arguments, as they are written
        assert source.made() == 3
        assert cache.later() == cache.futures.later().result() == "later"
        assert source.made() == 4

    cached(mode, body)


@both
def test_what_is_not_cached_is_passed_on(mode):
    def body(cache, source):
        cache.pull()
        cache.set(7.0)
        assert source.read() == []
        assert cache.pull()["w"][0] == 0.0  # a change does not empty the cache
        assert [cache.note(1), cache.note(1)] == [1, 1]
        assert source.read() == [1, 1]
        with cache.stream.items(1000) as stream:
            assert [next(stream), next(stream)] == [0, 1]
        assert list(cache.stream.items(3)) == [0, 1, 2]
        for name in ("state_dict", "missing", "_read"):
            with pytest.raises(mpiml.UnknownMethodError, match="cache/0"):
                getattr(cache, name)

    cached(mode, body)


@both
def test_errors_go_to_the_reader_and_are_not_kept(mode):
    def body(cache, source):
        for expected in (1, 2):
            with pytest.raises(KeyError, match="nothing") as caught:
                cache.fails("nothing")
            assert "source/0" in str(caught.value.__cause__)
            assert source.made() == expected
        for expected in (3, 4):
            with pytest.raises(OSError, match="cannot be read here"):
                cache.unreadable()
            assert source.made() == expected

    cached(mode, body)


@pytest.mark.parametrize("concurrency", [1, 3])
@both
def test_readers_that_come_meanwhile_share_one_call(mode, concurrency):
    def body(cache, source):
        futures = [cache.futures.held("x") for _ in range(5)]
        limit = time.monotonic() + LIMIT
        while not source.made():  # the first call has begun
            assert time.monotonic() < limit
        assert cache.count() == 2  # the cacher goes on meanwhile; no other call came between
        assert not any(future.done() for future in futures)
        source.open()
        assert mpiml.gather(futures) == ["x"] * 5
        assert cache.held("x") == "x"
        assert source.made() == 2

    cached(mode, body, concurrency=concurrency)


@both
def test_many_nodes_read(mode):
    def body(cache, source):
        return cache.count()

    assert cached(mode, body, readers=1 if mode == "mpi" else 4) in (None, [1] * 4, [1])


def test_a_stale_answer_is_asked_for_again(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("mpiml.roles.cacher._clock", lambda: now[0])

    def body(cache, source):
        assert [cache.count(), cache.count()] == [1, 1]
        now[0] = 10.0
        assert cache.count() == 1
        now[0] = 10.1
        assert [cache.count(), cache.count()] == [2, 2]

    cached("threads", body, stale=10.0)


@both
def test_answers_in_use_are_renewed(mode):
    def body(cache, source):
        seen = 0
        while seen < 5:  # nobody but the renewals makes it move: they are long from stale
            seen = cache.count()
        return seen

    assert cached(mode, body, refresh=0.001) in (None, [5])


@both
def test_renewals_end_with_the_program_and_their_errors_with_the_answer(mode):
    def body(cache, source):
        cache.later()
        cache.later()
        limit = time.monotonic() + LIMIT
        while source.made() < 2:
            assert time.monotonic() < limit, "expected the answer to be renewed"
        mpiml.context().stop()
        assert mpiml.context().wait_for_stop(LIMIT)

    cached(mode, body, refresh=0.001)
    for thread in threading.enumerate():
        if thread.name.startswith("mpiml renewals of "):
            thread.join(LIMIT)
            assert not thread.is_alive()


class Refuses:
    @property
    def futures(self):
        raise OSError("cannot be asked now")


def test_renewals_go_on_after_an_error(monkeypatch):
    send, failed = _Cacher._send, []

    def fails_at_first(cacher, asked):
        target = cacher._target
        if asked.renews and len(failed) < 3:
            failed.append(asked)
            cacher._target = Refuses()
        try:
            send(cacher, asked)
        finally:
            cacher._target = target

    monkeypatch.setattr(_Cacher, "_send", fails_at_first)

    def body(cache, source):
        seen = 0
        while seen < 3:
            seen = cache.count()

    cached("threads", body, refresh=0.001)
    assert [str(asked.error) for asked in failed] == ["cannot be asked now"] * 3


@both
def test_entries_are_bounded(mode):
    def body(cache, source):
        for n in range(4):
            cache.pull(float(n))
        cache.pull(3.0)
        assert source.made() == 4
        cache.pull(0.0)
        assert source.made() == 5

    cached(mode, body, max_entries=2)


def test_each_replica_has_its_own_and_a_cacher_may_read_another():
    program = mpiml.Program("two")
    source = program.add_node(mpiml.ServiceNode(Source), label="source")
    inner = program.add_node(mpiml.CacherNode(source, stale=HOUR), label="inner")
    outer = program.add_node(mpiml.CacherNode(inner, stale=HOUR), label="outer", replicas=2)

    def body(caches, source):
        assert caches.count() == [1, 1]
        assert dir(caches[0]) == dir(source)

    program.add_node(mpiml.PyNode(body, outer, source), label="body")
    mpiml.launch(program)
    assert "inner  CacherNode(Source)" in str(program)


def test_a_target_that_has_gone_is_an_error():
    with mpiml.testing.running(_program(), manual=["body"]) as run:
        cache, source = run.client("cache"), run.client("source")
        assert cache.pull()["w"][1] == 1.0
        node = source.__dict__["_target"].engine  # one process: stop the target's server
        server = next(n for n in run._runtime.nodes if n.title == "source/0").server
        server.fail_all(OSError("its rank died"))
        with pytest.raises(mpiml.ServiceGoneError, match="source/0"):
            cache.count()
        with pytest.raises(mpiml.ServiceGoneError, match="source/0"):
            cache.pull(9.0)
        assert not node.closed


def _program():
    program = mpiml.Program("gone")
    source = program.add_node(mpiml.ServiceNode(Source), label="source")
    cache = program.add_node(mpiml.CacherNode(source, stale=HOUR), label="cache")
    program.add_node(mpiml.PyNode(lambda cache: None, cache), label="body")
    return program


# -- while the graph is built ----------------------------------------------------------------------


def test_wrong_targets_and_settings_are_refused():
    program = mpiml.Program("wrong")
    sources = program.add_node(mpiml.ServiceNode(Source), label="sources", replicas=2)
    body = program.add_node(mpiml.PyNode(lambda: None), label="body")
    with pytest.raises(
        mpiml.UsageError, match=r"handle of one service.*CacherNode\(handles\[0\]"
    ):
        mpiml.CacherNode(sources)
    with pytest.raises(mpiml.UsageError, match="expected a service, got <handle body/0"):
        mpiml.CacherNode(body)
    with pytest.raises(mpiml.UsageError, match="handle of a service, got type"):
        mpiml.CacherNode(Source)
    source = sources[0]
    for settings, text in (
        ({"stale": 0}, "stale: expected seconds above 0, got 0"),
        ({"stale": True}, "stale: expected seconds above 0, got True"),
        ({"stale": "1"}, "stale: expected seconds above 0, got '1'"),
        ({"stale": math.nan}, "stale: expected seconds above 0, got nan"),
        ({"refresh": [1]}, r"refresh: expected seconds above 0, got \[1\]"),
        ({"refresh": math.inf, "stale": math.inf}, "refresh < stale"),
        ({"stale": None}, "stale: expected seconds above 0, got None"),
        ({"refresh": -1.0}, "refresh: expected seconds above 0"),
        ({"refresh": 2.0, "stale": 2.0}, "refresh < stale"),
        ({"max_entries": 0}, "max_entries: expected at least 1"),
        ({"methods": "pull"}, "methods: expected a list of names"),
        ({"methods": ["push"]}, "Source serves no 'push'; served are: count"),
        ({"methods": ["items"]}, "items is a generator"),
    ):
        with pytest.raises(mpiml.UsageError, match=text):
            mpiml.CacherNode(source, **settings)
    with pytest.raises(mpiml.UsageError, match="not for a CacherNode"):
        mpiml.CacherNode(source).configure(source)
    assert mpiml.CacherNode(source, 1e12, math.inf).kwargs["stale"] == math.inf


def test_the_allow_list_of_the_target_holds():
    program = mpiml.Program("few")
    source = program.add_node(
        mpiml.ServiceNode(Source), label="source", allow=["pull", "count"]
    )
    node = mpiml.CacherNode(source)
    assert sorted(mpiml.nodes.public_methods(node.cls)) == ["count", "pull"]


def test_in_a_group_the_class_of_the_member_counts():
    class Other:
        def other(self):
            return 1

    program = mpiml.Program("group")
    with program.group("many"):
        first = program.add_node(mpiml.ServiceNode(Source))
        others = program.add_node(mpiml.ServiceNode(Other), replicas=2)
    assert "pull" in mpiml.nodes.public_methods(mpiml.CacherNode(first).cls)
    assert list(mpiml.nodes.public_methods(mpiml.CacherNode(others[1]).cls)) == ["other"]


def test_all_ranks_describe_it_alike():
    from mpiml.digest import describe

    def build(stale):
        program = mpiml.Program("alike")
        source = program.add_node(mpiml.ServiceNode(Source), label="source")
        program.add_node(mpiml.CacherNode(source, stale=stale), label="cache")
        return describe(program)

    assert build(1.0) == build(1.0)
    assert build(1.0) != build(2.0)


def test_threads_of_one_node_share_too():
    def body(cache, source):
        got = []
        threads = [
            threading.Thread(target=mpiml.context().bind(lambda: got.append(cache.count())))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert got == [1] * 4

    cached("threads", body)
