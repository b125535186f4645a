"""reduce and convert: the arithmetic of collectives, against NumPy in the stated order."""

from functools import reduce as fold
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpiml._native import convert, reduce, use_isa

DTYPES = [
    *(np.dtype(t) for t in ("f4", "f8", "f2", ml_dtypes.bfloat16, "i1", "i2", "i4", "i8")),
    *(np.dtype(t) for t in ("u1", "u2", "u4", "u8", "c8", "c16")),
]
OPS = ["sum", "mean", "min", "max", "prod"]
NUMPY = {
    "sum": np.add, "mean": np.add, "min": np.minimum, "max": np.maximum, "prod": np.multiply,
}  # fmt: skip
CODE = {t: i for i, t in enumerate(DTYPES)}
PAIRS = [
    (t, op)
    for t in DTYPES
    for op in OPS
    if not (op == "mean" and t.kind in "iu") and not (op in ("min", "max") and t.kind == "c")
]
NARROW = DTYPES[2:4]
SPECIAL = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, np.nan, 6e-8, -3e-5, 65504.0, 3e38, 1e-41]
ids = {"ids": lambda p: str(p)}
ISAS = ["plain", "avx2", "avx512"]


@pytest.fixture(params=ISAS, autouse=True)
def isa(request: pytest.FixtureRequest) -> Any:
    """Every test, with each instruction set that this CPU has."""
    have = use_isa(request.param)
    try:
        if have != request.param:
            pytest.skip(f"this CPU has no {request.param}")
        yield have
    finally:
        use_isa("avx512")  # or what comes nearest


def random(rng: np.random.Generator, dtype: np.dtype[Any], count: int) -> Any:
    """Numbers of which sums and products of nine stay finite, but neither small nor round."""
    if dtype.kind in "iu":
        return rng.integers(0, 256, count * dtype.itemsize, dtype=np.uint8).view(dtype)
    if dtype.kind == "c":
        parts = rng.uniform(-1.5, 1.5, 2 * count)
        return (parts[::2] + 1j * parts[1::2]).astype(dtype)
    return rng.uniform(-1.5, 1.5, count).astype(dtype)


def expected(op: str, sources: list[Any], divisor: float) -> Any:
    dtype = sources[0].dtype
    wide = np.dtype("f4") if dtype in NARROW else dtype
    with np.errstate(all="ignore"):
        acc = fold(NUMPY[op], [s.astype(wide) for s in sources])
        if op == "mean":
            acc = (
                (acc.view(acc.real.dtype) / acc.real.dtype.type(divisor)).view(wide)
                if dtype.kind == "c"
                else acc / wide.type(divisor)
            )
        return acc.astype(dtype)


def same(a: Any, b: Any) -> None:
    """Equal bit by bit; which NaN it is stays open."""
    word = f"u{a.real.dtype.itemsize}"
    parts = [x.view(x.real.dtype) for x in (a, b)]
    nan: Any = False
    if a.dtype.kind not in "iu":
        with np.errstate(invalid="ignore"):  # signalling NaNs are among the bits
            nan, other = (np.isnan(p) for p in parts)
        np.testing.assert_array_equal(nan, other)
    x, y = (np.where(nan, 0, p.view(word)) for p in parts)
    np.testing.assert_array_equal(x, y)


def run(op: str, sources: list[Any], destinations: list[Any], **options: Any) -> None:
    reduce(CODE[sources[0].dtype], OPS.index(op), sources, destinations, **options)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, **ids)
def test_is_what_numpy_computes_in_the_same_order(dtype, op):
    rng = np.random.default_rng(1)
    for n in range(1, 10):
        for count in (1, 7, 64, 129, 1000):
            sources = [random(rng, dtype, count) for _ in range(n)]
            out = [np.zeros(count, dtype) for _ in range(2)]
            run(op, sources, out, divisor=3)
            if op == "prod" and dtype.kind == "c" and n > 1:
                # NumPy may fuse here; the next test states the formula.
                np.testing.assert_allclose(out[0], expected(op, sources, 3), rtol=1e-4)
            else:
                same(out[0], expected(op, sources, 3))
            same(out[1], out[0])


@pytest.mark.parametrize("dtype", DTYPES[12:], **ids)
def test_a_complex_product_is_the_textbook_formula(dtype):
    rng = np.random.default_rng(2)
    x, y = (random(rng, dtype, 77) for _ in range(2))
    out = np.zeros_like(x)
    run("prod", [x, y], [out])
    same(out.real.copy(), x.real * y.real - x.imag * y.imag)
    same(out.imag.copy(), x.real * y.imag + x.imag * y.real)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, **ids)
def test_lengths_offsets_and_blocks_do_not_show(dtype, op, isa):
    rng = np.random.default_rng(3)
    longest = 1200
    sources = [random(rng, dtype, longest) for _ in range(3)]
    whole = np.zeros(longest, dtype)
    use_isa("plain")
    run(op, sources, [whole], divisor=3)
    use_isa(isa)
    for count in [*range(201), 511, 700]:
        start = (7 * count) % (longest - count)
        apart = np.zeros(count + 3, dtype)  # one element that must stay at either end
        run(op, [s[start : start + count] for s in sources], [apart[1 : count + 1]],
            divisor=3, stream=count % 2 == 1)  # fmt: skip
        same(apart[1 : count + 1], whole[start : start + count])
        assert not apart[[0, count + 1, count + 2]].any()


@pytest.mark.parametrize("dtype", DTYPES, **ids)
@pytest.mark.parametrize("n", [2, 3, 7, 40])
@pytest.mark.parametrize("stream", [False, True])
def test_in_place_in_all_of_the_sources(dtype, n, stream):
    rng = np.random.default_rng(4)
    sources = [random(rng, dtype, 3001)[i % 3 :][:2990] for i in range(n)]
    want = expected("sum", sources, 1)
    other = [np.zeros(2995, dtype)[k:][:2990] for k in (0, 1, 2)]
    run("sum", sources, [*sources, *other], stream=stream)
    for array in (*sources, *other):
        same(array, want)


@pytest.mark.parametrize(("dtype", "op"), [p for p in PAIRS if p[0].kind not in "iu"], **ids)
def test_nan_infinity_and_subnormal(dtype, op):
    with np.errstate(all="ignore"):
        values = np.array(SPECIAL).astype(dtype)
    sources = [np.repeat(values, len(values)), np.tile(values, len(values))]
    out = np.zeros_like(sources[0])
    run(op, sources, [out], divisor=2)
    if op == "prod" and dtype.kind == "c":
        assert np.isnan(out[np.isnan(sources[0]) | np.isnan(sources[1])]).all()
        return
    want = expected(op, sources, 2)
    if op in ("min", "max"):  # of 0.0 and -0.0 either is one
        want, out = want + 0.0, out + 0.0
    same(out.astype(dtype), want.astype(dtype))


def test_integers_wrap():
    for dtype in DTYPES[4:12]:
        top = np.full(100, np.iinfo(dtype).max, dtype)
        out = np.zeros_like(top)
        run("sum", [top, np.ones_like(top)], [out])
        assert (out == np.iinfo(dtype).min).all()
        run("prod", [top, np.full_like(top, 2)], [out])
        assert (out == np.array(-2).astype(dtype)).all()


@pytest.mark.parametrize("dtype", NARROW, **ids)
def test_sixteen_bits_are_summed_in_float32(dtype):
    ones = [np.ones(50, dtype) for _ in range(3000)]  # a sum in bfloat16 stops at 256
    out = np.zeros(50, dtype)
    run("sum", ones, [out])
    assert (out == np.float32(3000).astype(dtype)).all()
    run("mean", ones, [out], divisor=3000)
    assert (out == 1).all()


@pytest.mark.parametrize("dtype", NARROW, **ids)
def test_every_sixteen_bit_number_comes_and_goes(dtype):
    every = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    for wide in ("f4", "f8"):
        out = np.zeros(1 << 16, wide)
        convert(CODE[out.dtype], out, CODE[dtype], every)
        with np.errstate(invalid="ignore"):
            same(out, every.astype(wide))
        back = np.zeros_like(every)
        convert(CODE[dtype], back, CODE[out.dtype], out)
        same(back, every)
    quiet = np.isnan(out)
    bit = np.uint16(0x200 if dtype == np.float16 else 0x40)
    assert np.array_equal(back.view("u2")[quiet], every.view("u2")[quiet] | bit)


@pytest.mark.parametrize("dtype", NARROW, **ids)
def test_the_middle_between_two_numbers_goes_to_the_even_one(dtype):
    every = np.arange((1 << 16) - 1, dtype=np.uint16)
    with np.errstate(all="ignore"):
        low, high = (every + i for i in (0, 1))
        wide = [x.view(dtype).astype("f8") for x in (low, high)]
        good = np.isfinite(wide[0]) & np.isfinite(wide[1]) & (low & 0x7FFF != 0x7FFF)
    low, high, (a, b) = low[good], high[good], (w[good] for w in wide)
    middle, even = (a + b) / 2, np.where(low % 2 == 0, low, high)
    toward_a = middle + (a - b) * 1e-9  # float32 cannot tell this from the middle
    toward_b = middle + (b - a) * 1e-9
    for value, want in ((middle, even), (toward_a, low), (toward_b, high)):
        out = np.zeros(len(value), dtype)
        convert(CODE[dtype], out, CODE[np.dtype("f8")], value)
        assert np.array_equal(out.view("u2"), want)
    out = np.zeros(len(middle), dtype)
    convert(CODE[dtype], out, CODE[np.dtype("f4")], middle.astype("f4"))
    assert np.array_equal(out.view("u2"), even)


def test_conversions_between_all_four():
    values = np.array(SPECIAL * 9)
    for to in DTYPES[:4]:
        for start in DTYPES[:4]:
            with np.errstate(all="ignore"):
                source = values.astype(start)
                want = source.astype(to)
            out = np.zeros(len(values), to)
            convert(CODE[to], out, CODE[start], source)
            same(out, want)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["f2", "f4"]),
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=70),
    st.integers(2, 5),
)
def test_any_bits_give_the_same_with_every_instruction_set(kind, words, n):
    dtype = np.dtype(kind)
    bits = np.resize(np.array(words, np.uint32), n * len(words)).view(dtype)
    sources = [s.copy() for s in np.split(np.roll(bits, 1), n)]
    results = []
    for name in ISAS:
        use_isa(name)
        out = np.zeros_like(sources[0])
        run("sum", sources, [out])
        results.append(out)
    for other in results[1:]:
        same(other, results[0])


def test_the_modes_of_the_thread_do_not_matter():
    torch = pytest.importorskip("torch")
    tiny = np.full(100, 1e-40, np.float32)
    out = np.zeros_like(tiny)
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush subnormal numbers here")
    try:
        run("sum", [tiny, tiny], [out])
    finally:
        torch.set_flush_denormal(False)
    same(out, tiny + tiny)


def test_refuses():
    a, b = np.zeros(8, "f4"), np.zeros(8, "f4")
    raw = np.zeros(65, "u1")
    frozen = a.copy()
    frozen.flags.writeable = False
    for bad, match in [
        ((99, 0, [a], [b]), "expected a dtype from 0 to 13, got 99"),
        ((0, 7, [a], [b]), "expected an operation from 0 to 4, got 7"),
        ((6, 1, [a], [b]), "no operation 1 on dtype 6"),
        ((12, 2, [a], [b]), "no operation 2 on dtype 12"),
        ((0, 0, [], [b]), "sources: expected at least one buffer"),
        ((0, 0, [a], []), "destinations: expected at least one buffer"),
        ((0, 0, [a, b[1:]], [b]), "source 1: expected 32 bytes as source 0 has, got 28"),
        ((0, 0, [raw[:7]], [b]), "expected whole elements of 4 bytes, got 7"),
        ((0, 0, [raw[1:33]], [b]), "source 0: expected memory aligned to 4 bytes"),
        ((0, 0, [a[:6], b[:6]], [a[2:]]), "overlaps another buffer partly"),
    ]:
        with pytest.raises(ValueError, match=match):
            reduce(*bad)
    with pytest.raises(BufferError, match="destinations: expected writable memory"):
        reduce(0, 0, [a], [frozen])
    with pytest.raises(ValueError, match="expected dtypes from 0 to 3, got 4 and 0"):
        convert(4, a, 0, b)
    with pytest.raises(ValueError, match="got dst of 32 bytes and src of 28"):
        convert(0, a, 0, b[1:])
    with pytest.raises(ValueError, match="dst overlaps src partly"):
        convert(2, a.view("f2")[2:10], 0, a)
