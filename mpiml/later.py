"""Names that are not where they are looked for: refused by name, never ignored.

Those that the contract promises and this release does not have; and those that live elsewhere.
"""

import sys
from typing import NoReturn

from mpiml.errors import UsageError

__all__ = ["ELSEWHERE", "LATER", "refuse", "refuse_attribute"]

_SERVICES = "services"
_CLUSTER = "cluster"
_TASKS = "tasks"
_FAULT = "fault"

#: name -> (how a user spells it, the release that brings it)
LATER: dict[str, tuple[str, str]] = {
    "ReplayNode": ("mpiml.ReplayNode", _SERVICES),
    "tasks": ("mpiml.tasks", _TASKS),
    "TaskPoolNode": ("mpiml.TaskPoolNode", _TASKS),
    "checkpoint": ("mpiml.checkpoint", _FAULT),
    "on_failure": ("add_node(on_failure=)", _FAULT),
    "durable": ("add_node(durable=True)", _FAULT),
    "spares": ("--spares", _FAULT),
    "resume": ("--resume", _FAULT),
}

#: module -> the public names that it has, and `mpiml` not, parted by spaces
ELSEWHERE: dict[str, str] = {
    "mpiml.collectives": (
        "Bucket FusedOptimizer RingModel ShardedOptimizer SharedModel Window allreduce explain "
        "hierarchical_neighbor_allreduce neighbor_allreduce averaging compression neighbors "
        "onesided stragglers"
    ),
    "mpiml.collectives.averaging": (
        "AsyncElastic DiLoCo Elastic LocalSGD PostLocalSGD elastic_difference elastic_exchange "
        "elastic_limit"
    ),
    "mpiml.collectives.compression": (
        "Cast Codec EFSign ErrorFeedback Exchange NoFeedback OneBit PowerSGD QSGD RandomK Reducer "
        "SignMajority Statistics TernGrad TopK reducer_of"
    ),
    "mpiml.collectives.neighbors": "ADPSGD DPSGD PairGossip PushSum SGP gossip",
    "mpiml.collectives.onesided.svm": "SVMEpoch SVMScore svm_epoch svm_score",
    "mpiml.collectives.stragglers": (
        "Backup BackupGradient CodedGradient Cyclic Drops FractionalRepetition GradientCode Verdict"
    ),
    "mpiml.datasets": (
        "CSR SparseSVM Sparsity rcv1_like read_libsvm sparse_svm sparsity write_libsvm"
    ),
    "mpiml.jax": "GradientSync",
    "mpiml.roles": "Barrier Counter Reservoir",
    "mpiml.optim": "Adagrad Adam AdamW Coefficients Momentum Optimizer Rate SGD",
    "mpiml.topology": (
        "ActivePassive Cycle RandomPairs Schedule Topology as_schedule bipartite complete "
        "exponential from_matrix from_networkx grid metropolis one_peer_exponential push_sum ring "
        "star uniform"
    ),
    "mpiml.torch": "GradientSync ProcessGroup RoleStore StoreTimeoutError init_process_group",
}


class _LaterError(UsageError, AttributeError):
    """A name of a later release; an AttributeError too, so that `hasattr` is False."""


class _LaterImportError(UsageError, ImportError):
    """The same under ``from mpiml import name``, where an AttributeError loses its text."""


def refuse(name: str, spelling: str | None = None) -> NoReturn:
    """Raise the error that says which release brings `name`.

    Parameters
    ----------
    name : str
        A key of `LATER`.
    spelling : str, optional
        How the user wrote it, where that is more exact than the table's spelling.

    Raises
    ------
    UsageError
        Always; also an AttributeError, or an ImportError where an import statement asks.
    """
    shown, release = LATER[name]
    message = f"{spelling or shown} comes with the {release} release"
    raise (_LaterImportError if _importing() else _LaterError)(message)


def refuse_attribute(name: str, module: str = "mpiml") -> NoReturn:
    """Raise what a missing attribute of `module` raises.

    It says which release brings it, or in which module it is, where one of this is so.

    Raises
    ------
    UsageError
        The name comes with a later release: see `refuse`.
    AttributeError
        Always else; or an ImportError where an import statement asks for what is elsewhere.
    """
    if name in LATER:
        refuse(name)
    homes = [home for home, names in ELSEWHERE.items() if name in names.split()]
    if not homes:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    cure = ", or ".join([f"from {home} import {name}" for home in homes])
    if _importing():
        raise ImportError(
            f"cannot import name {name!r} from {module!r}. It is elsewhere: {cure}"
        )
    raise AttributeError(
        f"module {module!r} has no attribute {name!r}. It is elsewhere: {cure}"
    )


def _importing() -> bool:
    """Tell whether ``from mpiml import name`` asks, by way of the module's ``__getattr__``.

    The import statement turns an AttributeError into "cannot import name", without our
    text, and lets any other error through.
    """
    frame = sys._getframe(2)  # past _importing and who calls it
    for _ in range(3):  # __getattr__, perhaps by way of a helper, then who asks
        if frame.f_code.co_name == "_handle_fromlist":
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
