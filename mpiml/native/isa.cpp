// Finds the instruction set of this CPU, and lets a test choose a lesser one.
#include <atomic>
#include <string>

#include <nanobind/nanobind.h>

#include "isa.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using mpiml::Isa;

namespace {

constexpr const char *kNames[] = {"plain", "avx2", "avx512"};

// The flags of mpiml_kernels() in CMakeLists.txt, asked of the CPU one by one.
Isa of_this_cpu() {
#if defined(MPIML_WITH_ISAS)
    __builtin_cpu_init();
    if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")))
        return Isa::plain;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return Isa::avx512;
    return Isa::avx2;
#else
    return Isa::plain;
#endif
}

const Isa best = of_this_cpu();
std::atomic<Isa> chosen{best};

const char *use_isa(const std::string &name) {
    for (const Isa isa : {Isa::plain, Isa::avx2, Isa::avx512})
        if (name == kNames[static_cast<int>(isa)]) {
            chosen = isa < best ? isa : best;
            return kNames[static_cast<int>(chosen.load())];
        }
    throw nb::value_error(
        ("use_isa: name: expected plain, avx2 or avx512, got '" + name + "'").c_str());
}

}  // namespace

Isa mpiml::isa() { return chosen.load(std::memory_order_relaxed); }

void bind_isa(nb::module_ &m) {
    m.def(
        "use_isa", [](const nb::str &name) { return use_isa(name.c_str()); }, "name"_a,
        "Run kernels of this instruction set, or the best below it that the CPU has; its name.");
}
