"""What `GradientSync` refuses, and what its members compare."""

from collections.abc import Mapping
from typing import Any, Final

import torch

from mpiml.collectives.ops import COMPLEX, FLOATS, dtype_name
from mpiml.errors import UsageError

__all__ = ["check_model", "describe"]

WHERE: Final = "mpiml.torch.GradientSync"


def check_model(model: Any, where: str) -> None:
    """Refuse a model whose gradients cannot live in a bucket.

    Raises
    ------
    UsageError
        Which part of it, and the cure.
    """
    if not isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{where}: expected a torch.nn.Module, got {type(model).__qualname__}. Several "
            "models go into one torch.nn.ModuleList."
        )
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UsageError(
                f"{where}: {name or 'the model'} ({type(module).__name__}): expected dense "
                "gradients, got sparse=True. Make it with sparse=False."
            )
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise UsageError(
            f"{where}: expected a model with parameters that require a gradient, got "
            f"{type(model).__name__} without. Unfreeze them before."
        )
    for name, param in trained:
        _check_parameter(name, param, trained[0], where)


def _check_parameter(
    name: str, param: torch.Tensor, first: tuple[str, torch.Tensor], where: str
) -> None:
    place = f"{where}: parameter {name!r}"
    if isinstance(param, torch.nn.UninitializedParameter):
        raise UsageError(
            f"{place}: expected a shape, got a lazy parameter. Call the model once before."
        )
    if hasattr(param, "device_mesh"):
        raise UsageError(
            f"{place}: expected a plain tensor, got {type(param).__name__}, whose gradients "
            "FSDP or tensor parallelism reduces already. Use one of the two."
        )
    if param.layout != torch.strided:
        raise UsageError(f"{place}: expected a dense parameter, got {param.layout}")
    if dtype_name(param) not in FLOATS | COMPLEX:
        raise UsageError(
            f"{place}: expected one of the dtypes {', '.join(sorted(FLOATS | COMPLEX))}, got "
            f"{param.dtype}"
        )
    if param.device.type not in ("cpu", "cuda"):
        raise UsageError(
            f"{place}: expected a parameter on the CPU or a CUDA device, got {param.device}"
        )
    if param.device != first[1].device:
        raise UsageError(
            f"{place}: expected all parameters on one device, got {param.device}, and "
            f"{first[1].device} for {first[0]!r}. Make a GradientSync for the part on each."
        )


def describe(model: torch.nn.Module, options: Mapping[str, Any]) -> str:
    """Return what members compare, a line for each parameter, buffer and argument."""
    lines = [f"{key}={value}" for key, value in options.items()]
    lines += [
        f"parameter {name!r} {_layout(p)}{'' if p.requires_grad else ' frozen'}"
        for name, p in model.named_parameters()
    ]
    lines += [f"buffer {name!r} {_layout(b)}" for name, b in model.named_buffers()]
    return "\n".join(lines)


def _layout(tensor: torch.Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" strides {tuple(tensor.stride())}"
    return f"{tuple(tensor.shape)} {dtype_name(tensor)} {tensor.device.type}{strides}"
