"""PyTorch among the nodes of a role: gradients that are reduced, and `torch.distributed`.

PyTorch is optional: ``pip install 'mpiml[torch]'``.
"""

try:
    import torch as _torch  # noqa: F401 - where it is missing, that is said here
except ImportError as error:
    from mpiml.libraries import MissingLibraryError

    raise MissingLibraryError("mpiml.torch", "PyTorch", "torch", error) from None

from mpiml.torch.gradients import GradientSync
from mpiml.torch.group import ProcessGroup, init_process_group
from mpiml.torch.store import RoleStore, StoreTimeoutError

__all__ = [
    "GradientSync",
    "ProcessGroup",
    "RoleStore",
    "StoreTimeoutError",
    "init_process_group",
]
