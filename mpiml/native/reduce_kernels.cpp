// The loops of reduce.hpp, compiled once per instruction set (see isa.hpp). The vectors are
// those of GCC and Clang: one text serves all widths, and every element, in the middle or
// at an end of an array, passes through the same operations in the same order.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "reduce_table.hpp"

#define INLINE [[gnu::always_inline]] static inline

namespace mpiml::MPIML_ISA {
namespace {

#if defined(__AVX512F__)
constexpr std::size_t kVector = 64;
#elif defined(__AVX2__)
constexpr std::size_t kVector = 32;
#else
constexpr std::size_t kVector = 16;
#endif
// Vectors in flight: enough to hide the latency of loads, few enough for 16 registers
// where a vector needs two accumulators.
constexpr std::size_t kUnroll = 4;
// Up to kMany sources are read side by side. More are read kTogether at a time, a page of
// each: measured on Zen 4, 21 against 13 GB/s for 32 sources, 20 against 9 for 64.
constexpr int kMany = 16, kTogether = 8;
constexpr std::size_t kPage = 4096;

template <typename T> struct VectorOf {
    typedef T type __attribute__((vector_size(kVector)));
};
template <typename T> using Vector = typename VectorOf<T>::type;
using Floats = Vector<float>;
using Words = Vector<std::uint32_t>;
using SignedWords = Vector<std::int32_t>;

template <typename V> INLINE V load(const std::byte *p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <typename V> INLINE void store(std::byte *p, V v) { std::memcpy(p, &v, sizeof v); }

// p aligned to the vector.
template <typename V> INLINE void store_past_caches(std::byte *p, V v) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i *>(p), reinterpret_cast<__m512i>(v));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i *>(p), reinterpret_cast<__m256i>(v));
#elif defined(__x86_64__)
    _mm_stream_si128(reinterpret_cast<__m128i *>(p), reinterpret_cast<__m128i>(v));
#else
    store(p, v);
#endif
}

INLINE void end_of_streams() {
#if defined(__x86_64__)
    _mm_sfence();  // streamed stores are not ordered before later ones otherwise
#endif
}

// ---- float16 and bfloat16 ----------------------------------------------------------
// A 32-bit word holds two of them; the halves go through two vectors of float32. So no
// lane is ever moved, whatever the instruction set.

INLINE Words bits(Floats f) { return reinterpret_cast<Words>(f); }
INLINE Floats floats(Words w) { return reinterpret_cast<Floats>(w); }

// float16 in the low half of each word. As the instruction does: NaNs become quiet.
INLINE Floats half_to_float(Words h) {
    const Words sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
    const Words exponent = magnitude & 0x0f800000u;
    const Words normal = magnitude + (112u << 23);
    const Words special =
        (normal + (112u << 23)) | (magnitude > 0x0f800000u ? Words{} + 0x00400000u : Words{});
    // One too many in the exponent, then the leading one that subnormals lack comes off.
    const Words tiny = bits(floats(normal + (1u << 23)) - floats(Words{} + (113u << 23)));
    const Words value = exponent == 0x0f800000u ? special : exponent == 0u ? tiny : normal;
    return floats(value | sign);
}

// float16 in the low half of each word, rounded to nearest even; see F. Giesen,
// "float->half variants", float_to_half_fast3_rtne.
INLINE Words float_to_half(Floats f) {
    const Words sign = bits(f) & 0x80000000u, u = bits(f) ^ sign;
    const Words infinite = Words{} + 0x7c00u;
    const Words nan = 0x7e00u | ((u >> 13) & 0x3ffu);
    // This addition leaves the bits of a subnormal at the bottom, rounded by the adder.
    const Words magic = Words{} + (126u << 23);
    const Words tiny = bits(floats(u) + floats(magic)) - magic;
    const Words normal = (u + ((u >> 13) & 1u) + 0xc8000fffu) >> 13;
    const Words value = u > 0x7f800000u   ? nan
                        : u >= 0x47800000u ? infinite
                        : u < 0x38800000u  ? tiny
                                           : normal;
    return value | (sign >> 16);
}

// bfloat16 in the high half of each word, rounded to nearest even; the low half is open.
INLINE Words float_to_brain(Floats f) {
    const Words u = bits(f);
    return (u & 0x7fffffffu) > 0x7f800000u ? u | 0x00400000u : u + 0x7fffu + ((u >> 16) & 1u);
}

struct TwoFloats {
    Floats low, high;
};

struct Half {
    using Raw = Words;
    using Acc = TwoFloats;
    using Divisor = float;
    static constexpr bool kComplex = false;
#if defined(__AVX512F__)
    INLINE Acc widen(Raw w) {
        const __m512i i = reinterpret_cast<__m512i>(w);
        return {_mm512_cvtph_ps(_mm512_castsi512_si256(i)),
                _mm512_cvtph_ps(_mm512_extracti64x4_epi64(i, 1))};
    }
    INLINE Raw narrow(Acc a) {
        const __m256i low = _mm512_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
                      high = _mm512_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        return reinterpret_cast<Raw>(
            _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
    }
#elif defined(__F16C__)
    INLINE Acc widen(Raw w) {
        const __m256i i = reinterpret_cast<__m256i>(w);
        return {_mm256_cvtph_ps(_mm256_castsi256_si128(i)),
                _mm256_cvtph_ps(_mm256_extracti128_si256(i, 1))};
    }
    INLINE Raw narrow(Acc a) {
        const __m128i low = _mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT),
                      high = _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT);
        return reinterpret_cast<Raw>(_mm256_set_m128i(high, low));
    }
#else
    INLINE Acc widen(Raw w) { return {half_to_float(w & 0xffffu), half_to_float(w >> 16)}; }
    INLINE Raw narrow(Acc a) { return float_to_half(a.low) | float_to_half(a.high) << 16; }
#endif
};

struct Brain {
    using Raw = Words;
    using Acc = TwoFloats;
    using Divisor = float;
    static constexpr bool kComplex = false;
    INLINE Acc widen(Raw w) { return {floats(w << 16), floats(w & 0xffff0000u)}; }
    INLINE Raw narrow(Acc a) {
        return float_to_brain(a.low) >> 16 | (float_to_brain(a.high) & 0xffff0000u);
    }
};

template <typename T> struct Number {
    using Raw = Vector<T>;
    using Acc = Raw;
    using Divisor = T;
    static constexpr bool kComplex = false;
    INLINE Acc widen(Raw v) { return v; }
    INLINE Raw narrow(Acc v) { return v; }
};

// Real and imaginary parts take turns.
template <typename T> struct Complex : Number<T> {
    static constexpr bool kComplex = true;
};

// ---- operations --------------------------------------------------------------------

struct Sum {
    template <typename V> INLINE V of(V a, V b) { return a + b; }
};
struct Prod {
    template <typename V> INLINE V of(V a, V b) { return a * b; }
};
struct Min {  // the second half of the condition is for NaN; integers have none
    template <typename V> INLINE V of(V a, V b) { return ((a < b) | (a != a)) ? a : b; }
};
struct Max {
    template <typename V> INLINE V of(V a, V b) { return ((a > b) | (a != a)) ? a : b; }
};

// (a + bi)(c + di) by the textbook. The barrier: GCC 12 makes fused operations of
// alternating sums and differences of products, -ffp-contract=off or not.
template <typename V> INLINE V complex_product(V x, V y) {
    V turned, z;
    constexpr std::size_t kCount = kVector / sizeof x[0];
    for (std::size_t i = 0; i < kCount; i += 2) {
        turned[i] = y[i + 1];
        turned[i + 1] = y[i];
    }
    V same = x * y, cross = x * turned;
    __asm__("" : "+m"(same), "+m"(cross));
    for (std::size_t i = 0; i < kCount; i += 2) {
        z[i] = same[i] - same[i + 1];
        z[i + 1] = cross[i] + cross[i + 1];
    }
    return z;
}

template <typename K, typename F> INLINE typename K::Acc combine(typename K::Acc a,
                                                                 typename K::Acc b) {
    if constexpr (K::kComplex && std::is_same_v<F, Prod>)
        return complex_product(a, b);
    else if constexpr (sizeof(a) == kVector)
        return F::of(a, b);
    else
        return {F::of(a.low, b.low), F::of(a.high, b.high)};
}

template <typename K> INLINE typename K::Acc divide(typename K::Acc a, typename K::Divisor d) {
    if constexpr (sizeof(a) == kVector)
        return a / d;
    else
        return {a.low / d, a.high / d};
}

// ---- loops -------------------------------------------------------------------------

// One call of reduce(). kN is n where it is known when this is compiled, else 0.
template <typename K, typename F, bool kMean, int kN> struct Loop {
    using Raw = typename K::Raw;
    using Acc = typename K::Acc;

    const std::byte *const *src;
    int n;
    typename K::Divisor divisor;
    std::byte *const *dst;
    int m;
    std::uint64_t streams;  // bit j: dst[j] is written past the caches; j >= 64 never is

    INLINE Acc load_acc(const std::byte *p) { return K::widen(load<Raw>(p)); }

    [[gnu::always_inline]] inline Raw finish(Acc a) const {
        if constexpr (kMean)
            a = divide<K>(a, divisor);
        return K::narrow(a);
    }

    // kU vectors at byte `at`: sources from..to - 1 come to what is in acc.
    template <std::size_t kU>
    [[gnu::always_inline]] inline void add(Acc *acc, std::size_t at, int from, int to) const {
        for (int i = from; i < to; ++i) {
            const std::byte *const p = src[i] + at;
            for (std::size_t k = 0; k < kU; ++k)
                acc[k] = combine<K, F>(acc[k], load_acc(p + k * kVector));
        }
    }

    template <std::size_t kU, bool kStream>
    [[gnu::always_inline]] inline void give(int j, std::size_t at, const Raw *out) const {
        std::byte *const p = dst[j] + at;
        if (kStream && j < 64 && (streams >> j & 1)) {
            for (std::size_t k = 0; k < kU; ++k)
                store_past_caches(p + k * kVector, out[k]);
        } else {
            for (std::size_t k = 0; k < kU; ++k)
                store(p + k * kVector, out[k]);
        }
    }

    // kU vectors of all sources, in registers.
    template <std::size_t kU, bool kStream>
    [[gnu::always_inline]] inline void step(std::size_t at) const {
        Acc acc[kU];
        Raw out[kU];
        for (std::size_t k = 0; k < kU; ++k)
            acc[k] = load_acc(src[0] + at + k * kVector);
        add<kU>(acc, at, 1, kN ? kN : n);
        for (std::size_t k = 0; k < kU; ++k)
            out[k] = finish(acc[k]);
        for (int j = 0; j < m; ++j)
            give<kU, kStream>(j, at, out);
    }

    // A page of every source, a few sources at a time, so that no more streams are open
    // than prefetchers follow and sets of a cache that all sources fall into can hold.
    template <bool kStream> void page(std::size_t at) const {
        constexpr std::size_t kCount = kPage / kVector;
        Acc acc[kCount];
        Raw out[kCount];
        for (std::size_t k = 0; k < kCount; ++k)
            acc[k] = load_acc(src[0] + at + k * kVector);
        for (int from = 1; from < n; from += kTogether) {
            const int to = n - from < kTogether ? n : from + kTogether;
            for (std::size_t k = 0; k < kCount; k += kUnroll)
                add<kUnroll>(acc + k, at + k * kVector, from, to);
        }
        for (std::size_t k = 0; k < kCount; ++k)
            out[k] = finish(acc[k]);
        for (int j = 0; j < m; ++j)
            give<kCount, kStream>(j, at, out);
    }

    // Fewer bytes than a vector, through memory that is as large as one.
    void part(std::size_t at, std::size_t nbytes) const {
        alignas(kVector) std::byte padded[kVector] = {};
        std::memcpy(padded, src[0] + at, nbytes);
        Acc acc = load_acc(padded);
        for (int i = 1; i < n; ++i) {
            std::memcpy(padded, src[i] + at, nbytes);
            acc = combine<K, F>(acc, load_acc(padded));
        }
        store(padded, finish(acc));
        for (int j = 0; j < m; ++j)
            std::memcpy(dst[j] + at, padded, nbytes);
    }

    template <bool kStream> void run(std::size_t at, std::size_t nbytes) const {
        if (at)
            part(0, at);
        if (n > kMany)
            for (; nbytes - at >= kPage; at += kPage)
                page<kStream>(at);
        for (; nbytes - at >= kUnroll * kVector; at += kUnroll * kVector)
            step<kUnroll, kStream>(at);
        for (; nbytes - at >= kVector; at += kVector)
            step<1, kStream>(at);
        if (at < nbytes)
            part(at, nbytes - at);
    }
};

INLINE std::size_t misaligned(const std::byte *p) {
    return reinterpret_cast<std::uintptr_t>(p) % kVector;
}

// The bytes before the first destination is aligned to a vector, if whole elements.
INLINE std::size_t head(const std::byte *p, std::size_t nbytes, std::size_t item) {
    const std::size_t bytes = misaligned(p) ? kVector - misaligned(p) : 0;
    return bytes % item || bytes > nbytes ? 0 : bytes;
}

INLINE bool contains(const std::byte *const *src, int n, const std::byte *p) {
    for (int i = 0; i < n; ++i)
        if (src[i] == p)
            return true;
    return false;
}

template <typename K, typename F, bool kMean, std::size_t kItem>
void reduce(std::size_t nbytes, const std::byte *const *src, int n, double divisor,
            std::byte *const *dst, int m, bool stream) {
    std::uint64_t streams = 0;
    int first = 0;
    for (int j = 0; stream && j < m && j < 64; ++j)
        if (!contains(src, n, dst[j])) {
            first = streams ? first : j;
            // Those that can be aligned together with the first one.
            if (misaligned(dst[j]) == misaligned(dst[first]))
                streams |= std::uint64_t{1} << j;
        }
    const std::size_t at = head(dst[first], nbytes, kItem);
    if (misaligned(dst[first] + at))
        streams = 0;
    const auto d = static_cast<typename K::Divisor>(divisor);
    if (streams) {
        Loop<K, F, kMean, 0>{src, n, d, dst, m, streams}.template run<true>(at, nbytes);
        end_of_streams();
    } else if (n == 2) {
        Loop<K, F, kMean, 2>{src, n, d, dst, m, 0}.template run<false>(at, nbytes);
    } else {
        Loop<K, F, kMean, 0>{src, n, d, dst, m, 0}.template run<false>(at, nbytes);
    }
}

// ---- conversions -------------------------------------------------------------------

// To float32 so that a second rounding, to fewer digits, is right: what is cut off leaves
// its mark in the last digit (rounding to odd).
INLINE float to_odd(double d) {
    float f = static_cast<float>(d);
    if (static_cast<double>(f) == d || d != d)
        return f;
    std::uint32_t u;
    std::memcpy(&u, &f, sizeof u);
    const double magnitude = d < 0 ? -d : d;
    if (static_cast<double>(f < 0 ? -f : f) > magnitude)
        --u;
    u |= 1;
    std::memcpy(&f, &u, sizeof f);
    return f;
}

// As many float32 as a vector of 16-bit numbers holds, by way of memory on the stack.
struct Lane {
    alignas(kVector) float at[2 * kVector / sizeof(float)];
};

// Element 2i of a Half or Brain vector is the low half of word i where the accumulators
// follow words; the instructions of float16 keep elements in their order.
template <typename K> constexpr bool kPairs = true;
#if defined(__AVX512F__) || defined(__F16C__)
template <> constexpr bool kPairs<Half> = false;
#endif
// Which of the two of a word comes first in memory.
constexpr bool kLowFirst = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
constexpr std::size_t kLanes = kVector / sizeof(float);

template <typename K> INLINE std::size_t place(std::size_t element) {
    if (!kPairs<K>)
        return element;
    return element / 2 + ((element % 2 == 0) == kLowFirst ? 0 : kLanes);
}

template <typename K, typename To> void widen_all(std::byte *dst, const std::byte *src,
                                                  std::size_t count) {
    constexpr std::size_t kEach = kVector / 2;
    for (std::size_t e = 0; e < count; e += kEach) {
        const std::size_t some = count - e < kEach ? count - e : kEach;
        alignas(kVector) std::byte padded[kVector] = {};
        std::memcpy(padded, src + 2 * e, 2 * some);
        const TwoFloats two = K::widen(load<Words>(padded));
        Lane lane;
        std::memcpy(lane.at, &two, sizeof two);
        To out[kEach];
        for (std::size_t i = 0; i < kEach; ++i)
            out[i] = static_cast<To>(lane.at[place<K>(i)]);
        std::memcpy(dst + sizeof(To) * e, out, sizeof(To) * some);
    }
}

template <typename K, typename From> void narrow_all(std::byte *dst, const std::byte *src,
                                                     std::size_t count) {
    constexpr std::size_t kEach = kVector / 2;
    for (std::size_t e = 0; e < count; e += kEach) {
        const std::size_t some = count - e < kEach ? count - e : kEach;
        From in[kEach] = {};
        std::memcpy(in, src + sizeof(From) * e, sizeof(From) * some);
        Lane lane;
        for (std::size_t i = 0; i < kEach; ++i)
            if constexpr (sizeof(From) == 8)
                lane.at[place<K>(i)] = to_odd(in[i]);
            else
                lane.at[place<K>(i)] = in[i];
        TwoFloats two;
        std::memcpy(&two, lane.at, sizeof two);
        const Words w = K::narrow(two);
        std::memcpy(dst + 2 * e, &w, 2 * some);
    }
}

template <typename To, typename From>
void cast_all(std::byte *dst, const std::byte *src, std::size_t count) {
    for (std::size_t e = 0; e < count; ++e) {
        From x;
        std::memcpy(&x, src + sizeof x * e, sizeof x);
        const To y = static_cast<To>(x);
        std::memcpy(dst + sizeof y * e, &y, sizeof y);
    }
}

// Between the two kinds of 16 bits, by way of float32, which holds both.
template <typename To, typename From>
void cross_all(std::byte *dst, const std::byte *src, std::size_t count) {
    constexpr std::size_t kSome = 256;
    alignas(kVector) std::byte wide[kSome * sizeof(float)];
    for (std::size_t e = 0; e < count; e += kSome) {
        const std::size_t some = count - e < kSome ? count - e : kSome;
        widen_all<From, float>(wide, src + 2 * e, some);
        narrow_all<To, float>(dst + 2 * e, wide, some);
    }
}

template <std::size_t kItem> void move_all(std::byte *dst, const std::byte *src,
                                           std::size_t count) {
    std::memmove(dst, src, kItem * count);
}

// ---- the table ---------------------------------------------------------------------

template <typename K, std::size_t kItem> void arithmetic(ReduceKernel (&row)[kOps]) {
    row[static_cast<int>(Op::sum)] = reduce<K, Sum, false, kItem>;
    row[static_cast<int>(Op::prod)] = reduce<K, Prod, false, kItem>;
}

template <typename K, std::size_t kItem> void mean(ReduceKernel (&row)[kOps]) {
    row[static_cast<int>(Op::mean)] = reduce<K, Sum, true, kItem>;
}

template <typename K, std::size_t kItem> void order(ReduceKernel (&row)[kOps]) {
    row[static_cast<int>(Op::min)] = reduce<K, Min, false, kItem>;
    row[static_cast<int>(Op::max)] = reduce<K, Max, false, kItem>;
}

template <typename K, std::size_t kItem> void real(ReduceKernel (&row)[kOps]) {
    arithmetic<K, kItem>(row);
    mean<K, kItem>(row);
    order<K, kItem>(row);
}

template <typename K, std::size_t kItem> void complex(ReduceKernel (&row)[kOps]) {
    arithmetic<K, kItem>(row);
    mean<K, kItem>(row);
}

// Sums and products wrap as those of unsigned numbers do, which is also what they are.
template <typename Signed, typename Unsigned>
void integers(ReduceKernel (&of_signed)[kOps], ReduceKernel (&of_unsigned)[kOps]) {
    arithmetic<Number<Unsigned>, sizeof(Unsigned)>(of_signed);
    arithmetic<Number<Unsigned>, sizeof(Unsigned)>(of_unsigned);
    order<Number<Signed>, sizeof(Signed)>(of_signed);
    order<Number<Unsigned>, sizeof(Unsigned)>(of_unsigned);
}

KernelTable filled() {
    KernelTable t{};
    const auto row = [&t](Dtype d) -> ReduceKernel(&)[kOps] { return t.reduce[static_cast<int>(d)]; };
    real<Number<float>, 4>(row(Dtype::f32));
    real<Number<double>, 8>(row(Dtype::f64));
    real<Half, 2>(row(Dtype::f16));
    real<Brain, 2>(row(Dtype::bf16));
    integers<std::int8_t, std::uint8_t>(row(Dtype::i8), row(Dtype::u8));
    integers<std::int16_t, std::uint16_t>(row(Dtype::i16), row(Dtype::u16));
    integers<std::int32_t, std::uint32_t>(row(Dtype::i32), row(Dtype::u32));
    integers<std::int64_t, std::uint64_t>(row(Dtype::i64), row(Dtype::u64));
    complex<Complex<float>, 8>(row(Dtype::c64));
    complex<Complex<double>, 16>(row(Dtype::c128));

    const ConvertKernel convert[4][4] = {
        // from   f32                     f64                   f16                     bf16
        {move_all<4>, cast_all<float, double>, widen_all<Half, float>, widen_all<Brain, float>},
        {cast_all<double, float>, move_all<8>, widen_all<Half, double>, widen_all<Brain, double>},
        {narrow_all<Half, float>, narrow_all<Half, double>, move_all<2>, cross_all<Half, Brain>},
        {narrow_all<Brain, float>, narrow_all<Brain, double>, cross_all<Brain, Half>, move_all<2>},
    };
    std::memcpy(&t.convert, &convert, sizeof convert);
    return t;
}

}  // namespace

const KernelTable &kernels() {
    static const KernelTable table = filled();
    return table;
}

}  // namespace mpiml::MPIML_ISA
