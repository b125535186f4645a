"""Why a program's GPUs are not to be had: what each kind of host lacks, with the cure. Pure."""

from collections.abc import Sequence

from mpiml.hosts import Facts

__all__ = ["why_too_few"]


def why_too_few(facts: Sequence[Facts]) -> str:
    """Return a sentence for each kind of trouble, "" where every rank has a device. Local.

    Parameters
    ----------
    facts
        Of each rank, in rank order.
    """
    hosts: dict[tuple[str, int], list[int]] = {}
    for rank, fact in enumerate(facts):
        hosts.setdefault((fact.name, fact.machine), []).append(rank)
    found: dict[str, list[str]] = {}
    for (name, _), ranks in hosts.items():
        trouble = _trouble([facts[rank] for rank in ranks])
        if trouble:
            found.setdefault(trouble, []).append(name)
    return " ".join(f"{_hosts(names)} {trouble}" for trouble, names in found.items())


def _trouble(here: Sequence[Facts]) -> str:
    """Return what is wrong on one host."""
    count = len(here)
    blind = [fact for fact in here if not fact.gpus]
    if any(fact.gpus_hidden for fact in blind):
        return (
            "has devices, but CUDA_VISIBLE_DEVICES shows none of them: unset it, or ask the "
            "launcher for them (srun --gpus-per-node=N)."
        )
    if len(blind) == count:
        return (
            "has no NVIDIA device that its ranks see: start them where there is one (Slurm: "
            "--gres=gpu:N), and give containers theirs (--nv, --gpus all)."
        )
    if blind:
        return f"shows no device to {len(blind)} of its {count} ranks: show each all of them."
    if here[0].gpus_private:
        return ""
    devices = {gpu for fact in here for gpu in fact.gpus}
    if len(devices) >= count:
        return ""
    if all(len(fact.gpus) == 1 for fact in here) and count > 1:
        return (
            f"gives {count} ranks the same {_devices(len(devices))}: let CUDA_VISIBLE_DEVICES "
            "show each rank all devices of the host, which mpiml deals out, or one of its own."
        )
    return f"has {_devices(len(devices))} for {count} ranks: start as many ranks there as have one."


def _devices(count: int) -> str:
    return "1 device" if count == 1 else f"{count} devices"


def _hosts(names: Sequence[str]) -> str:
    return f"Host {names[0]}" if len(names) == 1 else f"Each of hosts {', '.join(names[:5])}"
