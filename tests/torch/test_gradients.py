"""`GradientSync`: what the members' gradients are, in threads and on ranks."""

import pytest

import mpiml

torch = pytest.importorskip("torch")

from torch.nn.functional import mse_loss  # noqa: E402

import mpiml.torch  # noqa: E402
from mpiml.torch import GradientSync  # noqa: E402
from tests.torch.learning import batch, each, learn, net  # noqa: E402

SMALL = {"bucket_bytes": 600, "first_bucket_bytes": 100}  # several buckets of a small net
STEPS = 4


def weights(model):
    """Return all parameters in one vector, detached."""
    return torch.cat([p.detach().flatten().double() for p in model.parameters()])


def gradients(model):
    """Return all gradients, None where there is none."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def loss_of(model, x):
    """Return a loss that is a mean over the rows of `x`."""
    return mse_loss(model(x), x[:, :2].square())


def same_everywhere(found):
    """Compare what the members return, to the last bit."""
    for other in found[1:]:
        assert torch.equal(found[0], other)


@each
@pytest.mark.parametrize("set_to_none", [True, False])
def test_the_curve_is_that_of_one_process_with_the_whole_batch(mode, set_to_none):
    def body():
        me = mpiml.context()
        model = net(seed=me.index)  # the first one's is taken
        sync = GradientSync(model, **SMALL)
        assert (sync.index, sync.size) == (me.index, me.replicas)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        alone = net(seed=0)
        whole = torch.optim.SGD(alone.parameters(), lr=0.2, momentum=0.9)
        for step in range(STEPS):
            x = batch(step, 4 * me.replicas)
            whole.zero_grad()
            loss_of(alone, x).backward()
            whole.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            loss_of(model, x[me.index :: me.replicas]).backward()
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)
            optimizer.step()
            torch.testing.assert_close(weights(model), weights(alone), rtol=1e-5, atol=1e-6)
        assert sync.statistics()["backwards"] == STEPS
        assert sync.statistics()["buckets"] > 2
        return weights(model)

    found = learn(mode, body)
    if found is not None:
        same_everywhere(found)


@each
def test_gradients_live_in_the_buckets_and_stay_there(mode):
    def body():
        model = net()
        sync = GradientSync(model, **SMALL)
        places = {slot.name: slot.view.data_ptr() for slot in sync._reduction.slots}
        memory = [
            (array.ctypes.data, array.ctypes.data + array.nbytes)
            for parcel in sync._reduction.parcels
            for array in parcel.bucket.flat
        ]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for set_to_none in (True, False, True):
            loss_of(model, batch(1, 4)).backward()
            for name, param in model.named_parameters():
                assert param.grad.data_ptr() == places[name]
                assert any(a <= places[name] < b for a, b in memory)
                assert param.grad.stride() == param.stride()
            optimizer.zero_grad(set_to_none=set_to_none)
        model[0].weight.grad = torch.ones_like(model[0].weight)  # the user's own is added to
        loss_of(model, batch(1, 4)).backward()
        assert model[0].weight.grad.data_ptr() == places["0.weight"]
        alone = net()
        alone[0].weight.grad = torch.ones_like(model[0].weight)
        loss_of(alone, batch(1, 4)).backward()
        torch.testing.assert_close(model[0].weight.grad, alone[0].weight.grad)

    learn(mode, body)


@each
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_no_sync_adds_up_and_the_next_backward_reduces_the_whole(mode, op):
    def body():
        me = mpiml.context()
        model, alone = net(), net()
        sync = GradientSync(model, op=op, **SMALL)
        parts = [batch(10 * me.index + k, 3) for k in range(3)]
        with sync.no_sync():
            for part in parts[:2]:
                loss_of(model, part).backward()
                assert model[0].weight.grad is not None
        for part in parts[:2]:
            loss_of(alone, part).backward()
        for ours, theirs in zip(gradients(model), gradients(alone), strict=True):
            assert torch.equal(ours, theirs)  # nothing has been reduced
        loss_of(model, parts[2]).backward()
        assert sync.statistics()["backwards"] == 1
        alone = net()
        factor = 1 / me.replicas if op == "mean" else 1.0
        for member in range(me.replicas):
            for k in range(3):
                (factor * loss_of(alone, batch(10 * member + k, 3))).backward()
        for ours, theirs in zip(gradients(model), gradients(alone), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)

    learn(mode, body)


class Branches(torch.nn.Module):
    """Parts of which a forward uses some, in the order in which they are named."""

    def __init__(self, **options):
        super().__init__()
        self.parts = torch.nn.ModuleDict(
            {name: net(seed, (4, 4)) for seed, name in enumerate("abcd")}
        )

    def forward(self, x, names):
        for name in names:
            x = torch.tanh(self.parts[name](x))
        return x


def plan(members):
    """Which parts each member uses, in which order: "d" none, "c" one of them."""
    return ["cab" if member == 0 else "ba" if member % 2 else "ab" for member in range(members)]


@each
def test_parameters_that_some_members_do_not_use(mode):
    def body():
        me = mpiml.context()
        model, alone = Branches(), Branches()
        GradientSync(model, **SMALL)
        for step in range(2):
            model.zero_grad()
            alone.zero_grad()
            model(
                batch(me.index + 50 * step, 3, 4), plan(me.replicas)[me.index]
            ).sum().backward()
            for member, names in enumerate(plan(me.replicas)):
                loss = alone(batch(member + 50 * step, 3, 4), names).sum() / me.replicas
                loss.backward()
            for (name, ours), theirs in zip(
                model.named_parameters(), alone.parameters(), strict=True
            ):
                if name.startswith("parts.d"):
                    assert ours.grad is None
                    assert theirs.grad is None
                else:
                    torch.testing.assert_close(ours.grad, theirs.grad)

    learn(mode, body)


@each
def test_a_missing_gradient_is_an_error_if_one_says_so(mode):
    def body():
        me = mpiml.context()
        model = Branches()
        GradientSync(model, find_unused=False, name="G", **SMALL)
        names = "abd" if me.index == 0 else "abcd"
        loss = model(batch(me.index, 3, 4), names).sum()
        if me.index == 0:
            with pytest.raises(mpiml.UsageError, match=r"'G': .* got none of parts\.c\.0\."):
                loss.backward()
        else:
            loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    found = learn(mode, body)
    if found is not None:
        same_everywhere(found)


@each
def test_gradients_of_several_dtypes(mode):
    class Mixed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList(
                net(seed, (5, 3), dtype)
                for seed, dtype in enumerate(
                    [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
                )
            )

        def forward(self, x):
            return sum(layer(x.to(layer[0].weight.dtype)).double() for layer in self.layers)

    def body():
        me = mpiml.context()
        model, sums = Mixed(), None
        sync = GradientSync(model, bucket_bytes=200)
        assert sync.statistics()["buckets"] < 5  # a bucket holds several dtypes
        model(batch(me.index, 4, 5)).square().mean().backward()
        for member in range(me.replicas):
            alone = Mixed()
            alone(batch(member, 4, 5)).square().mean().backward()
            mine = [p.grad.double() for p in alone.parameters()]
            sums = mine if sums is None else [a + b for a, b in zip(sums, mine, strict=True)]
        for param, total in zip(model.parameters(), sums, strict=True):
            assert param.grad.dtype == param.dtype
            # between hosts the sum of each host is rounded
            atol = 1e-3 if param.dtype.itemsize == 2 else 1e-6
            expected = (total / me.replicas).to(param.dtype)
            torch.testing.assert_close(param.grad, expected, rtol=1e-2, atol=atol)
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    found = learn(mode, body)
    if found is not None:
        same_everywhere(found)


class Shared(torch.nn.Module):
    """One weight used twice, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.body = net(3, (4, 4, 4))
        self.again = self.body[0]
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        return self.again(self.body(x) * self.frozen)


@each
def test_shared_and_frozen_parameters(mode):
    def body():
        me = mpiml.context()
        model, alone = Shared(), Shared()
        with torch.no_grad():
            model.frozen.mul_(1 + me.index)
        sync = GradientSync(model)
        assert sync.statistics()["parameters"] == 4
        model(batch(me.index, 4, 4)).sum().backward()
        assert model.frozen.grad is None
        assert torch.equal(model.frozen, torch.ones(4))  # the first member's
        for member in range(me.replicas):
            (alone(batch(member, 4, 4)).sum() / me.replicas).backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad, theirs.grad)
        model.frozen.requires_grad_(True)
        with pytest.raises(mpiml.UsageError, match="'frozen' was frozen when it was made"):
            model(batch(0, 4, 4))

    learn(mode, body)


class Witness(torch.autograd.Function):
    """Calls a function when backward comes by."""

    @staticmethod
    def forward(ctx, x, call):
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.call()
        return grad, None


@each
def test_buckets_are_reduced_while_backward_goes_on(mode):
    def body():
        model = net(sizes=(6, 16, 16, 16, 2))
        sync = GradientSync(model, **SMALL)
        seen = []

        def look():
            reduction = sync._reduction
            early = [p.request for p in reduction.parcels if p.request is not None]
            for request in early:
                request.wait(20)  # they end although backward waits here
            seen.append((len(early), len(reduction.parcels)))

        h = model[1](model[0](batch(1, 4)))
        h = model[2:](Witness.apply(h, look))
        h.sum().backward()
        (early, all_of_them) = seen[0]
        assert 0 < early < all_of_them
        assert sync.statistics()["reduced_early"] == all_of_them

    learn(mode, body)


@each
def test_buckets_go_in_one_order_whatever_the_order_of_gradients(mode):
    """Members whose backward comes to the parts in other orders would else wait for each other."""

    def body():
        me = mpiml.context()
        model, alone = Branches(), Branches()
        GradientSync(model, bucket_bytes=1, first_bucket_bytes=1)  # one for each parameter
        orders = ["abcd", "dcba", "badc", "cdab"]
        model(batch(me.index, 3, 4), orders[me.index % 4]).sum().backward()
        for member in range(me.replicas):
            loss = alone(batch(member, 3, 4), orders[member % 4]).sum() / me.replicas
            loss.backward()
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)

    learn(mode, body)


class Normed(torch.nn.Module):
    """Layers with buffers of several dtypes, in ``channels_last``."""

    def __init__(self, seed):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = torch.nn.BatchNorm2d(4)
        self.register_buffer("flag", torch.tensor(seed == 0))
        self.register_buffer("nothing", None)
        with torch.no_grad():
            self.conv.weight.copy_(batch(seed, 12, 9).reshape(4, 3, 3, 3))
            self.conv.bias.fill_(seed)

    def forward(self, x):
        return self.norm(self.conv(x))


def everything(model):
    """Return the whole state of a model in one vector."""
    return torch.cat([v.detach().double().flatten() for v in model.state_dict().values()])


@each
def test_models_begin_equal_and_buffers_stay_it(mode):
    def body():
        me = mpiml.context()
        model = Normed(me.index)
        sync = GradientSync(model)
        assert torch.equal(everything(model), everything(Normed(0)))
        assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
        x = batch(me.index, 24, 25).reshape(8, 3, 5, 5)
        model(x).square().sum().backward()
        assert model.conv.weight.grad.stride() == model.conv.weight.stride()
        first = Normed(0)
        first(batch(0, 24, 25).reshape(8, 3, 5, 5))
        assert torch.equal(model.norm.running_mean, first.norm.running_mean)
        assert int(model.norm.num_batches_tracked) == 1
        with torch.no_grad():
            model.conv.weight.add_(me.index)
        sync.broadcast(root=1)
        return everything(model)

    found = learn(mode, body)
    if found is not None:
        same_everywhere(found)


@each
def test_what_is_not_to_be_broadcast_is_not(mode):
    def body():
        me = mpiml.context()
        model = Normed(me.index)
        GradientSync(model, broadcast=False, broadcast_buffers=False)
        assert torch.equal(everything(model), everything(Normed(me.index)))
        model(batch(me.index, 24, 25).reshape(8, 3, 5, 5)).square().sum().backward()
        mine = Normed(me.index)
        mine(batch(me.index, 24, 25).reshape(8, 3, 5, 5))
        assert torch.equal(model.norm.running_mean, mine.norm.running_mean)

    learn(mode, body)


@pytest.mark.mpi(min_size=2)
def test_plain_mpi_code_passes_a_communicator():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    model, alone = net(comm.rank), net(0)
    with GradientSync(model, comm, **SMALL) as sync:
        assert (sync.index, sync.size) == (comm.rank, comm.size)
        loss_of(model, batch(comm.rank, 4)).backward()
    for member in range(comm.size):
        (loss_of(alone, batch(member, 4)) / comm.size).backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    loss_of(model, batch(comm.rank, 4)).backward()  # closed: nothing is reduced


@each
def test_a_stop_comes_between_two_steps(mode):
    def body():
        me = mpiml.context()
        model = net()
        sync = GradientSync(model, **SMALL)
        steps = 0
        while not me.stopping:
            if steps == 3 and me.index == 1:
                me.stop()
            model.zero_grad()
            loss_of(model, batch(steps, 4)).backward()
            steps += 1
            assert sync.statistics()["backwards"] == steps
        return torch.tensor([steps])

    found = learn(mode, body)
    if found is not None:
        same_everywhere(found)


@each
def test_an_error_in_backward_ends_the_program(mode):
    def body():
        model = net(sizes=(6, 16, 16, 16, 2))
        GradientSync(model, **SMALL)

        def fail():
            if mpiml.context().index == 1:
                raise ArithmeticError("in backward")

        h = Witness.apply(model[:4](batch(1, 4)), fail)
        model[4:](h).sum().backward()

    with pytest.raises(ArithmeticError, match="in backward"):
        learn(mode, body)
