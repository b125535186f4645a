"""`torch.distributed` in a role: its store in threads and on ranks, its groups on ranks."""

import datetime as dt
import subprocess
import sys
import threading
import time

import pytest

import mpiml
from mpiml.board import BoardClient
from tests.playing import both, play

torch = pytest.importorskip("torch")

from torch import distributed as dist  # noqa: E402

import mpiml.torch  # noqa: E402
from mpiml.torch import RoleStore, StoreTimeoutError  # noqa: E402


def store(prefix="p"):
    """Return a store as torch's C++ code has it."""
    node = mpiml.context()._node
    role_store = RoleStore(BoardClient(node.runtime, node, 0))
    return dist.PrefixStore(prefix, role_store), role_store


class Member:
    """One of a role whose stores are tried."""

    def basics(self):
        mine, _ = store(f"p{mpiml.context().index}")
        mine.set("a", "1")
        assert mine.get("a") == b"1"
        assert mine.add("n", 2) == 2
        assert mine.add("n", 3) == 5
        assert mine.get("n") == b"5"
        assert mine.check(["a", "n"])
        assert not mine.check(["a", "m"])
        assert mine.compare_set("c", "", "x") == b"x"
        assert mine.compare_set("c", "no", "y") == b"x"
        assert mine.compare_set("c", "x", "y") == b"y"
        mine.append("a", "2")
        mine.multi_set(["d", "e"], ["\x00\xff", ""])
        assert mine.multi_get(["a", "d", "e"]) == [b"12", "\x00\xff".encode(), b""]
        assert mine.delete_key("a")
        assert not mine.delete_key("a")
        assert not mine.check(["a"])
        assert mine.num_keys() >= 4  # the others write too
        assert mine.has_extended_api()
        assert mine.clone().get("c") == b"y"

    def meet(self):
        me = mpiml.context()
        shared, whole = store()
        shared.set(f"{me.index}", f"{me.index}")
        shared.wait([f"{i}" for i in range(me.replicas)], dt.timedelta(seconds=20))
        shared.barrier("b", me.replicas, dt.timedelta(seconds=20))
        assert whole.get("p/0") == b"0"
        return [shared.get(f"{i}") for i in range(me.replicas)]

    def miss(self):
        shared, whole = store()
        shared.set_timeout(dt.timedelta(milliseconds=20))
        assert whole.timeout == dt.timedelta(milliseconds=20)
        with pytest.raises(StoreTimeoutError, match=r"about 'p/never' within 0.02 s"):
            shared.get("never")
        with pytest.raises(dist.DistStoreError, match=r"within 0\.001 s"):
            shared.wait(["never"], dt.timedelta(milliseconds=1))
        shared.set("w", "word")
        with pytest.raises(mpiml.UsageError, match="expected a number"):
            shared.add("w", 1)


@both
def test_a_store_is_one_of_torch(mode):
    def body(member):
        member.basics()
        assert mpiml.gather(list(member.futures.meet())) == [[b"0", b"1"]] * 2
        member.miss()

    play(mode, body, member=Member, replicas={"member": 2})


@both
def test_a_thread_of_torch_is_answered_while_replica_0_computes(mode):
    def body():
        me = mpiml.context()
        if me.index == 0:
            x = torch.ones(64, 64)
            while not me.stopping:  # never waits in mpiml
                torch.mm(x, x)
            return
        shared, _ = store()
        answers = []
        thread = threading.Thread(target=lambda: answers.append(shared.add("n", 1)))
        thread.start()  # belongs to no node, as torch's own
        thread.join(20)
        assert answers == [1]
        me.stop()

    learn(body, mode, 2)


def learn(body, mode="mpi", replicas=mpiml.FILL):
    """Run `body` as a role, on all ranks or in threads; return what the replicas return."""
    program = mpiml.Program("learn")
    program.add_node(mpiml.PyNode(body), label="learner", replicas=replicas)
    comm = None
    if mode == "mpi":
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        if replicas != mpiml.FILL and comm.size > replicas:
            program.add_node(mpiml.PyNode(int), label="spare", replicas=mpiml.FILL)
    result = mpiml.launch(program, comm=comm)
    return result["learner"] if comm is None or comm.rank == 0 else None


def check_group(group):
    """Use a group as training does."""
    me = mpiml.context()
    assert (dist.get_rank(), dist.get_world_size()) == (me.index, me.replicas)
    assert (group.rank, group.world_size) == (me.index, me.replicas)
    x = torch.full((1000,), float(me.index))
    dist.all_reduce(x)
    assert x.tolist() == [sum(range(me.replicas))] * 1000
    dist.barrier()
    pair = dist.new_group([0, 1])
    if me.index < 2:
        y = torch.ones(3)
        dist.all_reduce(y, group=pair)
        assert y.tolist() == [2.0] * 3
    found = [None] * me.replicas
    dist.all_gather_object(found, me.index)
    assert found == list(range(me.replicas))


@pytest.mark.mpi(min_size=2)
def test_groups_come_and_go_in_programs_that_follow_each_other():
    def body():
        me = mpiml.context()
        with mpiml.torch.init_process_group("gloo", timeout=20) as group:
            check_group(group)
            dist.barrier()
        assert not dist.is_initialized()
        group = mpiml.torch.init_process_group("gloo", timeout=20)
        check_group(group)
        with pytest.raises(
            mpiml.UsageError, match="is initialised in this process already, for"
        ):
            mpiml.torch.init_process_group("gloo")
        dist.barrier()
        return len(me._node.runtime.boards)

    for _ in range(2):
        found = learn(body)
        assert found is None or found[0] == 1  # the first board is forgotten
        assert not dist.is_initialized()


def train(wrap):
    """Two steps of a tiny model, the same data everywhere; return its weights."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8)
    model = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model


@pytest.mark.mpi(min_size=2)
def test_ddp_and_fsdp_live_in_a_role():
    def body():
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        alone = [p.detach() for p in train(lambda m: m).parameters()]
        with mpiml.torch.init_process_group("gloo", timeout=20):
            whole = [p.detach() for p in train(DistributedDataParallel).parameters()]
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            sharded = train(lambda m: fully_shard(m, mesh=mesh) and m)
            parts = [p.full_tensor().detach() for p in sharded.parameters()]
            dist.barrier()
        for a, b, c in zip(alone, whole, parts, strict=True):
            torch.testing.assert_close(a, b)
            torch.testing.assert_close(a, c)
        return True

    found = learn(body)
    assert found is None or all(found)


class Pair:
    """A service whose methods meet, each holding the only turn of its replica."""

    def reduce(self):
        with mpiml.torch.init_process_group("gloo", timeout=20):
            x = torch.ones(2)
            dist.all_reduce(x)
            dist.barrier()
        return x.tolist()

    def leave_it(self):
        mpiml.torch.init_process_group("gloo", timeout=20)
        dist.barrier()


@pytest.mark.mpi(min_size=3)
def test_methods_of_a_service_make_a_group_and_its_end_is_that_of_the_program():
    def body(pair):
        assert mpiml.gather(list(pair.futures.reduce())) == [[2.0, 2.0]] * 2
        mpiml.gather(list(pair.futures.leave_it()))

    play("mpi", body, pair=Pair, replicas={"pair": 2})
    assert not dist.is_initialized()


@pytest.mark.mpi(min_size=2)
def test_the_error_of_a_replica_is_the_one_that_is_shown():
    """The others wait in gloo, which tells them of lost connections."""

    def body():
        mpiml.torch.init_process_group("gloo", timeout=20)
        if mpiml.context().index == 1:
            raise ArithmeticError("the cause")
        dist.all_reduce(torch.ones(3))

    began = time.monotonic()
    with pytest.raises(ArithmeticError, match="the cause"):
        learn(body)
    assert time.monotonic() - began < 15  # below the timeout of the group
    assert not dist.is_initialized()


@pytest.mark.mpi(min_size=2)
def test_a_replica_that_does_not_come_ends_the_wait():
    def body():
        if mpiml.context().index == 0:
            return
        with pytest.raises((StoreTimeoutError, dist.DistStoreError), match=r"within|Timed out"):
            mpiml.torch.init_process_group("gloo", timeout=0.2)
        assert not dist.is_initialized()

    learn(body)


@pytest.mark.mpi(min_size=2)
def test_a_stop_ends_the_wait_for_the_others():
    def body():
        me = mpiml.context()
        if me.index == 0:
            me.stop()
        else:
            mpiml.torch.init_process_group("gloo", timeout=60)

    learn(body)
    assert not dist.is_initialized()


def refused(match, error=mpiml.UsageError, **options):
    with pytest.raises(error, match=match):
        mpiml.torch.init_process_group("gloo", **options)


def test_outside_of_a_node_it_is_refused():
    refused(r"init_process_group: .*expected to be called inside a node")


def test_what_the_role_decides_is_not_given():
    def body():
        refused("expected no rank or world_size: .*role 'body'", rank=0, world_size=1)
        refused("expected no init_method", init_method="tcp://localhost:1")
        refused("a timeout above 0 s, got 0", timeout=0)

    play("threads", body)


def test_threads_of_one_process_are_refused():
    def body():
        refused("the 2 replicas of the role share 1", mpiml.PlacementError)

    program = mpiml.Program("threads")
    program.add_node(mpiml.PyNode(body), label="learner", replicas=2)
    mpiml.launch(program)


def test_a_role_of_one_works_in_a_thread():
    def body():
        with mpiml.torch.init_process_group("gloo", timeout=10) as group:
            check = torch.ones(2)
            dist.all_reduce(check)
            refused("for body/0")
        assert check.tolist() == [1.0, 1.0]
        assert "left" in repr(group)
        group.destroy()
        with pytest.raises(KeyError), mpiml.torch.init_process_group("gloo", timeout=10):
            raise KeyError
        mpiml.torch.init_process_group("gloo", timeout=10)  # what an error left is replaced

    play("threads", body)
    assert not dist.is_initialized()


def test_without_torch_it_says_what_to_install():
    code = "import sys; sys.modules['torch'] = None\nimport mpiml.torch"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "pip install 'mpiml[torch]'" in ended.stderr
    assert "During handling" not in ended.stderr
