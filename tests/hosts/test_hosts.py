"""Programs over hosts that MPI takes for several: where ranks go, and what passes between hosts."""

from pathlib import Path

import pytest

from tests.mpi import start
from tests.two_hosts import several_hosts

HERE = Path(__file__).parent


@pytest.mark.parametrize("slots", [(2, 2), (2, 1, 1)])
def test_programs_over_hosts(slots):
    """The second time a host has more ranks than the others, and a node fails on the last one."""
    with several_hosts(*slots, programs=True) as hosts:
        outcome = hosts.run([str(HERE / "job.py"), *map(str, slots)])
        assert "all is well" in outcome.stdout
        if len(slots) > 2:
            failing(hosts)


def failing(hosts):
    """All end with status 1 and one traceback, wherever they are."""
    file = f"{HERE / 'programs.py'}:failing"
    command, env = hosts.command(["-m", "mpiml.run", file, "--host", hosts.names[-1]])
    with start(*command, env=env) as job:
        ended = job.wait(60)
    assert ended.rc == 1, str(ended)
    assert ended.stderr.count("Traceback") == 1, str(ended)
    assert "bad/0" in ended.stderr
    assert "boom" in ended.stderr
    assert not ended.leftovers
