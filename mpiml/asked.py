"""What `launch` and `attach` may be asked: their settings, checked before anything starts."""

import math
from typing import Any

from mpiml.errors import UsageError
from mpiml.whole import as_whole

__all__ = ["check_settings"]

_LONGEST = 1e9  # s; the clocks of Python take no number that is much larger


def check_settings(settings: Any, threads: int | None, call: str) -> None:
    """Refuse settings that a run could only fail on later, on one rank perhaps.

    Local: no MPI.

    Parameters
    ----------
    settings
        A `mpiml.runtime.Settings`.
    threads
        Replicas of the role that has ``FILL``, without MPI.
    call
        The function that was given them: ``"launch"`` or ``"attach"``.

    Raises
    ------
    UsageError
        Names the function, the setting, what it may be, and what it is.
    """
    longest = f"{_LONGEST:.0e}".replace("e+0", "e")
    time = f"a number of seconds from 0 to {longest}"
    longer = f"None or a number of seconds above 0, to {longest}"
    limit = settings.max_time
    checks = [
        ("grace", settings.grace, time, _seconds(settings.grace) >= 0),
        ("stall_warning", settings.stall_warning, time, _seconds(settings.stall_warning) >= 0),
        ("seed", settings.seed, "a whole number, 0 or more", _whole(settings.seed) >= 0),
        ("max_time", limit, longer, limit is None or _seconds(limit) > 0),
        ("threads", threads, "None or at least 1", threads is None or _whole(threads) >= 1),
        (
            "on_stuck",
            settings.on_stuck,
            "'abort' or 'raise'",
            isinstance(settings.on_stuck, str) and settings.on_stuck in ("abort", "raise"),
        ),
    ]
    for name, value, wanted, right in checks:
        if not right:
            raise UsageError(f"mpiml.{call}: {name}: expected {wanted}, got {value!r}")


def _seconds(value: Any) -> float:
    """Return a number of seconds; -1 for what is none."""
    if isinstance(value, (bool, str, bytes)):
        return -1
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return seconds if math.isfinite(seconds) and seconds <= _LONGEST else -1


def _whole(value: Any) -> int:
    """Return a whole number; -1 for what is none."""
    number = as_whole(value)
    return -1 if number is None else number
