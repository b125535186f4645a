"""Where nodes go around ranks that attach, and the splits that make role communicators."""

from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpiml
from mpiml.external.crowd import Crowd
from mpiml.hosts import Facts, Hosts
from mpiml.layout import check_levels, lay_out, split_layers
from mpiml.threads import FUNNELED, MULTIPLE, SERIALIZED

FACTS = Facts("host", frozenset(range(4)))


def program(**roles):
    built = mpiml.Program("laid out")
    for label, replicas in roles.items():
        built.add_node(mpiml.PyNode(print), label=label, replicas=replicas)
    return built


def placed(built, attached, **more):
    plan, _ = lay_out(built, [FACTS] * len(attached), attached, **more)
    return plan


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_attached_rank_keeps_its_role_and_others_go_around(rank):
    attached = [None] * 3
    attached[rank] = 1
    plan = placed(program(server=1, solver=1, worker=1), attached)
    assert plan.ranks[1] == (rank,)
    assert sorted(r for ranks in plan.ranks for r in ranks) == [0, 1, 2]


def test_fill_may_attach_and_others_may_fill():
    assert placed(program(s=1, w=mpiml.FILL), [None, 1, 1, 1]).ranks == ((0,), (1, 2, 3))
    assert placed(program(s=1, w=mpiml.FILL), [None, 0, None]).ranks == ((1,), (0, 2))


def test_ranks_of_other_programs_are_told_apart_from_those_that_are_too_many():
    built = program(w=2)
    built.add_node(mpiml.ExternalNode(), label="solver", replicas=2)
    with pytest.raises(
        mpiml.PlacementError, match=r"needs 2 ranks, but there are 3.*2 as 'sol"
    ):
        placed(built, [None] * 3, crowd=Crowd(["solver"] * 2, [0, 1], [2, 3, 4]))


def test_the_rest_is_folded_onto_the_ranks_that_are_left():
    plan = placed(program(s=1, w=4), [0, None, None])
    assert plan.ranks[0] == (0,)
    assert sorted(plan.ranks[1]) == [1, 1, 2, 2]
    assert plan.notes


@pytest.mark.parametrize(
    ("roles", "attached", "text"),
    [
        ({"s": 1, "w": 2}, [1, None, None], r"expected 2 ranks to attach.* got 1 \(ranks 0\)"),
        ({"s": 1, "w": 1}, [1, 1, None], r"expected 1 ranks to attach.* got 2 \(ranks 0, 1\)"),
        ({"s": 1, "w": 2}, [1, 1], "ranks for s too, but all 2 attach"),
        ({"w": 2}, [0, 0, None], "all 3 ranks to attach.* but 1 called mpiml.launch"),
    ],
)
def test_too_many_and_too_few(roles, attached, text):
    with pytest.raises(mpiml.UsageError, match=text):
        placed(program(**roles), attached)


def test_more_ranks_than_nodes_names_both_numbers():
    with pytest.raises(mpiml.PlacementError, match=r"2.*\b5\b|\b5\b.*2"):
        placed(program(a=1, b=1), [None] * 5)


def test_a_lone_rank_may_attach_to_what_it_holds_anyhow():
    assert placed(program(s=1, w=mpiml.FILL), [1]).ranks == ((0,), (0,))


def test_pretend_hosts_split_the_table():
    _, hosts = lay_out(program(w=4), [FACTS] * 4, [None] * 4, host_size=2)
    assert [row.ranks for row in hosts.rows] == [(0, 1), (2, 3)]


@given(
    st.dictionaries(st.sampled_from("abcd"), st.integers(1, 4), min_size=1),
    st.integers(1, 10),
)
def test_splits_make_one_communicator_for_each_role_on_several_ranks(roles, size):
    built = program(**roles)
    total = sum(roles.values())
    ranks = min(size, total)
    plan = placed(built, [None] * ranks)
    vertices = built.expand(plan.replicas)
    where = [plan.ranks[v.unit[0]][v.unit[1]] for v in vertices]
    given_ = [split_layers(vertices, where, rank) for rank in range(ranks)]
    assert len({len(splits) for splits in given_}) == 1  # all ranks take part in all splits
    found, shared = {}, set()
    for layer in zip(*given_, strict=True):
        for rank, (role, colour, key, folded) in enumerate(layer):
            assert role == colour
            if role >= 0:
                found.setdefault(role, {})[key] = rank
                shared |= {role} if folded else set()
    for index, role in enumerate(built.roles):
        owners = [where[v.id] for v in vertices if v.role == role.label]
        distinct = list(dict.fromkeys(owners))
        assert (index in shared) == (1 < len(distinct) < len(owners))
        if len(distinct) == 1 < len(owners):
            assert index not in found  # threads of one process
        else:
            assert found.pop(index) == dict(enumerate(distinct))
    assert not found


def test_a_program_of_disjoint_roles_takes_one_split():
    built = program(a=1, b=2, c=3)
    vertices = built.expand((1, 2, 3))
    assert len(split_layers(vertices, range(6), 4)) == 1


def test_a_folded_role_takes_no_split_of_its_own_where_its_ranks_are_free():
    vertices = program(a=1, b=4).expand((1, 4))
    assert split_layers(vertices, [0, 1, 1, 2, 2], 2) == [(1, 1, 1, True)]
    assert split_layers(vertices, [0, 1, 1, 1, 1], 1) == [(-1, -1, 0, False)]


@pytest.mark.parametrize(
    ("levels", "bad"),
    [
        ([MULTIPLE] * 3, None),
        ([FUNNELED, SERIALIZED, FUNNELED], None),
        ([FUNNELED, MULTIPLE, MULTIPLE], None),  # another role
        (
            [MULTIPLE, MULTIPLE, SERIALIZED],
            r"MULTIPLE on rank 1 \(host0\) and MPI_THREAD_SERIAL",
        ),
        (
            [MULTIPLE, FUNNELED, MULTIPLE],
            r"FUNNELED on rank 1 \(host0\) and MPI_THREAD_MULTIPLE",
        ),
    ],
)
def test_the_ranks_of_a_role_have_full_thread_support_or_none_has(levels, bad):
    vertices = program(s=1, w=2).expand((1, 2))
    refused = (
        pytest.raises(mpiml.UsageError, match=f"^role 'w': .*{bad}") if bad else nullcontext()
    )
    with refused:
        check_levels(vertices, [0, 1, 2], levels, Hosts.of_sizes([3]))
