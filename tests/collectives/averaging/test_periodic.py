"""What the rules share: the start, bad input, checkpoints, the end."""

import copy
import re

import numpy as np
import pytest

from mpiml import optim
from mpiml.collectives import Bucket
from mpiml.collectives.averaging import DiLoCo, Elastic, LocalSGD, PostLocalSGD
from mpiml.errors import ServiceGoneError, UsageError
from tests.collectives.averaging.crowd import flat, grads, weights
from tests.collectives.together import outcomes, together

MAKE = {
    "local": lambda p, t, **k: LocalSGD(p, optim.Momentum(0.1), comm=t, **{"every": 3, **k}),
    "synchronous": lambda p, t, **k: LocalSGD(p, optim.Adam(0.1), comm=t, **{"every": 1, **k}),
    "post": lambda p, t, **k: PostLocalSGD(
        p, optim.Adam(0.1), comm=t, **{"every": 3, "until": 2, **k}
    ),
    "diloco": lambda p, t, **k: DiLoCo(p, optim.AdamW(0.1), comm=t, **{"every": 3, **k}),
    "easgd": lambda p, t, **k: Elastic(p, optim.SGD(0.1), comm=t, **{"every": 3, **k}),
    "eamsgd": lambda p, t, **k: Elastic(
        p, optim.Momentum(lambda done: 0.1 / (1 + done), nesterov=True), comm=t, **{"every": 2, **k}
    ),
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", MAKE)


def errors(size, text, body):
    """Every member ends in a UsageError with this text."""
    for error in outcomes(size, body):
        assert isinstance(error, UsageError), repr(error)
        assert re.search(text, str(error)), str(error)


@KINDS
@pytest.mark.parametrize("held", ["tree", "bucket"])
def test_all_start_from_the_bits_of_member_0(kind, held):
    odd = np.array([-0.0, np.nan, np.inf, 5e-324, -1.0])

    def body(team):
        params = {"x": odd.copy() if team.index == 0 else np.ones(5), "y": np.ones(2, "f4")}
        if held == "bucket":
            values, params = params, Bucket(team, like=params)
            params["x"] = values["x"]
        model = MAKE[kind](params, team)
        assert model.params["x"].tobytes() == odd.tobytes()
        assert (model.params is params) == (held == "tree")
        assert (model.members, model.steps) == (3, 0)

    together(3, body)


@KINDS
def test_arrays_with_strides_are_trained_in_place(kind):
    def body(team):
        memory, plain = np.zeros((6, 4)), np.zeros((4, 3))
        model = MAKE[kind](memory[::2].T, team)
        other = MAKE[kind](plain, team)
        for step in range(5):
            grad = np.random.default_rng([team.index, step]).normal(size=(4, 3))
            model.step(grad)
            other.step(grad)
        np.testing.assert_allclose(memory[::2].T, plain, rtol=1e-12)
        assert plain.any()
        assert not memory[1::2].any()

    together(2, body)


@KINDS
@pytest.mark.parametrize("every", [0, -1, 1.5, "2", None, True])
def test_every_is_a_whole_number_from_1_on(kind, every):
    text = f"every: expected a whole number >= 1, got {re.escape(repr(every))}"
    errors(
        2, text, lambda team: MAKE[kind](np.zeros(3), team, every=every if team.index else 3)
    )


@KINDS
@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"b": np.zeros(3)}, r"expected the same .*\['b'\]"),
        ({"a": np.zeros(4)}, r"expected the same .*\(4,\)"),
        ({"a": np.zeros(3, "f4")}, "expected the same .*float32"),
        ({"a": np.zeros(3, "i4")}, r"params\['a'\]: expected a float32 or float64"),
        ({"a": 3.0}, r"leaf \['a'\]: expected an array"),
        ({}, "expected at least one array"),
        ({"a": np.broadcast_to(np.zeros(1), 3)}, r"params\['a'\]: .* can be written"),
    ],
)
def test_parameters_that_do_not_fit_are_an_error_on_all(kind, params, text):
    params = params if params else {}
    errors(
        3,
        text,
        lambda team: MAKE[kind](params if team.index == 1 else {"a": np.zeros(3)}, team),
    )


def test_optimizers_and_names_that_differ_are_an_error_on_all():
    errors(
        2,
        "expected the same",
        lambda team: LocalSGD(np.zeros(3), optim.SGD(0.1 + team.index), every=2, comm=team),
    )
    errors(
        2,
        "expected an optimizer of mpiml.optim",
        lambda team: LocalSGD(np.zeros(3), optim.SGD, every=2, comm=team),
    )
    errors(
        2,
        "expected the same",
        lambda team: DiLoCo(np.zeros(3), optim.SGD(0.1), every=2 + team.index, comm=team),
    )


BAD = [
    ([np.zeros(3)], "expected a tree like the parameters"),
    ({"a": np.zeros(4)}, r"grads\['a'\]: expected .* \(3,\), .* got numpy float64\(4,\)"),
    ({"a": np.zeros(3, "i4")}, r"floating-point array .* got numpy int32\(3,\)"),
    ({"a": None}, r"leaf \['a'\]: expected an array"),
]


@KINDS
@pytest.mark.parametrize(("bad", "text"), BAD)
def test_gradients_that_do_not_fit_change_nothing(kind, bad, text):
    def body(team):
        model = MAKE[kind]({"a": np.zeros(3)}, team)
        good = {"a": np.ones(3)}
        for _ in range(7):
            over = kind == "post" and model.steps == 2  # members part in this step
            joint = model._joint() and not over
            before = model.params["a"].copy()
            if joint or team.index == 1:
                mine = bad if team.index == 1 else good
                own = (
                    text
                    if team.index == 1
                    else f"could not take part .*{text}|{text}.*on member 1"
                )
                with pytest.raises(UsageError, match=own):
                    model.step(mine)
                assert model.params["a"].tobytes() == before.tobytes()
            model.step(good)
        assert model.steps == 7

    together(2, body)


def test_a_bucket_of_others_is_refused():
    def body(team):
        params = Bucket(team, like=np.zeros(3))
        model = LocalSGD(params, optim.SGD(0.1), every=1, comm=team)

        def other(own):
            with pytest.raises(UsageError, match="x: expected a bucket of the members"):
                model._replica.matched(Bucket(own, like=np.zeros(3)), "x")
            with pytest.raises(UsageError, match="comm: expected that of the bucket"):
                LocalSGD(params, optim.SGD(0.1), every=1, comm=own)

        together(1, other)

    together(2, body)


@KINDS
def test_a_checkpoint_goes_on_with_the_same_bits(kind):
    def body(team):
        model = MAKE[kind](weights(0, "f4"), team)
        for step in range(1, 5):
            model.step(grads(team.index, step, "f4"))
        kept = copy.deepcopy(model.state_dict())
        other = MAKE[kind](weights(5, "f4"), team)
        other.step(grads(team.index, 9, "f4"))
        other.load_state_dict(kept)
        for step in range(5, 12):
            assert flat(other.params).tobytes() == flat(model.params).tobytes()
            for one in (model, other):
                one.step(grads(team.index, step, "f4"))
        assert flat(other.params).tobytes() == flat(model.params).tobytes()
        assert other.steps == model.steps == 11
        if isinstance(model, Elastic):
            assert flat(other.center).tobytes() == flat(model.center).tobytes()
            assert flat(other.positions).tobytes() == flat(model.positions).tobytes()
        if isinstance(model, DiLoCo):
            assert flat(other.outer_params).tobytes() == flat(model.outer_params).tobytes()
            assert other.rounds == 3
        # what was kept is nobody's memory, and may be read-only
        for array in (kept["arrays"]["params"][0], kept["arrays"]["params"][1]["b"]):
            array.flags.writeable = False
        again = MAKE[kind](weights(5, "f4"), team)
        again.load_state_dict(kept)
        assert flat(again.params).tobytes() == flat(kept["arrays"]["params"]).tobytes()

    together(2, body)


@KINDS
def test_another_number_of_members_goes_on_after_a_meeting(kind):
    def first(team):
        model = MAKE[kind](weights(0), team)
        for step in range(1, 6):
            model.step(grads(team.index, step))
        model.meet()
        return model.state_dict()

    kept = together(2, first)[0]

    def second(team):
        model = MAKE[kind](weights(1), team)
        model.load_state_dict(kept)
        for step in range(6, 9):
            model.step(grads(team.index, step))
        return model.steps

    assert together(3, second) == [8, 8, 8]


SPOILED = {
    "a rule": lambda s: s.update(rule="Other"),
    "a step": lambda s: s.update(step=-1),
    "a step that differs": lambda s: s.update(step=s["step"] + 1),
    "an optimizer": lambda s: s.update(optimizer=optim.Adagrad().state_dict()),
    "a count": lambda s: s.update({list(s)[-2]: "many"}),
    "a rate": lambda s: s["optimizer"].update(weight_decay=0.5),
    "no arrays": lambda s: s["arrays"].pop("params"),
    "a shape": lambda s: s["arrays"].update(params=np.zeros(4)),
    "a structure": lambda s: s["arrays"].update(params=[np.zeros(3)]),
    "another tree": lambda s: s["arrays"].update({list(s["arrays"])[-1]: np.zeros(4)}),
    "nothing": lambda s: s.clear(),
}


@KINDS
@pytest.mark.parametrize("how", SPOILED)
def test_a_checkpoint_that_does_not_fit_is_an_error_on_all(kind, how):
    def body(team):
        model = MAKE[kind](np.zeros(3), team)
        for _ in range(3):
            model.step(np.ones(3))
        kept, before = model.state_dict(), repr(model.state_dict())
        if team.index == 1:
            SPOILED[how](kept)
        with pytest.raises(UsageError, match="load_state_dict"):
            model.load_state_dict(kept)
        assert repr(model.state_dict()) == before
        with pytest.raises(UsageError, match="load_state_dict"):
            model.load_state_dict(3 if team.index else kept)

    together(2, body)


@pytest.mark.parametrize(("kind", "what"), [("easgd", "center"), ("diloco", "outer params")])
def test_what_members_have_in_common_must_be_the_same(kind, what):
    def body(team):
        model = MAKE[kind](np.zeros(3), team)
        kept = model.state_dict()
        kept["arrays"][what][team.index] += 1
        with pytest.raises(UsageError, match=f"{what}: values with the digest"):
            model.load_state_dict(kept)

    together(2, body)


@KINDS
def test_after_its_end(kind):
    def body(team):
        with MAKE[kind](np.zeros(3), team) as model:
            model.step(np.ones(3))
            assert type(model).__name__ in repr(model)
            assert "1 steps, member" in repr(model)
        assert model.params.any()
        for call in (lambda: model.step(np.ones(3)), model.meet, model.state_dict):
            with pytest.raises(ServiceGoneError, match="it is closed"):
                call()
        with pytest.raises(ServiceGoneError):
            model.load_state_dict({})
        assert model.statistics()["steps"] == 1

    together(2, body)


def test_one_that_is_closed_is_told_to_all():
    def body(team):
        model = MAKE["diloco"](np.zeros(3), team, every=2)
        model.step(np.ones(3))
        if team.index:
            model.close()
        model.step(np.ones(3))

    first, second = outcomes(2, body)
    assert isinstance(first, UsageError)
    assert "DiLoCo.step: it is closed" in str(first)
    assert "on member 1" in str(first)
    assert isinstance(second, ServiceGoneError)


def test_a_name_is_shown():
    def body(team):
        model = LocalSGD(np.zeros(3), optim.SGD(0.1), every=2, comm=team, name="net")
        model.step(np.ones(3))
        if team.index:
            model.step(np.ones(3))
        else:
            model.meet()

    errors(2, r"LocalSGD 'net': parameters after 1 steps.*LocalSGD.step\(name='net'\)", body)
