"""Types of the compiled module; see mpiml/native/."""

from typing import Any, TypeAlias, final

from numpy.typing import NDArray
from typing_extensions import Buffer

_Array: TypeAlias = Buffer | NDArray[Any]  # one has a type for its buffer from Python 3.12 on

@final
class Doorbell:
    def __init__(self, memory: Buffer, index: int) -> None: ...
    def ring(self, i: int) -> None: ...
    def value(self) -> int: ...
    def wait(self, seen: int, spin_us: int, timeout_us: int) -> bool: ...

@final
class Block:
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

GANG_INLINE: int

@final
class Gang:
    def __init__(
        self,
        memory: Buffer,
        index: int,
        size: int,
        box: int,
        segment: int,
        shared: int,
        spin_us: int,
        yield_us: int,
        threads: bool,
    ) -> None: ...
    @property
    def busy(self) -> bool: ...
    @property
    def shared_at(self) -> int: ...
    def gone(self) -> list[int]: ...
    def leave(self) -> None: ...
    def missing(self) -> list[int]: ...
    def run(
        self,
        plan: Plan,
        hash: int,
        compare: bool,
        timeout_us: int,
        input: Buffer | None = None,
        output: Buffer | None = None,
    ) -> int: ...
    def segment_at(self, member: int) -> int: ...

@final
class Gate:
    def __init__(self, memory: Buffer, index: int, size: int) -> None: ...
    @property
    def closed_by(self) -> int: ...
    def enter(self, timeout_us: int = 10_000_000) -> bool: ...
    def inside(self) -> list[int]: ...
    def leave(self, adds: int = 1) -> None: ...
    def snapshot(
        self, model: Buffer, out: Buffer, timeout_us: int = 10_000_000, clear: bool = False
    ) -> int | None: ...
    def quiet_version(self) -> int | None: ...
    def version(self) -> int: ...

@final
class Mapping:
    def __init__(self, fd: int, nbytes: int) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

@final
class Plan:
    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    def fetch(self, shared: int, at: int, nbytes: int) -> None: ...
    def gather(self, at: int, nbytes: int, in_slot: bool = False) -> None: ...
    def get(self, member: int, from_: int, at: int, nbytes: int) -> None: ...
    def post(
        self,
        at: int,
        nbytes: int,
        box: int = 0,
        external: bool = False,
        in_slot: bool = False,
    ) -> None: ...
    def pull(self, member: int, at: int, nbytes: int) -> None: ...
    def put(self, at: int, nbytes: int, to: int) -> None: ...
    def reduce(
        self,
        dtype: int,
        op: int,
        divisor: float,
        at: int,
        count: int,
        where: int,
        to: int | None = None,
    ) -> None: ...
    def reduce_posted(
        self,
        dtype: int,
        op: int,
        divisor: float,
        box: int,
        at: int,
        count: int,
        where: int,
        in_slot: bool = False,
    ) -> None: ...
    def set_coefficients(self, coefficients: tuple[float, ...]) -> None: ...
    def sync(self) -> None: ...
    def update(
        self,
        dtype: int,
        op: int,
        divisor: float,
        at: int,
        count: int,
        where: int,
        rule: int,
        wide: bool,
        param: Buffer,
        states: tuple[Buffer, ...],
    ) -> None: ...

def checksum(buffer: Buffer, seed: int = 0) -> int: ...
def convert(to: int, dst: Buffer, from_: int, src: Buffer) -> None: ...
def copy(dst: Buffer, src: Buffer) -> None: ...
def gang_bytes(size: int, box: int, segment: int, shared: int) -> int: ...
def gate_bytes(size: int) -> int: ...
def hogwild_add(
    model: _Array,
    values: _Array,
    scale: float = 1.0,
    gate: Gate | None = None,
    timeout_us: int = 10_000_000,
) -> None: ...
def hogwild_add_at(
    model: _Array,
    indices: _Array,
    values: _Array,
    scale: float = 1.0,
    gate: Gate | None = None,
    timeout_us: int = 10_000_000,
) -> None: ...
def hogwild_add_rows(
    model: _Array,
    indptr: _Array,
    indices: _Array,
    values: _Array,
    coefficients: _Array,
    how: str = "atomic",
    lock: _Array | None = None,
    gate: Gate | None = None,
    timeout_us: int = 10_000_000,
) -> None: ...
def hogwild_svm_rows(
    model: _Array,
    indptr: _Array,
    indices: _Array,
    values: _Array,
    labels: _Array,
    degrees: _Array,
    eta: float,
    mu: float,
    order: _Array | None = None,
    how: str = "atomic",
    lock: _Array | None = None,
    gate: Gate | None = None,
    timeout_us: int = 10_000_000,
) -> tuple[int, float]: ...
def join_plain(
    kind: int,
    flags: int,
    source: int,
    target: int,
    id: int,
    aux: int,
    name: bytes,
    value: object,
) -> bytes | None: ...
def pool_statistics() -> dict[str, int]: ...
def reduce(
    dtype: int,
    op: int,
    sources: list[Any],
    destinations: list[Any],
    divisor: float = 1.0,
    stream: bool = False,
) -> None: ...
def ring_prepare(
    own: _Array,
    snapshot: _Array,
    following_copy: _Array,
    step: float,
    beta: float,
    lam: float,
    tolerance: float,
    out_delta: _Array,
) -> tuple[int, int]: ...
def ring_sync(
    own: _Array,
    snapshot: _Array,
    following: _Array,
    step: float,
    beta: float,
    lam: float,
    tolerance: float,
) -> tuple[int, int]: ...
def set_pool_limit(nbytes: int) -> None: ...
def set_timer_slack(ns: int) -> None: ...
def split_frame(memory: Buffer, size: int) -> tuple[Any, ...] | None: ...
def take(nbytes: int) -> Block: ...
def update(
    rule: int,
    itemsize: int,
    param: Buffer,
    grad: Buffer,
    states: tuple[Buffer, ...],
    coefficients: tuple[float, ...],
) -> None: ...
def use_isa(name: str) -> str: ...
def writable(buffer: Buffer) -> memoryview: ...
