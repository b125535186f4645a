"""Synchronous steps that do not wait for the slowest: gradient coding, backup workers.

`CodedGradient` and `BackupGradient` carry gradients between members; the rules by which they
decide and compute stand beside them, without messages. Names are loaded when they are first
used.
"""

from typing import TYPE_CHECKING

from mpiml.lazily import lazily

if TYPE_CHECKING:
    from mpiml.collectives.stragglers.backup import Backup, Drops, Verdict
    from mpiml.collectives.stragglers.coded import CodedGradient
    from mpiml.collectives.stragglers.coding import FractionalRepetition, GradientCode
    from mpiml.collectives.stragglers.cyclic import Cyclic
    from mpiml.collectives.stragglers.first import BackupGradient

__all__ = [
    "Backup",
    "BackupGradient",
    "CodedGradient",
    "Cyclic",
    "Drops",
    "FractionalRepetition",
    "GradientCode",
    "Verdict",
]

_HOME = {
    "Backup": "backup",
    "BackupGradient": "first",
    "CodedGradient": "coded",
    "Cyclic": "cyclic",
    "Drops": "backup",
    "FractionalRepetition": "coding",
    "GradientCode": "coding",
    "Verdict": "backup",
}

__getattr__, __dir__ = lazily(__name__, _HOME)
