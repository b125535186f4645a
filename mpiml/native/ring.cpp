// What the holder of the token does in HogWild++: one cluster's model meets the next one's.
//
// Zhang, Hsieh, Akella: "HogWild++: A New Mechanism for Decentralized Asynchronous
// Stochastic Gradient Descent", ICDM 2016. With D = step * (own - snapshot), for each
// component, the right-hand sides as they were before:
//
//   |D| > tolerance   following += beta * D
//                     own        = lam * following + (1 - lam) * own + (beta + lam - 1) * D
//                     snapshot   = own
//   otherwise         own        = lam * following + (1 - lam) * own + lam * D
//                     snapshot   = own - D
//
// Others go on adding to both models. So both are added to, atomically, as hogwild.cpp adds:
// the right-hand side minus the old value is lam * (following - own) + ..., and 0 where two
// models agree, so that they stay as they are and nothing is written. What somebody else adds
// meanwhile is not in the snapshot and so part of the next D.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "array.hpp"
#include "gil.hpp"
#include "hogwild.hpp"
#include "isa.hpp"
#include "ring_kernels.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using mpiml::Access;
using mpiml::Array;
using mpiml::expect_dtype;
using mpiml::expect_size;
using mpiml::refuse;
using mpiml::hogwild::apply;
using mpiml::hogwild::How;
using mpiml::ring::Constants;
using mpiml::ring::kBlock;
using mpiml::ring::Part;

namespace {

// The numbers of one call, checked.
struct Numbers {
    double step, beta, lam, tolerance;
};

template <typename T> Constants<T> constants(const Numbers &n) {
    return {T(n.step), T(n.beta), T(n.lam), T(n.beta + n.lam - 1), T(n.tolerance)};
}

template <typename T> void read(const T *from, T *to, std::size_t n) {
    for (std::size_t k = 0; k < n; ++k)
        to[k] = std::atomic_ref<T>(const_cast<T &>(from[k])).load(std::memory_order_relaxed);
}

// Fills `change` and `pass` and sets the snapshot; how many components took the first branch.
template <typename T>
std::size_t decide(Part<T> &part, T *snapshot, std::size_t n, const Constants<T> &c) {
    MPIML_DISPATCH(ring_decide, part, snapshot, n, c)
}

// Lines of 64 bytes that change nowhere are not written; within a line a choice per component
// costs more than an atomic add of zero.
template <typename T> void add(T *model, const T *more, std::size_t n) {
    constexpr std::size_t kLine = 64 / sizeof(T);
    for (std::size_t at = 0; at < n; at += kLine) {
        const std::size_t end = std::min(at + kLine, n);
        bool any = false;
        for (std::size_t k = at; k < end; ++k)
            any |= more[k] != 0;
        for (std::size_t k = at; any && k < end; ++k)
            apply<How::atomic>(model[k], [m = more[k]](T old) { return old + m; });
    }
}

using Counts = std::pair<std::size_t, std::size_t>;

// `give(part, at, n)` brings part.pass to where it goes.
template <typename T, typename Give>
Counts sync(T *own, T *snapshot, const T *following, std::size_t size, const Constants<T> &c,
            Give give) {
    Part<T> part;
    std::size_t moved = 0;
    for (std::size_t at = 0; at < size; at += kBlock) {
        const std::size_t n = std::min(kBlock, size - at);
        read(own + at, part.own, n);
        read(following + at, part.following, n);
        const std::size_t here = decide(part, snapshot + at, n, c);
        add(own + at, part.change, n);
        give(part, at, n, here != 0);
        moved += here;
    }
    return {moved, size - moved};
}

// Checks and keeps the arrays and numbers that both forms are given.
class Call {
public:
    Call(const std::string &where, nb::handle own_, nb::handle snapshot_, nb::handle following_,
         Access access, const Numbers &numbers_)
        : own(own_, Access::write, Array::Kind::real, where + ": own"),
          snapshot(snapshot_, Access::write, Array::Kind::real, where + ": snapshot"),
          following(following_, access, Array::Kind::real, where + ": following"),
          numbers(numbers_),
          where_(where) {
        expect(snapshot, "snapshot");
        expect(following, "following");
        apart(own, "own", snapshot, "snapshot");
        apart(own, "own", following, "following");
        apart(snapshot, "snapshot", following, "following");
        const double most = own.wide() ? std::numeric_limits<double>::max()
                                       : double{std::numeric_limits<float>::max()};
        number(numbers.step, most, "step");
        number(numbers.beta, 1, "beta");
        number(numbers.lam, 1, "lam");
        number(numbers.tolerance, most, "tolerance");
    }

    void expect(const Array &array, const char *name) const {
        expect_dtype(array, own, where_ + ": " + name, "own has");
        expect_size(array, own.size(), where_ + ": " + name, "own has");
    }

    void apart(const Array &one, const char *name, const Array &other, const char *its) const {
        const auto *a = one.as<const char>(), *b = other.as<const char>();
        if (a < b + other.nbytes() && b < a + one.nbytes())
            refuse(where_ + ": " + name + " overlaps " + its);
    }

    // Calls f with a zero of the arrays' type, without the GIL if there is much to do.
    template <typename F> Counts perform(F f) const {
        std::optional<mpiml::Released> release;
        if (own.nbytes() > mpiml::kReleaseGilAbove)
            release.emplace();
        return own.wide() ? f(double{}) : f(float{});
    }

    const Array own, snapshot, following;
    const Numbers numbers;

private:
    void number(double value, double most, const char *name) const {
        if (!(value >= 0 && value <= most))
            refuse(where_ + ": " + name + ": expected 0 " +
                   (most == 1 ? "to 1" : "or more, finite in the models' dtype") + ", got " +
                   std::to_string(value));
    }

    std::string where_;
};

Counts py_sync(nb::handle own, nb::handle snapshot, nb::handle following, double step,
               double beta, double lam, double tolerance) {
    const Call call("ring_sync", own, snapshot, following, Access::write,
                    {step, beta, lam, tolerance});
    return call.perform([&](auto real) {
        using T = decltype(real);
        auto *next = call.following.as<T>();
        return sync(call.own.as<T>(), call.snapshot.as<T>(), static_cast<const T *>(next),
                    call.own.size(), constants<T>(call.numbers),
                    [next](const Part<T> &part, std::size_t at, std::size_t n, bool any) {
                        if (any)
                            add(next + at, part.pass, n);
                    });
    });
}

Counts py_prepare(nb::handle own, nb::handle snapshot, nb::handle following_copy, double step,
                  double beta, double lam, double tolerance, nb::handle out_delta) {
    const Call call("ring_prepare", own, snapshot, following_copy, Access::read,
                    {step, beta, lam, tolerance});
    const Array out(out_delta, Access::write, Array::Kind::real, "ring_prepare: out_delta");
    call.expect(out, "out_delta");
    call.apart(out, "out_delta", call.own, "own");
    call.apart(out, "out_delta", call.snapshot, "snapshot");
    call.apart(out, "out_delta", call.following, "following_copy");
    return call.perform([&](auto real) {
        using T = decltype(real);
        auto *to = out.as<T>();
        return sync(call.own.as<T>(), call.snapshot.as<T>(), call.following.as<const T>(),
                    call.own.size(), constants<T>(call.numbers),
                    [to](const Part<T> &part, std::size_t at, std::size_t n, bool) {
                        std::copy_n(part.pass, n, to + at);
                    });
    });
}

}  // namespace

void bind_ring(nb::module_ &m) {
    m.def("ring_prepare", &py_prepare, "own"_a, "snapshot"_a, "following_copy"_a, "step"_a,
          "beta"_a, "lam"_a, "tolerance"_a, "out_delta"_a,
          "`ring_sync` where the following model is elsewhere: out_delta is what to add to it.");
    m.def("ring_sync", &py_sync, "own"_a, "snapshot"_a, "following"_a, "step"_a, "beta"_a,
          "lam"_a, "tolerance"_a,
          "HogWild++ with the token: components (passed on, averaged one-sidedly).");
}
