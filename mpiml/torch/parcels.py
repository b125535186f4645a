"""Gradients that travel together, and the memory they live in."""

from collections.abc import Sequence
from typing import Any

import torch

from mpiml.collectives.bucket import Bucket
from mpiml.collectives.requests import Request
from mpiml.errors import UsageError
from mpiml.torch.memory import physical, tensor_in

__all__ = ["Parcel", "Slot"]


class Slot:
    """A parameter, and the place of its gradient in a bucket.

    Attributes
    ----------
    view : torch.Tensor
        Like the parameter's gradient; in the bucket's memory.
    parcel : Parcel
        The bucket.
    ready : bool
        Whether backward has come to it.
    """

    __slots__ = ("name", "number", "param", "parcel", "ready", "view")

    def __init__(
        self, name: str, number: int, param: torch.Tensor, parcel: "Parcel", view: torch.Tensor
    ) -> None:
        self.name = name
        self.number = number
        self.param = param
        self.parcel = parcel
        self.view = view
        self.ready = False

    def attach(self, where: str) -> None:
        """Make the bucket's memory the parameter's gradient again, if it is another tensor.

        It is after ``zero_grad()``, which sets it to None: then backward makes a new tensor,
        and one copy brings it here, which is cheaper than clearing this memory and adding.

        Raises
        ------
        UsageError
            A sparse gradient; one that has a graph; one of another dtype or place.
        """
        grad = self.param.grad
        if grad is self.view:
            return
        if grad is None or grad.layout != torch.strided:
            layout = None if grad is None else grad.layout
            raise UsageError(
                f"{where}: parameter {self.name!r}: expected a dense gradient, got {layout}. "
                "Make the layer with sparse=False."
            )
        if grad.requires_grad:
            raise UsageError(
                f"{where}: parameter {self.name!r}: expected a gradient without a graph, got one "
                "of backward(create_graph=True), and the graph would not know of the other "
                "members. Take the inner gradient with torch.autograd.grad(..., "
                "create_graph=True), which reduces nothing, and call backward() on the loss that "
                "is made of it."
            )
        if grad.dtype != self.view.dtype or grad.device != self.view.device:
            raise UsageError(
                f"{where}: parameter {self.name!r}: expected a gradient of {self.view.dtype} on "
                f"{self.view.device}, got {grad.dtype} on {grad.device}. The model has been "
                "converted or moved: do that first, and then make a new GradientSync."
            )
        self.view.copy_(grad)
        self.param.grad = self.view


class Parcel:
    """One bucket of gradients.

    Collective over the members: making it.

    Parameters
    ----------
    comm
        As for `Bucket`.
    named : sequence of (str, torch.Tensor, int)
        Name, value and number of each parameter.
    name : str
        What messages call it.
    fallback : bool
        As for `Bucket`.
    """

    def __init__(
        self,
        comm: Any,
        named: Sequence[tuple[str, torch.Tensor, int]],
        name: str,
        fallback: bool,
    ) -> None:
        laid = {key: physical(param) for key, param, _ in named}
        like = {key: tensor for key, (tensor, _) in laid.items()}
        self.bucket = Bucket(comm, like, name=name, fallback=fallback)
        self.slots = []
        for key, param, number in named:
            view = tensor_in(self.bucket[key], param.dtype).permute(laid[key][1])
            self.slots.append(Slot(key, number, param, self, view))
        dtypes = [getattr(torch, region.dtype_name) for region in self.bucket.regions.regions]
        self._flat = [
            tensor_in(array, dtype)
            for array, dtype in zip(self.bucket.flat, dtypes, strict=True)
        ]
        self.left = len(self.slots)
        self.request: Request | None = None

    def again(self) -> None:
        """Be ready for another backward."""
        self.request = None
        self.left = len(self.slots)
        for slot in self.slots:
            slot.ready = False

    def zero(self) -> None:
        """Set the memory to zero."""
        for flat in self._flat:
            flat.zero_()

    def scale(self, factor: float) -> None:
        """Multiply the memory by a number."""
        for flat in self._flat:
            flat.mul_(factor)
