// Optimizer steps for Python: checks, then the kernels without the GIL.
#include "update.hpp"

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>

#include "bytes.hpp"
#include "gil.hpp"
#include "isa.hpp"
#include "update_kernels.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using mpiml::Access;
using mpiml::Bytes;
using mpiml::Coefficients;
using mpiml::Rule;

void mpiml::update(Rule rule, std::size_t count, float *param, const float *grad,
                   float *const *state, const Coefficients &c) {
    MPIML_DISPATCH(update, rule, count, param, grad, state, c)
}

void mpiml::update(Rule rule, std::size_t count, double *param, const double *grad,
                   double *const *state, const Coefficients &c) {
    MPIML_DISPATCH(update, rule, count, param, grad, state, c)
}

namespace {

void expect(bool good, const std::string &text) {
    if (!good)
        throw nb::value_error(("update: " + text).c_str());
}

template <typename T>
void run(Rule rule, const Bytes &param, const Bytes &grad,
         const std::vector<std::unique_ptr<Bytes>> &states, const Coefficients &c) {
    std::array<T *, 2> state{};
    for (std::size_t i = 0; i < states.size(); ++i)
        state[i] = reinterpret_cast<T *>(states[i]->data());
    mpiml::update(rule, param.size() / sizeof(T), reinterpret_cast<T *>(param.data()),
                  reinterpret_cast<const T *>(grad.data()), state.data(), c);
}

void check(const Bytes &bytes, const Bytes &param, std::size_t itemsize, const char *what) {
    expect(bytes.size() == param.size() && bytes.size() % itemsize == 0,
           std::string(what) + ": expected " + std::to_string(param.size()) +
               " bytes as param has, in items of " + std::to_string(itemsize) + ", got " +
               std::to_string(bytes.size()));
    expect(reinterpret_cast<std::uintptr_t>(bytes.data()) % itemsize == 0,
           std::string(what) + ": expected memory aligned to " + std::to_string(itemsize) +
               " bytes");
}

void update(int rule, int itemsize, nb::handle param, nb::handle grad, const nb::tuple &states,
            const std::array<double, mpiml::kCoefficients> &c) {
    expect(rule >= 0 && rule < 4, "rule: expected 0 to 3, got " + std::to_string(rule));
    expect(itemsize == 4 || itemsize == 8,
           "itemsize: expected 4 or 8, got " + std::to_string(itemsize));
    expect(nb::len(states) == static_cast<std::size_t>(mpiml::kStates[rule]),
           "states: expected " + std::to_string(mpiml::kStates[rule]) + ", got " +
               std::to_string(nb::len(states)));
    const auto size = static_cast<std::size_t>(itemsize);
    const Bytes p(param, Access::write, "update: param"), g(grad, Access::read, "update: grad");
    check(p, p, size, "param");
    check(g, p, size, "grad");
    std::vector<std::unique_ptr<Bytes>> kept;
    for (const nb::handle state : states) {
        kept.push_back(std::make_unique<Bytes>(state, Access::write, "update: state"));
        check(*kept.back(), p, size, "state");
    }
    const Coefficients coefficients = mpiml::coefficients(c.data());
    std::optional<mpiml::Released> release;
    if (p.size() > mpiml::kReleaseGilAbove)
        release.emplace();
    if (itemsize == 4)
        run<float>(static_cast<Rule>(rule), p, g, kept, coefficients);
    else
        run<double>(static_cast<Rule>(rule), p, g, kept, coefficients);
}

}  // namespace

void bind_update(nb::module_ &m) {
    m.def("update", &update, "rule"_a, "itemsize"_a, "param"_a, "grad"_a, "states"_a,
          "coefficients"_a,
          "One optimizer step in place: float32 or float64 by itemsize; see mpiml/optim.py.");
}
