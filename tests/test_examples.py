"""Each example does what its header says: the command there is run, its output compared.

The header is the module's docstring; tests/transcript.py tells how it shows commands. They are
run in a folder of their own that shows the repository's files: what an example writes is there.
"""

import ast
import itertools
import re

import numpy as np
import pytest

from tests.mpi import ROOT, child
from tests.transcript import mismatch, parse

FILES = sorted((ROOT / "examples").glob("*.py"))
EXAMPLES = [path for path in FILES if "__main__" in path.read_text()]
MAX_LINES = 120
LIMIT = 100  # s for each command; below faulthandler_timeout of pyproject.toml


def header(path):
    return ast.get_docstring(ast.parse(path.read_text())) or ""


STEPS = [
    pytest.param(path, step, id=f"{path.stem}-{i}")
    for path in EXAMPLES
    for i, step in enumerate(parse(header(path)))
]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_an_example_is_short_and_shows_a_command_and_its_output(path):
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{path.name} has {lines} lines, at most {MAX_LINES}"
    steps = parse(header(path))
    assert steps, f"{path.name}: the docstring shows no command (a line that starts with '$ ')"
    shown = re.compile(rf"examples/{path.name}\b")
    assert any(shown.search(s.command) for s in steps), f"no command runs examples/{path.name}"
    assert any(s.expected for s in steps), f"{path.name}: the docstring shows no output"


def test_what_is_no_example_is_short_and_used_by_several():
    for path in set(FILES) - set(EXAMPLES):
        assert len(path.read_text().splitlines()) <= MAX_LINES
        users = [e for e in EXAMPLES if f"from {path.stem} import" in e.read_text()]
        assert len(users) >= 2, path


@pytest.fixture
def folder(tmp_path):
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


@pytest.mark.parametrize(("path", "step"), STEPS)
def test_the_command_prints_what_the_header_says(path, step, folder, mpi_launcher):
    script = f"{{ {step.command}\n}} 2>&1"
    ended = child("bash", "-c", script, timeout=LIMIT, cwd=folder).check()
    wrong = mismatch(step.expected, ended.stdout)
    assert wrong is None, f"$ {step.command}\n{wrong}"
    assert not ended.leftovers
    written = re.findall(r"wrote (\S+\.png)", ended.stdout)
    assert sorted(written) == sorted(p.name for p in folder.glob("*.png"))
    for name in written:
        rows = check_losses(ended.stdout)
        check_picture(folder / name, rows)


def check_losses(text):
    """Return how many rows the table has; each must tell that its loss fell."""
    lines = [re.split(r" {2,}", re.sub(r"^\[\S+\] ", "", line)) for line in text.splitlines()]
    start = next(i for i, line in enumerate(lines) if line[0] == "method")
    columns = lines[start]
    rows = list(itertools.takewhile(lambda r: len(r) == len(columns), lines[start + 1 :]))
    assert len(rows) >= 3, text
    for row in rows:
        found = dict(zip(columns, row, strict=True))
        assert float(found["last loss"]) < 0.9 * float(found["first loss"]), row
    return len(rows)


def check_picture(path, curves):
    """Check that it is a PNG, with curves against time on the left and bytes on the right."""
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    from matplotlib import colors, image  # which the example has imported too

    pixels = (255 * image.imread(path)[..., :3]).round()  # (height, width, 3)
    left, right = np.array_split(pixels, 2, axis=1)
    drawn = [np.array(colors.to_rgb(f"C{i}")) * 255 for i in range(curves)]
    seen = [[(abs(half - c) < 1).all(axis=2).any() for c in drawn] for half in (left, right)]
    assert all(seen[0]), seen  # the legend is there
    assert sum(seen[1]) >= 2, seen  # one may hide another
