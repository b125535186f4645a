"""Reports of nodes: what reaches the line, with and without ranks."""

import pytest

import mpiml
from tests.mpi import environment, mpiexec


def work(steps):
    for step in range(1, steps + 1):
        mpiml.context().report(step, steps, loss=1 / step)


def graph(replicas):
    program = mpiml.Program("reports")
    program.add_node(mpiml.PyNode(work, 50), label="worker", replicas=replicas)
    return program


def test_the_last_line_has_the_final_report_of_every_node(capsys):
    mpiml.launch(graph(2), progress=True)
    last = capsys.readouterr().err.splitlines()[-1]
    assert "100/100" in last
    assert "loss" in last
    assert "0.02" in last


def test_nothing_is_shown_or_sent_without_progress(capsys):
    mpiml.launch(graph(2))
    assert capsys.readouterr().err == ""


def test_a_held_report_is_sent_when_the_body_ends(capsys):
    def body():
        for step in range(20):
            mpiml.context().report(step)

    program = mpiml.Program("held")
    program.add_node(mpiml.PyNode(body), label="worker")
    mpiml.launch(program, progress=True)
    assert "19" in capsys.readouterr().err.splitlines()[-1]


def test_what_is_no_number_is_a_usage_error():
    def body():
        mpiml.context().report("much")

    program = mpiml.Program("wrong")
    program.add_node(mpiml.PyNode(body), label="worker")
    with pytest.raises(mpiml.UsageError, match="done"):
        mpiml.launch(program, progress=True)


def test_reports_of_other_ranks_reach_rank_0(mpi_launcher, tmp_path):
    file = tmp_path / "reports.py"
    file.write_text(
        "import mpiml\n"
        "def work(steps):\n"
        "    for step in range(1, steps + 1):\n"
        "        mpiml.context().report(step, steps)\n"
        "def build():\n"
        "    program = mpiml.Program('reports')\n"
        "    program.add_node(mpiml.PyNode(work, 50), label='worker', replicas=mpiml.FILL)\n"
        "    return program\n"
    )
    ended = mpiexec(3, "-m", "mpiml.run", "--progress", file, env=environment()).check()
    assert "150/150" in ended.stderr.splitlines()[-1], ended
