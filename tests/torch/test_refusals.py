"""`GradientSync`: what it refuses, and kinds of backward that are not plain."""

import contextlib

import pytest

import mpiml

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

import mpiml.torch  # noqa: E402
from mpiml.collectives.compression import Cast, ErrorFeedback, TopK  # noqa: E402
from mpiml.torch import GradientSync  # noqa: E402
from tests.torch.learning import batch, each, learn, net  # noqa: E402

SMALL = {"bucket_bytes": 600, "first_bucket_bytes": 100}


def grads(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def mean_of(make, loss_of, members):
    """Return the mean of the members' gradients, each by a model of its own."""
    total = 0
    for member in range(members):
        model = make()
        loss_of(model, member).backward()
        total = total + grads(model) / members
    return total


def compare(mode, loss_of, make=net, **options):
    """Compare what members get with the mean of what each would have got alone."""

    def body():
        me = mpiml.context()
        model = make()
        GradientSync(model, **{**SMALL, **options})
        for _ in range(2):
            model.zero_grad()
            loss_of(model, me.index).backward()
            expected = mean_of(make, loss_of, me.replicas)
            torch.testing.assert_close(grads(model), expected, rtol=1e-4, atol=1e-5)

    learn(mode, body)


@each
def test_a_penalty_on_gradients(mode):
    def loss_of(model, member):
        x = batch(member, 4).requires_grad_(True)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().mean()

    compare(mode, loss_of)


@each
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(mode, reentrant):
    def loss_of(model, member):
        x = batch(member, 4).requires_grad_(True)
        h = checkpoint(model[:2], x, use_reentrant=reentrant)
        h = model[2:4](h)
        return checkpoint(model[4:], h, use_reentrant=reentrant).square().mean()

    compare(mode, loss_of)


@each
def test_checkpoints_around_the_whole_model(mode):
    """Every gradient comes in a backward inside of the one that the user calls."""

    def loss_of(model, member):
        x = batch(member, 4).requires_grad_(True)
        for part in (model[:2], model[2:4], model[4:]):
            x = checkpoint(part, x, use_reentrant=True)
        return x.square().mean()

    compare(mode, loss_of)


@each
def test_two_backwards_of_one_step(mode):
    """The second adds to gradients that are reduced already: their mean is what they are."""

    def body():
        me = mpiml.context()
        model = net()
        sync = GradientSync(model, **SMALL)
        y = model(batch(me.index, 4))
        y.sum().backward(retain_graph=True)
        y.square().sum().backward()
        assert sync.statistics()["backwards"] == 2

        def loss_of(alone, member):
            z = alone(batch(member, 4))
            return z.sum() + z.square().sum()

        expected = mean_of(net, loss_of, me.replicas)
        torch.testing.assert_close(grads(model), expected, rtol=1e-4, atol=1e-5)

    learn(mode, body)


@each
def test_compressed_gradients(mode):
    def loss_of(model, member):
        return model(batch(member, 4)).square().mean()

    compare(mode, loss_of, compress=TopK(1.0))

    def body():
        me = mpiml.context()
        model = net()
        GradientSync(model, compress=Cast("float16"), **SMALL)
        picky = net()
        GradientSync(picky, compress=TopK(1.0), **SMALL)
        loss_of(model, me.index).backward()
        expected = mean_of(net, loss_of, me.replicas)
        assert not torch.equal(grads(model), expected)
        torch.testing.assert_close(grads(model), expected, rtol=1e-2, atol=1e-3)
        # what one member cannot send is an error on all of them, and they may go on
        bad = torch.full((4, 6), float("nan") if me.index == 1 else 0.5)
        with pytest.raises(mpiml.UsageError, match=r"NaN|nan"):
            picky(bad).square().mean().backward()
        picky.zero_grad()
        loss_of(picky, me.index).backward()
        torch.testing.assert_close(grads(picky), expected, rtol=1e-4, atol=1e-5)

    learn(mode, body)


def refused(mode, make, match, **options):
    """Expect that no member gets a GradientSync of what `make` returns for it."""

    def body():
        with pytest.raises(mpiml.UsageError, match=match):
            GradientSync(make(mpiml.context().index), **options)

    learn(mode, body)


@each
def test_models_that_differ(mode):
    refused(
        mode,
        lambda member: net(sizes=(6, 16, 2 + member % 2)),
        r"expected the same model and arguments on all .*got parameter '2.weight' "
        r"\(2, 16\) float32 .*'2.weight' \(3, 16\) float32",
    )


@each
def test_arguments_that_differ(mode):
    def body():
        index = mpiml.context().index
        with pytest.raises(mpiml.UsageError, match=r"op='mean' .* op='sum'"):
            GradientSync(net(), op="sum" if index else "mean")

    learn(mode, body)


@each
def test_one_member_that_cannot_go_on_is_an_error_on_all(mode):
    def make(member):
        return [net()] if member == 1 else net()

    refused(mode, make, r"expected a torch.nn.Module, got list.*ModuleList")


class Half:
    """A codec of the user's; two of them look different."""

    def encode(self, array):
        return array.astype("float16")

    def decode(self, payload, shape, dtype):
        return payload.astype(dtype).reshape(shape)


@each
def test_codecs_of_the_users_are_told_apart_by_their_class(mode):
    def body():
        me = mpiml.context()
        for make in (Half, lambda: ErrorFeedback(Half())):
            model = net()
            GradientSync(model, compress=make())
            model(batch(me.index, 4)).square().mean().backward()
            expected = mean_of(net, lambda m, i: m(batch(i, 4)).square().mean(), me.replicas)
            torch.testing.assert_close(grads(model), expected, rtol=1e-2, atol=1e-3)
        with pytest.raises(mpiml.UsageError, match=r"got compress=(Half|Cast)"):
            GradientSync(net(), compress=Cast() if me.index else Half())

    learn(mode, body)


@each
@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ("bfloat16", r"GradientSync: compress: expected None, .*, got str"),
        (TopK, r"expected an object, got the class TopK itself"),
        (TopK(0.1), r"parameter '0.weight': expected one of the dtypes .*got complex64"),
    ],
)
def test_a_codec_that_is_none_is_refused_at_once_on_all(mode, wrong, match):
    def body():
        odd = mpiml.context().index == 1
        model = net()
        if isinstance(wrong, TopK):
            model[0].weight = torch.nn.Parameter(model[0].weight.to(torch.complex64))
        with pytest.raises(mpiml.UsageError, match=match):
            GradientSync(model, compress=wrong if odd else None)

    learn(mode, body)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (torch.nn.Embedding(3, 2, sparse=True), "got sparse=True.*sparse=False"),
        (torch.nn.ReLU(), "expected a model with parameters that require a gradient"),
        (torch.nn.LazyLinear(2), "lazy parameter. Call the model once before"),
        (torch.nn.Linear(2, 2, device="meta"), "on the CPU or a CUDA device, got meta"),
    ],
)
def test_models_that_cannot_be_reduced(model, match):
    refused("threads-1", lambda _: model, match)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"op": "max"}, "op: expected 'mean' or 'sum', got 'max'"),
        ({"bucket_bytes": 0}, "bucket_bytes: expected a number of bytes, got 0"),
        ({"first_bucket_bytes": 1.5}, "first_bucket_bytes: expected a number"),
    ],
)
def test_arguments_that_mean_nothing(options, match):
    refused("threads-1", lambda _: net(), match, **options)


def test_outside_of_a_node_it_asks_for_a_communicator():
    with pytest.raises(mpiml.UsageError, match=r"GradientSync: .*comm=MPI\.COMM_WORLD"):
        GradientSync(net())


def test_a_graph_of_gradients_is_refused():
    def body():
        model = net()
        GradientSync(model)
        with (
            pytest.raises(mpiml.UsageError, match=r"parameter '4\.\w+'.*torch\.autograd\.grad"),
            pytest.warns(UserWarning, match="create_graph"),
        ):
            model(batch(1, 4)).sum().backward(create_graph=True)
        model.zero_grad()
        model(batch(1, 4)).sum().backward()  # goes on

    learn("threads-1", body)


def test_a_backward_that_the_user_s_code_ends_is_known_in_the_next_forward():
    def body():
        model = net()
        GradientSync(model)

        def fails(_):
            raise ZeroDivisionError

        y = model[:2](batch(1, 4))
        y.register_hook(fails)
        with pytest.raises(ZeroDivisionError):
            model[2:](y).sum().backward()
        with pytest.raises(mpiml.UsageError, match="did not come to its end"):
            model(batch(1, 4))

    learn("threads-1", body)


class Odd(torch.nn.Module):
    """Gives one of its parameters a gradient that no bucket takes, while `odd` is set."""

    def __init__(self, which):
        super().__init__()
        self.net = net()
        self.spare = torch.nn.Parameter(torch.ones(3))  # in no loss
        self.register_buffer("mean", torch.zeros(3))
        self.odd = False
        self.which = self.spare if which is None else list(self.net.parameters())[which]
        self.which.register_post_accumulate_grad_hook(self.spoil)

    def spoil(self, param):
        if self.odd:
            param.grad = param.grad.to_sparse()

    def forward(self, x):
        if self.odd and self.which is self.spare:
            self.spare.grad = torch.ones(3).to_sparse()
        return self.net(x)


@each
@pytest.mark.parametrize("find_unused", [True, False])
@pytest.mark.parametrize("which", [0, -1, None])
@pytest.mark.parametrize("join", [True, False])
def test_a_gradient_that_one_member_cannot_take_is_an_error_on_all(
    mode, find_unused, which, join
):
    """Found at the end of backward, at its begin, and when all hooks have run."""

    def body():
        me = mpiml.context()
        model = Odd(which)
        sync = GradientSync(model, **SMALL, find_unused=find_unused)
        for odd in (me.replicas - 1, 0):
            model.odd = me.index == odd
            model.zero_grad()
            model.spare.grad = None if find_unused else torch.ones(3)
            with pytest.raises(mpiml.UsageError, match="expected a dense gradient") as caught:
                with sync.join() if join else contextlib.nullcontext():
                    model(batch(me.index, 4)).sum().backward()
            assert me.index == odd or "could not take part" in str(caught.value)
            model.odd = False
        model.zero_grad()
        model.spare.grad = torch.ones(3)
        model(batch(me.index, 4)).sum().backward()
        found = model.net[0].weight.grad
        total = sum(_first(member) for member in range(me.replicas)) / me.replicas
        torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-5)

    learn(mode, body)


def _first(member):
    model = net()
    model(batch(member, 4)).sum().backward()
    return model[0].weight.grad


@each
def test_a_gradient_of_buffers_only_is_waited_for_in_vain_by_nobody(mode):
    """All gradients are reduced when one member fails: the others hear of it with the buffers."""

    def body():
        me = mpiml.context()
        model = Twice(True) if me.index == 0 else Twice(False)
        model.register_buffer("mean", torch.zeros(3))
        GradientSync(model, first_bucket_bytes=80, bucket_bytes=80, find_unused=False)
        with pytest.raises(mpiml.UsageError, match="second gradient in one backward"):
            model(batch(1, 4, 4)).sum().backward()

    learn(mode, body)


@pytest.mark.mpi(min_size=2)
def test_mpi4py_s_sum_is_an_operation():
    from mpi4py import MPI

    def body():
        model = net()
        GradientSync(model, op=MPI.SUM)
        model(batch(1, 4)).sum().backward()
        with pytest.raises(mpiml.UsageError, match="op: expected 'mean' or 'sum'"):
            GradientSync(net(), op=MPI.MAX)

    learn("mpi", body)


@pytest.mark.mpi
def test_a_sparse_gradient_is_refused():
    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.ones(3, 2))

        def forward(self, x):
            return torch.nn.functional.embedding(x, self.table, sparse=True)

    def body():
        model = Sparse()
        GradientSync(model)
        with pytest.raises(mpiml.UsageError, match="'table': expected a dense gradient"):
            model(torch.tensor([1])).sum().backward()

    learn("mpi", body)


def test_a_model_that_was_converted_is_refused():
    def body():
        model = net()
        GradientSync(model)
        model.double()
        with pytest.raises(mpiml.UsageError, match=r"of torch\.float32 .* got torch\.float64"):
            model(batch(1, 4).double()).sum().backward()

    learn("threads-1", body)


class Twice(torch.nn.Module):
    """A layer used twice, in checkpoints, and one below it."""

    def __init__(self, reentrant, below=True):
        super().__init__()
        self.below = net(1, (4, 4)) if below else torch.nn.Identity()
        self.shared = net(2, (4, 4))
        self.reentrant = reentrant

    def forward(self, x):
        x = self.below(x.requires_grad_(True))
        x = checkpoint(self.shared, x, use_reentrant=self.reentrant)
        return checkpoint(self.shared, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize(("below", "op"), [(True, "mean"), (False, "sum")])
def test_a_weight_shared_by_reentrant_checkpoints_is_refused(below, op):
    def body():
        model = Twice(True, below)
        GradientSync(model, op=op, first_bucket_bytes=80)
        loss = model(batch(1, 4, 4)).sum()
        with pytest.raises(mpiml.UsageError, match="a second gradient in one backward"):
            loss.backward()

    learn("threads-1", body)


@each
def test_a_weight_shared_by_checkpoints(mode):
    def loss_of(model, member):
        return model(batch(member, 4, 4)).sum()

    compare(mode, loss_of, lambda: Twice(False))
    compare(mode, loss_of, lambda: Twice(True, below=False))


@each
def test_a_model_that_is_itself_in_a_checkpoint(mode):
    def loss_of(model, member):
        x = checkpoint(model, batch(member, 4, 4).requires_grad_(True), use_reentrant=False)
        return checkpoint(model, x, use_reentrant=False).sum()

    compare(mode, loss_of, lambda: net(sizes=(4, 5, 4)))


def test_a_closed_one_says_so():
    def body():
        model = net()
        with GradientSync(model) as sync:
            assert "6 parameters in 1 buckets, member 0 of 1" in repr(sync)
        for use in (sync.join, lambda: sync.no_sync().__enter__()):
            with pytest.raises(mpiml.UsageError, match="it is closed; make another one"):
                use()
        model(batch(1, 4)).sum().backward()

    learn("threads-1", body)
