"""What a Downpour worker pulls and pushes when, beside algorithm 7.1 written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpiml.errors import UsageError
from mpiml.optim import Adagrad
from mpiml.roles.parameter_server.downpour import Downpour, DownpourStatistics
from mpiml.roles.parameter_server.keys import Keys


class Pushing:
    """The future of a push; the gradient must stay as it is until it has been waited for."""

    def __init__(self, client, gradient):
        self.client, self.gradient = client, gradient
        self.then = {name: leaf.copy() for name, leaf in gradient.items()}

    def result(self):
        assert self.client.under_way.pop() is self
        self.client.log.append("pushed")
        for name, leaf in self.gradient.items():
            assert (leaf == self.then[name]).all()
        if self.client.broken:
            raise OSError(self.client.broken)


class Client:
    """Servers that add what is pushed, at rate 1, when it is sent."""

    def __init__(self):
        self.w = {"a": np.zeros((2, 3), "f4"), "b": np.zeros(2)}
        self.version = 10
        self.log, self.under_way, self.broken = [], [], ""
        self.futures = self.Futures(self)

    def pull(self):
        self.log.append("pull")
        tree = {name: leaf.copy() for name, leaf in self.w.items()}
        for leaf in tree.values():
            leaf.flags.writeable = False
        return tree, self.version

    class Futures:
        def __init__(self, client):
            self.client = client

        def push(self, gradient, version):
            client = self.client
            assert not client.under_way, "two pushes at once"
            client.log.append(("push", float(gradient["a"][0, 0]), version))
            for name, leaf in client.w.items():
                leaf -= gradient[name]
            client.version += 1
            client.under_way.append(Pushing(client, gradient))
            return client.under_way[0]


def like(value):
    return {"a": np.full((2, 3), value, "f4"), "b": np.full(2, value, "f8")}


def test_with_both_periods_one_each_step_pushes_and_pulls():
    client = Client()
    with Downpour(client, rate=0.5) as replica:
        assert client.log == ["pull"]
        replica.step(like(1))
        assert client.log == ["pull", ("push", 1.0, 10), "pull"]
        assert (replica.params["a"] == -1).all()
        assert replica.version == 11
        client.log.clear()
        replica.step(like(2))
        assert client.log == ["pushed", ("push", 2.0, 11), "pull"]
    assert client.log[-1] == "pushed"
    assert replica.statistics() == DownpourStatistics(steps=2, pulls=3, pushes=2)


def test_pushes_are_sums_and_the_copy_steps_between_fetches():
    client = Client()
    replica = Downpour(client, fetch=3, push=2, rate=0.25)
    params, seen = replica.params, []
    for value in (1, 2, 4, 8, 16):
        replica.step(like(value))
        seen.append(float(params["b"][0]))
    # The copy: -1/4, -1/4 - 2/4; after step 2 what steps 0 to 2 have pushed; -8/4, -16/4
    assert seen == [-0.25, -0.75, -7.0, -9.0, -13.0]
    replica.flush()
    # step 2 pushes before it fetches: 2 + 4 were computed from version 10, 8 + 16 from 12
    assert client.log == [
        "pull",
        ("push", 1.0, 10),
        "pushed",
        ("push", 6.0, 10),
        "pull",
        "pushed",
        ("push", 24.0, 12),
        "pushed",
    ]
    replica.flush()
    assert client.log[-1] == "pushed"
    assert len(client.log) == 8
    assert params is replica.params


@given(
    st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(-4, 4), min_size=1, max_size=14)
)
def test_a_worker_does_what_the_algorithm_says(fetch, push, gradients):
    client, log = Client(), []
    replica = Downpour(client, fetch, push, rate=0.5)
    server = params = accrued = 0.0
    for step, gradient in enumerate(gradients):
        if step % fetch == 0:
            log.append("pull")
            params = server
        assert (replica.params["a"] == params).all()
        replica.step(like(gradient))
        accrued += gradient
        params -= 0.5 * gradient
        if step % push == 0:
            log.append(accrued)
            server, accrued = server - accrued, 0.0
    if len(gradients) % fetch == 0:
        log.append("pull")
    left = len(gradients) - 1 - (len(gradients) - 1) // push * push
    replica.flush()
    done = [entry[1] if isinstance(entry, tuple) else entry for entry in client.log]
    assert [entry for entry in done if entry != "pushed"] == log + [accrued] * bool(left)
    assert (client.w["b"] == -sum(gradients)).all()  # sums are exact
    assert not client.under_way


def test_the_gradient_is_free_after_a_step():
    client = Client()
    replica = Downpour(client, fetch=9, rate=1.0)
    gradient = like(1)
    replica.step(gradient)
    gradient["a"][:] = 5  # Pushing looks at what was sent
    replica.flush()
    assert (client.w["a"] == -1).all()


def test_a_push_that_failed_is_told_once_and_its_memory_is_left_alone():
    client = Client()
    replica = Downpour(client, fetch=9, rate=1.0)
    replica.step(like(1))
    sent, client.broken = client.under_way[0].gradient, "gone"
    with pytest.raises(OSError, match="gone"):
        replica.step(like(2))
    client.broken = ""
    replica.step(like(3))
    replica.step(like(7))
    replica.flush()
    assert (sent["a"] == 1).all()
    assert [e[1] for e in client.log if isinstance(e, tuple)] == [1.0, 5.0, 7.0]


def test_an_error_inside_is_not_held_up_by_a_push():
    client = Client()
    replica = Downpour(client, push=2, fetch=9, rate=1.0)
    replica.step(like(1))
    replica.step(like(1))
    with pytest.raises(KeyError), replica:
        raise KeyError
    assert len(client.under_way) == 1
    assert client.log == ["pull", ("push", 1.0, 10)]


def test_gradients_of_lower_precision():
    client = Client()
    replica = Downpour(client, fetch=9, push=9, rate=0.5)
    replica.step({name: leaf.astype("f2") for name, leaf in like(1.5).items()})
    assert (replica.params["b"] == -0.75).all()
    replica.step(like(0.5))
    replica.flush()
    assert (client.w["a"] == -2).all()


@pytest.mark.parametrize(
    ("gradient", "match"),
    [
        ({"a": np.ones((2, 3), "f4")}, r"expected a gradient like .*\['b'\] missing"),
        ({**like(1), "b": np.ones(3)}, r"gradient\['b'\]: .* shape \(2,\), got float64\(3,\)"),
        ({**like(1), "b": np.ones(2, int)}, r"gradient\['b'\]: expected floating-point"),
        ({**like(1), "b": None}, r"gradient: leaf \['b'\]: expected an array"),
    ],
)
def test_gradients_that_do_not_fit_change_nothing(gradient, match):
    client = Client()
    replica = Downpour(client, fetch=9, push=2, rate=1.0)
    with pytest.raises(UsageError, match=f"Downpour.step: {match}"):
        replica.step(gradient)
    assert replica.statistics().steps == 0
    assert client.log == ["pull"]
    assert (replica.params["a"] == 0).all()


def test_arguments_out_of_range():
    for arguments, match in [
        ({"fetch": 0}, "Downpour: fetch"),
        ({"push": 1.5}, "Downpour: push"),
        ({"rate": 0}, "lr: expected"),
    ]:
        client = Client()
        with pytest.raises(UsageError, match=match):
            Downpour(client, **{"rate": 1.0, **arguments})
        assert not client.log
    client.w = {"a": np.ones(3, int)}
    with pytest.raises(UsageError, match=r"pull\(\)\['a'\]: expected a float32 or float64"):
        Downpour(client, rate=1.0)
    client.pull = lambda: ({"a": Keys(10)}, 0)
    with pytest.raises(UsageError, match=r"pull\(\)\['a'\]: expected a NumPy or CuPy array"):
        Downpour(client, rate=1.0)


def test_the_rate_may_be_a_function_of_the_steps():
    replica = Downpour(Client(), fetch=9, push=9, rate=lambda step: 1.0 / (step + 1))
    replica.step(like(1))
    replica.step(like(1))
    assert (replica.params["b"] == -1.5).all()


def test_adagrad_has_a_rate_for_each_parameter():
    rng = np.random.default_rng(0)
    w, squares = rng.standard_normal(50), np.zeros(50)
    expected, rule = w.copy(), Adagrad(0.1, eps=1e-30)
    state = rule.init(w)
    for step in range(1, 6):
        g = rng.standard_normal(50) * np.logspace(-3, 3, 50)
        rule.apply(w, g, state, step)
        squares += g * g
        expected -= 0.1 / np.sqrt(squares) * g
        np.testing.assert_allclose(w, expected, rtol=1e-12)
