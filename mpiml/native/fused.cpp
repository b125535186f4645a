// Gradients are combined into a block that never leaves the first cache.
#include "fused.hpp"

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace mpiml {
namespace {

// Elements. The arrays often lie at the same offset of a page, so their blocks compete for
// the same sets of the first cache. Measured with Adam on Zen 4, ns per element: 0.70 at 256,
// 0.80 at 512, 1.5 at 1024, 2.2 at 2048.
constexpr std::size_t kBlock = 256;

void expect(bool good, const std::string &text) {
    if (!good)
        throw std::invalid_argument("Plan.update: " + text);
}

void check(const Bytes &bytes, std::size_t count, std::size_t size, const char *what) {
    expect(bytes.size() == count * size, std::string(what) + ": expected " +
                                             std::to_string(count * size) + " bytes, got " +
                                             std::to_string(bytes.size()));
    expect(reinterpret_cast<std::uintptr_t>(bytes.data()) % size == 0,
           std::string(what) + ": expected aligned memory");
}

}  // namespace

Fused::Fused(Dtype dtype, Op op, double divisor, std::size_t at, std::size_t count, Rule rule,
             bool wide, std::unique_ptr<Bytes> param, std::vector<std::unique_ptr<Bytes>> states)
    : dtype_(dtype), op_(op), divisor_(divisor), at_(at), count_(count), rule_(rule),
      wide_(wide), param_(std::move(param)), states_(std::move(states)) {
    const int number = static_cast<int>(rule);
    expect(number >= 0 && number <= static_cast<int>(Rule::adam), "no such rule");
    expect(op == Op::sum || op == Op::mean, "expected the operation sum or mean");
    expect(converts(wide ? Dtype::f64 : Dtype::f32, dtype), "expected gradients of floats");
    expect(states_.size() == static_cast<std::size_t>(kStates[number]),
           "expected " + std::to_string(kStates[number]) + " states, got " +
               std::to_string(states_.size()));
    const std::size_t size = wide ? 8 : 4;
    check(*param_, count, size, "param");
    for (const auto &state : states_)
        check(*state, count, size, "state");
}

void Fused::run(const std::byte *const *segments, std::size_t n, const Coefficients &c) {
    if (wide_)
        blocks<double>(segments, n, c);
    else
        blocks<float>(segments, n, c);
}

template <typename T>
void Fused::blocks(const std::byte *const *segments, std::size_t n, const Coefficients &c) {
    constexpr Dtype own = std::is_same_v<T, double> ? Dtype::f64 : Dtype::f32;
    alignas(64) std::byte combined[kBlock * 8];
    alignas(64) T converted[kBlock];
    const std::size_t size = itemsize(dtype_);
    const bool as_it_is = n == 1 && (op_ == Op::sum || divisor_ == 1.0);
    sources_.resize(n);
    T *state[2] = {nullptr, nullptr};
    for (std::size_t done = 0; done < count_; done += kBlock) {
        const std::size_t now = std::min(kBlock, count_ - done);
        for (std::size_t i = 0; i < n; ++i)
            sources_[i] = segments[i] + at_ + done * size;
        T *param = reinterpret_cast<T *>(param_->data()) + done;
        for (std::size_t i = 0; i < states_.size(); ++i)
            state[i] = reinterpret_cast<T *>(states_[i]->data()) + done;
        const void *gradient = sources_[0];
        if (!as_it_is) {
            void *target = combined;
            reduce(dtype_, op_, now, sources_.data(), static_cast<int>(n), divisor_, &target, 1,
                   false);
            gradient = combined;
        }
        if (dtype_ != own) {
            convert(own, converted, dtype_, gradient, now);
            gradient = converted;
        }
        update(rule_, now, param, static_cast<const T *>(gradient), state, c);
    }
}

std::size_t Fused::bytes() const {
    return count_ * (itemsize(dtype_) + (2 + 2 * states_.size()) * (wide_ ? 8 : 4));
}

}  // namespace mpiml
