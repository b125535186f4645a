"""`GradientSync` and a model that is changed, copied or saved afterwards."""

import copy
import io
import pickle
import subprocess
import sys

import pytest

import mpiml

torch = pytest.importorskip("torch")

from mpiml.torch import GradientSync  # noqa: E402
from tests.torch.learning import batch, each, learn, net  # noqa: E402


def replaced(model):
    model[4] = net(3, (16, 2))[0]


def unfrozen(model):
    model[2].requires_grad_(True)


def assigned(model):
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def weighed(model):
    model[4].weight = torch.nn.Parameter(model[4].weight.detach().clone())


def wrapped(model):
    torch.nn.utils.parametrizations.weight_norm(model[4])


def added(model):
    model.append(net(3, (2, 2)))


CHANGES = [replaced, unfrozen, assigned, weighed, wrapped, added]


@each
@pytest.mark.parametrize("change", CHANGES)
def test_a_parameter_that_would_be_missed_is_refused(mode, change):
    def body():
        me = mpiml.context()
        model = net()
        model[2].requires_grad_(False)
        sync = GradientSync(model)
        change(model)
        with torch.no_grad():
            model(batch(1, 4))  # trains nothing
        text = r"parameter '\d.*(has come into the model|was frozen).*make a new GradientSync"
        with pytest.raises(mpiml.UsageError, match=text):
            model(batch(1, 4))
        sync.close()
        GradientSync(model)  # the cure
        model(batch(me.index, 4)).square().sum().backward()
        everyone = mpiml.collectives.allreduce(
            {key: p.grad for key, p in model.named_parameters() if p.requires_grad}, "mean"
        )
        for key, value in everyone.items():
            torch.testing.assert_close(value, model.get_parameter(key).grad)

    learn(mode, body)


@each
def test_it_is_found_where_the_model_itself_is_not_called(mode):
    """In backward, and so the members that changed nothing hear of it."""

    def body():
        me = mpiml.context()
        model = net()
        GradientSync(model)
        if me.index == 1:
            replaced(model)
        with pytest.raises(mpiml.UsageError, match=r"parameter '4\.weight' has come into"):
            model[4](model[:4](batch(1, 4))).sum().backward()

    learn(mode, body)


def test_what_trains_nothing_new_is_no_change():
    def body():
        model = net()
        model[0].requires_grad_(False)
        GradientSync(model)
        model[2].requires_grad_(False)
        model.append(torch.nn.Linear(2, 2).requires_grad_(False))
        model(batch(1, 4)).sum().backward()
        other = {key: p.detach() * 2 for key, p in model.named_parameters()}
        torch.func.functional_call(model, other, batch(1, 4))
        grown = {key: p * 2 for key, p in model.named_parameters()}
        torch.func.functional_call(model, grown, batch(1, 4)).sum().backward()

    learn("threads-1", body)


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def averaged(model):
    return torch.optim.swa_utils.AveragedModel(model).module


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def twice(model):
    return copy.deepcopy(pickled(model))


COPIES = [copy.deepcopy, saved, averaged, pickled, twice]


@each
@pytest.mark.parametrize("make", COPIES)
def test_a_copy_is_an_ordinary_model(mode, make):
    def body():
        me = mpiml.context()
        model = net()
        sync = GradientSync(model)
        model(batch(me.index, 4)).square().sum().backward()
        twin = make(model)
        assert all(p.grad is None for p in twin.parameters())
        replaced(twin)
        replaced(alone := net())
        for one in (twin, alone):
            one(batch(me.index, 4)).sum().backward()
        assert sync.statistics()["backwards"] == 1
        for p, q in zip(twin.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        model.zero_grad()
        model(batch(me.index, 4)).square().sum().backward()  # goes on
        assert sync.statistics()["backwards"] == 2

    learn(mode, body)


def test_a_saved_model_is_loaded_without_mpiml(tmp_path):
    def body():
        model = torch.nn.Sequential(torch.nn.Linear(6, 2))
        GradientSync(model)
        torch.save(model, tmp_path / "model.pt")

    learn("threads-1", body)
    code = (
        "import sys, torch; sys.modules['mpiml'] = None\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "model(torch.ones(1, 6)).sum().backward()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_gradient_sync_is_no_part_of_a_copy():
    def body():
        model = net()
        model.sync = GradientSync(model)
        for make in (copy.deepcopy, pickle.dumps):
            with pytest.raises(mpiml.UsageError, match="Keep it outside of the model"):
                make(model)

    learn("threads-1", body)
