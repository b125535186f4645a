"""`Bucket` and `allreduce` with arrays on devices, in a role, in every mode."""

import numpy as np
import pytest

import mpiml
from mpiml.collectives import Bucket, allreduce
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives import test_in_nodes
from tests.collectives.test_in_nodes import of_role
from tests.fake_device import FakeArray, install

run = test_in_nodes.run  # the fixture: in threads, on ranks, folded


@pytest.fixture
def devices(monkeypatch):
    return install(monkeypatch)


def tree(index, place=FakeArray):
    rng = np.random.default_rng(index)
    return {
        "w": rng.standard_normal((40, 33)).astype(np.float32).view(place),
        "b": [rng.standard_normal(5).astype(np.float16).view(place)],
        "n": np.array(index + 1).view(place),
    }


def total(size):
    """Return the sum by definition, in the order of the members."""
    trees = [tree(i, np.ndarray) for i in range(size)]
    w, b = trees[0]["w"], trees[0]["b"][0].astype(np.float32)
    for other in trees[1:]:
        w, b = w + other["w"], b + other["b"][0].astype(np.float32)
    return {"w": w, "b": [b.astype(np.float16)], "n": np.array(size * (size + 1) // 2)}


def same(got, expected):
    assert np.array_equal(got["w"], expected["w"])
    assert np.array_equal(got["b"][0], expected["b"][0])
    assert np.array_equal(got["n"], expected["n"])


def put(bucket, values):
    bucket["w"][...] = values["w"]
    bucket["b"][0][...] = values["b"][0]
    bucket["n"][...] = values["n"]


def in_buckets():
    context = mpiml.context()
    index, size = context.index, context.replicas
    with Bucket(like=tree(index)) as bucket:
        assert all(type(view) is FakeArray for view in (bucket["w"], bucket["n"]))
        assert bucket.statistics()["way"].startswith("device on a fake device")
        assert not bucket["w"].any()
        put(bucket, tree(index))
        bucket.allreduce()
        same(bucket.tree, total(size))
        put(bucket, tree(index))
        bucket.iallreduce("sum").wait(20)
        same(bucket.tree, total(size))
        put(bucket, tree(index))
        bucket.reduce_scatter()
        for flat, stripe in zip(bucket.flat, bucket.stripes, strict=True):
            outside = np.ones(len(flat), bool)
            outside[stripe] = False
            flat[outside] = 99
        bucket.allgather()
        same(bucket.tree, total(size))
        put(bucket, tree(index))
        bucket.broadcast(root=1)
        same(bucket.tree, tree(1))
    same(bucket.tree, tree(1))  # the views keep the memory
    with pytest.raises(ServiceGoneError):
        bucket.allreduce()


def test_buckets(run, devices):
    run(of_role(in_buckets, run.replicas))
    assert devices[0].calls.count("combine") > 0


def begun():
    context = mpiml.context()
    with Bucket(like=np.zeros(100, np.float32).view(FakeArray)) as bucket:
        for begin in (bucket.iallreduce, bucket.ireduce_scatter, bucket.iallgather):
            bucket.tree[:] = 1
            begin().wait(20)
        bucket.tree[:] = context.index
        bucket.ibroadcast(1).wait(20)
        assert np.all(bucket.tree == 1)


def test_what_is_begun_waits_for_what_its_thread_has_done(run, devices):
    run(of_role(begun, run.replicas))
    calls = devices[0].calls
    assert "settle" not in calls
    assert calls.count("mark") == calls.count("marked") > 0


def outside_of_buckets():
    context = mpiml.context()
    index, size = context.index, context.replicas
    x = tree(index)
    result = allreduce(x)
    same(result, total(size))
    same(x, tree(index))
    assert type(result["w"]) is FakeArray
    out = {
        "w": np.zeros_like(x["w"]),
        "b": [np.zeros_like(x["b"][0])],
        "n": np.zeros_like(x["n"]),
    }
    assert allreduce(x, out=out) is out
    same(out, total(size))
    mixed = allreduce({"near": np.ones(3), "far": np.full(70, 2.0).view(FakeArray)}, "prod")
    assert np.all(mixed["near"] == 1)
    assert type(mixed["near"]) is np.ndarray
    assert np.all(mixed["far"] == 2.0**size)
    assert type(mixed["far"]) is FakeArray


def test_arrays_outside_of_buckets(run, devices):
    run(of_role(outside_of_buckets, run.replicas))
    assert devices[0].calls.count("combine") > 0


def one_in_host_memory(call):
    place = FakeArray if mpiml.context().index else np.ndarray
    with pytest.raises(UsageError, match=r"the same .* on all .* device"):
        call(np.zeros(3).view(place))


@pytest.mark.parametrize("call", [allreduce, lambda x: Bucket(like=x)])
def test_members_must_agree_where_their_arrays_are(run, devices, call):
    run(of_role(one_in_host_memory, run.replicas, call))


def refused():
    mixed = [np.zeros(3).view(FakeArray), np.zeros(3)]
    with pytest.raises(UsageError, match=r"got \[1\] in host memory beside arrays on a device"):
        Bucket(like=mixed)
    with pytest.raises(UsageError, match="result='shared' is for host memory"):
        Bucket(like=mixed[:1], result="shared")
    apart = [np.zeros(3).view(FakeArray), np.zeros(3).view(FakeArray)]
    apart[1].index = 1
    with pytest.raises(UsageError, match=r"\[0\] on device 0 and \[1\] on device 1"):
        Bucket(like=apart)


def test_what_a_bucket_refuses(run, devices):
    run(of_role(refused, run.replicas))


def compressed():
    from mpiml.collectives.compression import Cast

    context = mpiml.context()
    with Bucket(like=np.zeros(100, np.float32).view(FakeArray)) as bucket:
        bucket.tree[:] = context.index + 1
        bucket.allreduce(compress=Cast("float16"))
        assert np.all(bucket.tree == context.replicas * (context.replicas + 1) / 2)


def test_compression_goes_through_host_memory(run, devices):
    run(of_role(compressed, run.replicas))
