"""Commands and what they print, as pages and examples show them, compared with a real run.

    $ python -m mpiml.run -n 4 hello.py
    [worker/0] took ... s
    [worker/1] took ... s
    ...

A line after ``$ `` is a command (a trailing backslash continues it), the lines up to the next
command or empty line are what it prints. `...` stands for any text within a line; alone on a
line, for any further lines. Lines with different ``[role/index]`` prefixes may come in any
order, those with the same prefix come in the order shown. stdout and stderr count alike.
"""

import re
from typing import NamedTuple

__all__ = ["Step", "mismatch", "parse"]


class Step(NamedTuple):
    """One command and the lines it prints."""

    command: str
    expected: list[str]


def parse(text):
    """Return the `Step` of every command in a text whose lines may be indented alike."""
    steps, current, continued = [], None, False
    for raw in text.splitlines():
        line = raw.strip()
        if continued:
            steps[-1] = current = Step(f"{current.command}\n{line}", current.expected)
        elif line.startswith("$ "):
            current = Step(line[2:], [])
            steps.append(current)
        elif not line:
            current = None
        elif current is not None:
            current.expected.append(line)
        continued = line.endswith("\\") and current is not None and not current.expected
    return steps


def _pattern(line):
    return re.compile(r".*".join(re.escape(part) for part in line.split("...")))


def _prefix(line):
    found = re.match(r"\[[^\]]*\]", line)
    return found.group() if found else ""


def mismatch(expected, output):
    """Return what is wrong with `output` (text), or None if it is as `expected` (lines)."""
    left = [(i, line.strip()) for i, line in enumerate(output.splitlines()) if line.strip()]
    last = {}  # prefix -> index of the last line matched
    for wanted in (line.strip() for line in expected):
        if wanted == "...":
            continue
        pattern, after = _pattern(wanted), last.get(_prefix(wanted), -1)
        for found in left:
            if found[0] > after and pattern.fullmatch(found[1]):
                left.remove(found)
                last[_prefix(wanted)] = found[0]
                break
        else:
            return f"no line {wanted!r}, or not in this order; the output was\n{output}"
    if expected and left and "..." not in (line.strip() for line in expected):
        return f"{left[0][1]!r} is not in the text; the output was\n{output}"
    return None
