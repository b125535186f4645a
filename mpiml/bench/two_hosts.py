"""Two hosts made of one, 2 ranks on each: what most benchmarks of several hosts run on."""

from mpiml.bench.several_hosts import SeveralHosts
from mpiml.bench.spawn import Ranks

__all__ = ["TwoHosts"]


class TwoHosts(SeveralHosts):
    """`SeveralHosts` of 2 ranks each.

    Parameters
    ----------
    ranks, programs
        As for `SeveralHosts`.
    """

    def __init__(self, ranks: Ranks, programs: bool = False) -> None:
        super().__init__(ranks, (2, 2), programs)
