"""`allreduce` of arrays and trees that lie in no bucket."""

import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml._native import gang_bytes
from mpiml.collectives import Bucket, allreduce
from mpiml.collectives.fusion import ALONE, FUSED, messages
from mpiml.collectives.in_host import SMALL, box_of
from mpiml.collectives.staged import CHUNK, chunk_of
from mpiml.errors import UsageError
from tests.collectives.test_bucket import everywhere, in_order, index_size, members_of, some
from tests.collectives.together import together

F4 = np.dtype("f4")


@pytest.mark.parametrize("size", [1, 2, 4, 5, 7])
@pytest.mark.parametrize(
    "nbytes",
    [0, 4, 100, 108, 8192, 8196, CHUNK - 4, CHUNK, CHUNK + 4, 3 * CHUNK + 20],
)
def test_all_lengths_and_numbers_of_members(size, nbytes):
    values = [some(F4, nbytes // 4, i) for i in range(size)]
    expected = in_order(values, "mean", F4)

    def body(team):
        x = values[team.index].copy()
        y = allreduce(x, "mean", team)
        assert x.tobytes() == values[team.index].tobytes()
        z = np.empty_like(x)
        allreduce(x, "mean", team, out=z if team.index else x)  # some in place, some not
        assert (z if team.index else x).tobytes() == y.tobytes()
        return y.tobytes()

    assert set(together(size, body)) == {expected.tobytes()}


@everywhere
@pytest.mark.parametrize(
    "dtype", ["f8", "f2", "i1", "u8", "c16", "bool", ml_dtypes.bfloat16], ids=str
)
def test_dtypes(members, dtype):
    dtype = np.dtype(dtype)

    def body(comm):
        index, size = index_size(comm)
        values = [some(dtype, (3, 50), i) for i in range(size)]
        op = "max" if dtype.kind == "b" else "sum"
        got = allreduce(values[index], op, comm)
        assert got.dtype == dtype
        assert got.shape == (3, 50)
        assert got.tobytes() == in_order(values, op, dtype).tobytes()
        return True

    members_of(members)(body)


@everywhere
def test_a_tree_of_many_arrays_of_several_libraries(members):
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")

    def body(comm):
        index, size = index_size(comm)
        total = size * (size + 1) // 2
        k = index + 1
        tree = {
            "small": [np.full((2, 3), k, "f4") for _ in range(40)],
            "large": np.full(ALONE // 4 + 3, k, "f4"),
            "torch": (torch.full((4,), k, dtype=torch.bfloat16), torch.full((2, 2), k)),
            "jax": jnp.full(5, k),
            "scalar": np.float64(k),
            "0-d": np.full((), k, "i2"),
            "empty": np.empty((0, 3)),
        }
        got = allreduce(tree, comm=comm)
        assert sorted(got) == sorted(tree)
        assert all((leaf == total).all() for leaf in got["small"])
        assert (got["large"] == total).all()
        assert got["torch"][0].dtype == torch.bfloat16
        assert (got["torch"][0] == total).all()
        assert (got["torch"][1] == total).all()
        assert isinstance(got["jax"], type(tree["jax"]))
        assert (got["jax"] == total).all()
        assert got["scalar"] == got["0-d"] == total
        assert got["empty"].shape == (0, 3)
        assert tree["large"][0] == k
        return True

    members_of(members)(body)


@everywhere
def test_out_takes_the_result_whatever_its_memory(members):
    def body(comm):
        index, size = index_size(comm)
        total = size * (size + 1) / 2
        x = np.full((6, 8), index + 1.0)
        for out in (
            np.empty((6, 8)),
            np.empty((6, 8), order="F"),
            np.empty((6, 16))[:, ::2],
            x.copy(),
        ):
            assert allreduce(x, comm=comm, out=out) is out
            assert (out == total).all()
        for view in (x.copy()[:, ::2], np.asfortranarray(x), x.copy()[::-1]):
            assert allreduce(view, comm=comm, out=view) is view
            assert (view == total).all()
        tree = {"a": x.copy(), "b": [x.copy()]}
        assert allreduce(tree, comm=comm, out=tree) is tree
        assert (tree["a"] == total).all()
        assert (tree["b"][0] == total).all()
        return True

    members_of(members)(body)


def test_chunks_and_mailboxes_fit_into_what_containers_have():
    for members in (1, 2, 7, 16, 33, 64, 128, 256):
        chunk = chunk_of(members)
        box = box_of(2 * SMALL // members, members)
        assert chunk % 64 == 0
        assert gang_bytes(members, box, 2 * chunk, 0) < 40 << 20
    assert chunk_of(8) == CHUNK


def test_more_members_have_smaller_chunks():
    size, chunk = 17, chunk_of(17)
    assert chunk < CHUNK
    values = [some(F4, chunk // 4 + 1, i) for i in range(size)]
    found = together(size, lambda team: allreduce(values[team.index], comm=team).tobytes())
    assert set(found) == {in_order(values, "sum", F4).tobytes()}


SIZES = [3 * CHUNK + 4, 100, CHUNK, 8192, 2 * CHUNK, 0, 12_000, CHUNK + 64, 4]


@everywhere
def test_operations_of_all_sizes_follow_each_other(members):
    def body(comm):
        index, size = index_size(comm)
        pause = np.random.default_rng(index)
        for number, nbytes in enumerate(SIZES * 3):
            x = np.full(nbytes // 4, number + index, "f4")
            for _ in range(pause.integers(3)):
                os.sched_yield()  # members come in another order each time
            got = allreduce(x, "max", comm)
            assert (got == number + size - 1).all()
            tree = [x, x[:10]]
            assert all(
                (leaf == number + size - 1).all() for leaf in allreduce(tree, "max", comm)
            )
        return True

    members_of(members)(body)


@everywhere
@pytest.mark.parametrize("nbytes", [(4, CHUNK), (3 * CHUNK, 12_000), (CHUNK, 2 * CHUNK)])
def test_lengths_that_differ_are_an_error_and_the_next_operation_is_right(members, nbytes):
    def body(comm):
        index, size = index_size(comm)
        x = np.full(nbytes[index % 2] // 4, index, "f4")
        with pytest.raises(UsageError, match="expected the same operation on all"):
            allreduce(x, comm=comm)
        for length in (3 * CHUNK // 4, 10, CHUNK // 4):
            got = allreduce(np.full(length, index, "f4"), comm=comm)
            assert (got == size * (size - 1) // 2).all()
        return True

    members_of(members)(body)


@everywhere
def test_large_arrays_change_as_soon_as_the_call_has_returned(members):
    """Nobody may need an array, or a chunk of it, after the call: here it changes at once."""

    def body(comm):
        index, size = index_size(comm)
        x, out = np.empty((2, 5 * CHUNK // 8), "f4")  # two chunks and a half
        for number in range(20):
            x[:] = number + index
            assert allreduce(x, comm=comm, out=out) is out
            x[:] = -1
            assert (out == number * size + size * (size - 1) // 2).all()
            out[:] = -2
        return True

    members_of(members)(body)


@everywhere
@pytest.mark.parametrize("shift", [1, -1, CHUNK // 8, -CHUNK // 8])
def test_an_out_that_overlaps_its_argument(members, shift):
    n = 3 * CHUNK // 8

    def body(comm):
        index, size = index_size(comm)
        memory = np.arange(n + abs(shift), dtype="f8") * (index + 1)
        x, out = (memory[: -abs(shift)], memory[abs(shift) :])[:: 1 if shift > 0 else -1]
        expected = (x / (index + 1)) * (size * (size + 1) // 2)
        allreduce(x, comm=comm, out=out)
        np.testing.assert_array_equal(out, expected)
        return True

    members_of(members)(body)


@everywhere
def test_a_number_gives_a_number(members):
    def body(comm):
        index, size = index_size(comm)
        loss = allreduce(0.5 * (index + 1), "mean", comm)
        count = allreduce(index, "max", comm)
        assert (loss, count) == ((size + 1) / 4, size - 1)
        assert (type(loss), type(count)) == (float, int)
        return True

    members_of(members)(body)


@pytest.mark.mpi(min_size=2)
def test_operations_of_mpi4py_everywhere():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    x = np.full(3, comm.rank + 1.0)
    total = comm.size * (comm.size + 1) / 2
    assert (allreduce(x, MPI.SUM, comm) == total).all()
    assert (allreduce([x], MPI.MAX, comm)[0] == comm.size).all()
    with Bucket(comm, x) as bucket:
        bucket.tree[:] = x
        bucket.allreduce(MPI.SUM)
        assert (bucket.tree == total).all()
        bucket.iallreduce(MPI.MIN).wait()
        bucket.reduce_scatter(MPI.MAX)
        with pytest.raises(UsageError, match="op: expected 'sum'"):
            bucket.allreduce(MPI.BAND)
    with pytest.raises(UsageError, match="op: expected 'sum'"):
        allreduce(x, MPI.BAND, comm)


ODD = {
    "op": (lambda x, comm: allreduce(x, ["sum"], comm), "op: expected 'sum'"),
    "name": (lambda x, comm: allreduce(x, comm=comm, name=["a"]), "name: expected a str"),
    "object": (lambda x, comm: allreduce(x.astype(object), comm=comm), "got object"),
    "number": (
        lambda x, comm: allreduce([3.0], comm=comm),
        r"the number 3.0. Make it an array",
    ),
    "none": (lambda x, comm: allreduce({"a": None}, comm=comm), r"leaf \['a'\]: .* got None"),
    "text": (lambda x, comm: allreduce("abc", comm=comm), "Only numbers can be reduced"),
    "order": (lambda x, comm: allreduce(x.astype(">f8"), comm=comm), "byte order"),
    "out shape": (lambda x, comm: allreduce(x, comm=comm, out=np.empty(4)), r"of shape \(3,\)"),
    "out dtype": (
        lambda x, comm: allreduce(x, comm=comm, out=np.empty(3, "f4")),
        "dtype float64",
    ),
    "out kind": (lambda x, comm: allreduce(x, comm=comm, out=[np.empty(3)]), "a tree like x"),
    "read-only": (lambda x, comm: allreduce(_frozen(x), comm=comm, out=_frozen(x)), "writable"),
    "mean": (lambda x, comm: allreduce(x.astype(int), "mean", comm), "Take 'sum' and divide"),
    "codec": (lambda x, comm: allreduce(x, comm=comm, compress=3), "compress"),
    "shape": (lambda x, comm: allreduce(np.append(x, 1), comm=comm), r"\(4,\) float64"),
    "tree": (lambda x, comm: allreduce([x], comm=comm), "expected the same operation"),
}


def _frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


@everywhere
@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("who", ["all", "one"])
def test_what_is_wrong_is_one_error_on_all_members(members, what, who):
    call, text = ODD[what]

    def body(comm):
        index, size = index_size(comm)
        x = np.ones(3)
        if who == "all" and what not in ("shape", "tree"):
            with pytest.raises(UsageError, match=text):
                call(x, comm)
        elif who == "one":
            with pytest.raises(UsageError, match=text if index == 1 else None):
                call(x, comm) if index == 1 else allreduce(x, comm=comm)
        assert (allreduce(x, comm=comm) == size).all()
        return True

    members_of(members)(body)


@given(
    st.lists(st.tuples(st.sampled_from(["f4", "f8"]), st.integers(0, 3 * ALONE)), max_size=40)
)
@settings(deadline=None)
def test_messages_hold_each_array_once_and_never_mix_or_overfill(arrays):
    dtypes, sizes = [a for a, _ in arrays], [b for _, b in arrays]
    groups = messages(dtypes, sizes)
    assert sorted(number for group in groups for number in group) == list(range(len(arrays)))
    for group in groups:
        assert len({dtypes[number] for number in group}) == 1
        assert len(group) == 1 or sum(sizes[number] for number in group) <= FUSED
        assert len(group) == 1 or all(sizes[number] < ALONE for number in group)
    small = {d: sum(s for t, s in arrays if t == d and s < ALONE) for d in dtypes}
    alone = sum(size >= ALONE for size in sizes)
    assert len(groups) - alone <= sum(2 * s // FUSED + 1 for s in small.values())


@everywhere
def test_names_are_compared(members):
    def body(comm):
        index, _ = index_size(comm)
        x = np.ones(3)
        with pytest.raises(UsageError, match=r"name='a'.*name='b'"):
            allreduce(x, comm=comm, name="b" if index else "a")
        for step in range(600):  # more than are kept
            allreduce(x, comm=comm, name=f"step {step}")
        return True

    members_of(members)(body)


@pytest.mark.mpi(min_size=2)
def test_what_belongs_to_a_communicator_goes_with_it():
    import gc
    import os
    import weakref

    from mpi4py import MPI

    from mpiml.collectives.members import team_of

    files = len(os.listdir("/proc/self/fd"))
    teams = []
    for _ in range(20):
        comm = MPI.COMM_WORLD.Dup()
        allreduce(np.ones(3), comm=comm)
        Bucket(comm, np.ones(3)).close()
        teams.append(weakref.ref(team_of(comm, "test")))
        comm.Free()
    gc.collect()
    assert not any(team() for team in teams)
    assert len(os.listdir("/proc/self/fd")) <= files + 2


def test_tensors_whose_strides_or_bits_are_not_what_they_show():
    torch = pytest.importorskip("torch")

    def body(team):
        single = torch.arange(4.0)[1:3:2]  # stride 2, and contiguous all the same
        assert allreduce(single, comm=team).tolist() == [2.0]
        out = torch.zeros(4)
        assert allreduce(torch.ones(1), comm=team, out=out[1:3:2]).tolist() == [2.0]
        assert out.tolist() == [0.0, 2.0, 0.0, 0.0]
        x = torch.tensor([1 + 2j])
        assert allreduce(x.conj(), comm=team).tolist() == [2 - 4j]
        assert allreduce(x.conj().imag, comm=team).tolist() == [-4.0]
        with pytest.raises(UsageError, match="conjugates or negates"):
            allreduce(x, comm=team, out=torch.zeros_like(x).conj())

    together(2, body)
