"""What a rank leaves behind that ends a program over several hosts at once."""

import os
from types import SimpleNamespace

import pytest

from mpiml import failure
from mpiml.failure import Failures


class Over(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture
def abort(monkeypatch):
    """Abort on a rank of a program; return what was done, in order."""

    def run(hosts, silent="", hydra=False, **how):
        done = []

        def last(what):
            def end(status):
                done.append((what, status))
                raise Over

            return end

        def bury(patience):
            done.append(("bury", patience))
            return hydra

        monkeypatch.setattr(failure, "bury", bury)
        monkeypatch.setattr(failure, "resign", last("resign"))
        monkeypatch.setattr(os, "_exit", last("exit"))
        runtime = SimpleNamespace(
            engine=SimpleNamespace(link=object()),
            hosts=SimpleNamespace(rows=range(hosts)),
            world=SimpleNamespace(abort=last("abort")),
            survey=SimpleNamespace(silent=lambda patience, cut: silent),
        )
        with pytest.raises(Over):
            Failures(runtime).abort(3, **how)
        return done

    return run


def test_on_one_host_the_end_is_left_to_mpi(abort):
    assert abort(1) == [("abort", 3)]


@pytest.mark.parametrize("hydra", [False, True])
def test_where_all_hosts_are_heard_the_launcher_gets_time_to_end_by_itself(abort, hydra):
    (what, patience), last = abort(2, hydra=hydra)
    assert what == "bury"
    assert patience >= 10
    assert last == ("abort", 3)


@pytest.mark.parametrize("how", [{"silent": "nothing has come"}, {"lost": True}])
def test_where_one_may_be_cut_off_the_launcher_gets_little_time(abort, how):
    (what, patience), last = abort(2, **how)
    assert what == "bury"
    assert 1 <= patience <= 3  # a launcher gives its ranks a second to end
    assert last == ("abort", 3)


@pytest.mark.parametrize("how", [{"silent": "nothing has come"}, {"lost": True}])
def test_mpi_abort_which_would_wait_for_a_lost_host_is_not_called_with_mpich(abort, how):
    assert abort(2, hydra=True, **how)[1] == ("resign", 3)
