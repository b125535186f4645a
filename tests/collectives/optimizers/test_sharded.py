"""ShardedOptimizer: the bits of allreduce and a step on every member, state in stripes."""

import ml_dtypes
import numpy as np
import pytest

from mpiml import optim
from mpiml.collectives import Bucket, FusedOptimizer, ShardedOptimizer
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives.everywhere import everywhere, modes
from tests.fake_device import FakeArray, install

RULES = {
    "sgd": lambda: optim.SGD(0.1, weight_decay=0.01),
    "momentum": lambda: optim.Momentum(lambda done: 0.1 / (1 + done)),
    "adagrad": lambda: optim.Adagrad(0.1),
    "adam": lambda: optim.Adam(0.1),
    "adamw": lambda: optim.AdamW(0.1, weight_decay=0.1),
}
SHAPES = {"w": (33, 7), "b": (5,), "s": ()}


def weights(seed, dtype):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def put(bucket, values):
    for name, value in values.items():
        bucket[name][...] = value


def like(dtype="f4"):
    return {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}


def same(a, b):
    return all(
        np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes() for name in SHAPES
    )


def several_hosts(bucket):
    return bucket.statistics()["hosts"] > 1


@modes
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", ml_dtypes.bfloat16])
def test_bits_of_allreduce_and_steps_on_every_member(mode, rule, dtype):
    op = "mean" if dtype in ("f4", "f2") else "sum"
    full = "f8" if dtype == "f8" else "f4"

    def body(comm):
        params, gradients = Bucket(comm, like=like(dtype)), Bucket(comm, like=like(dtype))
        reduced = Bucket(comm, like=like(dtype))
        put(params, weights(params.index, dtype))  # those of member 0 count
        model = ShardedOptimizer(params, gradients, RULES[rule]())
        whole = {name: array.astype(full) for name, array in weights(0, dtype).items()}
        optimizer = RULES[rule]()
        state = {name: optimizer.init(array) for name, array in whole.items()}
        for step in (1, 2, 3):
            mine = weights([params.index, step], dtype)
            put(gradients, mine)
            put(reduced, mine)
            model.step(op)
            reduced.allreduce(op)
            for name, array in whole.items():
                optimizer.apply(array, reduced[name], state[name], step)
        assert model.steps == 3
        expected = {name: array.astype(dtype) for name, array in whole.items()}
        if several_hosts(params):  # sums of sums: the order depends on the hosts
            for name, array in expected.items():
                rough = 1e-5 if full == dtype == "f4" else 1e-12 if full == "f8" else 0.05
                a, b = params[name].astype("f8"), array.astype("f8")
                np.testing.assert_allclose(a, b, rtol=rough, atol=rough)
        else:
            assert same(params.tree, expected)
        kept = params.size * model.statistics()["state"]
        states = len(optimizer.states) + (dtype not in ("f4", "f8"))
        padded = sum(r.count for r in params.regions.regions) * np.dtype(full).itemsize
        assert kept <= states * (padded + params.size * 128)

    everywhere(mode, body)


@modes
def test_checkpoint_goes_on_with_the_same_bits(mode):
    def body(comm):
        for dtype in ("f4", "f2"):
            params, gradients = Bucket(comm, like=like(dtype)), Bucket(comm, like=like(dtype))
            put(params, weights(0, dtype))
            model = ShardedOptimizer(params, gradients, optim.Adam(0.1))
            for step in (1, 2):
                put(gradients, weights([params.index, step], dtype))
                model.step()
            kept = model.state_dict()
            assert kept["params"]["w"].dtype == "f4"
            put(gradients, weights([params.index, 3], dtype))
            model.step()
            after = {name: array.copy() for name, array in params.tree.items()}
            others = Bucket(comm, like=like(dtype))
            other = ShardedOptimizer(others, gradients, optim.Adam(0.5))
            other.load_state_dict(kept)
            rounded = {name: a.astype(dtype) for name, a in kept["params"].items()}
            assert same(others.tree, rounded)
            put(gradients, weights([params.index, 3], dtype))
            other.step()
            assert (other.steps, other.optimizer.lr) == (3, 0.1)
            assert same(others.tree, after)

    everywhere(mode, body)


@modes
def test_checkpoint_of_the_fused_one(mode):
    def body(comm):
        params, gradients = Bucket(comm, like=like()), Bucket(comm, like=like())
        fused = FusedOptimizer(gradients, weights(0, "f4"), optim.Adam(0.1))
        sharded = ShardedOptimizer(params, gradients, optim.Adam(0.1))
        put(gradients, weights(gradients.index, "f4"))
        fused.step()
        sharded.load_state_dict(fused.state_dict())
        assert same(params.tree, fused.tree)
        put(gradients, weights(gradients.index + 9, "f4"))
        fused.step()
        put(gradients, weights(gradients.index + 9, "f4"))
        sharded.step()
        if not several_hosts(params):
            assert same(params.tree, fused.tree)

    everywhere(mode, body)


@modes
def test_what_does_not_go_together_is_an_error_on_all(mode):
    def body(comm):
        params = Bucket(comm, like=like())
        for other, text in (
            ({**like(), "b": np.zeros(6, "f4")}, r"\['b'\] \(5,\) .* and \['b'\] \(6,\)"),
            (like("f2"), r"\['b'\] \(5,\) float32 of the .* and \['b'\] \(5,\) float16"),
            ({"b": like()["b"]}, r"of the parameters and fewer"),
        ):
            with pytest.raises(UsageError, match=f"^ShardedOptimizer: expected .*{text}"):
                ShardedOptimizer(params, Bucket(comm, like=other), optim.SGD(0.1))
        whole = Bucket(comm, like=np.zeros(3, "i4"))
        with pytest.raises(UsageError, match="expected parameters of floats, got int32"):
            ShardedOptimizer(whole, Bucket(comm, like=np.zeros(3, "i4")), optim.SGD(0.1))
        for wrong, text in (
            (params, "expected two buckets, .* got one for both"),
            (like(), r"params: expected an mpiml\.collectives\.Bucket, got dict"),
        ):
            gradients = Bucket(comm, like=like())
            last = params.index == params.size - 1
            with pytest.raises(UsageError, match=f"^ShardedOptimizer: {text}"):
                ShardedOptimizer(
                    wrong if last else params, params if wrong is params else gradients,
                    optim.SGD(0.1),
                )  # fmt: skip
        odd = params.index == params.size - 1
        if params.size > 1:
            gradients = Bucket(comm, like=like())
            with pytest.raises(UsageError, match="expected the same optimizer and parameters"):
                ShardedOptimizer(params, gradients, optim.SGD(0.2 if odd else 0.1))

    everywhere(mode, body)


@modes
def test_members_that_differ_in_a_step(mode):
    def body(comm):
        params, gradients = Bucket(comm, like=like()), Bucket(comm, like=like())
        model = ShardedOptimizer(params, gradients, optim.SGD(0.1))
        if params.size > 1:
            model.optimizer.lr = 0.3 if params.index == 0 else 0.1
            with pytest.raises(UsageError, match=r"ShardedOptimizer.step.*lr=0\.[13]"):
                model.step()
        assert model.steps == 0
        with pytest.raises(UsageError, match=r"step: op: expected 'mean' or 'sum', got 'max'"):
            model.step("max")

    everywhere(mode, body)


@pytest.mark.mpi(min_size=2)
def test_buckets_of_other_members():
    from mpi4py import MPI

    own, alone = Bucket(MPI.COMM_WORLD, like=like()), Bucket(MPI.COMM_SELF, like=like())
    with pytest.raises(UsageError, match="expected buckets of the same members"):
        ShardedOptimizer(own, alone, optim.SGD(0.1))


@modes
def test_closed_bucket(mode):
    def body(comm):
        bucket = Bucket(comm, like=like())
        model = ShardedOptimizer(bucket, Bucket(comm, like=like()), optim.SGD(0.1))
        bucket.close()
        with pytest.raises(ServiceGoneError, match="the bucket is closed"):
            model.step()

    everywhere(mode, body)


@modes
def test_device_arrays(mode, monkeypatch):
    install(monkeypatch)

    def body(comm):
        found = []
        for place in (np.ndarray, FakeArray):
            tree = {name: array.view(place) for name, array in like().items()}
            params, gradients = Bucket(comm, like=tree), Bucket(comm, like=tree)
            assert type(params["w"]) is place
            put(params, weights(0, "f4"))
            model = ShardedOptimizer(params, gradients, optim.AdamW(0.1))
            for step in (1, 2):
                put(gradients, weights([params.index, step], "f4"))
                model.step()
            found.append((params, gradients, model.state_dict()))
        (host, _, a), (device, gradients, b) = found
        if several_hosts(host):
            return
        assert same(host.tree, device.tree)
        assert same(a["params"], b["params"])
        assert same(a["state"]["exp_avg_sq"], b["state"]["exp_avg_sq"])
        with pytest.raises(UsageError, match="both buckets in host memory, or both on devices"):
            ShardedOptimizer(host, gradients, optim.SGD(0.1))
        with pytest.raises(UsageError, match="expected gradients in host memory"):
            FusedOptimizer(gradients, like(), optim.SGD(0.1))

    everywhere(mode, body)
