import math
import sys
import types

import ml_dtypes
import numpy as np
import pytest

import mpiml
from mpiml import _native, optim, optim_step
from mpiml.errors import UsageError

RULES = {
    "sgd": lambda **k: optim.SGD(0.1, **k),
    "momentum": lambda **k: optim.Momentum(0.1, 0.8, **k),
    "nesterov": lambda **k: optim.Momentum(0.1, 0.8, nesterov=True, **k),
    "adagrad": lambda **k: optim.Adagrad(0.1, **k),
    "adam": lambda **k: optim.Adam(0.1, (0.8, 0.95), **k),
    "adamw": lambda **k: optim.AdamW(0.1, (0.8, 0.95), **k),
}
DECAYS = [0.0, 0.125]

every_rule = pytest.mark.parametrize("rule", RULES)
every_decay = pytest.mark.parametrize("decay", DECAYS)
both_dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


def values(shape, dtype, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def torch_twin(rule, decay, parameter):
    import torch

    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=decay),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, weight_decay=decay),
        "nesterov": lambda p: torch.optim.SGD(
            p, lr=0.1, momentum=0.8, nesterov=True, weight_decay=decay
        ),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=decay),
        "adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.95), weight_decay=decay),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.8, 0.95), weight_decay=decay),
    }
    return make[rule]([parameter])


@every_rule
@every_decay
@both_dtypes
def test_as_torch_optim(rule, decay, dtype):
    import torch

    param = values((7, 5), dtype)
    theirs = torch.nn.Parameter(torch.from_numpy(param.copy()))
    twin = torch_twin(rule, decay, theirs)
    optimizer = RULES[rule](weight_decay=decay)
    state = optimizer.init(param)
    for step in range(1, 8):
        grad = values((7, 5), dtype, seed=step)
        theirs.grad = torch.from_numpy(grad.copy())
        twin.step()
        optimizer.apply(param, grad, state, step)
    close = 1e-5 if dtype == np.float32 else 1e-13
    np.testing.assert_allclose(param, theirs.detach().numpy(), rtol=close, atol=close)
    kept = twin.state[theirs]
    for name, ours in zip(optimizer.states, state, strict=True):
        np.testing.assert_allclose(ours, kept[name].numpy(), rtol=close, atol=close)


@every_rule
@every_decay
@both_dtypes
@pytest.mark.parametrize("n", [0, 1, 3, 31, 64, 1000, 40_001])
def test_native_loop_and_formula_agree_in_every_bit(rule, decay, dtype, n):
    optimizer = RULES[rule](weight_decay=decay)
    native, formula = values(n, dtype), values(n, dtype)
    a, b = optimizer.init(native), optimizer.init(formula)
    for step in (1, 2, 3):
        grad = values(n, dtype, seed=step)
        optimizer.apply(native, grad, a, step)
        c = optimizer.coefficients(step)
        optim_step.apply_formula(optimizer.rule, c, formula, grad, *b)
    assert native.tobytes() == formula.tobytes()
    assert [s.tobytes() for s in a] == [s.tobytes() for s in b]
    assert n == 0 or not np.array_equal(native, values(n, dtype))


@every_rule
def test_pieces_give_the_bits_of_the_whole(rule):
    optimizer = RULES[rule](weight_decay=0.125)
    whole, pieces = values(1003, np.float32), values(1003, np.float32)
    state, parts = optimizer.init(whole), optimizer.init(pieces)
    for step in (1, 2):
        grad = values(1003, np.float32, seed=step)
        optimizer.apply(whole, grad, state, step)
        for cut in (slice(0, 333), slice(333, 334), slice(334, None)):
            optimizer.apply(pieces[cut], grad[cut], [s[cut] for s in parts], step)
    assert whole.tobytes() == pieces.tobytes()


@every_rule
@pytest.mark.parametrize("layout", ["transposed", "strided", "zero-dimensional"])
def test_any_layout(rule, layout):
    change = {
        "transposed": lambda a: a.T,
        "strided": lambda a: a[::2, 1:],
        "zero-dimensional": lambda a: a[1, 1, ...],
    }[layout]
    optimizer = RULES[rule](weight_decay=0.125)
    big, grad = values((300, 200), np.float32), values((300, 200), np.float32, seed=1)
    param = change(big)
    plain, state = param.copy(), optimizer.init(param)
    flat = optimizer.init(plain)
    optimizer.apply(param, change(grad), state, 1)
    optimizer.apply(plain, change(grad).copy(), flat, 1)
    assert np.array_equal(param, plain)
    assert np.shares_memory(param, big)


@pytest.mark.parametrize("low", [np.float16, ml_dtypes.bfloat16])
def test_gradient_of_lower_precision(low):
    optimizer = optim.Adam()
    grad = values(40_001, np.float32).astype(low)
    param, exact = np.zeros(40_001, np.float32), np.zeros(40_001, np.float32)
    optimizer.apply(param, grad, optimizer.init(param), 1)
    optimizer.apply(exact, grad.astype(np.float32), optimizer.init(exact), 1)
    assert param.tobytes() == exact.tobytes()
    formula = np.zeros(40_001, np.float32)
    state = optimizer.init(formula)
    optim_step.apply_formula(optimizer.rule, optimizer.coefficients(1), formula, grad, *state)
    assert formula.tobytes() == exact.tobytes()


class DeviceArray(np.ndarray):
    """Stands for the array of CuPy, which no native loop may touch."""

    def __buffer__(self, flags):
        raise AssertionError("device memory was read by the host")


DeviceArray.__module__, DeviceArray.__name__ = "cupy", "ndarray"


@pytest.fixture
def cupy(monkeypatch):
    """A module with those functions of CuPy that are used, on arrays of its class."""

    def of(function):
        return lambda *arguments, **named: function(*arguments, **named).view(DeviceArray)

    made = types.ModuleType("cupy")
    for name in ("add", "divide", "empty_like", "multiply", "sqrt", "subtract", "zeros_like"):
        setattr(made, name, of(getattr(np, name)))
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(_native, "update", None)
    return made


@every_rule
def test_device_arrays_take_the_formula(rule, cupy):
    optimizer = RULES[rule](weight_decay=0.125)
    host, param = values(1003, np.float32), values(1003, np.float32).view(DeviceArray)
    state, twin = optimizer.init(param), [np.zeros_like(host) for _ in optimizer.states]
    assert all(type(array) is DeviceArray for array in state)
    for step in (1, 2):
        grad = values(1003, np.float16, seed=step)
        optimizer.apply(param, grad.view(DeviceArray), state, step)
        c = optimizer.coefficients(step)
        optim_step.apply_formula(optimizer.rule, c, host, grad, *twin)
    assert type(param) is DeviceArray
    assert np.array_equal(param, host)
    with pytest.raises(UsageError, match=r"a gradient of the parameter's library, got numpy"):
        optimizer.apply(param, grad, state, 3)


def test_gradient_is_only_read():
    grad = values(10, np.float32)
    before = grad.copy()
    for rule in RULES.values():
        optimizer = rule(weight_decay=0.5)
        for apply in (optimizer.apply, formula_of(optimizer)):
            param = values(10, np.float32)
            apply(param, grad, optimizer.init(param), 1)
    assert np.array_equal(grad, before)


def formula_of(optimizer):
    def apply(param, grad, state, step):
        c = optimizer.coefficients(step)
        optim_step.apply_formula(optimizer.rule, c, param, grad, *state)

    return apply


def test_learning_rate_as_a_function_of_the_steps_done():
    seen = []

    def schedule(done):
        seen.append(done)
        return 0.5**done

    optimizer = optim.SGD(schedule)
    param = np.zeros(2)
    for step in (1, 2, 3):
        optimizer.apply(param, np.ones(2), (), step)
    assert seen == [0, 1, 2]
    assert param.tolist() == [-1.75, -1.75]


def test_learning_rate_may_be_set_and_is_checked():
    optimizer = optim.SGD(0.1)
    optimizer.lr = 0.2
    assert optimizer.coefficients(1).rate == 0.2
    with pytest.raises(UsageError, match=r"^SGD: lr: expected a number > 0 or a function"):
        optimizer.lr = -1.0
    optimizer.lr = lambda done: -0.1
    with pytest.raises(UsageError, match=r"^SGD: lr\(4\): expected a number >= 0, got -0.1"):
        optimizer.coefficients(5)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: optim.SGD(0.0), r"SGD: lr: expected a number > 0 or a function, got 0.0"),
        (lambda: optim.SGD(math.nan), "SGD: lr: .*got nan"),
        (lambda: optim.SGD("fast"), "SGD: lr: .*got 'fast'"),
        (lambda: optim.SGD(0.1, weight_decay=-1), "SGD: weight_decay: .*>= 0, got -1"),
        (lambda: optim.Momentum(0.1, 1.0), r"Momentum: momentum: .*in \[0, 1\), got 1.0"),
        (lambda: optim.Adagrad(eps=0), "Adagrad: eps: expected a number > 0, got 0"),
        (lambda: optim.Adam(betas=(0.9, 1)), r"Adam: betas\[1\]: .*in \[0, 1\), got 1"),
        (lambda: optim.Adam(betas=(-0.1, 0.9)), r"Adam: betas\[0\]: .*got -0.1"),
        (lambda: optim.AdamW(betas=0.9), "AdamW: betas: expected two numbers .*got 0.9"),
        (lambda: optim.AdamW(eps=math.inf), "AdamW: eps: .*got inf"),
    ],
)
def test_hyperparameters_are_checked(make, text):
    with pytest.raises(UsageError, match=f"^{text}"):
        make()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"param": np.zeros(3, "i4")}, "expected a float32 or float64 parameter, got int32"),
        ({"param": np.zeros(3, "f2")}, "expected a float32 .*got float16; keep the parameter"),
        ({"param": np.zeros(3, ">f4")}, "expected a float32 or float64 parameter, got >f4"),
        ({"param": [1.0]}, "expected a NumPy or CuPy array as parameter, got builtins.list"),
        ({"grad": np.zeros(4, "f4")}, r"expected a floating-point gradient of shape \(3,\)"),
        ({"grad": np.zeros(3, "i4")}, r"expected a floating-point .*got int32\(3,\)"),
        ({"grad": [1.0]}, "expected a gradient of the parameter's library, got builtins.list"),
        ({"state": ()}, r"expected 1 state arrays float32\(3,\) as init"),
        ({"state": (np.zeros(3),)}, r"expected 1 state arrays .*got \['float64\(3,\)'\]"),
        ({"step": 0}, "expected a step from 1 on, got 0"),
    ],
)
def test_arrays_are_checked(change, text):
    arrays = {
        "param": np.zeros(3, "f4"),
        "grad": np.zeros(3, "f4"),
        "state": (np.zeros(3, "f4"),),
        "step": 1,
    }
    with pytest.raises(UsageError, match=f"^Momentum.apply: {text}"):
        optim.Momentum(0.1).apply(**(arrays | change))


@every_rule
def test_hyperparameters_travel(rule):
    optimizer = RULES[rule](weight_decay=0.125)
    other = type(optimizer)(0.7)
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict() == optimizer.state_dict()
    assert other.coefficients(3) == optimizer.coefficients(3)
    assert repr(other) == repr(optimizer)
    assert repr(other).startswith(f"{type(other).__name__}(lr=0.1")


def test_a_schedule_stays_where_it_is():
    scheduled = optim.Adam(lambda done: 0.5, (0.5, 0.5))
    kept = scheduled.state_dict()
    assert kept["lr"] is None
    plain = optim.Adam(0.25)
    plain.load_state_dict(kept)
    assert (plain.lr, plain.betas) == (0.25, (0.5, 0.5))
    scheduled.load_state_dict(optim.Adam(0.1).state_dict())
    assert scheduled.coefficients(1).rate == pytest.approx(0.5 / 0.1)


def test_hyperparameters_of_another_optimizer_are_refused():
    with pytest.raises(
        UsageError, match=r"^Adam.load_state_dict: expected name='Adam' .*'SGD'"
    ):
        optim.Adam().load_state_dict(optim.SGD(0.1).state_dict())
    with pytest.raises(UsageError, match="got name='Adam'"):
        optim.Adam().load_state_dict({"name": "Adam", "lr": 0.1})


def test_public_name():
    assert mpiml.optim is optim
