"""Which plain tests .ci/run does once only: those that passed without touching MPI.

A leg is all tests with one MPI library. Most plain tests (without the mark mpi) do the same
with any of them, and nobody says which: the first leg watches each test while it runs, and
writes down what a later leg may leave out. That is a test which

- passed in the first leg of this same .ci/run, which passed as a whole, and
- did not touch MPI, nor did the import of its file or a fixture of wider scope that it uses.

To touch MPI is to start a process (any: it may be mpiexec), to import mpi4py, to load libmpi, or
to ask tests/mpi.py for the launcher or the MPI's name. All else is repeated: what was skipped,
what is new, and everything where no first leg went before.
"""

import json
import sys
from pathlib import Path

import pytest

__all__ = ["LeaveOut", "Watch", "plugin", "touches"]

# Audit events of Python (https://docs.python.org/3/library/audit_events.html); the last is ours.
TOUCHES = {
    *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"),
    *("pty.spawn", "subprocess.Popen", "tests.mpi"),
}
# Once imported, what these do is no event any more.
MODULES = {"mpi4py", "multiprocessing.popen_forkserver", "multiprocessing.popen_spawn_posix"}


def plugin(path):
    """Return the plugin for the list at `path`: it is written if there is none, else read."""
    return LeaveOut(path) if Path(path).exists() else Watch(path)


def touches(event, args):
    """Tell whether an audit event means that MPI may be touched."""
    if event == "import":
        return args[0].partition(".")[0] == "mpi4py"
    if event == "ctypes.dlopen":
        return "libmpi" in str(args[0])
    return event in TOUCHES


def file_of(nodeid):
    return nodeid.partition("::")[0]


class Watch:
    """Plugin of the first leg: writes down which tests the later ones may leave out."""

    def __init__(self, path):
        self.path = Path(path)
        self.here = ""  # the test that runs, or the file that is imported
        self.touching = set()  # tests and files
        self.fixtures = set()  # names of those of wider scope that touched MPI
        self.passed = []
        self.unseen = set(MODULES)
        sys.addaudithook(self._audit)

    def _audit(self, event, args):
        if touches(event, args):
            self.touching.add(self.here)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        self.here = file_of(collector.nodeid)
        return (yield)

    def pytest_runtest_logstart(self, nodeid):
        self.here = nodeid

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == "function":
            return (yield)
        test, self.here = self.here, file_of(self.here)
        try:
            return (yield)
        finally:
            if self.here in self.touching:
                self.fixtures.add(fixturedef.argname)
            self.here = test

    def pytest_runtest_setup(self, item):
        if not self.fixtures.isdisjoint(item.fixturenames):
            self.touching.add(item.nodeid)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item):
        new = self.unseen & sys.modules.keys()
        self.unseen -= new
        if new:
            pytest.fail(f"{', '.join(sorted(new))}: not to be imported here; use tests/mpi.py")

    def once(self):
        """The tests that one leg suffices for."""
        return [n for n in self.passed if self.touching.isdisjoint((n, file_of(n)))]

    def pytest_sessionfinish(self, exitstatus):
        if exitstatus == 0:
            new = self.path.with_suffix(".new")
            new.write_text(json.dumps(self.once()))
            new.replace(self.path)

    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.write_line(
            f"{len(self.once())} of {len(self.passed)} tests need no other leg (tests/legs.py)"
        )


class LeaveOut:
    """Plugin of a later leg: leaves out what the first one wrote down."""

    def __init__(self, path):
        self.once = frozenset(json.loads(Path(path).read_text()))

    def pytest_collection_modifyitems(self, config, items):
        left = [item for item in items if item.nodeid in self.once]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item.nodeid not in self.once]

    def pytest_report_header(self):
        return f"left out: {len(self.once)} tests that an earlier leg saw pass without MPI"
