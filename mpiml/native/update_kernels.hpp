// What update_kernels.cpp defines for each instruction set.
#pragma once

#include "update.hpp"

#define MPIML_UPDATE_KERNELS(isa)                                                                \
    namespace mpiml::isa {                                                                       \
    void update(Rule, std::size_t, float *, const float *, float *const *, const Coefficients &); \
    void update(Rule, std::size_t, double *, const double *, double *const *,                    \
                const Coefficients &);                                                           \
    }

MPIML_UPDATE_KERNELS(plain)
MPIML_UPDATE_KERNELS(avx2)
MPIML_UPDATE_KERNELS(avx512)
#undef MPIML_UPDATE_KERNELS
