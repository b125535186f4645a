"""Whether members of one host may read each other's memory."""

import secrets

from mpiml._native import address_of, read_peer
from mpiml.collectives.labels import Label
from mpiml.collectives.team import Team

__all__ = ["readable"]

_SECRET = 16  # bytes that nobody else has where a member has them


def readable(team: Team, label: Label) -> str:
    """Try whether each member can read the others' memory.

    Collective over the members of the team, which live on one host.

    Parameters
    ----------
    team : Team
        The members.
    label : Label
        What this is for.

    Returns
    -------
    str
        Empty if all can; otherwise who cannot, and why. The same on all members.

    Notes
    -----
    The system decides by ptrace's rules: Yama's ``ptrace_scope`` and a container's seccomp
    profile may refuse. Process numbers of different containers can be alike, so what is read is
    compared with what was written.
    """
    secret = secrets.token_bytes(_SECRET)
    memory = bytearray(secret)
    pid, address = address_of(memory)
    offers = team.exchange(
        pid.to_bytes(8, "little") + address.to_bytes(8, "little") + secret, label
    )
    wrong = next(filter(None, map(_tried, offers)), "")
    said = team.exchange(wrong.encode(), label)  # `memory` lives until all have come here
    for name, text in zip(team.names, said, strict=True):
        if text:
            return f"{name}: {text.decode(errors='replace')}"
    return ""


def _tried(offer: bytes) -> str:
    pid, address = int.from_bytes(offer[:8], "little"), int.from_bytes(offer[8:16], "little")
    found = bytearray(_SECRET)
    try:
        read_peer(pid, address, found)
    except RuntimeError as error:
        return str(error)
    return "" if found == offer[16:] else f"process {pid} is another one here"
