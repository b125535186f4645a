"""How much memory a rank holds that no other rank pays for."""

__all__ = ["MARK", "held"]

MARK = "held bytes:"


def held() -> tuple[int, int]:
    """Return this process's proportional bytes, and those that it alone has written.

    Pages of files that no other process maps do not count: that depends on who else runs.
    """
    sizes = {"Pss:": 0, "Private_Dirty:": 0}
    with open("/proc/self/smaps_rollup") as lines:
        for line in lines:
            words = line.split()
            if words[0] in sizes:
                sizes[words[0]] = int(words[1]) << 10
    return sizes["Pss:"], sizes["Private_Dirty:"]
