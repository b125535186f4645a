import pytest

from mpiml.config import BUILD_VARIABLES, VARIABLES, Config, inner_environ
from mpiml.errors import UsageError

STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
}


def hints(config):
    return (
        config.launcher,
        config.rank_hint,
        config.size_hint,
        config.local_rank_hint,
        config.local_size_hint,
    )


def test_nothing_is_set():
    config = Config.read({})
    assert config == Config()
    assert hints(config) == (None,) * 5
    assert not config.singleton_trap
    assert (config.window_messages, config.window_bytes) == (128, 16 << 20)


def test_reads_this_process_by_default(monkeypatch):
    monkeypatch.setenv("MPIML_SPIN_US", "7")
    assert Config.read().spin_us == 7


def test_openmpi_goes_before_the_step_of_its_daemon():
    ompi = {
        "OMPI_COMM_WORLD_RANK": "2",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_RANK": "2",
    }
    for environ in (ompi, STEP | ompi):
        config = Config.read(environ)
        assert hints(config) == ("openmpi", 2, 4, 0, 2)
        assert not config.singleton_trap


def test_hydra_goes_before_the_step_of_its_proxy():
    hydra = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    for environ in (hydra, STEP | hydra):
        config = Config.read(environ)
        assert hints(config) == ("mpich", 3, 4, 1, 2)
        assert not config.singleton_trap


@pytest.mark.parametrize("pmi", [{"PMI_RANK": "4", "PMI_SIZE": "6"}, {"PMIX_RANK": "4"}])
def test_srun_with_a_pmi(pmi):
    config = Config.read(STEP | pmi)
    assert hints(config) == ("slurm", 4, 6, 1, 3)
    assert not config.singleton_trap


def test_what_scancel_calls_a_step():
    step = STEP | {"PMIX_RANK": "4", "SLURM_JOB_ID": "7"}
    parts = {"SLURM_HET_SIZE": "2", "SLURM_STEP_NUM_NODES": "3"}
    for k, nodes in ((0, "1"), (1, "2")):
        parts[f"SLURM_JOB_ID_HET_GROUP_{k}"] = str(7 + k)
        parts[f"SLURM_JOB_NUM_NODES_HET_GROUP_{k}"] = nodes
    said = [
        Config.read(environ).slurm_steps
        for environ in (
            step, step | {"SLURM_JOB_ID": "x"}, step | {"SLURM_PTY_PORT": "34567"}, step | parts,
            step | parts | {"SLURM_STEP_NUM_NODES": "2"}, {"PMIX_RANK": "4", "SLURM_JOB_ID": "7"},
        )
    ]  # fmt: skip
    assert said == [("7.0",), (), (), ("7.0", "8.0"), (), ()]


def test_an_older_slurm_on_cray_ex_has_only_the_number_of_pals():
    config = Config.read(STEP | {"PALS_RANKID": "4", "PALS_APID": "5.0"})
    assert hints(config) == ("slurm", 4, 6, 1, 3)
    assert config.pmi
    assert not config.singleton_trap
    assert Config.read({"PALS_RANKID": "4"}).launcher is None, "PALS itself sets PMI_RANK"
    assert "PALS_RANKID" not in inner_environ({"PALS_RANKID": "4"})


def test_a_shell_by_srun_pty_is_no_trap():
    shell = STEP | {"SLURM_PTY_PORT": "34567", "SLURM_PROCID": "0"}
    assert hints(Config.read(shell)) == (None,) * 5
    assert Config.read(shell | {"SLURM_PROCID": "1"}).singleton_trap


def test_plain_srun_is_the_singleton_trap():
    config = Config.read(STEP)
    assert config.singleton_trap
    assert config.slurm_step_tasks == 6
    assert config.rank_hint == 4


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_STEP_ID": "batch"},
        {"SLURM_STEP_ID": "4294967291"},  # the batch step as a number
        {"SLURM_STEP_ID": ""},
        {"SLURM_STEP_NUM_TASKS": "many"},
    ],
)
def test_no_trap_outside_a_numeric_step_of_several_tasks(change):
    config = Config.read(STEP | change)
    assert not config.singleton_trap
    assert hints(config) == (None,) * 5


def test_settings_of_open_mpi_are_no_rank():
    assert Config.read(STEP | {"OMPI_MCA_osc": "^ucx", "PMIX_MCA_gds": "hash"}).singleton_trap


@pytest.mark.parametrize(
    ("text", "node", "size"),
    [("4(x2),3", "0", 4), ("4(x2),3", "1", 4), ("4(x2),3", "2", 3), ("4(x2),3", "3", None),
     ("odd", "0", None), ("", "0", None), ("5", "0", 5)],
)  # fmt: skip
def test_tasks_of_this_host(text, node, size):
    environ = STEP | {"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": node}
    assert Config.read(environ).local_size_hint == size


@pytest.mark.parametrize(
    ("extra", "private"),
    [
        ({"SLURM_GPUS_PER_TASK": "1"}, True),
        ({"SLURM_TRES_PER_TASK": "gres/gpu=1"}, True),
        ({"SLURM_GPU_BIND": "verbose,single:1"}, True),
        ({"SLURM_GPU_BIND": "none"}, False),
        ({}, False),
    ],
)
def test_gpus_bound_by_slurm(extra, private):
    assert Config.read(STEP | {"PMIX_RANK": "4"} | extra).gpus_private is private


def test_malformed_foreign_variables_count_as_unset():
    config = Config.read({"OMPI_COMM_WORLD_RANK": "x", "SLURM_CPUS_PER_TASK": "-1"})
    assert config == Config()


def test_every_override():
    config = Config.read(
        {
            "MPIML_SPIN_US": "0",
            "MPIML_WINDOW_MESSAGES": "3",
            "MPIML_WINDOW_BYTES": "4M",
            "MPIML_DOORBELL": "off",
            "MPIML_GPU_DIRECT": "Off",
            "MPIML_HOST_SIZE": "2",
            "MPIML_LAUNCHER_PID": "77",
            "MPIML_LAUNCHER_HOST": "n1",
            "OMP_NUM_THREADS": "",
            "SLURM_CPUS_PER_TASK": "8",
            "CUDA_VISIBLE_DEVICES": "0",
        }
    )
    assert config == Config(
        spin_us=0,
        window_messages=3,
        window_bytes=4 << 20,
        doorbell=False,
        gpu_direct="off",
        host_size=2,
        launcher_pid=77,
        launcher_host="n1",
        omp_set=True,
        cpus_per_task=8,
        cuda_visible_devices="0",
    )
    assert all(field in Config._fields for field, _, _ in VARIABLES.values())


@pytest.mark.parametrize("name", sorted(VARIABLES))
def test_a_bad_value_is_named(name):
    with pytest.raises(UsageError, match=name) as caught:
        Config.read({name: ""})
    assert VARIABLES[name][2] in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("MPIML_HOST_SIZE", "0"), ("MPIML_SPIN_US", "-1"), ("MPIML_WINDOW_BYTES", "0k"),
     ("MPIML_DOORBELL", "2"), ("MPIML_LAUNCHER_PID", "1.5")],
)  # fmt: skip
def test_a_bad_value_shows_itself(name, value):
    with pytest.raises(UsageError, match=value):
        Config.read({name: value})


def test_the_launcher_is_known_whatever_our_own_variables_say(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("MPIML_SPIN_US", "many")
    assert Config.read_foreign().launcher == "openmpi"


def test_an_unknown_variable_is_named():
    with pytest.raises(UsageError, match="MPIML_SPIN_MS"):
        Config.read({"MPIML_SPIN_MS": "1"})
    assert Config.read(dict.fromkeys([*BUILD_VARIABLES, "MPIML_TEST_LEG"], "ON")) == Config()


def test_an_inner_job_does_not_see_the_outer_one():
    layout = {"SLURM_NTASKS_PER_NODE": "32", "SLURM_NTASKS": "64", "PMIX_RANK": "0",
              "OMPI_COMM_WORLD_SIZE": "2", "PMI_FD": "5", "MPI_LOCALRANKID": "0"}  # fmt: skip
    kept = {"OMPI_MCA_osc": "^ucx", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_TASKS_PER_NODE": "32(x2)", "PATH": "/bin"}  # fmt: skip
    inner = inner_environ(layout | STEP | kept)
    assert kept.items() <= inner.items()
    assert not inner.keys() & layout.keys()
    assert Config.read(inner) == Config()
