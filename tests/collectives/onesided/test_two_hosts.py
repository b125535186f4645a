"""One-sided memory between two hosts that MPI takes for two: network namespaces and a link."""

from pathlib import Path

import pytest

from tests.two_hosts import two_hosts

JOB = str(Path(__file__).with_name("two_hosts_job.py"))


@pytest.mark.parametrize("way", ["windows", "messages"])
def test_models_windows_and_neighbours_over_a_link(way):
    with two_hosts() as two:
        asked = {"MPIML_ONESIDED": "messages"} if way == "messages" else {}
        outcome = two.run([JOB], asked)
        assert "all is well, read by" in outcome.stdout
        if way == "messages":
            assert "as MPIML_ONESIDED=messages says" in outcome.stdout
