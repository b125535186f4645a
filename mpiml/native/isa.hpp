// Kernels are compiled once per instruction set; which of them runs is chosen here.
//
// A file named in `mpiml_kernels()` of CMakeLists.txt is compiled with MPIML_ISA set to
// plain, avx2 and avx512, and the flags of each. It puts its functions into the
// namespace of that name and includes no header that brings inline functions along: the
// linker keeps one copy of those, perhaps the one that this CPU cannot run.
//
//     namespace mpiml::MPIML_ISA { void f(float *x, std::size_t n) { ... } }   // the kernel
//     void f(float *x, std::size_t n) { MPIML_DISPATCH(f, x, n); }             // who calls it
//
// The result must not depend on the choice: kernels are compiled without contraction
// to fused multiply-add and without reordering of sums.
#pragma once

namespace mpiml {

enum class Isa : int { plain, avx2, avx512 };

// The best set that this CPU has and `use_isa` allows.
Isa isa();

}  // namespace mpiml

#if defined(MPIML_WITH_ISAS)
#define MPIML_DISPATCH(function, ...)                                                            \
    switch (mpiml::isa()) {                                                                      \
    case mpiml::Isa::avx512: return mpiml::avx512::function(__VA_ARGS__);                        \
    case mpiml::Isa::avx2: return mpiml::avx2::function(__VA_ARGS__);                            \
    default: return mpiml::plain::function(__VA_ARGS__);                                         \
    }
#else
#define MPIML_DISPATCH(function, ...) return mpiml::plain::function(__VA_ARGS__)
#endif
