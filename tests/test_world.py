"""Communicators of a program and the memory its ranks share."""

import os
import sys
from pathlib import Path

import pytest

from mpiml.layout import split_layers
from tests.mpi import child, environment


def world():
    from mpi4py import MPI

    from mpiml.world import World

    return MPI.COMM_WORLD, World(MPI.COMM_WORLD)


@pytest.mark.mpi(min_size=1)
def test_communicators_are_duplicates_and_freed():
    from mpi4py import MPI

    comm, made = world()
    for own in (made.engine_comm, made.user_comm):
        assert MPI.Comm.Compare(own, comm) == MPI.CONGRUENT
    made.close()
    made.close()
    assert made.engine_comm == MPI.COMM_NULL
    assert comm.allreduce(1) == comm.size


@pytest.mark.mpi(min_size=2)
def test_roles_get_their_own_communicators_in_one_split():
    comm, made = world()
    made.split_roles([(comm.rank % 2, comm.rank % 2, -comm.rank, False)])
    role = made.roles[comm.rank % 2]
    assert role.allgather(comm.rank) == sorted(range(comm.rank % 2, comm.size, 2), reverse=True)
    made.close()


@pytest.mark.mpi(min_size=2)
def test_a_rank_outside_of_all_roles_takes_part_in_the_split():
    comm, made = world()
    made.split_roles([(0, 0, 0, False) if comm.rank else (-1, -1, 0, False)])
    assert bool(made.roles) == (comm.rank > 0)
    made.close()


@pytest.mark.mpi(min_size=2)
def test_communicators_of_folded_roles_stand_apart_and_are_freed_too():
    comm, made = world()
    made.split_roles([(3, 3, -comm.rank, True)])
    assert not made.roles
    folded = made.folded[3]
    assert folded.rank == comm.size - 1 - comm.rank
    made.close()
    assert not folded  # freed


def shared(made, comm, groups):
    """Prepare memory for pretended hosts of ranks; return it with the lines that are left."""
    mine = groups[comm.rank]
    lines = {rank: i for i, rank in enumerate(r for r in range(comm.size) if groups[r] == mine)}
    token = comm.bcast(os.urandom(8).hex())
    path = f"/dev/shm/mpiml-{token}-{mine}"
    return made.prepare(path, lines), lines, path


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_of_a_host_share_a_line_each_and_leave_no_file(hosts):
    comm, made = world()
    groups = [rank % hosts for rank in range(comm.size)]
    memory, lines, path = shared(made, comm, groups)
    assert memory is not None
    assert sorted(lines) == [r for r in range(comm.size) if groups[r] == groups[comm.rank]]
    memory[64 * lines[comm.rank]] = comm.rank + 1
    comm.barrier()
    assert all(memory[64 * line] == rank + 1 for rank, line in lines.items())
    assert not Path(path).exists()
    made.close()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_map_the_memory_is_left_out_by_the_others():
    comm, made = world()
    lines = {rank: rank for rank in range(comm.size)}
    token = comm.bcast(os.urandom(8).hex())
    path = f"/dev/shm/mpiml-{token}" if comm.rank else "/nowhere/at/all"
    memory = made.prepare(path, lines)
    if comm.rank == 0:
        assert memory is None
    else:
        assert 0 not in lines
        assert comm.rank in lines
    comm.barrier()
    assert not Path(f"/dev/shm/mpiml-{token}").exists()
    made.close()


@pytest.mark.mpi(min_size=2)
def test_exchanges_give_every_rank_all_bytes():
    from mpiml.exchanges import exchange_record, exchange_text, lowest, spread

    comm, made = world()
    assert exchange_record(comm, bytes([comm.rank, 7])) == [
        bytes([r, 7]) for r in range(comm.size)
    ]
    texts = [b"x" * (1000 * rank) for rank in range(comm.size)]
    assert exchange_text(comm, texts[comm.rank]) == texts
    assert lowest(comm, 10 - comm.rank) == 11 - comm.size
    for root in range(comm.size):
        assert spread(comm, texts[comm.rank], root) == texts[root]
    made.close()


@pytest.mark.mpi(min_size=2)
def test_too_much_text_is_refused_on_all_ranks(monkeypatch):
    import mpiml
    from mpiml import exchanges as module

    comm, made = world()
    monkeypatch.setattr(module, "_MOST", 100)
    with pytest.raises(mpiml.UsageError, match=r"at most 100 bytes.*got 101.*from rank 1"):
        module.exchange_text(comm, b"x" * 101 if comm.rank == 1 else b"")
    assert len(module.exchange_text(comm, b"x" * 100 if comm.rank == 1 else b"")) == comm.size
    made.close()


@pytest.mark.mpi(min_size=1)
def test_what_the_user_attached_to_a_communicator_is_not_ours():
    from mpi4py import MPI

    key = MPI.Comm.Create_keyval(copy_fn=True)
    comm = MPI.COMM_WORLD.Create_cart([MPI.COMM_WORLD.size])
    comm.Set_attr(key, "mine")
    from mpiml.world import World

    made = World(comm)
    assert made.engine_comm.Get_attr(key) is None
    assert made.engine_comm.Get_topology() == MPI.UNDEFINED
    assert made.engine_comm.rank == comm.rank
    made.close()
    comm.Free()
    MPI.Comm.Free_keyval(key)


@pytest.mark.parametrize("own", [None, "ucx"])
def test_what_mpi_is_told_at_its_start_is_not_left_in_the_environment(own):
    code = (
        "import os\nfrom mpiml import world\nbefore = dict(os.environ)\nworld.start()\n"
        "left = {k: v for k, v in os.environ.items() if k.startswith('OMPI_MCA')}\n"
        "print(left == {k: v for k, v in before.items() if k.startswith('OMPI_MCA')})"
    )
    env = environment(OMPI_MCA_mpi_yield_when_idle=None, OMPI_MCA_osc=own)
    assert child(sys.executable, "-c", code, env=env).check().stdout == "True\n"


def test_mpi_below_thread_multiple_is_used(mpi_launcher):
    code = (
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'\n"
        "from mpi4py import MPI; import mpiml\n"
        "p = mpiml.Program('x'); p.add_node(mpiml.PyNode(print), label='n')\n"
        "mpiml.launch(p, MPI.COMM_SELF)\n"
    )
    ended = child(sys.executable, "-c", code, env=environment()).check()
    assert ended.stdout == "[n/0] \n", ended


def test_layers_are_what_split_roles_takes():
    assert split_layers([], [], 0) == []


def test_importing_mpiml_first_leaves_mpi4py_as_it_is(tmp_path):
    """A script that imports all of mpiml finds MPI initialised by mpi4py afterwards."""
    script = tmp_path / "first.py"
    script.write_text(
        "from mpiml import attach, context, launch\n"
        "import mpiml.session, mpiml.testing\n"
        "from mpi4py import MPI\n"
        "assert MPI.Is_initialized()\n"
        "print(MPI.COMM_WORLD.size)\n"
    )
    assert child(sys.executable, str(script)).check().stdout.strip() == "1"
