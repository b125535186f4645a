"""`mpiml.wait_until_ready`: constructed services, who is late, who has failed."""

import numpy as np
import pytest

import mpiml
from tests.playing import Gate, both, play
from tests.roles.parameter_server.serving import node, served


class Slow:
    """Is constructed only once the gate is open."""

    def __init__(self, gate):
        gate.hold()

    def works(self):
        return True


class Fast:
    def __init__(self):
        pass

    def where(self):
        return mpiml.context().index


class Several:
    """A client that is made of others, as that of a parameter server is."""

    def __init__(self, clients):
        self.clients = clients

    def _ready_targets(self):
        return [client.__dict__["_target"] for client in self.clients]


def only_slow_is_late(clients):
    """Ask with more and more time: who is ready may be held off its core and answer later."""
    seconds, late = 0.01, ""
    while not late.startswith("slow/0. "):
        assert seconds < 10, late
        with pytest.raises(mpiml.DeadlineError) as caught:
            mpiml.wait_until_ready(clients, timeout=seconds)
        said, _, late = str(caught.value).partition("; not ready: ")
        assert said.endswith(f"expected 3 nodes to be ready within {seconds:g} s")
        assert late.startswith("slow/0")
        seconds *= 4


@both
def test_it_returns_when_all_are_constructed_and_names_who_is_late(mode):
    def body(gate, slow, fast):
        mpiml.wait_until_ready(fast)
        mpiml.wait_until_ready([fast[0], fast[1:]], timeout=30.0)
        only_slow_is_late([slow, fast])
        with pytest.raises(mpiml.DeadlineError, match="not ready: slow/0"):
            mpiml.wait_until_ready(slow, timeout=0)
        only_slow_is_late([Several([slow]), Several(fast)])
        gate.open()
        # a deadline for calls is not one for this
        mpiml.wait_until_ready((slow.with_options(timeout=0), slow, fast, gate))
        assert slow.works()
        mpiml.wait_until_ready([])

    play(
        mode,
        body,
        gate=Gate,
        slow=mpiml.ServiceNode(Slow, None),
        fast=Fast,
        replicas={"fast": 2},
        concurrency={"gate": 2},
        after=lambda handles: _nodes(handles["slow"]).configure(handles["gate"]),
    )


@pytest.mark.parametrize("shards", [1, 2])
@both
def test_the_client_of_a_parameter_server_stands_for_its_shards(mode, shards):
    def body(params):
        mpiml.wait_until_ready(params)
        mpiml.wait_until_ready([params, params.with_options(timeout=0)], timeout=30.0)
        titles = [target.title for target in params._ready_targets()]
        assert titles == [f"params/{shard}" for shard in range(shards)]
        return params.pull()[1]

    init = {"w": np.zeros(40), "v": np.zeros(3)}
    assert served(mode, node(init, shards=shards), body) in ([0], [])


def _nodes(handle):
    return handle.program.roles[handle.role_index].members[0].node


def test_bodies_are_ready_and_others_are_refused():
    def body(other):
        mpiml.wait_until_ready(other)
        assert other.done is False
        for wrong in ("other", 3, None, [None]):
            with pytest.raises(mpiml.UsageError, match="expected clients, got"):
                mpiml.wait_until_ready(wrong)
        for timeout in (-1, "1"):
            with pytest.raises(mpiml.UsageError, match="expected timeout >= 0"):
                mpiml.wait_until_ready(other, timeout=timeout)

    program = mpiml.Program("bodies")
    other = program.add_node(
        mpiml.PyNode(lambda: mpiml.context().wait_for_stop()), label="other"
    )
    program.add_node(mpiml.PyNode(body, other), label="body")
    mpiml.launch(program)


def test_the_error_is_that_of_the_one_that_has_failed():
    program = mpiml.Program("failing")
    program.add_node(mpiml.ServiceNode(Fast), label="good")
    program.add_node(mpiml.ServiceNode(Fast), label="bad")
    program.add_node(mpiml.PyNode(lambda: None), label="body")
    with mpiml.testing.running(program, manual=["body"]) as run:
        nodes = {one.title: one for one in run._runtime.nodes}
        nodes["bad/0"].server.fail_all(ValueError("boom in the constructor"))
        with pytest.raises(mpiml.ServiceGoneError, match="bad/0 failed: ValueError") as caught:
            mpiml.wait_until_ready([run.client("good"), run.client("bad")])
        assert "ValueError: boom in the constructor" in str(caught.value.__cause__)
