"""The command: its line, and one real run of each benchmark with few repetitions.

No figure is judged here: that all rows are there, are numbers, and belong together is.
"""

import json
import math
import signal
import subprocess
import sys
import time

import pytest

from mpiml.bench import peers
from mpiml.bench.command import NAMES, main, parse
from mpiml.starter import members

BUSY = ("", "_mean", "_p99", "_called", "_quiet", "_body")
SUMS = ("mpi", "mpi_in_place", "mpi_new", "bucket", "shared", "outside", "new")
SIZES = ("8B", "1KiB", "4KiB", "64KiB", "1MiB", "16MiB", "64MiB")
APART = (
    *("accumulate", "accumulate_given", "push", "push_flush", "window_flush", "put", "get"),
    *("get_given", "pull", "snapshot", "get_1MiB", "get_1MiB_given", "pull_1MiB"),
    *("snapshot_1MiB", "accumulate_1MiB", "push_1MiB"),
)
RACES = ("atomic", "racy", "spinlock", "mutex")
NEAR = ("raw_ring", "ring", "raw_one_peer", "one_peer", "mpi", "allreduce")
NEAR_SIZES = ("8B", "1KiB", "64KiB", "1MiB", "16MiB")
WAYS = ("memcpy", "raw_result", "lent", "kept", "raw_push", "push", "push_futures")
GROWN = ("rate_1s", "rate_2s", "grown")
PULLED = ("64KiB", "1MiB", "16MiB")
ROWS = {
    "rpc": {
        *("raw_small", "small", "raw_flight", "flight"),
        *(f"busy_{kind}{end}" for kind in ("matmul", "elementwise", "python") for end in BUSY),
        *("crowd_raw", "crowd", "crowd_max", "crowd_raw_max"),
        *("crowd_few_rate", "crowd_rate", "crowd_least"),
        *(f"group_{way}{end}" for way in ("gathered", "reduced") for end in ("", "_bytes")),
    },
    "pubsub": {
        *("raw_small", "small", "small_latest", "raw_rate", "rate", "raw_fan_out", "fan_out"),
        *(f"{size}_given" for size in ("1MiB", "16MiB")),
        *(f"{raw}{size}" for raw in ("raw_", "") for size in ("1MiB", "16MiB")),
    },
    "ps": {
        *(f"here_{size}{end}" for size in PULLED for end in ("", "_memcpy")),
        *(f"pretended_{size}{end}" for size in PULLED for end in ("", "_raw")),
        *("push_raw", "push", "push_pull", "pull_small"),
        *(f"{what}_{w}w{s}s" for what in ("rate", "bytes") for w in (1, 2) for s in (1, 2)),
        *(f"staleness_{late}" for late in (0, 1, 2, 3, "max")),
        *(f"digits_{mode}" for mode in ("bsp", "delay", "ssp", "async", "sooner")),
    },
    "arrays": {f"{size}_{way}" for size in ("1KiB", "1MiB", "16MiB") for way in WAYS},
    "allreduce": {
        *(f"{size}_{way}" for size in SIZES for way in SUMS),
        *(f"64MiB_{end}" for end in ("copy", "speed", "bucket_bound", "shared_bound")),
        *("one_1MiB", "many_1MiB", "one_16MiB", "many_16MiB", "check_off", "check_on"),
        *("halves_float32", "halves_float16", "halves_bfloat16"),
        *("apart_sgd", "fused_sgd", "apart_adam", "fused_adam", "memory_own", "memory_shared"),
    },
    "neighbors": {
        *(f"{size}_{way}" for size in NEAR_SIZES for way in NEAR),
        *(f"slow_{way}" for way in ("work", "all", "neighbours", "adpsgd")),
    },
    "onesided": {
        *(
            f"alone_{model}{end}"
            for model in ("rcv1", "64MiB")
            for end in ("", "_racy", "_cost")
        ),
        *(f"in_{way}" for way in ("accumulate", "add_at", "get", "read", "snapshot")),
        *(f"racing_rcv1_zipf_{way}{end}" for way in RACES for end in ("", "_grown")),
        *(f"{kind}{end}" for kind in ("shared", "ring", "ring_64") for end in ("", "_grown")),
        *(f"pretended_{way}" for way in APART),
    },
    "startup": {
        *("import_numpy", "import_mpiml", "import_names"),
        *("memory_plain", "memory", "memory_max", "memory_private"),
        *("start_plain", "start_hello"),
    },
    "poll": {
        f"{what}_{w}" for w in ("multiple", "funneled") for what in ("test", "poll", "small")
    },
    "idle": {"raw", "service", "caller", "answer", "answer_max"},
    "external": set(),
    "scale": {
        *(f"{what}_{n}" for what in ("plain", "start", "launch", "model") for n in (2, 4)),
        *("L", "o", "g", "G", "frame", "duplicate", "placing"),
        *(f"far_{n}" for n in (100, 1000, 10_000)),
        *("calls", "calls_s", "rate", "grown"),
        *(f"private_{what}{n}" for what in ("plain_", "") for n in (2, 4)),
    },
}
#: Where this machine can be several hosts: rows, the goals among them, and what is said where not.
NOT_TWO = "two hosts: not measured"
EXTERNAL = (
    *("raw_call", "call", "raw_echo", "echo", "call_small", "publish", "publish_over"),
    *("raw_publish", "publish_small", "raw_stream", "raw_apart", "stream", "stream_share"),
    *("stream_apart", "step"),
)
HOSTS = {
    "external": [(set(EXTERNAL), 5, "no compiler, or no sources")],
    "allreduce": [
        (
            {
                f"hosts_1MiB_{way}{end}"
                for way in ("mpi", "mpi_in_place", "leaders", "bucket") for end in ("", "_link")
            },
            1,
            NOT_TWO,
        ),
    ],
    "onesided": [({f"hosts_{way}" for way in APART}, 4, NOT_TWO)],
    "ps": [
        (
            {
                *(f"hosts_{size}{end}" for size in PULLED for end in ("", "_raw")),
                *(f"hosts_{what}" for what in GROWN),
            },
            1,
            NOT_TWO,
        ),
        ({f"links_{what}" for what in GROWN}, 1, "slow cards: not measured"),
    ],
}  # fmt: skip
GOALS = {
    "allreduce": 29,
    "neighbors": 10,
    "rpc": 17,
    "pubsub": 7,
    "ps": 4,
    "arrays": 4,
    "onesided": 8,
    "startup": 4,
    "idle": 3,
    "external": 0,
    "poll": 2,
    "scale": 2,
}


def bench(*argv, timeout=240):
    ended = subprocess.run(
        [sys.executable, "-m", "mpiml.bench", *argv],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    return ended.stdout


def test_each_benchmark_has_its_rows_here():
    assert ROWS.keys() == NAMES.keys() - {"gpu"}  # which tests/gpu and test_gpu.py look at


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_each_benchmark_measures_all_its_rows(name, mpi_launcher):
    ranks = ["--ranks", "4"] if name in ("rpc", "startup", "allreduce") else []
    found = json.loads(bench(name, "--quick", "--json", *ranks))
    rows = {row["key"]: row for row in found["rows"]}
    expected, goals = set(ROWS[name]), GOALS[name]
    for keys, more, said in HOSTS.get(name, ()):
        if not any(said in note for note in found["notes"]):
            expected, goals = expected | keys, goals + more
    assert rows.keys() == expected
    assert len(rows) == len(found["rows"])
    for row in rows.values():
        numbers = [
            row[key] for key in ("value", "low", "high", "ratio") if row[key] is not None
        ]
        assert all(map(math.isfinite, numbers)), row
        assert row["samples"] >= 1
        assert (row["reached"] is None) == (row["goal"] == "")
        if row["low"] is not None:
            assert row["low"] <= row["value"] <= row["high"]
    assert sum(row["goal"] != "" for row in rows.values()) == goals
    assert "few repetitions" in found["facts"]["quick"]
    assert found["facts"].keys() >= {"cpu", "cores", "mpi", "python", "numpy", "mpi4py", "date"}


@pytest.mark.slow
def test_peers_that_are_not_there_are_named(mpi_launcher, tmp_path):
    """All peers get a Python that has none of them."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    options = [f"--peer-python={name}={python}" for name in peers.PEERS]
    said = bench("idle", "--quick", *options)
    assert "idle has no figure that other systems share" in said
    found, notes = peers.measure(parse(["rpc", "--quick", *options]), [])
    assert found == []
    assert notes == missing("rpc")
    found, notes = peers.measure(parse(["allreduce", "--quick", *options]), [])
    assert found == []
    assert notes == missing("allreduce")


def missing(bench):
    return [
        f"{peer.title}: not installed (pip install {peer.pip})"
        for peer in peers.PEERS.values()
        if bench in peer.benches
    ]


def test_what_a_peer_prints_becomes_rows(tmp_path):
    """A Python that answers for all scripts: the rows, their statistics and their ratios."""
    python = tmp_path / "python"
    text = json.dumps({"version": "9", "small": [2e-6, 4e-6], "flight": [50.0]})
    python.write_text(f"#!/bin/sh\necho noise\necho '[0] {peers.MARK}{text}'\n")
    python.chmod(0o755)
    others = [f"--peer-python={name}=/no" for name in peers.PEERS if name != "ray"]
    options = parse(["rpc", "--quick", f"--peer-python=ray={python}", *others])
    raw = [row(key, value) for key, value in (("raw_small", 1.0), ("raw_flight", 100.0))]
    found, notes = peers.measure(options, raw)
    mine = {one.key: one for one in found if one.key.startswith("peer_ray")}
    assert mine["peer_ray_small"].what == "Ray actor 9: small call"
    assert mine["peer_ray_small"].value == pytest.approx(3.0)
    assert mine["peer_ray_small"].ratio == pytest.approx(3.0)
    assert mine["peer_ray_flight"].ratio == pytest.approx(0.5)
    assert "Dask actor, worker to worker: no Python at /no" in notes


def test_a_peer_of_allreduce_stands_beside_the_faster_form_and_beside_ours(tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    mpiexec = tmp_path / "mpiexec"
    found = {"version": "9", "1MiB": [3e-3], "64KiB_in_place": [9e-6]}
    mpiexec.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/asked\necho '{marked(found)}'\n")
    for file in (python, mpiexec):
        file.chmod(0o755)
    others = [f"--peer-python={name}=/no" for name in peers.PEERS if name != "impi"]
    line = ["allreduce", "--quick", "--ranks=4", f"--peer-python=impi={python}", *others]
    raw = {"1MiB_mpi": 2.0, "1MiB_mpi_in_place": 1.5, "1MiB_bucket": 1.1}
    raw |= {"64KiB_mpi": 3.0, "64KiB_mpi_in_place": 4.5}
    beside = [row(key, value) for key, value in raw.items()]
    assert peers.measure(parse(line), beside)[0] == []  # none of Intel's programs is there
    (tmp_path / "impi_info").touch()
    rows, notes = peers.measure(parse(line), beside)
    small, large = rows
    assert (small.key, small.ratio, small.goal) == ("peer_impi_64KiB_in_place", 3.0, "")
    assert large.what == "Intel MPI 9: 1 MiB"
    assert (large.ratio, large.goal, large.reached) == (2.0, ">= 3 x Bucket", False)
    assert "gloo all_reduce of torch: no Python at /no" in notes
    assert f"-n 4 {python}" in (tmp_path / "asked").read_text()


def marked(found):
    return peers.MARK + json.dumps(found)


def row(key, value):
    from mpiml.bench.measure import Row

    return Row(key, key, "µs", value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "required: NAME"),
        (["speed"], "invalid choice: 'speed'"),
        (["rpc", "--ranks", "0"], "expected 1 or more"),
        (["rpc", "--ranks", "x"], "invalid _count value: 'x'"),
        (["rpc", "--peer-python", "ray"], "expected PEER=PATH"),
        (["rpc", "--peer-python", "slurm=/x"], "expected PEER=PATH with one of ray"),
        (["arrays", "--ranks", "4"], "arrays measures two ranks"),
        (["idle", "--ranks", "4"], "idle measures two ranks"),
        (["allreduce", "--ranks", "1"], "expected 2 or more"),
        (["rpc", "--ranks", "3"], "expected 4 or more"),
        (["startup", "--ranks", "1"], "expected 2 or more"),
        (["scale", "--ranks", "1"], "expected 2 or more"),
        (["scale", "--calls", "0"], "expected 1 or more"),
        (["pubsub", "--ranks", "2"], "expected 3 or more"),
        (["ps", "--ranks", "2"], "expected 3 or more"),
    ],
)
def test_a_wrong_line_is_usage_and_status_2(argv, said, capsys, unlaunched):
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


@pytest.fixture
def unlaunched(monkeypatch):
    """No launcher, whichever started this test, and none looked for."""
    from mpiml.bench import command

    monkeypatch.setattr(command.Config, "read", classmethod(lambda cls: cls()))
    monkeypatch.setattr(command, "Ranks", lambda: None)


def test_ranks_do_not_start_ranks(monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert main(["idle"]) == 2
    assert "a launcher started this process" in capsys.readouterr().err


def test_the_process_that_measures_loads_no_mpi():
    """Else the mpiexec that it starts would fail silently."""
    names = [*NAMES, "command", "measure", "peers", "spawn"]
    code = "".join(f"import mpiml.bench.{name}\n" for name in names)
    code += "import sys; sys.exit('mpi4py.MPI' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr or "mpi4py.MPI was imported"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_ranks_too(number, mpi_launcher):
    bench = subprocess.Popen(
        [sys.executable, "-m", "mpiml.bench", "idle"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        limit = time.monotonic() + 60
        while sum(members(bench.pid).values()) < 2 and time.monotonic() < limit:
            assert bench.poll() is None, bench.communicate()[1]
        bench.send_signal(number)
        out, err = bench.communicate(timeout=60)
    finally:
        bench.kill()
    assert (bench.returncode, out, err) == (128 + number, "", "")
    assert members(bench.pid) == {}


def test_help_says_what_there_is(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in NAMES)
    assert "--peers" in out


def test_peers_are_measured_when_a_python_is_given_for_one():
    assert parse(["rpc", "--peer-python", "ray=/x/python"]).peers
    assert not parse(["rpc"]).peers


@pytest.mark.slow
def test_ranks_that_fail_are_an_error_and_not_a_table(mpi_launcher):
    from mpiml.bench.spawn import BenchError, Ranks

    with pytest.raises(BenchError, match="got status") as caught:
        Ranks(60.0).scenario("idle:missing", 2, {})
    assert "no attribute 'missing'" in str(caught.value)
