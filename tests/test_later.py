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
    assert not hasattr(package, "consistency")
    with pytest.raises(
        UsageError, match=r"^mpiml\.consistency comes with the services release$"
    ):
        _ = package.consistency


def test_import_statement_keeps_the_text(package):
    with pytest.raises(UsageError, match=r"^mpiml\.CacherNode comes with") as caught:
        exec("from refusing_package import CacherNode", {})
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
