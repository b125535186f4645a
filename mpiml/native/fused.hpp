// A reduction of gradients that ends in an optimizer step: one pass over both.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bytes.hpp"
#include "reduce.hpp"
#include "update.hpp"

namespace mpiml {

// One stripe of gradients, and what its owner updates with it. Written by Python once.
class Fused {
public:
    // `at`: bytes from the begin of each member's gradients. `wide`: the parameters and
    // their state are float64, else float32. Throws std::invalid_argument.
    Fused(Dtype dtype, Op op, double divisor, std::size_t at, std::size_t count, Rule rule,
          bool wide, std::unique_ptr<Bytes> param, std::vector<std::unique_ptr<Bytes>> states);

    // Combines the gradients of all sources, in this order, block by block, and does the
    // step on each block while it is in the first cache.
    void run(const std::byte *const *segments, std::size_t n, const Coefficients &c);

    std::size_t bytes() const;  // moved by one run, about

private:
    template <typename T>
    void blocks(const std::byte *const *segments, std::size_t n, const Coefficients &c);

    Dtype dtype_;
    Op op_;
    double divisor_;
    std::size_t at_, count_;
    Rule rule_;
    bool wide_;
    std::unique_ptr<Bytes> param_;
    std::vector<std::unique_ptr<Bytes>> states_;
    std::vector<const void *> sources_;
};

}  // namespace mpiml
