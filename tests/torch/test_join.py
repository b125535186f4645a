"""`join`: members with different numbers of batches."""

import pytest

import mpiml

torch = pytest.importorskip("torch")

from torch.nn.functional import mse_loss  # noqa: E402

import mpiml.torch  # noqa: E402
from mpiml.torch import GradientSync  # noqa: E402
from tests.torch.learning import batch, each, learn, net  # noqa: E402

SMALL = {"bucket_bytes": 600, "first_bucket_bytes": 100}


def count(member):
    """How many batches a member has; member 1 has none."""
    return (3, 0, 5, 1)[member % 4]


def vector(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def loss_of(model, member, step):
    x = batch(100 * member + step, 4)
    return mse_loss(model(x), x[:, :2].square())


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def expected(members, op):
    """Train one model as the members together do; return its weights and its momentum."""
    model = net()
    optimizer = optimizer_of(model)
    for step in range(max(map(count, range(members)))):
        optimizer.zero_grad()
        here = [m for m in range(members) if step < count(m)]
        for member in here:
            (loss_of(model, member, step) / (len(here) if op == "mean" else 1)).backward()
        optimizer.step()
    return vector(model.parameters()), momentum(optimizer)


def momentum(optimizer):
    return vector(state["momentum_buffer"] for state in optimizer.state.values())


@each
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_those_without_data_count_as_nothing(mode, op):
    def body():
        me = mpiml.context()
        model = net()
        sync = GradientSync(model, op=op, **SMALL)
        optimizer = optimizer_of(model)
        with sync.join():
            for step in range(count(me.index)):
                optimizer.zero_grad()
                loss_of(model, me.index, step).backward()
                optimizer.step()
        weights, _ = expected(me.replicas, op)
        torch.testing.assert_close(vector(model.parameters()), weights, rtol=1e-4, atol=1e-5)
        loss_of(model, 0, 0).backward()  # afterwards all take part again
        return vector(model.parameters())

    found = learn(mode, body)
    if found is not None:
        for other in found[1:]:
            assert torch.equal(found[0], other)


@each
def test_those_without_data_can_step_along(mode):
    def body():
        me = mpiml.context()
        model = net()
        sync = GradientSync(model, **SMALL)
        optimizer = optimizer_of(model)
        with sync.join(step=optimizer.step):
            for step in range(count(me.index)):
                optimizer.zero_grad()
                loss_of(model, me.index, step).backward()
                optimizer.step()
        weights, inertia = expected(me.replicas, "mean")
        torch.testing.assert_close(vector(model.parameters()), weights, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(momentum(optimizer), inertia, rtol=1e-4, atol=1e-5)
        return torch.cat([vector(model.parameters()), momentum(optimizer)])

    found = learn(mode, body)
    if found is not None:
        for other in found[1:]:
            assert torch.equal(found[0], other)


class Counting(torch.nn.Module):
    """Its buffer says how often, and on which member, it was called."""

    def __init__(self, member):
        super().__init__()
        self.layer = net()
        self.register_buffer("calls", torch.tensor([0, member]))

    def forward(self, x):
        with torch.no_grad():
            self.calls[0] += 1
            self.calls[1] = mpiml.context().index
        return self.layer(x)


@each
def test_buffers_are_those_of_a_member_with_data(mode):
    def body():
        me = mpiml.context()
        model = Counting(me.index)
        sync = GradientSync(model, find_unused=False, **SMALL)
        calls = 0 if me.index == 0 else 2
        with sync.join():
            for step in range(calls):
                model.zero_grad()
                model(batch(step, 4)).sum().backward()
        return model.calls.tolist()

    found = learn(mode, body)
    if found is not None:
        assert found == [[2, 1]] * len(found)


@each
def test_accumulation_in_a_join_block(mode):
    def body():
        me = mpiml.context()
        model = net()
        sync = GradientSync(model, **SMALL)
        with sync.join():
            if me.index == 0:
                with sync.no_sync():
                    loss_of(model, 0, 0).backward()
                loss_of(model, 0, 1).backward()
        alone = net()
        loss_of(alone, 0, 0).backward()
        loss_of(alone, 0, 1).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    learn(mode, body)


@each
def test_blocks_in_blocks_and_errors_in_them(mode):
    def body():
        me = mpiml.context()
        model = net()
        sync = GradientSync(model)
        with sync.join(), pytest.raises(mpiml.UsageError, match=r"join\(\) inside of join"):
            with sync.join():
                pass
        with sync.join():
            pass  # nobody has data
        with sync.join():
            loss_of(model, 0, 0).backward()
            if me.index == 1:
                raise ArithmeticError("in the block")

    with pytest.raises(ArithmeticError, match="in the block"):
        learn(mode, body)
