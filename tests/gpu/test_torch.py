"""`GradientSync` of a model on a real device: the gradients of one on the CPU."""

import pytest

import mpiml

torch = pytest.importorskip("torch")

import mpiml.torch  # noqa: E402
from mpiml.torch import GradientSync  # noqa: E402
from tests.torch.learning import batch, learn, net  # noqa: E402

pytestmark = pytest.mark.gpu
both = pytest.mark.parametrize(
    "mode", ["threads-2", pytest.param("mpi", marks=pytest.mark.mpi(min_size=2))]
)
SMALL = {"bucket_bytes": 600, "first_bucket_bytes": 100}


def loss_of(model, x):
    return (model(x).float() - x[:, :2].float()).square().mean()


def device_of(me):
    return torch.device("cuda", me.index % torch.cuda.device_count())


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("side", [False, True])
def test_gradients_on_a_device(mode, dtype, side):
    def body():
        me = mpiml.context()
        device = device_of(me)
        model, alone = net(me.index, dtype=dtype).to(device), net(0, dtype=dtype).to(device)
        sync = GradientSync(model, **SMALL)
        stream = torch.cuda.Stream(device) if side else torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            for step in range(3):
                model.zero_grad()
                alone.zero_grad()
                x = batch(step, 4 * me.replicas).to(device, dtype)
                loss_of(model, x[me.index :: me.replicas]).backward()
                for member in range(me.replicas):
                    (loss_of(alone, x[member :: me.replicas]) / me.replicas).backward()
                for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                    torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-2, atol=2e-3)
        torch.cuda.synchronize(device)
        assert sync.statistics()["backwards"] == 3
        return torch.cat([p.grad.float().flatten().cpu() for p in model.parameters()])

    found = learn(mode, body)
    if found is not None:
        assert all(torch.equal(found[0], other) for other in found)


@both
def test_members_without_data_and_buffers_on_a_device(mode):
    def body():
        me = mpiml.context()
        torch.manual_seed(0)
        model = torch.nn.Sequential(net(me.index), torch.nn.BatchNorm1d(2)).to(device_of(me))
        sync = GradientSync(model, **SMALL)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with sync.join():
            for step in range(1 + me.index):
                optimizer.zero_grad()
                loss_of(model, batch(step, 4).to(device_of(me))).backward()
                optimizer.step()
        return torch.cat(
            [v.detach().float().flatten().cpu() for v in model.state_dict().values()]
        )

    found = learn(mode, body)
    if found is not None:
        assert all(torch.equal(found[0], other) for other in found)
