"""Collectives between two hosts that MPI takes for two: network namespaces and a link."""

from pathlib import Path

import pytest

from mpiml.bench.spawn import BenchError, Ranks
from mpiml.bench.two_hosts import TwoHosts
from mpiml.errors import UsageError

JOB = str(Path(__file__).with_name("two_hosts_job.py"))


@pytest.mark.parametrize("senders", ["leaders", "stripes"])
def test_results_and_bytes_on_the_link(senders):
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
        outcome = two.run([JOB, senders], {"MPIML_BETWEEN": senders})
        assert "link" in outcome.stdout
