"""From a program's file to its `Program`: import the file, read `build`'s parameters, call it.

Nothing here touches MPI, prints, or exits, so of many ranks one can speak for all.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

from mpiml.errors import UsageError
from mpiml.program import Program
from mpiml.settings import FILL
from mpiml.signatures import accepts

__all__ = ["Help", "answering_help", "call_build", "check_file", "load", "refuse_while_loading"]

PROG = "mpiml run"
#: What stands before the file: named here too, to say so where it stands behind.
RUN_OPTIONS = frozenset(
    [
        "-n",
        "--mpi",
        "--dry-run",
        "--threads",
        "--grace",
        "--stall-warning",
        "--seed",
        "--max-time",
        "--log-dir",
        "--progress",
        "--no-progress",
    ]
)
_loading: list[str] = []


class Help(Exception):
    """Local: the user asked for help; the text of it is the message, and the status is 0."""


def answering_help(load: Callable[[], Program], speaks: bool) -> Callable[[], Program]:
    """Wrap `load` so that a wish for help ends this rank with status 0, and one rank speaks.

    Local: no MPI; prints to stdout where `speaks`.
    """

    def answering() -> Program:
        try:
            return load()
        except Help as wish:
            if speaks:
                print(wish, end="", flush=True)
            raise SystemExit(0) from None

    return answering


def check_file(file: str | os.PathLike[str]) -> None:
    """Raise a `UsageError` where `file` is not a file. Local: no MPI."""
    if os.path.isdir(file):
        raise UsageError(f"{file}: expected a Python file, got a folder.")
    if not os.path.exists(file):
        raise UsageError(f"{file}: there is no such file (looked in {_folder()}).")


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        raise UsageError(
            "the working folder of this process is missing: it was removed, or this host does "
            "not have it. Start from a folder that all hosts see."
        ) from None


def load(file: str | os.PathLike[str], name: str = "build") -> Callable[..., object]:
    """Import `file` under its own name and return its function `name`.

    Local: so the guard ``if __name__ == "__main__"`` stays closed, and classes of the file
    pickle by reference. ``sys.path[0]`` becomes the file's folder, as Python itself does it.

    Raises
    ------
    UsageError
        There is no such file or function, or the file's name is taken by another module.
    BaseException
        Whatever the file raises while it is imported.
    """
    check_file(file)
    _loading.append(os.path.basename(file))
    try:
        return _build_of(file, name)
    finally:
        _loading.pop()


def refuse_while_loading() -> None:
    """Refuse a launch from the top level of a file that `load` is importing.

    Raises
    ------
    UsageError
        Its guard is missing.
    """
    if _loading:
        raise UsageError(
            f"{_loading[-1]} calls mpiml.launch while {PROG} loads it. Put the call under "
            '`if __name__ == "__main__":`.'
        )


def _build_of(file: str | os.PathLike[str], name: str) -> Callable[..., object]:
    module = _import(os.path.join("" if os.path.isabs(file) else _folder(), file))
    build = getattr(module, name, None)
    if build is None:
        raise UsageError(_no_build(file, name, module))
    if not callable(build):
        raise UsageError(
            f"{file}: {name!r} is a {type(build).__name__}, expected a function that returns "
            f"an mpiml.Program: `def {name}() -> mpiml.Program:`.",
        )
    return build  # type: ignore[no-any-return]


def _no_build(file: str | os.PathLike[str], name: str, module: object) -> str:
    functions = [
        key for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == vars(module)["__name__"]
        and not isinstance(value, type) and not key.startswith("_")
    ]  # fmt: skip
    has = f"it has {', '.join(sorted(functions))}" if functions else "it has no functions"
    if name != "build":
        return f"{file}: there is no function {name!r} ({has})."
    return (
        f"{file}: there is no function 'build' ({has}). Name another one as {file}:NAME. "
        "A file without build is a task script, which comes with mpiml.tasks."
    )


def _import(path: str) -> object:
    import importlib.machinery
    import importlib.util

    folder, base = os.path.split(path)
    # a dot would ask for a package of that name
    name = os.path.splitext(base)[0].replace(".", "_")
    known = sys.modules.get(name)
    if known is not None and _same(getattr(known, "__file__", None), path):
        return known
    _refuse_taken(name, path)
    if sys.path:
        sys.path[0] = folder
    else:
        sys.path.append(folder)
    loader = importlib.machinery.SourceFileLoader(name, path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look it up there
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _same(file: str | None, path: str) -> bool:
    return file is not None and os.path.exists(file) and os.path.samefile(path, file)


def _refuse_taken(name: str, path: str) -> None:
    """Refuse numpy.py: everything imported later would find it in numpy's place."""
    import importlib.util

    owner: str | None = None
    if name in sys.modules:
        owner = getattr(sys.modules[name], "__file__", None) or "built into Python"
    elif name in sys.stdlib_module_names:
        owner = "Python's standard library"
    elif name != "test":  # Python's own test suite, which no program imports
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None and not _same(spec.origin, path):
            owner = spec.origin
    if owner is not None:
        raise UsageError(
            f"{os.path.basename(path)}: the module name {name!r} is taken ({owner}), and classes of a "
            f"program are pickled by it. Rename the file, to my_{name}.py for instance.",
        )


def call_build(build: Callable[..., object], args: tuple[str, ...] = ()) -> Program:
    """Call `build` with its parameters read from `args`.

    Local: types bool, int, float, str, Path, Literal, Optional, list and dataclasses;
    defaults from the signature. A parameter whose default is `FILL` takes a number or the
    word FILL.

    Raises
    ------
    UsageError
        The arguments do not fit, or `build` returned something else than a `Program`.
    Help
        ``--help`` is among the arguments.
    """
    complete = not args and _callable_as_it_is(build)  # if not, tyro says what is missing
    positional, keywords = ((), {}) if complete else _read(build, args)
    program = build(*positional, **keywords)
    if not isinstance(program, Program):
        hint = " Did it forget to return it?" if program is None else ""
        raise UsageError(
            f"{build.__module__}.{build.__qualname__}: expected it to return an "
            f"mpiml.Program, got {type(program).__name__}.{hint}",
        )
    return program


def _callable_as_it_is(build: Callable[..., object]) -> bool:
    if accepts(build, (), ()):
        return True
    import inspect

    try:
        inspect.signature(build).bind()
    except TypeError:
        return False
    return True


def _read(
    build: Callable[..., object], args: tuple[str, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for `build`, by tyro, which every rank pays for."""
    import contextlib
    import io

    try:
        import tyro
    except ImportError as error:
        raise UsageError(
            "options after the file are read by tyro, which is not installed: "
            f"`{sys.executable} -m pip install tyro`.",
        ) from error
    stdout, stderr = io.StringIO(), io.StringIO()
    code = getattr(build, "__code__", None)
    file = "build" if code is None else os.path.basename(code.co_filename)
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            return tyro.cli(
                _recorder(build),
                args=list(args),
                prog=f"{PROG} {file}",
                description=build.__doc__ or "",
            )
    except SystemExit as end:
        if end.code in (0, None):
            raise Help(stdout.getvalue()) from None
        text = (stderr.getvalue() or stdout.getvalue()).rstrip()
        ours = [a for a in args if a.partition("=")[0] in RUN_OPTIONS]
        if ours:
            text += f"\n{ours[0]} is an option of {PROG}: {PROG} {ours[0]} ... {file}"
        raise UsageError(f"usage: {PROG} {file} [options]\n{text}") from None


def _recorder(
    build: Callable[..., object],
) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return a function with the signature of `build` that only notes its arguments.

    The file's own output must not go where tyro's goes, so tyro never calls `build`.
    """
    import inspect
    import typing

    import tyro

    word = tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT|FILL",
        instance_from_str=lambda texts: FILL if texts[0].upper() == "FILL" else int(texts[0]),
        is_instance=lambda value: isinstance(value, int),
        str_from_instance=lambda value: [repr(value)],
    )
    signature = inspect.signature(build)
    hints = typing.get_type_hints(build, include_extras=True)
    parameters = []
    for parameter in signature.parameters.values():
        hint = hints.get(parameter.name, parameter.annotation)
        if parameter.default is FILL:
            hint = typing.Annotated[int, word]
            hints[parameter.name] = hint
        parameters.append(parameter.replace(annotation=hint))

    def record(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    record.__name__, record.__doc__ = build.__name__, build.__doc__
    record.__annotations__ = hints
    record.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return record
