"""Each example does what its header says: the command there is run, its output compared.

The header is the module's docstring; tests/transcript.py tells how it shows commands.
"""

import ast
import re

import pytest

from tests.mpi import ROOT, child
from tests.transcript import mismatch, parse

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
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


@pytest.mark.parametrize(("path", "step"), STEPS)
def test_the_command_prints_what_the_header_says(path, step, mpi_launcher):
    ended = child("bash", "-c", f"{{ {step.command}\n}} 2>&1", timeout=LIMIT, cwd=ROOT).check()
    wrong = mismatch(step.expected, ended.stdout)
    assert wrong is None, f"$ {step.command}\n{wrong}"
    assert not ended.leftovers
