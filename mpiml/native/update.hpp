// Optimizer steps in place, on a stretch of the parameters and of their state.
#pragma once

#include <cstddef>

namespace mpiml {

// The numbers are those of mpiml/optim.py, where the coefficients are computed too:
// adamw is adam whose weights shrink and whose gradient does not decay.
enum class Rule : int { sgd, momentum, adagrad, adam };

inline constexpr int kStates[] = {0, 1, 1, 2};  // state arrays of each rule

// Everything that depends on hyperparameters and the number of the step.
struct Coefficients {
    double rate = 0;    // p -= rate * direction
    double decay = 0;   // g += decay * p before all else; 0: left out
    double shrink = 1;  // p *= shrink before the step
    double keep1 = 0, add1 = 0;  // the running mean: m = keep1 * m + add1 * g
    double keep2 = 0, add2 = 0;  // the running square: v = keep2 * v + add2 * g * g
    double scale = 1, eps = 0;   // the divisor: sqrt(v) * scale + eps
    double nesterov = 0;         // of momentum: 1 looks ahead
};

inline constexpr std::size_t kCoefficients = 10;

// From numbers in the order of the fields above.
inline Coefficients coefficients(const double *c) {
    return {c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], c[8], c[9]};
}

// The arrays never overlap; any alignment to sizeof(T).
void update(Rule rule, std::size_t count, float *param, const float *grad, float *const *state,
            const Coefficients &c);
void update(Rule rule, std::size_t count, double *param, const double *grad,
            double *const *state, const Coefficients &c);

}  // namespace mpiml
