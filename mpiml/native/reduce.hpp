// The arithmetic of collectives: n arrays combined element by element, and conversions.
#pragma once

#include <cstddef>

namespace mpiml {

enum class Dtype : int { f32, f64, f16, bf16, i8, i16, i32, i64, u8, u16, u32, u64, c64, c128 };
enum class Op : int { sum, mean, min, max, prod };
inline constexpr int kDtypes = 14, kOps = 5;

std::size_t itemsize(Dtype);

// False for the mean of integers and for min and max of complex numbers.
bool reduces(Dtype, Op);

// True between f32, f64, f16 and bf16.
bool converts(Dtype to, Dtype from);

// dst[j][e] = src[0][e] op src[1][e] op ... op src[n - 1][e], in this order, for all j.
// The accumulation type is the dtype, float32 for f16 and bf16, which are rounded once
// (to nearest even) at the end; mean divides the sum by divisor before that rounding.
// Integers wrap; min and max hand NaN on, as NumPy's do. A dst may be one of the src
// (the same pointer) but never overlaps one partly; elements are aligned to their size
// (complex ones: to that of their parts). stream: stores past the caches for every dst
// that is no src, for results that nobody reads soon.
// The bits of a result do not depend on count, alignment, stream or CPU; only of two NaNs
// that meet it is open which one lives on.
void reduce(Dtype, Op, std::size_t count, const void *const *src, int n, double divisor,
            void *const *dst, int m, bool stream);

// dst[e] = src[e], rounded once to nearest even. dst == src only if the sizes are equal.
void convert(Dtype to, void *dst, Dtype from, const void *src, std::size_t count);

}  // namespace mpiml
