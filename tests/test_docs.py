"""Every block of README.md and docs/ runs, or says why it does not.

| fence | what is done |
|---|---|
| ```console | each `$ ` command is run, its output compared (tests/transcript.py) |
| ```bash | run as a script, status 0 |
| ```python whose first line is `# NAME.py` | saved under that name, for the page's commands |
| ```python | run as a script, status 0 |
| ```text, ```mermaid, ```toml, ... | nothing |

On the line above a fence, `<!-- not run: REASON -->` leaves a block out, and
`<!-- only on openmpi debian: REASON -->` runs it with these MPIs only.

A page's blocks run in order in a folder of its own that shows the repository's files, so
`examples/hello.py` is there, and what a page writes is not in the repository.
"""

import os
import re
import sys
from typing import NamedTuple

import pytest

from tests.mpi import ROOT, child, vendor
from tests.transcript import mismatch, parse

PAGES = [p for p in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if p.exists()]
RUN = ("console", "bash", "python")
WRONG = ("", "sh", "shell", "zsh", "py", "pycon", "shell-session")  # spelt so, none would run
LIMIT = 100  # s for each block; below faulthandler_timeout of pyproject.toml
FENCE = re.compile(
    r"(?:^[ ]*<!--(?P<note>[^\n]*?)-->[ ]*\n)?^(?P<indent>[ ]*)```(?P<kind>[\w-]*)[^\n]*\n"
    r"(?P<body>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """One fenced block; `file` is the name a python block gives itself."""

    page: str
    line: int
    kind: str
    body: str
    note: str
    file: str | None


def blocks_of(page):
    """Return the blocks of a page, in order."""
    text, found = page.read_text(), []
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        body = "".join(line[indent:] or "\n" for line in match["body"].splitlines(True))
        name = re.match(r"# ([\w/]+\.py)\s*$", body.partition("\n")[0])
        name = name[1] if name and match["kind"] == "python" else None
        line = text.count("\n", 0, match.start("body"))
        note = (match["note"] or "").strip()
        page_name = str(page.relative_to(ROOT))
        found.append(Block(page_name, line, match["kind"], body, note, name))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def ids(block):
    return f"{block.page}:{block.line}"


def left_out(block):
    """Return why a block is not run here, or None."""
    if found := re.fullmatch(r"not run: *(\S.*)", block.note):
        return found[1]
    if found := re.fullmatch(r"only on ([\w ]+): *(\S.*)", block.note):
        return None if vendor() in found[1].split() else f"only on {found[1]}: {found[2]}"
    return None


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of a page by its name; made when first asked for."""
    made = {}

    def folder(page):
        if page not in made:
            made[page] = tmp_path_factory.mktemp("page")
            for entry in ROOT.iterdir():
                if not entry.name.startswith((".venv", ".git", "build")):
                    (made[page] / entry.name).symlink_to(entry)
        return made[page]

    return folder


@pytest.mark.parametrize("block", BLOCKS, ids=ids)
def test_a_block_says_what_it_is(block):
    assert block.kind not in WRONG, (
        f"{ids(block)}: fence {block.kind!r}; write one of {RUN} to have it run, "
        "or text and the like for what is only read"
    )
    if block.note.startswith(("not run", "only on")):
        assert re.fullmatch(r"(not run|only on [\w ]+): *\S.*", block.note), (
            f"{ids(block)}: {block.note!r} gives no reason"
        )
    if block.file and not left_out(block):
        used = any(block.file in b.body for b in BLOCKS if b.page == block.page and b != block)
        assert used, f"{ids(block)}: no other block of the page runs {block.file}"


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.kind in RUN], ids=ids)
def test_a_block_runs(block, folders, mpi_launcher):
    if reason := left_out(block):
        pytest.skip(f"the page says: {reason}")
    folder = folders(block.page)
    for other in BLOCKS:  # also when this block is run alone
        if other.page == block.page and other.line <= block.line and other.file:
            path = folder / other.file
            if not path.parent.exists():
                path.parent.mkdir(parents=True)
            path.unlink(missing_ok=True)  # never through a link into the repository
            path.write_text(other.body)
    if block.file:
        compile(block.body, block.file, "exec")
    elif block.kind == "python":
        child(sys.executable, "-c", block.body, timeout=LIMIT, cwd=folder).check()
    elif block.kind == "bash":
        child("bash", "-euo", "pipefail", "-c", block.body, timeout=LIMIT, cwd=folder).check()
    else:
        steps = parse(block.body)
        assert steps, f"{ids(block)}: a console block without a line that starts with '$ '"
        for step in steps:
            script = f"{{ {step.command}\n}} 2>&1"
            ended = child("bash", "-c", script, timeout=LIMIT, cwd=folder).check()
            wrong = mismatch(step.expected, ended.stdout)
            assert wrong is None, f"{ids(block)}: $ {step.command}\n{wrong}"
            assert not ended.leftovers


def test_what_this_file_finds(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / "p.md"
    page.write_text(
        "```python\n# a.py\nx = 1\n```\n\n<!-- not run: needs a cluster -->\n```bash\nsrun x\n```\n"
        "- item\n  ```console\n  $ echo hi\n  hi\n  ```\n"
    )
    assert blocks_of(page) == [
        Block("p.md", 1, "python", "# a.py\nx = 1\n", "", "a.py"),
        Block("p.md", 7, "bash", "srun x\n", "not run: needs a cluster", None),
        Block("p.md", 11, "console", "$ echo hi\nhi\n", "", None),
    ]
    assert os.path.commonpath([page, tmp_path]) == str(tmp_path)
