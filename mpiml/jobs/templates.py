"""Where the templates are, which there are, and what they say of themselves."""

from pathlib import Path
from typing import NamedTuple

from mpiml.errors import UsageError

__all__ = ["Template", "find", "folder", "templates"]


class Template(NamedTuple):
    """One template: its name, the file, its text, and its first comment."""

    name: str
    path: Path
    text: str
    about: str


def folder() -> Path:
    """Return the folder of the templates: of the wheel, or of the repository.

    Local: no MPI.
    """
    inside = Path(__file__).parent / "files"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "jobs"


def templates(where: Path | None = None) -> list[Template]:
    """Return the templates by name. Local: reads their files."""
    where = folder() if where is None else where
    files = sorted(p for p in where.iterdir() if p.suffix in (".sbatch", ".yaml"))
    return [Template(p.stem, p, text, _about(text)) for p in files for text in [p.read_text()]]


def find(name: str) -> Template:
    """Return the template of a name, such as ``program``.

    Raises
    ------
    UsageError
        There is none; names those there are.
    """
    known = {template.name: template for template in templates()}
    if name not in known:
        raise UsageError(f"no template {name!r}; those are {', '.join(known)}")
    return known[name]


def _about(text: str) -> str:
    """Return the first sentence of the comment at the top."""
    words = []
    for line in text.splitlines():
        if line.startswith("#!"):
            continue
        if not line.startswith("# "):
            break
        words.append(line[2:])
    return " ".join(words).split(". ")[0].rstrip(".")
