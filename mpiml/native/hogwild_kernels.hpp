// The loops of Hogwild! over rows of a CSR matrix; hogwild.cpp checks what they are given.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "bytes.hpp"
#include "hogwild.hpp"

namespace mpiml::hogwild {

// Models beyond this do not fit the second cache. A compare-and-swap of x86 waits for all
// loads before it, so only a prefetch lets two of them be under way at once.
inline constexpr std::size_t kFarFrom = std::size_t{1} << 20;
inline constexpr std::size_t kAhead = 16;

// Row pointers, or numbers of rows, of either width.
struct Integers {
    const void *at;
    bool wide;
    std::int64_t operator[](std::size_t i) const {
        return wide ? static_cast<const std::int64_t *>(at)[i]
                    : static_cast<const std::int32_t *>(at)[i];
    }
};

// Some rows of a CSR matrix, whose pointers need not begin at 0, and the model they change.
template <typename T, typename I> struct Block {
    T *model;
    std::size_t components;
    Integers starts;
    std::size_t rows;
    const I *indices;
    const T *values;
    std::size_t nonzeros;  // in indices and in values, used by these rows or not
};

// The first of indices[begin, end) that names no component, or `end`.
template <typename I>
std::size_t out_of_range(const I *indices, std::size_t begin, std::size_t end,
                         std::size_t components) {
    using Unsigned = std::make_unsigned_t<I>;  // negative ones become large
    const auto limit = std::min<std::uint64_t>(components, Unsigned(-1) / 2 + std::uint64_t{1});
    Unsigned worst = 0;
    for (std::size_t k = begin; k < end; ++k)
        worst = std::max(worst, static_cast<Unsigned>(indices[k]));
    if (begin == end || worst < limit)
        return end;
    while (static_cast<Unsigned>(indices[begin]) < limit)
        ++begin;
    return begin;
}

template <typename I>
void check_indices(const I *indices, std::size_t begin, std::size_t end, std::size_t components,
                   const std::string &where) {
    const std::size_t bad = out_of_range(indices, begin, end, components);
    if (bad == end)
        return;
    refuse(where + ": indices: expected " +
           (components == 0 ? "none, as the model is empty"
                            : "0 to " + std::to_string(components - 1)) +
           ", got " + std::to_string(indices[bad]) + " at position " + std::to_string(bad));
}

inline void check_starts(const Integers &starts, std::size_t rows, std::size_t nonzeros,
                         const std::string &where) {
    std::int64_t least = 0;
    for (std::size_t row = 0; row <= rows; ++row) {
        const std::int64_t start = starts[row];
        if (start < least || static_cast<std::uint64_t>(start) > nonzeros)
            refuse(where + ": indptr: expected " + std::to_string(least) + " to " +
                   std::to_string(nonzeros) + ", got " + std::to_string(start) +
                   " at position " + std::to_string(row));
        least = start;
    }
}

template <typename T> void add_dense(T *model, const T *values, std::size_t n, T scale) {
    for (std::size_t k = 0; k < n; ++k) {
        const T more = scale * values[k];
        apply<How::atomic>(model[k], [more](T old) { return old + more; });
    }
}

// model[indices[k]] += scale * values[k] for k in begin..end; may look ahead up to `last`.
template <How how, bool far, typename T, typename I>
void add_sparse(T *model, const I *indices, const T *values, std::size_t begin, std::size_t end,
                [[maybe_unused]] std::size_t last, T scale) {
    for (std::size_t k = begin; k < end; ++k) {
        if constexpr (far)
            __builtin_prefetch(model + indices[std::min(k + kAhead, last - 1)], 1);
        const T more = scale * values[k];
        apply<how>(model[indices[k]], [more](T old) { return old + more; });
    }
}

template <How how, bool far, typename T, typename I>
void add_rows(const Block<T, I> &b, const T *coefficients, Section &section) {
    const auto last = static_cast<std::size_t>(b.starts[b.rows]);
    for (std::size_t row = 0; row < b.rows && section.begin(); ++row) {
        add_sparse<how, far>(b.model, b.indices, b.values, static_cast<std::size_t>(b.starts[row]),
                             static_cast<std::size_t>(b.starts[row + 1]), last,
                             coefficients[row]);
        section.done();
    }
}

// What a linear model with hinge loss needs beyond the rows.
template <typename T> struct Svm {
    const T *labels;   // of each row, 1 or -1
    const T *degrees;  // of each component: rows that touch it
    Integers order;    // the rows to visit, or null for each once
    std::size_t visits;
    T rate;   // eta
    T decay;  // eta * mu

    std::size_t row(std::size_t visit) const {
        return order.at == nullptr ? visit : static_cast<std::size_t>(order[visit]);
    }
};

// A row that is about to be visited.
template <typename T, typename I> struct Row {
    std::size_t begin = 0, end = 0;

    Row() = default;
    Row(const Block<T, I> &b, std::size_t row)
        : begin(static_cast<std::size_t>(b.starts[row])),
          end(static_cast<std::size_t>(b.starts[row + 1])) {}
};

// <w, x>, summed in double from left to right. Fetches what `next` will touch; `ascending`:
// no component comes twice, for sure.
template <bool far, typename T, typename I>
double dot_of(const Block<T, I> &b, const Svm<T> &s, Row<T, I> row,
              [[maybe_unused]] Row<T, I> next, bool &ascending) {
    double dot = 0;
    std::int64_t before = -1;
    ascending = true;
    for (std::size_t k = row.begin; k < row.end; ++k) {
        if constexpr (far) {
            if (next.begin < next.end) {
                const auto j = b.indices[next.begin++];
                __builtin_prefetch(b.model + j, 1);
                if (s.decay != 0)
                    __builtin_prefetch(s.degrees + j);
            }
        }
        const auto j = b.indices[k];
        ascending &= before < j;
        before = j;
        const std::atomic_ref<T> w(b.model[j]);
        dot += static_cast<double>(w.load(std::memory_order_relaxed)) *
               static_cast<double>(b.values[k]);
    }
    return dot;
}

// One row by the local step of HogWild++ (and of Hogwild!'s own code): w += eta y x if
// y <w, x> < 1; then w_j *= 1 - eta mu / deg_j for each j of the row. Where no component
// comes twice both are one swap, which rounds as the two would.
template <How how, typename T, typename I>
void svm_update(const Block<T, I> &b, const Svm<T> &s, Row<T, I> row, bool active, T step,
                bool ascending) {
    const bool both = active && s.decay != 0 && ascending;
    if (active && !both)
        add_sparse<how, false>(b.model, b.indices, b.values, row.begin, row.end, row.end, step);
    if (s.decay == 0)
        return;
    for (std::size_t k = row.begin; k < row.end; ++k) {
        const auto j = b.indices[k];
        const T keep = T(1) - s.decay / s.degrees[j];
        if (both) {
            const T more = step * b.values[k];
            apply<how>(b.model[j], [more, keep](T old) { return (old + more) * keep; });
        } else {
            apply<how>(b.model[j], [keep](T old) { return old * keep; });
        }
    }
}

struct Seen {
    std::size_t active = 0;  // rows within the margin
    double loss = 0;         // the hinge losses that they were seen with
};

template <How how, bool far, typename T, typename I>
void svm_rows(const Block<T, I> &b, const Svm<T> &s, Section &section, Seen &seen) {
    for (std::size_t visit = 0; visit < s.visits && section.begin(); ++visit) {
        const Row<T, I> row(b, s.row(visit));
        Row<T, I> next;
        if (far && visit + 1 < s.visits)
            next = Row<T, I>(b, s.row(visit + 1));
        bool ascending;
        const T label = s.labels[s.row(visit)];
        const double margin =
            static_cast<double>(label) * dot_of<far>(b, s, row, next, ascending);
        const bool active = margin < 1;
        if (active) {
            ++seen.active;
            seen.loss += 1 - margin;
        }
        svm_update<how>(b, s, row, active, s.rate * label, ascending);
        section.done();
    }
}

}  // namespace mpiml::hogwild
