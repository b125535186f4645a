"""Hosts made of this machine, for tests; skips where there can be none."""

import os
from contextlib import contextmanager

import pytest

from mpiml.bench.several_hosts import SeveralHosts
from mpiml.bench.spawn import BenchError, Ranks
from mpiml.errors import UsageError

__all__ = ["several_hosts", "two_hosts"]

# A leg of the tests, or a run in CI, has an MPI that starts: there what is wrong with it is no
# reason to skip. Network namespaces are a machine's to have or not, unless it is CI's, or .ci/run has
# found `ip` for them.
_MUST = bool(os.environ.get("MPIML_TEST_LEG")) or os.environ.get("CI") == "true"
_MUST_HOSTS = bool(os.environ.get("MPIML_TEST_HOSTS")) or os.environ.get("CI") == "true"


def two_hosts():
    """Yield hosts of 2 ranks each, on which MPI starts and sees two hosts."""
    return several_hosts(2, 2)


@contextmanager
def several_hosts(*slots, programs=False):
    """Yield a `SeveralHosts` of so many ranks each, on which MPI starts and sees them."""
    try:
        ranks = Ranks(timeout=120)
    except UsageError as error:
        _give_up(f"no launcher: {error}")
    with SeveralHosts(ranks, slots, programs) as hosts:
        why = hosts.why_not()
        if why:
            _give_up(f"no {len(slots)} hosts: {why}", _MUST_HOSTS)
        try:
            sizes = hosts.scenario("allreduce_apart:houses", {})["sizes"]
        except BenchError as error:
            _give_up(f"MPI does not start on them: {str(error).splitlines()[-1]}")
        if sizes != list(slots):
            _give_up(f"MPI splits by host into {sizes}")
        yield hosts


def _give_up(why, must=_MUST):
    """Skip the test; fail it where what it needs is sure to be there."""
    (pytest.fail if must else pytest.skip)(why)
