"""Optimizers for arrays of NumPy and CuPy, in place, with PyTorch's conventions.

An optimizer holds hyperparameters only. Its state (running means and squares) is arrays of
the parameter's shape and dtype that belong to the caller, so that a stripe of a parameter can
be updated by whoever owns it, with the same result in every bit as the whole at once.

Steps count from 1, as in ``torch.optim``, and the results are those of ``torch.optim`` within
rounding. The coefficients of a step are computed here in double precision; the step itself is
in `mpiml.optim_step`.

Sources: Polyak 1964 and Sutskever et al. 2013 (momentum), Duchi et al. 2011 (Adagrad), Kingma
and Ba 2015 (Adam), Loshchilov and Hutter 2019 (AdamW).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from mpiml.arrays import namespace
from mpiml.errors import UsageError
from mpiml.optim_step import Coefficients, apply, check_parameter

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Coefficients", "Momentum", "Optimizer", "Rate"]

Rate = float | Callable[[int], float]


class Optimizer:
    """What all optimizers share; use one of the classes derived from it.

    Local: nothing here communicates.

    Parameters
    ----------
    lr : float or callable
        Learning rate, > 0; or a function of the number of steps done before (0 at the first)
        that returns it, >= 0.
    weight_decay : float
        >= 0.

    Raises
    ------
    UsageError
        A hyperparameter is out of its range.
    """

    rule: ClassVar[int]
    """Number of the native rule."""

    states: ClassVar[tuple[str, ...]] = ()
    """Names of the state arrays, in order, as ``torch.optim`` spells them."""

    _hyper: ClassVar[tuple[str, ...]] = ("lr", "weight_decay")

    def __init__(self, lr: Rate, weight_decay: float) -> None:
        self.lr = lr
        self.weight_decay = self._nonnegative("weight_decay", weight_decay)

    @property
    def lr(self) -> Rate:
        """The learning rate, or the function that gives it; may be set between steps."""
        return self._lr

    @lr.setter
    def lr(self, value: Rate) -> None:
        if not callable(value):
            value = self._number("lr", value, "a number > 0 or a function", lambda x: x > 0)
        self._lr: Rate = value

    @property
    def name(self) -> str:
        """The name of the class."""
        return type(self).__name__

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        if not callable(self._lr):
            return self._lr
        return self._nonnegative(f"lr({step - 1})", self._lr(step - 1))

    def coefficients(self, step: int) -> Coefficients:
        """Return the numbers of a step, counted from 1."""
        raise NotImplementedError

    def described(self, step: int) -> str:
        """Return name and hyperparameters of a step, on which `coefficients` depend, and no more."""
        values = [f"{name}={getattr(self, name)!r}" for name in self._hyper[1:]]
        return f"{self.name}({', '.join([f'lr={self.rate(step)!r}', *values])})"

    def init(self, like: Any) -> tuple[Any, ...]:
        """Return new state for a parameter, in its library, shape and dtype.

        Parameters
        ----------
        like : array, float32 or float64
            The parameter, of NumPy or CuPy, any shape.

        Returns
        -------
        tuple of arrays
            One for each name of `states`.

        Raises
        ------
        UsageError
            The parameter is of another library or dtype.
        """
        check_parameter(f"{self.name}.init", like)
        return tuple(namespace(like).zeros_like(like) for _ in self.states)

    def apply(
        self, param: Any, grad: Any, state: Sequence[Any], step: int, rate: float = 1.0
    ) -> None:
        """Do one step in place.

        Parameters
        ----------
        param : array, float32 or float64
            The parameter, of NumPy or CuPy, any shape; changed.
        grad : array
            Its gradient, of the same shape; another floating dtype is converted block by
            block.
        state : sequence of arrays
            What `init` returned; changed.
        step : int
            Number of this step, from 1.
        rate : float
            What the learning rate is multiplied with, in this step. The state learns of the
            gradient as it is.

        Raises
        ------
        UsageError
            Libraries, shapes or dtypes do not fit, or the step is below 1.
        """
        if step < 1:
            raise UsageError(f"{self.name}.apply: expected a step from 1 on, got {step}")
        c = self.coefficients(step)
        if rate != 1:
            c = c._replace(rate=c.rate * rate)
        apply(f"{self.name}.apply", self.rule, c, param, grad, state)

    def state_dict(self) -> dict[str, Any]:
        """Return the hyperparameters as plain values; `lr` is None where it is a function."""
        values = {name: getattr(self, name) for name in self._hyper}
        if callable(values["lr"]):
            values["lr"] = None
        return {"name": self.name, **values}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over hyperparameters that `state_dict` returned.

        A learning rate that is a function, there or here, stays what it is here.

        Raises
        ------
        UsageError
            They are those of another optimizer, incomplete or out of range.
        """
        names = {"name", *self._hyper}
        if state.get("name") != self.name or set(state) != names:
            raise UsageError(
                f"{self.name}.load_state_dict: expected name={self.name!r} and "
                f"{sorted(names)}, got name={state.get('name')!r} and {sorted(state)}"
            )
        values = {name: state[name] for name in self._hyper}
        if values["lr"] is None or callable(self._lr):
            values["lr"] = self._lr
        self.__init__(**values)  # type: ignore[misc]

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._hyper)
        return f"{self.name}({inside})"

    def _number(
        self, name: str, value: Any, expected: str, good: Callable[[float], bool]
    ) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and good(number)):
            raise UsageError(f"{self.name}: {name}: expected {expected}, got {value!r}")
        return number

    def _nonnegative(self, name: str, value: Any) -> float:
        return self._number(name, value, "a number >= 0", lambda x: x >= 0)

    def _below_one(self, name: str, value: Any) -> float:
        return self._number(name, value, "a number in [0, 1)", lambda x: 0 <= x < 1)

    def _positive(self, name: str, value: Any) -> float:
        return self._number(name, value, "a number > 0", lambda x: x > 0)


class SGD(Optimizer):
    """Gradient descent: ``p -= lr * (g + weight_decay * p)``.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the number of steps done before.
    weight_decay : float
        The penalty on squares, >= 0.
    """

    rule = 0

    def __init__(self, lr: Rate, *, weight_decay: float = 0.0) -> None:
        super().__init__(lr, weight_decay)

    def coefficients(self, step: int) -> Coefficients:
        """Return the numbers of a step, counted from 1."""
        return Coefficients(self.rate(step), self.weight_decay)


class Momentum(Optimizer):
    """Gradient descent with momentum: ``m = momentum * m + g; p -= lr * m``.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the number of steps done before.
    momentum : float
        In [0, 1).
    nesterov : bool
        Look ahead: ``p -= lr * (g + momentum * m)``.
    weight_decay : float
        The penalty on squares, >= 0.
    """

    rule = 1
    states = ("momentum_buffer",)
    _hyper = ("lr", "momentum", "nesterov", "weight_decay")

    def __init__(
        self,
        lr: Rate,
        momentum: float = 0.9,
        *,
        nesterov: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(lr, weight_decay)
        self.momentum = self._below_one("momentum", momentum)
        self.nesterov = bool(nesterov)

    def coefficients(self, step: int) -> Coefficients:
        """Return the numbers of a step, counted from 1."""
        return Coefficients(
            self.rate(step),
            self.weight_decay,
            keep1=self.momentum,
            nesterov=float(self.nesterov),
        )


class Adagrad(Optimizer):
    """Adagrad: ``v += g**2; p -= lr * g / (sqrt(v) + eps)``.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the number of steps done before.
    eps : float
        > 0.
    weight_decay : float
        The penalty on squares, >= 0.
    """

    rule = 2
    states = ("sum",)
    _hyper = ("lr", "eps", "weight_decay")

    def __init__(
        self, lr: Rate = 0.01, *, eps: float = 1e-10, weight_decay: float = 0.0
    ) -> None:
        super().__init__(lr, weight_decay)
        self.eps = self._positive("eps", eps)

    def coefficients(self, step: int) -> Coefficients:
        """Return the numbers of a step, counted from 1."""
        return Coefficients(self.rate(step), self.weight_decay, eps=self.eps)


class Adam(Optimizer):
    """Adam with corrected bias; the weight decay is a penalty on squares.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a function of the number of steps done before.
    betas : pair of float
        How much of the running mean and square is kept, each in [0, 1).
    eps : float
        > 0.
    weight_decay : float, optional
        Added to the gradient, times the parameter; >= 0. 0 by default.
    """

    rule = 3
    states = ("exp_avg", "exp_avg_sq")
    _hyper = ("lr", "betas", "eps", "weight_decay")
    _decay: ClassVar[float] = 0.0  # unless one is given

    def __init__(
        self,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        eps: float = 1e-8,
        weight_decay: float | None = None,
    ) -> None:
        super().__init__(lr, self._decay if weight_decay is None else weight_decay)
        try:
            first, second = betas
        except (TypeError, ValueError):
            raise UsageError(
                f"{self.name}: betas: expected two numbers in [0, 1), got {betas!r}"
            ) from None
        self.betas = (self._below_one("betas[0]", first), self._below_one("betas[1]", second))
        self.eps = self._positive("eps", eps)

    def coefficients(self, step: int) -> Coefficients:
        """Return the numbers of a step, counted from 1."""
        first, second = self.betas
        return Coefficients(
            self.rate(step) / (1 - first**step),
            self.weight_decay,
            keep1=first,
            add1=1 - first,
            keep2=second,
            add2=1 - second,
            scale=1 / math.sqrt(1 - second**step),
            eps=self.eps,
        )


class AdamW(Adam):
    """Adam whose weight decay shrinks the parameter by itself: ``p *= 1 - lr * weight_decay``.

    Parameters as for `Adam`; the weight decay is 0.01 unless another is given, as in
    ``torch.optim``.
    """

    _decay = 0.01

    def coefficients(self, step: int) -> Coefficients:
        """Return the numbers of a step, counted from 1."""
        shrink = 1 - self.rate(step) * self.weight_decay
        return super().coefficients(step)._replace(decay=0.0, shrink=shrink)
