"""The CUDA source that combines one stripe of all members' memory, element by element.

Text only: CuPy compiles it at run time (NVRTC), so it includes no header and needs no nvcc. The
rules are those of the kernels for host memory: members in the order 0..n-1, float16 and bfloat16
accumulated in float32 and rounded once (to nearest even), whole numbers wrap, NaN wins in min and
max as in NumPy. So float32 sums have the same bits on a device as in host memory.

CuPy compiles with ``-ftz=true``, which turns denormal float32 numbers to zero in plain ``a + b``;
so float32 arithmetic is written as PTX instructions, which no option changes. Those four lines
apart a C++ compiler takes the source as well: that is how the tests run it without a device.
The 16-bit floats are converted by integer arithmetic. Memory is the bound, not arithmetic.
"""

from typing import Final

__all__ = ["ENTRY", "PACK", "parts", "source"]

ENTRY: Final = "mpiml_reduce"
#: bytes that a thread reads and writes at once; regions and stripes are whole packs
PACK: Final = 16

# name -> (in memory, min and max compare, sum and prod accumulate). Whole numbers are
# added as unsigned ones, whose overflow is defined.
_TYPES: Final = {
    "float32": ("float", "float", "float"),
    "float64": ("double", "double", "double"),
    "float16": ("unsigned short", "float", "float"),
    "bfloat16": ("unsigned short", "float", "float"),
    "int8": ("signed char", "signed char", "unsigned int"),
    "int16": ("short", "short", "unsigned int"),
    "int32": ("int", "int", "unsigned int"),
    "int64": ("long long", "long long", "unsigned long long"),
    "uint8": ("unsigned char", "unsigned char", "unsigned int"),
    "uint16": ("unsigned short", "unsigned short", "unsigned int"),
    "uint32": ("unsigned int", "unsigned int", "unsigned int"),
    "uint64": ("unsigned long long", "unsigned long long", "unsigned long long"),
    "bool": ("unsigned char", "unsigned char", "unsigned int"),
}
_COMPLEX: Final = {"complex64": "float32", "complex128": "float64"}

_COMBINE: Final = {
    "sum": "plus(a, b)",
    "mean": "plus(a, b)",
    "prod": "times(a, b)",
    "min": "(less(a, b) || a != a) ? a : b",
    "max": "(less(b, a) || a != a) ? a : b",
}

_LOAD: Final = {
    "float16": """
    unsigned int bits = (unsigned int)(x & 0x7fffu) << 13;
    unsigned int wide = bits | 0x7f800000u;                             /* infinity, NaN */
    if (bits < 0x0f800000u)                           /* 2^112: the exponents' biases differ */
        wide = __float_as_uint(times(__uint_as_float(bits), 5.192296858534828e33f));
    return __uint_as_float(wide | (unsigned int)(x & 0x8000u) << 16);""",
    "bfloat16": " return __uint_as_float((unsigned int)x << 16);",
}
_STORE: Final = {
    "float16": """
    unsigned int bits = __float_as_uint(v), sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return (Item)(sign | 0x7e00u | ((bits >> 13) & 0x3ffu));   /* NaN */
    if (bits >= 0x477ff000u) return (Item)(sign | 0x7c00u);         /* rounds to infinity */
    if (bits < 0x38800000u) {                              /* below the smallest normal */
        if (bits < 0x33000000u) return (Item)sign;                     /* rounds to zero */
        unsigned int shift = 126u - (bits >> 23);
        unsigned int whole = (bits & 0x7fffffu) | 0x800000u;
        unsigned int kept = whole >> shift, rest = whole & ((1u << shift) - 1u);
        unsigned int half = 1u << (shift - 1u);
        kept += (rest > half || (rest == half && (kept & 1u))) ? 1u : 0u;
        return (Item)(sign | kept);
    }
    bits += 0xfffu + ((bits >> 13) & 1u);
    return (Item)(sign | ((bits - 0x38000000u) >> 13));""",
    "bfloat16": """
    unsigned int bits = __float_as_uint(v);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (Item)((bits >> 16) | 0x40u);       /* NaN */
    return (Item)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);""",
}

# __CUDACC_RTC__ is NVRTC's own name for itself.
_ARITHMETIC: Final = """
template <class T> __device__ static inline T plus(T a, T b) { return a + b; }
template <class T> __device__ static inline T times(T a, T b) { return a * b; }
template <class T> __device__ static inline T over(T a, T b) { return a / b; }
template <class T> __device__ static inline bool less(T a, T b) { return a < b; }
#ifdef __CUDACC_RTC__
#pragma nv_diag_suppress 177  /* a kernel uses one or two of them */
template <> __device__ inline float plus(float a, float b) {
    float r; asm("add.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
template <> __device__ inline float times(float a, float b) {
    float r; asm("mul.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
template <> __device__ inline float over(float a, float b) {
    float r; asm("div.rn.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }
template <> __device__ inline bool less(float a, float b) {
    int r; asm("{.reg .pred p; setp.lt.f32 p, %1, %2; selp.s32 %0, 1, 0, p;}"
               : "=r"(r) : "f"(a), "f"(b)); return r; }
#endif
"""

_SOURCE: Final = """
typedef {item} Item;
typedef {value} Value;
#define COUNT ({pack} / (int)sizeof(Item))
struct alignas({pack}) Pack {{ Item item[COUNT]; }};

__device__ static inline Value wide_of(Item x) {{{load}
}}
__device__ static inline Item narrow_of(Value v) {{{store}
}}
__device__ static inline Value combine(Value a, Value b) {{ return (Value)({combine}); }}

/* Combines packs first..first+packs of the memory of members 0..size-1 and writes the result
   to members from..to-1. Nobody else touches these packs meanwhile. */
extern "C" __global__ void {entry}(const unsigned long long *members, int size, int from, int to,
                                   long long first, long long packs, double divisor) {{
    long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < packs; i += step) {{
        Pack pack = ((const Pack *)members[0])[first + i];
        Value sum[COUNT];
        for (int e = 0; e < COUNT; ++e) sum[e] = wide_of(pack.item[e]);
        for (int m = 1; m < size; ++m) {{
            pack = ((const Pack *)members[m])[first + i];
            for (int e = 0; e < COUNT; ++e) sum[e] = combine(sum[e], wide_of(pack.item[e]));
        }}
        for (int e = 0; e < COUNT; ++e) pack.item[e] = narrow_of({finish});
        for (int m = from; m < to; ++m) ((Pack *)members[m])[first + i] = pack;
    }}
}}
"""


def parts(dtype: str, op: str) -> tuple[str, int] | None:
    """Return the dtype that the kernel works on, and how many of it an element has.

    Local: no MPI.

    Returns
    -------
    (str, int) or None
        A complex number is two floats where real and imaginary part are combined by
        themselves. None: there is no kernel for this pair (products of complex numbers).
    """
    if dtype in _COMPLEX:
        return (_COMPLEX[dtype], 2) if op in ("sum", "mean") else None
    return (dtype, 1) if dtype in _TYPES else None


def source(dtype: str, op: str) -> str:
    """Return the CUDA source of the kernel `ENTRY` for a dtype and an operation.

    Local: no MPI.

    Parameters
    ----------
    dtype : str
        The first that `parts` returns.
    op : str
        ``"sum"``, ``"mean"``, ``"min"``, ``"max"`` or ``"prod"``.
    """
    item, compared, added = _TYPES[dtype]
    return _ARITHMETIC + _SOURCE.format(
        item=item,
        value=compared if op in ("min", "max") else added,
        pack=PACK,
        load=_LOAD.get(dtype, " return (Value)x;"),
        store=_STORE.get(dtype, " return (Item)v;"),
        combine=_COMBINE[op],
        entry=ENTRY,
        finish="over(sum[e], (Value)divisor)" if op == "mean" else "sum[e]",
    )
