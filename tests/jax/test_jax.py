"""`mpiml.jax`: gradient trees, in threads and on ranks, between and inside of jitted functions."""

import subprocess
import sys

import numpy as np
import pytest

import mpiml

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import mpiml.jax  # noqa: E402
from mpiml.collectives.compression import Cast, ErrorFeedback, TopK  # noqa: E402
from mpiml.jax import GradientSync  # noqa: E402

#: In threads a test runs with 2 learners and with 4, on ranks with as many as there are.
each = pytest.mark.parametrize(
    "mode", ["threads-2", "threads-4", pytest.param("mpi", marks=pytest.mark.mpi(min_size=2))]
)
SMALL = {"bucket_bytes": 200}


def learn(mode, body):
    """Run `body` as a role of learners; return what each of them returns, None but on rank 0."""
    program = mpiml.Program("learn")
    count = mpiml.FILL if mode == "mpi" else int(mode.rpartition("-")[2])
    program.add_node(mpiml.PyNode(body), label="learner", replicas=count)
    comm = None
    if mode == "mpi":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
    result = mpiml.launch(program, comm=comm)
    return result["learner"] if comm is None or comm.rank == 0 else None


def params(seed=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "layers": [
            {"w": jax.random.normal(keys[0], (4, 8), dtype), "b": jnp.zeros(8, dtype)},
            {"w": jax.random.normal(keys[1], (8, 2), dtype), "b": jnp.ones(2, dtype)},
        ],
        "scale": jnp.asarray(1.5, dtype),
        "nothing": None,
    }


def batch(seed, rows):
    return jax.random.uniform(jax.random.key(1000 + seed), (rows, 4))


def loss_of(p, x):
    h = x
    for layer in p["layers"]:
        h = jnp.tanh(h @ layer["w"] + layer["b"])
    return jnp.mean((p["scale"] * h - x[:, :2]) ** 2)


grad_of = jax.jit(jax.grad(loss_of))


@jax.jit
def update(p, grads):
    return jax.tree.map(lambda a, g: a - 0.3 * g, p, grads)


def close(found, expected, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(a, jax.Array)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol, atol
        )


def flat(tree):
    return np.concatenate(
        [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    )


def same_everywhere(found):
    for other in found[1:] if found is not None else ():
        assert (found[0] == other).all()


@each
def test_the_curve_is_that_of_one_process_with_the_whole_batch(mode):
    def body():
        me = mpiml.context()
        p, alone = params(me.index), params(0)
        sync = GradientSync(p, **SMALL)
        assert (sync.index, sync.size) == (me.index, me.replicas)
        assert sync.statistics()["buckets"] > 1
        p = sync.broadcast(p)
        close(p, params(0), 0, 0)
        for step in range(4):
            x = batch(step, 4 * me.replicas)
            p = update(p, sync(grad_of(p, x[me.index :: me.replicas])))
            alone = update(alone, grad_of(alone, x))
            close(p, alone)
        assert sync.statistics()["calls"] == 4
        return flat(p)

    same_everywhere(learn(mode, body))


@each
def test_results_are_no_memory_of_a_bucket(mode):
    """JAX would take aligned memory as it is, and the next call would change the array."""

    def body():
        me = mpiml.context()
        sync = GradientSync(jnp.zeros(64))
        first = sync(jnp.full(64, me.index + 1.0))
        kept = np.array(first)
        sync(jnp.full(64, 100.0))
        sync.broadcast(jnp.full(64, 200.0))
        assert (np.asarray(first) == kept).all()
        assert (kept == (1 + me.replicas) / 2).all()

    learn(mode, body)


@each
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_dtypes_and_operations(mode, op):
    def body():
        me = mpiml.context()
        tree = {
            name: jnp.arange(5, dtype=name) * (me.index + 1)
            for name in ("float32", "bfloat16", "float16", "complex64")
        }
        factor = sum(range(1, me.replicas + 1)) / (me.replicas if op == "mean" else 1)
        found = GradientSync(tree, op=op)(tree)
        for name, array in found.items():
            expected = jnp.arange(5, dtype=name) * factor
            assert array.dtype == expected.dtype
            np.testing.assert_allclose(
                np.asarray(array, np.complex128), np.asarray(expected, np.complex128), 1e-2
            )
        return np.asarray(found["bfloat16"], np.float64)

    same_everywhere(learn(mode, body))


@each
def test_compressed_gradients(mode):
    def body():
        me = mpiml.context()
        p = params()
        grads = [grad_of(p, batch(member, 4)) for member in range(me.replicas)]
        expected = jax.tree.map(lambda *g: sum(g) / me.replicas, *grads)
        close(GradientSync(p, compress=TopK(1.0), **SMALL)(grads[me.index]), expected)
        found = GradientSync(p, compress=Cast("float16"), **SMALL)(grads[me.index])
        assert not (flat(found) == flat(expected)).all()
        close(found, expected, 1e-2, 1e-3)
        return flat(found)

    same_everywhere(learn(mode, body))


@pytest.mark.mpi(min_size=2)
def test_a_whole_step_is_jitted_where_each_member_has_a_process():
    def body():
        me = mpiml.context()
        p, alone = params(0), params(0)
        sync = GradientSync(p, **SMALL)

        @jax.jit
        def steps(p, xs):
            def step(p, x):
                grads = sync(jax.grad(loss_of)(p, x))
                return update(p, grads), loss_of(p, x)

            return jax.lax.scan(step, p, xs)

        xs = jnp.stack([batch(step, 4 * me.replicas) for step in range(5)])
        p, losses = steps(p, xs[:, me.index :: me.replicas])
        for x in xs:
            alone = update(alone, grad_of(alone, x))
        close(p, alone, 1e-4, 1e-5)
        assert losses.shape == (5,)
        assert sync.statistics()["calls"] == 5
        return flat(p)

    same_everywhere(learn("mpi", body))


def test_inside_of_a_jitted_function_threads_are_refused():
    def body():
        sync = GradientSync(jnp.zeros(4))
        with pytest.raises(mpiml.UsageError, match="2 members are threads of one"):
            jax.jit(lambda x: sync(x * 2))(jnp.ones(4))

    learn("threads-2", body)


def test_a_member_alone_may_be_a_thread_in_a_jitted_function():
    def body():
        sync = GradientSync(jnp.zeros(4))
        assert jax.jit(lambda x: sync(x * 2))(jnp.ones(4)).tolist() == [2.0] * 4

    learn("threads-1", body)


@pytest.mark.mpi(min_size=2)
def test_plain_mpi_code_passes_a_communicator():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    with GradientSync(jnp.zeros(3), comm, op="sum") as sync:
        assert sync(jnp.ones(3)).tolist() == [comm.size] * 3
        assert f"1 arrays in 1 buckets, member {comm.rank} of {comm.size}" in repr(sync)


def refused(mode, make, match, **options):
    def body():
        with pytest.raises(mpiml.UsageError, match=match):
            GradientSync(make(mpiml.context().index), **options)

    learn(mode, body)


@each
def test_trees_that_differ(mode):
    refused(
        mode,
        lambda member: {"a": jnp.ones(2), "b": jnp.ones(3 + member % 2)},
        r"expected the same tree and arguments .* leaf 1: \['b'\] \(3,\) float32 \(member",
    )


@each
def test_a_tree_of_one_array_counts_from_its_first_leaf(mode):
    refused(
        mode,
        lambda member: jnp.ones(3 + member % 2),
        r" leaf 0: the array \(3,\) float32 \(member",
    )


class Half:
    """A codec of the user's; two of them look different."""

    def encode(self, array):
        return array.astype("float16")

    def decode(self, payload, shape, dtype):
        return payload.astype(dtype).reshape(shape)


@each
def test_codecs(mode):
    """Those of the user's are told apart by their class; what is none is refused at once."""

    def body():
        me = mpiml.context()
        for make in (Half, lambda: ErrorFeedback(Half())):
            sync = GradientSync(jnp.ones(2), compress=make())
            assert sync(jnp.ones(2)).tolist() == [1.0, 1.0]
        with pytest.raises(mpiml.UsageError, match=r"got compress=(Half|Cast)"):
            GradientSync(jnp.ones(2), compress=Cast() if me.index else Half())
        complex_ = {"a": jnp.ones(2, jnp.complex64)}
        for wrong, like, text in (
            ("bfloat16", jnp.ones(2), "compress: expected None, .* got str"),
            (TopK, jnp.ones(2), "got the class TopK itself"),
            (Cast(), complex_, r"leaf \['a'\]: expected one of the dtypes .* got complex64"),
        ):
            with pytest.raises(mpiml.UsageError, match=text):
                GradientSync(like, compress=wrong if me.index == 1 else None)

    learn(mode, body)


@pytest.mark.parametrize(
    ("like", "other", "match"),
    [
        (
            (1,),
            [1],
            r"with the structure PyTreeDef\(\(\*,\)\), got the .* PyTreeDef\(\[\*\]\) \(",
        ),
        ([1], [1, 1], r"with no more, got \[1\] \(2,\) float32 \(1 and 2 leaves\)"),
        ([1, 1], [1], r"with \[1\] \(2,\) float32, got no more \(2 and 1 leaves\)"),
        ([*[1] * 300, (1,)], [*[1] * 300, [1]], r"structure \.\.\..*\(\*,\)\]\).*\[\*\]\]\)"),
    ],
    ids=["list", "more", "fewer", "long"],
)
def test_another_tree_is_shown(like, other, match):
    def body():
        made = [jax.tree.map(lambda _: jnp.ones(2), tree) for tree in (like, other)]
        sync = GradientSync(made[0])
        with pytest.raises(mpiml.UsageError, match=match) as caught:
            sync(made[1])
        assert len(str(caught.value)) < 1200

    learn("threads-1", body)


@each
def test_one_member_that_cannot_go_on_is_an_error_on_all(mode):
    refused(
        mode, lambda member: "text" if member == 1 else jnp.ones(2), "expected an array, got"
    )


@pytest.mark.parametrize(
    ("tree", "options", "match"),
    [
        ({"n": jnp.arange(3)}, {}, r"leaf \['n'\]: expected one of the dtypes .*got int32"),
        ({"n": None}, {}, "expected at least one array"),
        (jnp.ones(2), {"op": "max"}, "op: expected 'mean' or 'sum', got 'max'"),
        (jnp.ones(2), {"bucket_bytes": 0}, "bucket_bytes: expected a number of bytes"),
    ],
)
def test_what_means_nothing(tree, options, match):
    refused("threads-1", lambda _: tree, match, **options)


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"a": jnp.ones(2)}, r"with \['a'\] \(3,\) float32, got \['a'\] \(2,\) float32"),
        ({"a": jnp.ones(3), "b": jnp.ones(3)}, r"\(1 and 2 leaves\)"),
        ({"a": jnp.ones(3, jnp.float16)}, r"got \['a'\] \(3,\) float16"),
    ],
)
def test_another_tree_than_it_was_made_for(tree, match):
    def body():
        sync = GradientSync({"a": jnp.ones(3)})
        with pytest.raises(mpiml.UsageError, match=match):
            sync(tree)

    learn("threads-1", body)


@each
def test_a_tree_that_one_member_has_wrong_is_an_error_on_all(mode):
    def body():
        me = mpiml.context()
        with GradientSync(params(), **SMALL, op="sum") as sync:
            assert sync.statistics()["buckets"] > 1
            bad = [{"a": jnp.ones(2)}, jax.tree.map(lambda x: x.astype("f2"), params()), 3]
            for odd, wrong in [(0, bad[0]), (me.replicas - 1, bad[1]), (0, bad[2])]:
                given = wrong if me.index == odd else params()
                for call in (lambda: sync(given), lambda: sync.broadcast(given)):  # noqa: B023
                    with pytest.raises(mpiml.UsageError, match="expected a") as caught:
                        call()
                    assert me.index == odd or "could not take part" in str(caught.value)
            for root in (me.replicas, -1, "x"):
                with pytest.raises(mpiml.UsageError, match=r"root: expected 0\.\."):
                    sync.broadcast(params(), root if me.index == 0 else 0)
            assert sync(params())["scale"] == 1.5 * me.replicas

    learn(mode, body)


@each
def test_a_computation_that_fails_on_one_member_is_an_error_on_all(mode):
    """JAX says so when the numbers are taken, which is after the first buckets have gone."""

    def body():
        me = mpiml.context()
        with GradientSync(params(), **SMALL) as sync:
            fill, count = sync._fill, []

            def fails(bucket, numbers, leaves):
                count.append(bucket)
                if me.index == me.replicas - 1 and len(count) == 2:
                    raise RuntimeError("of the device")
                fill(bucket, numbers, leaves)

            sync._fill = fails
            with pytest.raises((RuntimeError, mpiml.UsageError), match="of the device"):
                sync(params())
            sync(params())

    learn(mode, body)


@pytest.mark.mpi(min_size=2)
def test_mpi4py_s_sum_is_an_operation():
    from mpi4py import MPI

    def body():
        with GradientSync(params(), op=MPI.SUM) as sync:
            assert sync(params())["scale"] == 1.5 * sync.size

    learn("mpi", body)


def test_without_jax_it_says_what_to_install():
    code = "import sys; sys.modules['jax'] = None\nimport mpiml.jax"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "pip install 'mpiml[jax]'" in ended.stderr
    assert "During handling" not in ended.stderr
