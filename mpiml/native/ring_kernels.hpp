// A block of what ring.cpp does, and what ring_kernels.cpp defines for each instruction set.
#pragma once

#include <cstddef>

namespace mpiml::ring {

// Components of a block: what one needs stays in the first cache.
inline constexpr std::size_t kBlock = 256;

// The numbers of HogWild++, `rest` for beta + lam - 1.
template <typename T> struct Constants {
    T step, beta, lam, rest, tolerance;
};

// The models as they were read, and what to add to them.
template <typename T> struct Part {
    T own[kBlock], following[kBlock];
    T change[kBlock];  // to add to own
    T pass[kBlock];    // to add to following; -0, which changes no bit of a sum, where kept
};

}  // namespace mpiml::ring

#define MPIML_RING_KERNELS(isa)                                                                  \
    namespace mpiml::isa {                                                                       \
    std::size_t ring_decide(ring::Part<float> &, float *, std::size_t,                           \
                            const ring::Constants<float> &);                                     \
    std::size_t ring_decide(ring::Part<double> &, double *, std::size_t,                         \
                            const ring::Constants<double> &);                                    \
    }

MPIML_RING_KERNELS(plain)
MPIML_RING_KERNELS(avx2)
MPIML_RING_KERNELS(avx512)
#undef MPIML_RING_KERNELS
