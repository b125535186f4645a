// The arithmetic of ring.cpp, compiled once per instruction set (see isa.hpp).
#include "ring_kernels.hpp"

namespace mpiml::MPIML_ISA {
namespace {

inline float magnitude(float x) { return __builtin_fabsf(x); }
inline double magnitude(double x) { return __builtin_fabs(x); }

template <typename T, typename Count>
inline std::size_t decide(ring::Part<T> &part, T *__restrict snapshot, std::size_t n,
                          const ring::Constants<T> &c) {
    // copies: a choice between two numbers in memory keeps the loop from being vectorized
    const T step = c.step, beta = c.beta, lam = c.lam, rest = c.rest, tolerance = c.tolerance;
    Count moved = 0;  // as wide as T, for the same reason
    for (std::size_t k = 0; k < n; ++k) {
        const T own = part.own[k];
        const T delta = step * (own - snapshot[k]);
        const bool far = magnitude(delta) > tolerance;
        const T change = lam * (part.following[k] - own) + (far ? rest : lam) * delta;
        const T now = own + change;
        snapshot[k] = far ? now : now - delta;
        part.change[k] = change;
        part.pass[k] = far ? beta * delta : -T(0);
        moved += far;
    }
    return static_cast<std::size_t>(moved);
}

}  // namespace

std::size_t ring_decide(ring::Part<float> &part, float *snapshot, std::size_t n,
                        const ring::Constants<float> &c) {
    return decide<float, unsigned>(part, snapshot, n, c);
}

std::size_t ring_decide(ring::Part<double> &part, double *snapshot, std::size_t n,
                        const ring::Constants<double> &c) {
    return decide<double, unsigned long long>(part, snapshot, n, c);
}

}  // namespace mpiml::MPIML_ISA
