import importlib
import subprocess
import sys
import types

import pytest

from mpiml import later
from mpiml.errors import UsageError


@pytest.mark.parametrize("name", later.LATER)
def test_each_name_is_refused_with_its_release(name):
    shown, release = later.LATER[name]
    with pytest.raises(UsageError) as caught:
        later.refuse(name)
    assert str(caught.value) == f"{shown} comes with the {release} release"


def test_spelling_of_the_user_is_kept():
    with pytest.raises(
        UsageError, match=r"^add_node\(on_failure='restart'\) comes with the fault"
    ):
        later.refuse("on_failure", "add_node(on_failure='restart')")


@pytest.fixture
def package():
    """A package whose __getattr__ refuses, as that of mpiml does."""
    module = types.ModuleType("refusing_package")
    module.__path__ = []

    def __getattr__(name):
        if name in later.LATER:
            later.refuse(name)
        raise AttributeError(name)

    module.__getattr__ = __getattr__
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_hasattr_is_false(package):
    assert not hasattr(package, "checkpoint")
    with pytest.raises(UsageError, match=r"^mpiml\.checkpoint comes with the fault release$"):
        _ = package.checkpoint


def test_import_statement_keeps_the_text(package):
    with pytest.raises(UsageError, match=r"^mpiml\.ReplayNode comes with") as caught:
        exec("from refusing_package import ReplayNode", {})
    assert isinstance(caught.value, ImportError)


def test_an_unknown_name_is_the_usual_import_error(package):
    with pytest.raises(ImportError, match="cannot import name 'Nonsense'"):
        exec("from refusing_package import Nonsense", {})


def test_importing_the_words_loads_no_heavy_module():
    code = (
        "import sys; before = set(sys.modules); import mpiml.later, mpiml.settings;"
        "heavy = {'numpy', 'mpi4py', 'inspect', 'asyncio', 'dataclasses'};"
        "print(sorted(heavy & (set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() in ("[]",)


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("mpiml", "SharedModel", "mpiml.collectives"),
        ("mpiml", "LocalSGD", "mpiml.collectives.averaging"),
        ("mpiml", "ring", "mpiml.topology"),
        ("mpiml", "averaging", "mpiml.collectives"),
        ("mpiml.collectives", "LocalSGD", "mpiml.collectives.averaging"),
        ("mpiml.collectives.averaging", "DPSGD", "mpiml.collectives.neighbors"),
    ],
)
def test_a_name_that_lives_elsewhere_is_told_where(module, name, home):
    text = rf"name '{name}' from '{module}'.*: from {home} import {name}$"
    with pytest.raises(ImportError, match=text):
        exec(f"from {module} import {name}", {})
    found = importlib.import_module(module)
    assert not hasattr(found, name)
    with pytest.raises(
        AttributeError, match=rf"attribute '{name}'\..* from {home} import {name}$"
    ):
        getattr(found, name)


def test_a_name_that_two_modules_have_is_told_of_both():
    with pytest.raises(AttributeError, match=r"from mpiml\.jax .*, or from mpiml\.torch "):
        _ = importlib.import_module("mpiml").GradientSync


def test_a_name_that_nobody_has_is_only_missing():
    with pytest.raises(AttributeError, match=r"^module 'mpiml' has no attribute 'Nonsense'$"):
        _ = importlib.import_module("mpiml").Nonsense


@pytest.mark.parametrize("home", later.ELSEWHERE)
def test_names_elsewhere_are_those_of_the_module(home):
    for optional in ("torch", "jax"):
        if home == f"mpiml.{optional}":
            pytest.importorskip(optional)
    module = importlib.import_module(home)
    rooms = set(getattr(module, "_ROOMS", ())) - {"optimizers"}
    others = {
        n for other, names in later.ELSEWHERE.items() if other < home for n in names.split()
    }
    known = set(later.ELSEWHERE[home].split())
    assert known <= set(module.__all__) | rooms
    assert set(module.__all__) | rooms <= known | others
    assert all(hasattr(module, name) for name in known)


def test_packages_of_collectives_are_reached_without_an_import_of_their_own():
    code = (
        "import sys, mpiml; c = mpiml.collectives; assert 'mpiml.collectives.averaging' not in sys.modules;"
        "print(c.averaging.LocalSGD.__name__, c.neighbors.DPSGD.__name__, c.stragglers.Cyclic.__name__,"
        " c.onesided.__name__, c.optimizers.__name__, c.compression.TopK.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == [
        "LocalSGD", "DPSGD", "Cyclic", "mpiml.collectives.onesided",
        "mpiml.collectives.optimizers", "TopK",
    ]  # fmt: skip
