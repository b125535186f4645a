// The loops of update.hpp, compiled once per instruction set (see isa.hpp).
//
// Every line rounds as the array formulas of mpiml/optim.py do, operation by operation,
// so that NumPy and these loops agree in every bit.
#include "update_kernels.hpp"

namespace mpiml::MPIML_ISA {
namespace {

inline float root(float x) { return __builtin_sqrtf(x); }
inline double root(double x) { return __builtin_sqrt(x); }

template <bool Decay, typename T> inline T gradient(T g, T p, T decay) {
    if constexpr (Decay)
        return g + p * decay;
    else
        return g;
}

template <bool Decay, typename T>
void sgd(std::size_t n, T *__restrict p, const T *__restrict g, const Coefficients &c) {
    const T rate = T(c.rate), decay = T(c.decay);
    for (std::size_t i = 0; i < n; ++i)
        p[i] -= gradient<Decay>(g[i], p[i], decay) * rate;
}

template <bool Decay, bool Nesterov, typename T>
void momentum(std::size_t n, T *__restrict p, const T *__restrict g, T *__restrict m,
              const Coefficients &c) {
    const T rate = T(c.rate), decay = T(c.decay), keep = T(c.keep1);
    for (std::size_t i = 0; i < n; ++i) {
        const T now = gradient<Decay>(g[i], p[i], decay);
        const T mean = m[i] * keep + now;
        m[i] = mean;
        p[i] -= (Nesterov ? now + mean * keep : mean) * rate;
    }
}

template <bool Decay, typename T>
void adagrad(std::size_t n, T *__restrict p, const T *__restrict g, T *__restrict v,
             const Coefficients &c) {
    const T rate = T(c.rate), decay = T(c.decay), eps = T(c.eps);
    for (std::size_t i = 0; i < n; ++i) {
        const T now = gradient<Decay>(g[i], p[i], decay);
        const T sum = v[i] + now * now;
        v[i] = sum;
        p[i] -= (now * rate) / (root(sum) + eps);
    }
}

template <bool Decay, typename T>
void adam(std::size_t n, T *__restrict p, const T *__restrict g, T *__restrict m,
          T *__restrict v, const Coefficients &c) {
    const T rate = T(c.rate), decay = T(c.decay), shrink = T(c.shrink), scale = T(c.scale),
            eps = T(c.eps), keep1 = T(c.keep1), add1 = T(c.add1), keep2 = T(c.keep2),
            add2 = T(c.add2);
    for (std::size_t i = 0; i < n; ++i) {
        const T now = gradient<Decay>(g[i], p[i], decay);
        const T mean = m[i] * keep1 + now * add1;
        const T square = v[i] * keep2 + (now * add2) * now;
        m[i] = mean;
        v[i] = square;
        p[i] = p[i] * shrink - (mean * rate) / (root(square) * scale + eps);
    }
}

template <bool Decay, typename T>
void step(Rule rule, std::size_t n, T *p, const T *g, T *const *state, const Coefficients &c) {
    switch (rule) {
    case Rule::sgd: return sgd<Decay>(n, p, g, c);
    case Rule::momentum:
        return c.nesterov != 0 ? momentum<Decay, true>(n, p, g, state[0], c)
                               : momentum<Decay, false>(n, p, g, state[0], c);
    case Rule::adagrad: return adagrad<Decay>(n, p, g, state[0], c);
    case Rule::adam: return adam<Decay>(n, p, g, state[0], state[1], c);
    }
}

}  // namespace

void update(Rule rule, std::size_t n, float *p, const float *g, float *const *state,
            const Coefficients &c) {
    return c.decay != 0 ? step<true>(rule, n, p, g, state, c)
                        : step<false>(rule, n, p, g, state, c);
}

void update(Rule rule, std::size_t n, double *p, const double *g, double *const *state,
            const Coefficients &c) {
    return c.decay != 0 ? step<true>(rule, n, p, g, state, c)
                        : step<false>(rule, n, p, g, state, c);
}

}  // namespace mpiml::MPIML_ISA
