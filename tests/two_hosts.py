"""Two hosts made of this machine, for tests; skips where there can be none."""

from contextlib import contextmanager

import pytest

from mpiml.bench.spawn import BenchError, Ranks
from mpiml.bench.two_hosts import TwoHosts
from mpiml.errors import UsageError

__all__ = ["two_hosts"]


@contextmanager
def two_hosts():
    """Yield a `TwoHosts` of 2 ranks each, on which MPI starts and sees two hosts."""
    try:
        ranks = Ranks(timeout=120)
    except UsageError as error:
        pytest.skip(f"no launcher: {error}")
    with TwoHosts(ranks) as two:
        why = two.why_not()
        if why:
            pytest.skip(f"no two hosts: {why}")
        try:
            sizes = two.scenario("allreduce_apart:houses", {})["sizes"]
        except BenchError as error:
            pytest.skip(f"MPI does not start on them: {str(error).splitlines()[-1]}")
        if sizes != [2, 2]:
            pytest.skip(f"MPI splits by host into {sizes}")
        yield two
