// What reduce_kernels.cpp, compiled once per instruction set, offers to reduce.cpp.
#pragma once

#include <cstddef>

#include "reduce.hpp"

namespace mpiml {

using ReduceKernel = void (*)(std::size_t nbytes, const std::byte *const *src, int n,
                              double divisor, std::byte *const *dst, int m, bool stream);
using ConvertKernel = void (*)(std::byte *dst, const std::byte *src, std::size_t count);

struct KernelTable {
    ReduceKernel reduce[kDtypes][kOps];  // null: no such operation
    ConvertKernel convert[4][4];         // [to][from] of the first four dtypes
};

namespace plain { const KernelTable &kernels(); }
namespace avx2 { const KernelTable &kernels(); }
namespace avx512 { const KernelTable &kernels(); }

}  // namespace mpiml
