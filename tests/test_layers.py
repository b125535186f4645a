"""Imports point down, MPI stays upstairs, modules stay small: the plan, as a test.

docs/architecture.md tells the same in words; a change of one changes the other.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Lowest first. A floor is a list of steps, a step a list of modules that do not import each
# other; a module imports from lower steps only. Split a step when the code asks for it. A new
# module fails here until it stands in one.
FLOORS = {
    "words": [
        ["mpiml.errors", "mpiml._native", "mpiml.forking"],
        ["mpiml.early", "mpiml.real", "mpiml.threads", "mpiml.whole"],
        ["mpiml.seconds"],
        ["mpiml.asked", "mpiml.config", "mpiml.later", "mpiml.settings"],
        ["mpiml.lazily"],
    ],
    "logic": [
        [
            "mpiml.consistency",
            "mpiml.control",
            "mpiml.filters",
            "mpiml.libraries",
            "mpiml.machine",
            "mpiml.references",
            "mpiml.scope",
            "mpiml.silence",
            "mpiml.vendors",
        ],
        ["mpiml.hosts", "mpiml.started"],
        ["mpiml.binding", "mpiml.gpus", "mpiml.whereabouts"],
        ["mpiml.alarms", "mpiml.external.codes", "mpiml.signatures", "mpiml.waits"],
        ["mpiml.payload_memory", "mpiml.tracebacks"],
        ["mpiml.callbacks", "mpiml.cores", "mpiml.handles", "mpiml.nodes", "mpiml.wire"],
        ["mpiml.arrays", "mpiml.payload_owned"],
        ["mpiml.external.encoding", "mpiml.optim_step", "mpiml.payload_arrays"],
        ["mpiml.external.specs", "mpiml.optim"],
        ["mpiml.payload_pickler"],
        ["mpiml.payload_errors"],
        ["mpiml.payload"],
        ["mpiml.contents", "mpiml.external.topics"],
        ["mpiml.futures"],
        ["mpiml.graph", "mpiml.topics.policy"],
        ["mpiml.vertices"],
        ["mpiml.topics.graph", "mpiml.topics.queues", "mpiml.topics.tree"],
        ["mpiml.drawing", "mpiml.external.node", "mpiml.fingerprint", "mpiml.hiding"],
        ["mpiml.checks"],
        ["mpiml.program"],
        ["mpiml.digest"],
    ],
    "data": [
        ["mpiml.datasets.csr", "mpiml.datasets.drafts", "mpiml.topology.checks"],
        ["mpiml.topology.value"],
        ["mpiml.topology.weights"],
        ["mpiml.topology.graphs", "mpiml.topology.schedule"],
        ["mpiml.topology.pairs"],
        ["mpiml.topology"],
        [
            "mpiml.datasets.cache",
            "mpiml.datasets.generator",
            "mpiml.datasets.measures",
            "mpiml.datasets.text",
            "mpiml.datasets.writing",
        ],
        ["mpiml.datasets.blocks"],
        ["mpiml.datasets.libsvm"],
        ["mpiml.datasets"],
    ],
    "roles": [
        ["mpiml.roles.packing"],
        ["mpiml.roles.asks"],
        ["mpiml.roles.placement"],
        ["mpiml.external.crowd"],
        ["mpiml.external.manifest"],
        [
            "mpiml.roles.parameter_server.following",
            "mpiml.roles.parameter_server.holding",
            "mpiml.roles.parameter_server.keys",
            "mpiml.roles.parameter_server.order",
            "mpiml.roles.parameter_server.settings",
        ],
        [
            "mpiml.roles.parameter_server.deciding",
            "mpiml.roles.parameter_server.layout",
            "mpiml.roles.parameter_server.table",
        ],
        ["mpiml.roles.parameter_server.plan", "mpiml.roles.parameter_server.store"],
        ["mpiml.roles.parameter_server.memory"],
        ["mpiml.roles.parameter_server.part"],
        ["mpiml.roles.cache"],
        ["mpiml.roles.reservoir_policy"],
    ],
    "world": [["mpiml.initializing"], ["mpiml.world"], ["mpiml.exchanges"]],
    "faults": [
        ["mpiml.ancestors", "mpiml.progress"],
        ["mpiml.faults", "mpiml.undertaker"],
        ["mpiml.latecomers", "mpiml.output"],
    ],
    "engine": [
        ["mpiml.funnel", "mpiml.seat"],
        [
            "mpiml.credit",
            "mpiml.driver",
            "mpiml.external.link",
            "mpiml.polling",
            "mpiml.transport",
        ],
        ["mpiml.engine"],
    ],
    "collectives": [
        [
            "mpiml.collectives.arrivals",
            "mpiml.collectives.device.kernel",
            "mpiml.collectives.device.stages",
            "mpiml.collectives.fusion",
            "mpiml.collectives.ops",
            "mpiml.collectives.over",
        ],
        ["mpiml.collectives.device.protocol"],
        ["mpiml.collectives.device.cuda"],
        ["mpiml.collectives.device.arrays"],
        ["mpiml.collectives.regions", "mpiml.collectives.trees"],
        [
            "mpiml.collectives.hosts.chunks",
            "mpiml.collectives.labels",
            "mpiml.collectives.onesided.ring_rule",
            "mpiml.collectives.optimizers.mirror",
            "mpiml.collectives.stragglers.backup",
            "mpiml.collectives.stragglers.combining",
            "mpiml.collectives.stragglers.records",
            "mpiml.collectives.stragglers.survivors",
        ],
        [
            "mpiml.collectives.onesided.ring_places",
            "mpiml.collectives.stragglers.blocks",
            "mpiml.collectives.stragglers.coding",
        ],
        ["mpiml.collectives.stragglers.cyclic", "mpiml.collectives.stragglers.rules"],
        [
            "mpiml.collectives.compression.bits",
            "mpiml.collectives.compression.checks",
            "mpiml.collectives.compression.draws",
            "mpiml.collectives.compression.orthogonal",
        ],
        ["mpiml.collectives.compression.exchange", "mpiml.collectives.compression.state"],
        ["mpiml.collectives.compression.coding"],
        ["mpiml.collectives.compression.message", "mpiml.collectives.compression.reducer"],
        ["mpiml.collectives.compression.feedback"],
        ["mpiml.collectives.compression.codec"],
        [
            "mpiml.collectives.compression.blocked",
            "mpiml.collectives.compression.cast",
            "mpiml.collectives.compression.powersgd",
            "mpiml.collectives.compression.topk",
        ],
        [
            "mpiml.collectives.compression.onebit",
            "mpiml.collectives.compression.qsgd",
            "mpiml.collectives.compression.randomk",
            "mpiml.collectives.compression.sign",
            "mpiml.collectives.compression.terngrad",
        ],
        ["mpiml.collectives.compression"],
        [
            "mpiml.collectives.calls",
            "mpiml.collectives.leavers",
            "mpiml.collectives.ledger",
            "mpiml.collectives.messages",
            "mpiml.collectives.requests",
            "mpiml.collectives.room",
        ],
        ["mpiml.collectives.funneled", "mpiml.collectives.notes"],
        ["mpiml.collectives.desk"],
        ["mpiml.collectives.team"],
        [
            "mpiml.collectives.alike",
            "mpiml.collectives.arena",
            "mpiml.collectives.gradients",
            "mpiml.collectives.hosts.farewells",
            "mpiml.collectives.members",
            "mpiml.collectives.office",
            "mpiml.collectives.onesided.agent",
            "mpiml.collectives.optimizers.shards",
        ],
        ["mpiml.collectives.parcels"],
        [
            "mpiml.collectives.mail",
            "mpiml.collectives.onesided.layout",
            "mpiml.collectives.onesided.memory",
            "mpiml.collectives.onesided.records",
        ],
        [
            "mpiml.collectives.onesided.adding",
            "mpiml.collectives.onesided.links",
            "mpiml.collectives.onesided.ring_token",
            "mpiml.collectives.onesided.serving",
        ],
        ["mpiml.collectives.onesided.windows"],
        ["mpiml.collectives.onesided.remote"],
        [
            "mpiml.collectives.onesided.held",
            "mpiml.collectives.onesided.pulling",
            "mpiml.collectives.onesided.ring_meeting",
            "mpiml.collectives.onesided.targets",
        ],
        [
            "mpiml.collectives.onesided.model",
            "mpiml.collectives.onesided.ring_member",
            "mpiml.collectives.onesided.window",
        ],
        [
            "mpiml.collectives.onesided.ring_model",
            "mpiml.collectives.onesided.shared_model",
            "mpiml.collectives.onesided.svm",
        ],
        ["mpiml.collectives.hosts.lanes", "mpiml.collectives.in_host"],
        ["mpiml.collectives.hosts.rounds"],
        ["mpiml.collectives.hosts.between"],
        ["mpiml.collectives.channel", "mpiml.collectives.device.direct"],
        ["mpiml.collectives.device.group"],
        ["mpiml.collectives.device.channel", "mpiml.collectives.staged"],
        ["mpiml.collectives.hosts.apart"],
        ["mpiml.collectives.compression.hosts", "mpiml.collectives.loose"],
        ["mpiml.collectives.exchanging"],
        [
            "mpiml.collectives.allreducing",
            "mpiml.collectives.explaining",
            "mpiml.collectives.bucket",
        ],
        ["mpiml.collectives.optimizers.stepping"],
        [
            "mpiml.collectives.averaging.replica",
            "mpiml.collectives.optimizers.fused",
            "mpiml.collectives.optimizers.sharded",
        ],
        ["mpiml.collectives.averaging.periodic"],
        [
            "mpiml.collectives.averaging.diloco",
            "mpiml.collectives.averaging.force",
            "mpiml.collectives.averaging.local",
        ],
        ["mpiml.collectives.averaging.elastic", "mpiml.collectives.averaging.elastic_async"],
        ["mpiml.collectives.averaging"],
        ["mpiml.collectives.stragglers.collector"],
        ["mpiml.collectives.stragglers.talk"],
        ["mpiml.collectives.stragglers.gathered"],
        ["mpiml.collectives.stragglers.coded", "mpiml.collectives.stragglers.first"],
        ["mpiml.collectives.stragglers"],
        [
            "mpiml.collectives.neighbors.combining",
            "mpiml.collectives.neighbors.edges",
            "mpiml.collectives.neighbors.leaves",
            "mpiml.collectives.neighbors.snapshots",
            "mpiml.collectives.neighbors.wording",
        ],
        ["mpiml.collectives.neighbors.exchange"],
        ["mpiml.collectives.neighbors.meeting", "mpiml.collectives.neighbors.reducing"],
        [
            "mpiml.collectives.neighbors.adpsgd",
            "mpiml.collectives.neighbors.hosts",
            "mpiml.collectives.neighbors.pairs",
            "mpiml.collectives.neighbors.trained",
        ],
        ["mpiml.collectives.neighbors.dpsgd", "mpiml.collectives.neighbors.pushsum"],
        ["mpiml.collectives.neighbors"],
        [
            "mpiml.collectives.device",
            "mpiml.collectives.hosts",
            "mpiml.collectives.onesided",
            "mpiml.collectives.optimizers",
        ],
        ["mpiml.collectives"],
    ],
    "rpc": [
        ["mpiml.roles.parameter_server.filtering.wire"],
        ["mpiml.roles.parameter_server.filtering.stages"],
        ["mpiml.roles.parameter_server.filtering.rules"],
        ["mpiml.roles.parameter_server.filtering.ends"],
        ["mpiml.roles.parameter_server.filtering.coders"],
        [
            "mpiml.roles.parameter_server.downpour",
            "mpiml.roles.parameter_server.filtering.links",
        ],
        ["mpiml.roles.parameter_server.filtering"],
        ["mpiml.turns"],
        ["mpiml.tasks"],
        ["mpiml.server"],
        ["mpiml.aio", "mpiml.batching", "mpiml.streams"],
        ["mpiml.target"],
        ["mpiml.board", "mpiml.client"],
        ["mpiml.reducing"],
        ["mpiml.group"],
        ["mpiml.readiness"],
        ["mpiml.topics.incoming", "mpiml.topics.outgoing"],
        ["mpiml.topics.ends", "mpiml.topics.exchange"],
        ["mpiml.topics"],
    ],
    # below launch, which reads the command line when it is given the function
    "command line": [["mpiml.loading"], ["mpiml.options"], ["mpiml.cmdline"]],
    "launch": [
        ["mpiml.absence", "mpiml.agree", "mpiml.hearing", "mpiml.waves"],
        ["mpiml.agreeing"],
        ["mpiml.ending", "mpiml.hosting", "mpiml.routing", "mpiml.survey"],
        [
            "mpiml.context",
            "mpiml.external.guest",
            "mpiml.failure",
            "mpiml.idle",
            "mpiml.membership",
            "mpiml.parting",
            "mpiml.topics.quiet",
        ],
        ["mpiml.external.reception", "mpiml.teams"],
        ["mpiml.external.party", "mpiml.runtime"],
        ["mpiml.external", "mpiml.refusal"],
        [
            "mpiml.claims",
            "mpiml.finalizing",
            "mpiml.handshake",
            "mpiml.layout",
            "mpiml.linking",
            "mpiml.reporting",
            "mpiml.result",
        ],
        ["mpiml.session"],
        ["mpiml.launch", "mpiml.testing"],
    ],
    "services": [
        [
            "mpiml.roles.parameter_server.by_path",
            "mpiml.roles.parameter_server.posting",
            "mpiml.roles.parameter_server.specs",
            "mpiml.roles.parameter_server.tree",
            "mpiml.roles.parameter_server.waiting",
        ],
        ["mpiml.roles.parameter_server.reading", "mpiml.roles.parameter_server.shard"],
        ["mpiml.roles.parameter_server.client"],
        ["mpiml.roles.parameter_server.opening"],
        ["mpiml.roles.parameter_server.node"],
        ["mpiml.roles.parameter_server"],
        [
            "mpiml.roles.barrier",
            "mpiml.roles.cacher",
            "mpiml.roles.counter",
            "mpiml.roles.reservoir",
        ],
        ["mpiml.roles"],
    ],
    "frameworks": [
        [
            "mpiml.jax",
            "mpiml.torch.checks",
            "mpiml.torch.memory",
            "mpiml.torch.store",
            "mpiml.torch.watching",
        ],
        ["mpiml.torch.group", "mpiml.torch.parcels"],
        ["mpiml.torch.reducing"],
        ["mpiml.torch.joining"],
        ["mpiml.torch.gradients"],
        ["mpiml.torch"],
    ],
    "public": [["mpiml"]],
    "commands": [
        ["mpiml.mpiexec"],
        ["mpiml.starter"],
        ["mpiml.doctor.check", "mpiml.doctor.copying", "mpiml.doctor.probe"],
        ["mpiml.doctor.machine", "mpiml.doctor.ranks"],
        ["mpiml.doctor.direct", "mpiml.doctor.merge", "mpiml.doctor.trials"],
        ["mpiml.doctor.job"],
        ["mpiml.doctor.report"],
        ["mpiml.doctor"],
        ["mpiml.doctor.__main__"],
        ["mpiml.jobs.checking", "mpiml.jobs.filling", "mpiml.jobs.templates"],
        ["mpiml.jobs.command"],
        ["mpiml.jobs"],
        ["mpiml.jobs.__main__"],
        ["mpiml.bench.measure"],
        [
            "mpiml.bench._worker",
            "mpiml.bench.allreduce_rounds",
            "mpiml.bench.hello",
            "mpiml.bench.onesided_apart",
            "mpiml.bench.onesided_inside",
            "mpiml.bench.ps_inside",
            "mpiml.bench.pubsub_inside",
            "mpiml.bench.resident",
            "mpiml.bench.scale_memory",
            "mpiml.bench.scale_model",
            "mpiml.bench.rpc_busy",
            "mpiml.bench.rpc_calls",
            "mpiml.bench.rpc_crowd",
            "mpiml.bench.rpc_group",
            "mpiml.bench.spawn",
            "mpiml.bench.peers.charm4py_chare",
            "mpiml.bench.peers.dask_actor",
            "mpiml.bench.peers.dragon_queue",
            "mpiml.bench.peers.impi_allreduce",
            "mpiml.bench.peers.monarch_actor",
            "mpiml.bench.peers.ray_actor",
            "mpiml.bench.peers.torch_allreduce",
            "mpiml.bench.peers.torch_rpc",
        ],
        [
            "mpiml.bench.allreduce_parts",
            "mpiml.bench.allreduce_sizes",
            "mpiml.bench.allreduce_steps",
            "mpiml.bench.gpu",
            "mpiml.bench.gpu_ways",
            "mpiml.bench.neighbors_inside",
            "mpiml.bench.scale_inside",
            "mpiml.bench.scale_plain",
            "mpiml.bench.ps_crowd",
            "mpiml.bench.several_hosts",
        ],
        ["mpiml.bench.on_hosts", "mpiml.bench.two_hosts"],
        [
            "mpiml.bench.allreduce_apart",
            "mpiml.bench.allreduce_hosts",
            "mpiml.bench.allreduce_inside",
            "mpiml.bench.arrays",
            "mpiml.bench.external",
            "mpiml.bench.idle",
            "mpiml.bench.neighbors",
            "mpiml.bench.onesided",
            "mpiml.bench.peers",
            "mpiml.bench.poll",
            "mpiml.bench.ps_links",
            "mpiml.bench.ps_training",
            "mpiml.bench.pubsub",
            "mpiml.bench.rpc",
            "mpiml.bench.scale",
            "mpiml.bench.startup",
        ],
        ["mpiml.bench.allreduce", "mpiml.bench.ps"],
        ["mpiml.bench.command"],
        ["mpiml.bench"],
        ["mpiml.bench.__main__"],
        ["mpiml.run"],
        ["mpiml.cli"],
    ],
}
MPI_FROM = "world"  # only this floor and those above it import mpi4py
MAX_MODULE = 400
MAX_FUNCTION = 50  # lines of code and comments; the docstring is free

STEPS = [(floor, step) for floor, steps in FLOORS.items() for step in steps]
LEVEL = {name: level for level, (_, step) in enumerate(STEPS) for name in step}
FLOOR_OF = {name: floor for floor, step in STEPS for name in step}
NAMES = list(FLOORS)
MODULES = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for p in sorted((ROOT / "mpiml").rglob("*.py"))
}


def tree(module):
    return ast.parse(MODULES[module].read_text())


def imports_of(module):
    """Every module that `module` imports, inside functions and for types too."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in LEVEL or name in MODULES else node.module


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module):
    assert module in LEVEL, f"give {module} a place in FLOORS"
    ours = {n for n in imports_of(module) if n.split(".")[0] == "mpiml"}
    unknown = ours - LEVEL.keys()
    assert not unknown, f"{module} imports {sorted(unknown)}, which have no place in FLOORS"
    wrong = sorted(n for n in ours if LEVEL[n] >= LEVEL[module])
    assert not wrong, (
        f"{module} (floor {FLOOR_OF[module]}) may not import "
        f"{[f'{n} ({FLOOR_OF[n]})' for n in wrong]}: imports point to lower steps only"
    )


@pytest.mark.parametrize("module", MODULES)
def test_mpi_is_imported_from_world_up(module):
    if NAMES.index(FLOOR_OF[module]) < NAMES.index(MPI_FROM):
        mpi = [n for n in imports_of(module) if n.split(".")[0] == "mpi4py"]
        assert not mpi, f"{module} is below {MPI_FROM} and may not import {mpi}"


@pytest.mark.parametrize("module", MODULES)
def test_modules_and_functions_stay_small(module):
    lines = len(MODULES[module].read_text().splitlines())
    assert lines <= MAX_MODULE, f"{module} has {lines} lines, at most {MAX_MODULE}"
    long = {}
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                size -= node.body[0].end_lineno - node.body[0].lineno + 1
            if size > MAX_FUNCTION:
                long[node.name] = size
    assert not long, f"{module}: functions over {MAX_FUNCTION} lines: {long}"


def top_level(statements):
    """Names that the statements bind, those under `if` and `try` too, imports apart."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (n.id for n in names if isinstance(n, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.If | ast.Try):
            handlers = [s for h in getattr(node, "handlers", ()) for s in h.body]
            yield from top_level(node.body + handlers + node.orelse)


def declared(module):
    """Return `__all__` as it is written, or None."""
    for node in tree(module).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        )
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return ast.literal_eval(node.value)
    return None


PLAIN = [m for m in MODULES if MODULES[m].stem not in ("__init__", "__main__")]
PACKAGES = [m for m in MODULES if MODULES[m].stem == "__init__"]


@pytest.mark.parametrize("module", PLAIN)
def test_all_is_exactly_the_public_names(module):
    names = declared(module)
    assert names is not None, f"{module} has no __all__"
    real = {n for n in top_level(tree(module).body) if not n.startswith("_")}
    # ruff's RUF022 keeps the order: constants, classes, functions, each sorted
    assert len(names) == len(set(names)), f"{module}.__all__ has duplicates"
    again = {  # names of other modules may be passed on
        alias.asname or alias.name
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    strange = sorted(set(names) - real - again)
    # a constant may stay out: its capitals say that it is no part of what the module does
    missing = sorted(n for n in real - set(names) if not n.isupper())
    assert not strange, f"{module}.__all__: no such names here: {strange}"
    assert not missing, f"{module}.__all__ lacks {missing} (or give them an underscore)"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_package_exists(package):
    names = declared(package)
    assert names is not None, f"{package} has no __all__"
    # in a child: a name may bring MPI with it, and this process must never start MPI
    code = f"import {package} as p\nfor n in {names}: getattr(p, n)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr


def test_importing_mpiml_starts_no_mpi():
    code = "import mpiml, sys; sys.exit('mpi4py.MPI' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 0, ended.stderr or "import mpiml imported mpi4py.MPI"


def test_the_plan_names_each_module_once():
    names = [name for _, step in STEPS for name in step]
    assert len(names) == len(set(names))
