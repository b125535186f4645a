"""Two hosts made of this machine, for tests; skips where there can be none."""

import os
from contextlib import contextmanager

import pytest

from mpiml.bench.spawn import BenchError, Ranks
from mpiml.bench.two_hosts import TwoHosts
from mpiml.errors import UsageError

__all__ = ["two_hosts"]

# A leg of the tests, or a run in CI, has an MPI that starts: there what is wrong with it is no
# reason to skip. Network namespaces are the machine's to have or not.
_MUST = bool(os.environ.get("MPIML_TEST_LEG")) or os.environ.get("CI") == "true"


@contextmanager
def two_hosts():
    """Yield a `TwoHosts` of 2 ranks each, on which MPI starts and sees two hosts."""
    try:
        ranks = Ranks(timeout=120)
    except UsageError as error:
        _give_up(f"no launcher: {error}")
    with TwoHosts(ranks) as two:
        why = two.why_not()
        if why:
            pytest.skip(f"no two hosts: {why}")
        try:
            sizes = two.scenario("allreduce_apart:houses", {})["sizes"]
        except BenchError as error:
            _give_up(f"MPI does not start on them: {str(error).splitlines()[-1]}")
        if sizes != [2, 2]:
            _give_up(f"MPI splits by host into {sizes}")
        yield two


def _give_up(why):
    """Skip the test; fail it where MPI is sure to be there."""
    (pytest.fail if _MUST else pytest.skip)(why)
