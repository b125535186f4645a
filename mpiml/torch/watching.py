"""The hook in a model, which its copies do not take along, and changes of the model."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch

from mpiml.errors import UsageError

__all__ = ["ForwardHook", "Watch"]


class ForwardHook:
    """Called before each forward of a model, and not copied with it.

    The copy of a model (`copy.deepcopy`, `torch.save`, a pickle) is an ordinary model. In place
    of this it has something of the standard library that does nothing, so that a saved one is
    loaded where there is no mpiml.

    Parameters
    ----------
    call : callable
        What is called, without arguments.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, module: torch.nn.Module, arguments: Any) -> None:
        """Be a forward pre-hook of the module."""
        self._call()

    def __reduce__(self) -> Any:
        return getattr, (nullcontext(), "__exit__")  # takes anything, returns None


class Watch:
    """Knows the parameters that are reduced, and finds those that would be missed.

    Local: no MPI.

    Parameters
    ----------
    model : torch.nn.Module
        The model.
    trained : iterable of torch.Tensor
        Its parameters that are reduced.
    title : str
        Opens the message of an error.
    """

    def __init__(
        self, model: torch.nn.Module, trained: Iterable[torch.Tensor], title: str
    ) -> None:
        self._model = model
        self._title = title
        self._trained = {id(p): p for p in trained}  # held, so that no other gets the number
        self._others = {id(p): p for p in model.parameters() if id(p) not in self._trained}

    def check(self) -> None:
        """Look at every parameter that the model has now: at each forward, so without names.

        Raises
        ------
        UsageError
            One is trained, and its gradient would not be reduced.
        """
        modules, seen = [self._model], {id(self._model)}
        while modules:
            module = modules.pop()
            for param in module._parameters.values():
                if param is not None and id(param) not in self._trained and self._missed(param):
                    raise self._error(param)
            for inner in module._modules.values():
                if inner is not None and id(inner) not in seen:
                    seen.add(id(inner))
                    modules.append(inner)

    def _missed(self, param: torch.Tensor) -> bool:
        """Tell whether another parameter is trained.

        A tensor that is none stands there for one call (`torch.func.functional_call`).
        """
        return param.requires_grad and isinstance(param, torch.nn.Parameter)

    def _error(self, param: torch.Tensor) -> UsageError:
        key = next(key for key, p in self._model.named_parameters() if p is param)
        what = (
            "was frozen when it was made, and is trained now"
            if id(param) in self._others
            else "has come into the model since it was made (a layer was replaced, or "
            "load_state_dict(assign=True) called)"
        )
        return UsageError(
            f"{self._title}: parameter {key!r} {what}: its gradients would not be reduced. "
            "close() this one, and make a new GradientSync."
        )
