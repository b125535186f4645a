import os
import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml import hosts, machine
from mpiml.config import Config
from mpiml.errors import UsageError
from mpiml.hosts import (
    FACTS_SIZE,
    FACTS_VERSION,
    Facts,
    Hosts,
    cores_available,
    group_quota,
    local_facts,
)

names = st.text(max_size=16).filter(lambda s: "\0" not in s and len(s.encode()) <= 64)
facts = st.builds(
    Facts,
    name=names,
    cores=st.frozensets(st.integers(0, 2047)),
    quota=st.none() | st.floats(0.01, 1e6),
    gpus=st.frozensets(st.integers(0, 63)).map(lambda s: tuple(sorted(s))),
    given=st.integers(0, 2**32 - 1),
    machine=st.integers(0, 2**64 - 1),
    gpus_private=st.booleans(),
    gpus_hidden=st.booleans(),
    threads=st.integers(0, 2**16 - 1),
    around=st.integers(0, 2**16 - 1),
    folder=st.integers(0, 2**32 - 1),
)


@settings(max_examples=40)
@given(facts)
def test_facts_survive_their_bytes(fact):
    data = fact.pack()
    assert len(data) == FACTS_SIZE
    assert Facts.unpack(memoryview(data)) == fact


def test_the_layout_is_fixed():
    data = Facts("n1", frozenset({0, 9}), 1.5, (1,), 3, 0x0102, True).pack()
    head = bytes.fromhex("01010200 03000000 000000000000f83f 0201000000000000 0200000000000000")
    assert data[:32] == head
    assert data[32:96] == b"n1" + bytes(62)
    assert data[96:99] == b"\x01\x02\x00"
    assert data[352:] == bytes(8), "what ranks of other languages leave out is not known"
    assert FACTS_SIZE == 360


def test_too_much_drops_out():
    fact = Facts("n" * 99, frozenset({0, 5000}), gpus=(2, 64))
    assert Facts.unpack(fact.pack()) == Facts("n" * 64, frozenset({0}), gpus=(2,))


@pytest.mark.parametrize("data", [b"", bytes(FACTS_SIZE), bytes([FACTS_VERSION]) * 8])
def test_foreign_facts_are_refused(data):
    with pytest.raises(UsageError, match=f"version {FACTS_VERSION}.*got {len(data)} bytes"):
        Facts.unpack(data)


@pytest.mark.parametrize(
    ("limits", "cores"),
    [((8,), 8), ((8, 2.5), 2), ((8, 0.5), 1), ((8, None, 4), 4), ((8, 3.0, 4), 3), ((0,), 1)],
)
def test_cores_available(limits, cores):
    assert cores_available(*limits) == cores


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/a/b", {"/sys/fs/cgroup/a/b/cpu.max": "max 100000"}, None),
        ("0::/a/b", {"/sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2.5),
        (
            "0::/a/b",
            {
                "/sys/fs/cgroup/a/b/cpu.max": "400000 100000",
                "/sys/fs/cgroup/cpu.max": "150000 100000",
            },
            1.5,
        ),
        (
            "12:memory:/x\n4:cpu,cpuacct:/job",
            {
                "/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "200000\n",
                "/sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            2.0,
        ),
        (
            "1:cpu:/",
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
        ("", {}, None),
        ("3:cpuset:/a", {"/sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "1"}, None),
    ],
)
def test_quota_of_a_control_group(group, files, quota):
    assert group_quota(group, files.get) == quota


def test_local_facts():
    fact = local_facts(Config(cpus_per_task=3, cuda_visible_devices="4,2"))
    assert fact.name == socket.gethostname()
    assert fact.cores == os.sched_getaffinity(0)
    assert fact.gpus == (2, 4)
    assert fact.given == 3
    assert fact.around == len(os.sched_getaffinity(os.getppid()))
    assert fact.folder
    assert Facts.unpack(fact.pack()) == fact
    assert local_facts().name == fact.name


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("", ()), ("0", (0,)), ("-1", ()), ("NoDevFiles", ()), ("GPU-ab, GPU-cd", (0, 1)),
     ("1,-1,2", (0,))],
)  # fmt: skip
def test_visible_gpus(visible, gpus):
    assert local_facts(Config(cuda_visible_devices=visible)).gpus == gpus


def test_a_device_shown_by_its_name_is_no_other_ranks():
    assert local_facts(Config(cuda_visible_devices="GPU-ab")).gpus_private
    assert local_facts(Config(cuda_visible_devices="MIG-ab")).gpus_private
    assert not local_facts(Config(cuda_visible_devices="GPU-ab,GPU-cd")).gpus_private
    assert not local_facts(Config(cuda_visible_devices="0")).gpus_private


def test_what_is_around_a_rank_of_srun_is_what_the_job_has(monkeypatch):
    monkeypatch.setattr(hosts, "affinity", lambda process=0: frozenset(range(64)))
    assert local_facts(Config(launcher="slurm", cpus_on_node=4)).around == 4
    assert local_facts(Config(launcher="slurm")).around == 64
    assert local_facts(Config(launcher="openmpi", cpus_on_node=4)).around == 64


def test_devices_that_are_hidden_are_not_none(monkeypatch):
    monkeypatch.setattr(machine, "_listed", lambda path: ["nvidia0", "nvidia1", "nvidiactl"])
    assert local_facts(Config(cuda_visible_devices="")).gpus_hidden
    assert not local_facts(Config(cuda_visible_devices="1")).gpus_hidden
    assert not local_facts(Config()).gpus_hidden


def test_a_working_folder_that_is_gone_has_no_number(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert machine.folder_number() > machine.GONE
    (tmp_path / "here").rmdir()
    assert machine.folder_number() == machine.GONE


def test_table_of_two_hosts_dealt_by_turns():
    hosts = Hosts([Facts(f"n{rank % 2}", frozenset({rank, 8})) for rank in range(5)])
    assert [(row.name, row.ranks, row.cores) for row in hosts.rows] == [
        ("n0", (0, 2, 4), 4),  # cores 0, 2, 4 and 8
        ("n1", (1, 3), 3),
    ]
    assert [hosts.host_of(rank) for rank in range(5)] == [0, 1, 0, 1, 0]
    assert [hosts.local_rank(rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert [hosts.local_size(rank) for rank in range(5)] == [3, 2, 3, 2, 3]
    assert [hosts.threads_per_rank(rank) for rank in range(5)] == [1] * 5
    assert hosts.name_of(3) == "n1"
    assert not hosts.oversubscribed(0)


def test_cores_are_capped_by_quota_and_launcher():
    mask = frozenset(range(64))
    assert Hosts([Facts("n", mask, 6.0)] * 2).rows[0].cores == 6
    assert Hosts([Facts("n", mask, 6.0), Facts("n", mask)]).rows[0].cores == 64
    assert Hosts([Facts("n", mask, 6.0), Facts("n", mask, 2.0)]).rows[0].cores == 6
    assert Hosts([Facts("n", mask, given=4)] * 2).rows[0].cores == 8
    assert Hosts([Facts("n", mask, given=4)] * 2).threads_per_rank(1) == 4
    assert Hosts([Facts("n", mask, 1.0)] * 2).threads_per_rank(0) == 1
    assert Hosts([Facts("n", mask, 1.0)] * 2).oversubscribed(0)


def test_one_name_on_two_machines_is_two_hosts():
    core = frozenset({0})
    hosts = Hosts([Facts("localhost", core, machine=1), Facts("localhost", core, machine=2)])
    assert [row.ranks for row in hosts.rows] == [(0,), (1,)]


def test_pretended_hosts_share_cores_and_gpus():
    fact = Facts("n", frozenset(range(8)), gpus=(0, 1, 2, 3))
    hosts = Hosts([fact] * 4, host_size=2)
    assert hosts.rows == (("n/0", (0, 1), 4, 2), ("n/1", (2, 3), 4, 2))
    assert [number for _, number in hosts.devices(3)] == [2, 3]
    assert hosts.threads_per_rank(0) == 2
    private = Hosts([fact._replace(gpus=(0,), gpus_private=True)] * 4, host_size=3)
    assert [row.gpus for row in private.rows] == [3, 1]
    assert private.devices(3) == ((3, 0),)


def test_gpus_are_counted_once_unless_private():
    fact = Facts("n", frozenset({0}), gpus=(0,))
    assert Hosts([fact] * 3).rows[0].gpus == 1
    assert Hosts([fact._replace(gpus_private=True)] * 3).rows[0].gpus == 3
    assert Hosts([fact, fact._replace(gpus=(1,))]).rows[0].gpus == 2


@settings(max_examples=40)
@given(st.lists(facts, min_size=1, max_size=9), st.none() | st.integers(1, 4))
def test_every_rank_has_one_place(found, host_size):
    hosts = Hosts(found, host_size)
    assert sorted(rank for row in hosts.rows for rank in row.ranks) == list(range(len(found)))
    for rank, fact in enumerate(found):
        row = hosts.rows[hosts.host_of(rank)]
        assert row.ranks[hosts.local_rank(rank)] == rank
        assert row.name.startswith(fact.name)
        assert hosts.threads_per_rank(rank) >= 1
        assert host_size is None or hosts.local_size(rank) <= host_size


def test_a_sketch():
    hosts = Hosts.of_sizes((2, 1), cores=4, gpus=1)
    assert hosts.rows == (("host0", (0, 1), 4, 1), ("host1", (2,), 4, 1))
