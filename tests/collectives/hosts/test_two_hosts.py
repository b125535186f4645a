"""Collectives between two hosts that MPI takes for two: network namespaces and a link."""

from pathlib import Path

import pytest

from tests.two_hosts import two_hosts

JOB = str(Path(__file__).with_name("two_hosts_job.py"))


@pytest.mark.parametrize("senders", ["leaders", "stripes"])
def test_results_and_bytes_on_the_link(senders):
    with two_hosts() as two:
        outcome = two.run([JOB, senders], {"MPIML_BETWEEN": senders})
        assert "link" in outcome.stdout
