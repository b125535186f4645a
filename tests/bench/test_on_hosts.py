"""The command that tries a program on hosts of this machine; tests/hosts has what it makes."""

import sys

import pytest

from mpiml.bench import on_hosts
from mpiml.errors import UsageError


class Hosts:
    """Stands in for `SeveralHosts`: the command ends once it has been cut off and joined."""

    why = ""
    made = None

    def __init__(self, ranks, slots, programs):
        Hosts.made = self
        self.slots, self.programs = slots, programs
        self.names = ["one", "two"]
        self.said = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.said.append("gone")

    def why_not(self):
        return self.why

    def command(self, argv):
        self.argv = argv
        return [sys.executable, "-c", "raise SystemExit(3)"], {}

    def cut(self, host):
        self.said.append(("cut", host))

    def mend(self, host):
        self.said.append(("mend", host))


@pytest.fixture(autouse=True)
def hosts(monkeypatch):
    monkeypatch.setattr(on_hosts, "Ranks", object)
    monkeypatch.setattr(on_hosts, "SeveralHosts", Hosts)
    return Hosts


def test_the_program_runs_on_the_hosts_asked_for(hosts):
    assert on_hosts.main(["2,1", "--stall-warning", "2", "far.py", "--seconds", "3"]) == 3
    made = hosts.made
    assert (made.slots, made.programs) == ([2, 1], True)
    assert made.argv == ["-m", "mpiml.run", "--stall-warning", "2", "far.py", "--seconds", "3"]
    assert made.said == ["gone"]


def test_the_last_host_is_cut_off(hosts, monkeypatch):
    class Now:
        def __init__(self, seconds, action, args):
            self.start = lambda: action(*args)
            self.cancel = lambda: None

    monkeypatch.setattr(on_hosts.threading, "Timer", Now)
    assert on_hosts.main(["--cut", "1", "--mend", "2", "1,1", "far.py"]) == 3
    assert hosts.made.said == [("cut", "two"), ("mend", "two"), "gone"]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["2,x", "far.py"], "got '2,x'"),
        (["2,0", "far.py"], "1 or more, such as 2,1, got '2,0'"),
        (["2²", "far.py"], "got '2²'"),
        (["2,1"], "expected a program after the ranks 2,1"),
    ],
)
def test_a_command_line_that_is_wrong_is_refused(argv, said, capsys):
    with pytest.raises(SystemExit) as ended:
        on_hosts.main(argv)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "nan", "soon"])
def test_times_that_are_none_are_refused(seconds, capsys):
    with pytest.raises(SystemExit) as ended:
        on_hosts.main([f"--cut={seconds}", "1,1", "far.py"])
    assert ended.value.code == 2
    assert "--cut" in capsys.readouterr().err


def test_it_is_said_why_there_are_no_hosts(hosts, monkeypatch):
    monkeypatch.setattr(hosts, "why", "only root may make network namespaces")
    with pytest.raises(UsageError, match="only root may"):
        on_hosts.main(["1,1", "far.py"])
