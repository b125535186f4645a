"""One-sided memory between two hosts that MPI takes for two: network namespaces and a link."""

from pathlib import Path

import pytest

from mpiml.bench.spawn import BenchError, Ranks
from mpiml.bench.two_hosts import TwoHosts
from mpiml.errors import UsageError

JOB = str(Path(__file__).with_name("two_hosts_job.py"))


@pytest.mark.parametrize("way", ["windows", "messages"])
def test_models_windows_and_neighbours_over_a_link(way):
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
        asked = {"MPIML_ONESIDED": "messages"} if way == "messages" else {}
        outcome = two.run([JOB], asked)
        assert "all is well, read by" in outcome.stdout
        if way == "messages":
            assert "as MPIML_ONESIDED=messages says" in outcome.stdout
