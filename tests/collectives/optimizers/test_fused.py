"""FusedOptimizer: the bits of allreduce and an optimizer on every member, at any number."""

import ml_dtypes
import numpy as np
import pytest

from mpiml import optim
from mpiml.collectives import Bucket, FusedOptimizer
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives.everywhere import everywhere, modes

RULES = {
    "sgd": lambda: optim.SGD(0.1, weight_decay=0.01),
    "nesterov": lambda: optim.Momentum(lambda done: 0.1 / (1 + done), nesterov=True),
    "adagrad": lambda: optim.Adagrad(0.1),
    "adam": lambda: optim.Adam(0.1),
    "adamw": lambda: optim.AdamW(0.1, weight_decay=0.1),
}
SHAPES = {"w": (33, 7), "b": (5,), "s": ()}


def weights(seed=0, dtype="f4"):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def gradients(member, step, dtype):
    rng = np.random.default_rng([member, step])
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in SHAPES.items()}


def fill(bucket, step, dtype):
    for name, values in gradients(bucket.index, step, dtype).items():
        bucket[name][...] = values


def expected(comm, rule, steps, dtype, op, full="f4"):
    """What members get that reduce in place and do every step themselves."""
    params = weights(dtype=full)
    like = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
    optimizer = RULES[rule]()
    state = {name: optimizer.init(param) for name, param in params.items()}
    with Bucket(comm, like=like) as bucket:
        for step in range(1, steps + 1):
            fill(bucket, step, dtype)
            bucket.allreduce(op)
            for name, param in params.items():
                optimizer.apply(param, bucket[name], state[name], step)
    return params


def same(a, b):
    return all(a[name].tobytes() == b[name].tobytes() for name in SHAPES)


@modes
@pytest.mark.parametrize("rule", RULES)
def test_bits_of_allreduce_and_steps_on_every_member(mode, rule):
    def body(comm):
        for dtype, full, op in (
            ("f4", "f4", "mean"),
            ("f8", "f8", "sum"),
            ("f2", "f4", "mean"),
            (ml_dtypes.bfloat16, "f4", "sum"),
        ):
            like = {name: np.zeros(shape, dtype) for name, shape in SHAPES.items()}
            bucket = Bucket(comm, like=like)
            start = weights(bucket.index, full)  # those of member 0 count
            with bucket, FusedOptimizer(bucket, start, RULES[rule]()) as model:
                assert same(model.tree, weights(0, full))
                for step in (1, 2, 3):
                    fill(bucket, step, dtype)
                    model.step(op)
                assert model.steps == 3
                assert same(model.tree, expected(comm, rule, 3, dtype, op, full))
                assert same(bucket.tree, gradients(bucket.index, 3, dtype)) or several(bucket)

    everywhere(mode, body)


def several(bucket):
    return bucket.statistics()["hosts"] > 1


@modes
def test_parameters_are_one_read_only_array_of_the_host(mode):
    def body(comm):
        with Bucket(comm, like=np.zeros(1000)) as bucket:
            model = FusedOptimizer(bucket, np.zeros(1000), optim.SGD(1.0))
            assert not model.tree.flags.writeable
            assert model.statistics()["parameters"] == 8000
            assert model.statistics()["state"] == 0
            bucket.tree[:] = 1.0
            model.step("sum")
            assert np.all(model.tree == -float(bucket.size))
            model.close()
            assert np.all(model.tree == -float(bucket.size))  # the view keeps its memory

    everywhere(mode, body)


@modes
def test_state_is_divided_among_the_members_of_a_host(mode):
    def body(comm):
        with Bucket(comm, like=np.zeros(64 * 60)) as bucket:
            with FusedOptimizer(bucket, np.zeros(64 * 60), optim.Adam()) as model:
                whole = 2 * 8 * 64 * 60
                members = len(bucket.team.local)
                assert model.statistics()["state"] <= whole / members + 2 * 64

    everywhere(mode, body)


@modes
def test_checkpoint_goes_on_with_the_same_bits(mode):
    def body(comm):
        with Bucket(comm, like=weights()) as bucket:
            model = FusedOptimizer(bucket, weights(), optim.Adam(0.1))
            for step in (1, 2):
                fill(bucket, step, "f4")
                model.step()
            kept = model.state_dict()
            assert kept["step"] == 2
            assert same(kept["params"], model.tree)
            assert kept["state"].keys() == {"exp_avg", "exp_avg_sq"}
            fill(bucket, 3, "f4")
            model.step()
            after = {name: array.copy() for name, array in model.tree.items()}
            other = FusedOptimizer(bucket, weights(7), optim.Adam(0.5))
            other.load_state_dict(kept)
            assert (other.steps, other.optimizer.lr) == (2, 0.1)
            assert same(other.tree, kept["params"])
            fill(bucket, 3, "f4")
            other.step()
            assert same(other.tree, after)
            model.close(), other.close()

    everywhere(mode, body)


def test_checkpoint_of_two_members_goes_on_with_three():
    kept, ends = {}, []

    def train(steps, load):
        def body(comm):
            with Bucket(comm, like=weights()) as bucket:
                with FusedOptimizer(bucket, weights(), optim.Adam(0.1)) as model:
                    if load:
                        model.load_state_dict(kept)
                    for step in steps:
                        for name, values in gradients(0, step, "f4").items():
                            bucket[name][...] = values  # the same on all: so is the mean
                        model.step()
                    state = model.state_dict()
                    if bucket.index == 0:
                        ends.append(state)

        return body

    everywhere(2, train((1, 2), False))
    kept.update(ends.pop())
    everywhere(3, train((3,), True))
    everywhere(1, train((1, 2, 3), False))
    three, one = ends
    for name in SHAPES:
        np.testing.assert_allclose(three["params"][name], one["params"][name], rtol=1e-5)
        for key in ("exp_avg", "exp_avg_sq"):
            a, b = three["state"][key][name], one["state"][key][name]
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7)


@modes
def test_what_does_not_go_together_is_an_error_on_all(mode):
    def body(comm):
        with Bucket(comm, like=weights()) as bucket:
            odd = bucket.index == bucket.size - 1
            params = weights()
            with pytest.raises(UsageError, match="leaf 0 is"):
                FusedOptimizer(bucket, {**params, "b": np.zeros(6, "f4")}, optim.SGD(0.1))
            if bucket.size == 1:
                return
            wrong = np.zeros(6 if odd else 5, "f4")
            with pytest.raises(UsageError, match=r"leaf 0 is .*\(6,\)"):
                FusedOptimizer(bucket, {**params, "b": wrong}, optim.SGD(0.1))
            with pytest.raises(UsageError, match="expected the same optimizer and parameters"):
                FusedOptimizer(bucket, params, optim.SGD(0.2 if odd else 0.1))

    everywhere(mode, body)


@modes
def test_members_that_differ_in_a_step(mode):
    def body(comm):
        with Bucket(comm, like=weights()) as bucket:
            if bucket.size == 1:
                return
            optimizer = optim.SGD(0.1)
            with FusedOptimizer(bucket, weights(), optimizer, name="net") as model:
                if bucket.index == 0:
                    optimizer.lr = 0.3
                with pytest.raises(UsageError, match=r"FusedOptimizer.step.*lr=0\.[13].*'net'"):
                    model.step()
                assert model.steps == 0
                assert same(model.tree, weights())
                optimizer.lr = 0.1
                model.step()  # as usable as before

    everywhere(mode, body)


@modes
def test_checkpoint_of_something_else_changes_nothing(mode):
    def body(comm):
        with Bucket(comm, like=weights()) as bucket:
            with FusedOptimizer(bucket, weights(), optim.Adagrad()) as model:
                good = model.state_dict()
                bad = [
                    ({"step": -1}, "step: expected a number >= 0"),
                    ({"state": {}}, r"state: expected \['sum'\], got \[\]"),
                    ({"params": {"w": np.zeros(3, "f4")}}, "expected 3 arrays, got 1"),
                    ({"params": {**good["params"], "b": np.zeros(5, "i4")}}, "got .*int32"),
                    ({"optimizer": optim.SGD(0.1).state_dict()}, "name='Adagrad'"),
                ]
                for change, text in bad:
                    changed = {**good, **change} if bucket.index == bucket.size - 1 else good
                    with pytest.raises(UsageError, match=text):
                        model.load_state_dict(changed)
                    assert same(model.tree, weights())
                with pytest.raises(UsageError, match="expected what state_dict"):
                    model.load_state_dict({"step": 1})

    everywhere(mode, body)


def test_operation_and_closed_bucket():
    def body(comm):
        bucket = Bucket(comm, like=weights())
        model = FusedOptimizer(bucket, weights(), optim.SGD(0.1))
        with pytest.raises(
            UsageError, match=r"^FusedOptimizer.step: op: expected 'mean' or 'sum'"
        ):
            model.step("max")
        bucket.close()
        with pytest.raises(ServiceGoneError, match="the bucket is closed"):
            model.step()

    everywhere(1, body)


@modes
@pytest.mark.parametrize("library", ["torch", "jax"])
def test_parameters_of_other_libraries(mode, library):
    module = pytest.importorskip(library)
    module = module.numpy if library == "jax" else module

    def body(comm):
        params = weights()
        like = {name: np.zeros(shape, "f4") for name, shape in SHAPES.items()}
        others = {name: module.asarray(value) for name, value in params.items()}
        with Bucket(comm, like=like) as bucket:
            model = FusedOptimizer(bucket, others, optim.SGD(0.5))
            assert same(model.tree, params)
            for name in SHAPES:
                bucket[name][...] = 1
            model.step("mean")
        assert all((model.tree[n] == params[n] - np.float32(0.5)).all() for n in SHAPES)

    everywhere(mode, body)
