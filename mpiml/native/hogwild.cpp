// Hogwild! for Python: checks, then the loops without the GIL.
#include "hogwild.hpp"

#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "array.hpp"
#include "bytes.hpp"
#include "gil.hpp"
#include "hogwild_kernels.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using mpiml::Access;
using mpiml::Array;
using mpiml::Bytes;
using mpiml::expect_dtype;
using mpiml::expect_size;
using mpiml::refuse;
using namespace mpiml::hogwild;

namespace {

constexpr std::int64_t kTimeoutUs = 10'000'000;
// Longer waits are cut to this: the deadline must not overflow.
constexpr std::int64_t kLongestUs = std::int64_t{1} << 40;  // 12 days

std::int64_t ns_of(std::int64_t timeout_us, const char *where) {
    if (timeout_us < 0)
        refuse(std::string(where) + ": timeout_us: expected 0 or more, got " +
               std::to_string(timeout_us));
    return std::min(timeout_us, kLongestUs) * 1000;
}

class Gate {
public:
    Gate(nb::handle memory, int index, int size)
        : memory_(memory, Access::write, "Gate: memory"),
          words_(memory_.data(), checked(index, size), size) {
        const std::size_t needed = GateWords::bytes(size);
        if (memory_.size() < needed)
            refuse("Gate: memory: expected " + std::to_string(needed) + " bytes, got " +
                   std::to_string(memory_.size()));
        if (reinterpret_cast<std::uintptr_t>(memory_.data()) % alignof(GateHead) != 0)
            refuse("Gate: memory: expected an alignment of 128 bytes");
    }

    const GateWords &words() const { return words_; }

    bool enter(std::int64_t timeout_us) const {
        std::optional<mpiml::Released> release;
        return words_.enter(patience(timeout_us, "Gate.enter", release));
    }

    void leave(std::uint64_t adds) const {
        words_.count(adds);
        words_.leave();
    }

    std::optional<std::uint64_t> snapshot(nb::handle model, nb::handle out,
                                          std::int64_t timeout_us, bool clear) const {
        const Bytes from(model, clear ? Access::write : Access::read, "Gate.snapshot: model"),
            to(out, Access::write, "Gate.snapshot: out");
        if (from.size() != to.size())
            refuse("Gate.snapshot: out: expected " + std::to_string(from.size()) +
                   " bytes as the model has, got " + std::to_string(to.size()));
        if (from.data() < to.data() + to.size() && to.data() < from.data() + from.size())
            refuse("Gate.snapshot: out overlaps the model");
        std::optional<mpiml::Released> release;
        if (from.size() > mpiml::kReleaseGilAbove)
            release.emplace();
        if (!words_.close(patience(timeout_us, "Gate.snapshot", release)))
            return std::nullopt;
        std::memcpy(to.data(), from.data(), from.size());
        const std::uint64_t version = words_.version();
        if (clear) {
            std::memset(from.data(), 0, from.size());  // which is zero in every dtype
            words_.count(1);  // an update too: who reads from afar compares versions
        }
        words_.open();
        return version;
    }

private:
    static Patience patience(std::int64_t timeout_us, const char *where,
                             std::optional<mpiml::Released> &release) {
        return {ns_of(timeout_us, where), [&release] {
                    if (!release)
                        release.emplace();
                }};
    }
    static int checked(int index, int size) {
        if (size < 1 || index < 0 || index >= size)
            refuse("Gate: index: expected 0 to " + std::to_string(size - 1) + ", got " +
                   std::to_string(index));
        return index;
    }

    Bytes memory_;
    GateWords words_;
};

// How a call is to write: what all of them are given in the same words.
class Manner {
public:
    // Atomic.
    Manner(const char *where, const Gate *gate, std::int64_t timeout_us)
        : Manner(where, "atomic", nb::none(), gate, timeout_us) {}

    Manner(const char *where, const std::string &how, nb::handle lock, const Gate *gate,
           std::int64_t timeout_us)
        : where_(where),
          how_(parsed(how, where)),
          gate_(gate == nullptr ? nullptr : &gate->words()),
          timeout_ns_(ns_of(timeout_us, where)) {
        if (how_ != How::spinlock && how_ != How::mutex)
            return;
        if (lock.is_none())
            refuse(where_ + ": lock: expected 4 bytes of shared memory for how='" + how +
                   "', got None");
        word_.emplace(lock, Access::write, (where_ + ": lock").c_str());
        if (word_->size() < 4 || reinterpret_cast<std::uintptr_t>(word_->data()) % 4 != 0)
            refuse(where_ + ": lock: expected 4 bytes or more, aligned to 4, got " +
                   std::to_string(word_->size()));
    }

    const std::string &where() const { return where_; }

    // Checks, then runs, within one section; raises TimeoutError if that waited too long.
    template <typename Check, typename Run>
    void perform(std::size_t nbytes, std::size_t updates, Check check, Run run) const {
        Section::Late late;
        std::size_t done;
        {
            std::optional<mpiml::Released> release;
            if (nbytes > mpiml::kReleaseGilAbove)
                release.emplace();
            check();
            const Patience patience{timeout_ns_, [&release] {
                                        if (!release)
                                            release.emplace();
                                    }};
            auto *word = word_ ? reinterpret_cast<std::uint32_t *>(word_->data()) : nullptr;
            Section section(gate_, Lock(how_, word), patience);
            if (how_ == How::atomic)
                run(std::integral_constant<How, How::atomic>{}, section);
            else
                run(std::integral_constant<How, How::racy>{}, section);
            late = section.late();
            done = section.updates();
        }
        if (late != Section::Late::nothing)
            raise_timeout(late, done, updates);
    }

private:
    static How parsed(const std::string &how, const char *where) {
        const char *names[] = {"atomic", "racy", "spinlock", "mutex"};
        for (int i = 0; i < 4; ++i)
            if (how == names[i])
                return static_cast<How>(i);
        refuse(std::string(where) + ": how: expected atomic, racy, spinlock or mutex, got '" +
               how + "'");
    }

    [[noreturn]] void raise_timeout(Section::Late late, std::size_t done,
                                    std::size_t updates) const {
        std::string text = where_ + ": ";
        if (late == Section::Late::lock) {
            text += "the lock was not given back";
        } else {
            const int by = gate_->closed_by();
            text += "the gate stayed closed";
            if (by >= 0)
                text += " by member " + std::to_string(by);
        }
        text += " within " + std::to_string(timeout_ns_ / 1000) + " us: " +
                std::to_string(done) + " of " + std::to_string(updates) + " updates were made";
        PyErr_SetString(PyExc_TimeoutError, text.c_str());
        throw nb::python_error();
    }

    std::string where_;
    How how_;
    const GateWords *gate_;
    std::int64_t timeout_ns_;
    std::optional<Bytes> word_;
};

template <typename F> void with_real(const Array &model, F f) {
    if (model.wide())
        f(double{});
    else
        f(float{});
}

template <typename F> void with_index(const Array &indices, F f) {
    if (indices.wide())
        f(std::int64_t{});
    else
        f(std::int32_t{});
}

template <typename F> void with_far(const Array &model, F f) {
    if (model.nbytes() >= kFarFrom)
        f(std::true_type{});
    else
        f(std::false_type{});
}

void py_add(nb::handle model, nb::handle values, double scale, const Gate *gate,
            std::int64_t timeout_us) {
    const Manner manner("hogwild_add", gate, timeout_us);
    const Array w(model, Access::write, Array::Kind::real, "hogwild_add: model"),
        v(values, Access::read, Array::Kind::real, "hogwild_add: values");
    expect_dtype(v, w, "hogwild_add: values");
    expect_size(v, w.size(), "hogwild_add: values", "the model has");
    with_real(w, [&](auto real) {
        using T = decltype(real);
        manner.perform(w.nbytes(), 1, [] {}, [&](auto, Section &section) {
            if (!section.begin())
                return;
            add_dense(w.as<T>(), v.as<const T>(), w.size(), T(scale));
            section.done();
        });
    });
}

void py_add_at(nb::handle model, nb::handle indices, nb::handle values, double scale,
               const Gate *gate, std::int64_t timeout_us) {
    const Manner manner("hogwild_add_at", gate, timeout_us);
    const Array w(model, Access::write, Array::Kind::real, "hogwild_add_at: model"),
        at(indices, Access::read, Array::Kind::index, "hogwild_add_at: indices"),
        v(values, Access::read, Array::Kind::real, "hogwild_add_at: values");
    expect_dtype(v, w, "hogwild_add_at: values");
    expect_size(v, at.size(), "hogwild_add_at: values", "indices has");
    const std::size_t n = v.size();
    with_real(w, [&](auto real) {
        with_index(at, [&](auto index) {
            with_far(w, [&](auto far) {
                using T = decltype(real);
                using I = decltype(index);
                const auto check = [&] {
                    check_indices(at.as<const I>(), 0, n, w.size(), manner.where());
                };
                manner.perform(v.nbytes(), 1, check, [&](auto, Section &section) {
                    if (!section.begin())
                        return;
                    add_sparse<How::atomic, decltype(far)::value>(
                        w.as<T>(), at.as<const I>(), v.as<const T>(), 0, n, n, T(scale));
                    section.done();
                });
            });
        });
    });
}

Integers integers(const Array &array) {
    return {array.as<const void>(), array.wide()};
}

// The arrays of a CSR block, kept for one call.
struct Csr {
    Csr(const std::string &where, nb::handle model_, nb::handle indptr_, nb::handle indices_,
        nb::handle values_)
        : model(model_, Access::write, Array::Kind::real, where + ": model"),
          indptr(indptr_, Access::read, Array::Kind::index, where + ": indptr"),
          indices(indices_, Access::read, Array::Kind::index, where + ": indices"),
          values(values_, Access::read, Array::Kind::real, where + ": values") {
        expect_dtype(values, model, where + ": values");
        expect_size(values, indices.size(), where + ": values", "indices has");
        if (indptr.size() == 0)
            refuse(where + ": indptr: expected rows + 1 elements, got 0");
    }

    template <typename T, typename I> Block<T, I> block() const {
        return {model.as<T>(),
                model.size(),
                integers(indptr),
                rows(),
                indices.as<const I>(),
                values.as<const T>(),
                indices.size()};
    }
    std::size_t rows() const { return indptr.size() - 1; }

    const Array model, indptr, indices, values;
};

void py_add_rows(nb::handle model, nb::handle indptr, nb::handle indices, nb::handle values,
              nb::handle coefficients, const std::string &how, nb::handle lock, const Gate *gate,
              std::int64_t timeout_us) {
    const Manner manner("hogwild_add_rows", how, lock, gate, timeout_us);
    const std::string &where = manner.where();
    const Csr csr(where, model, indptr, indices, values);
    const Array c(coefficients, Access::read, Array::Kind::real, where + ": coefficients");
    expect_dtype(c, csr.model, where + ": coefficients");
    expect_size(c, csr.rows(), where + ": coefficients", "there are rows");
    with_real(csr.model, [&](auto real) {
        with_index(csr.indices, [&](auto index) {
            using T = decltype(real);
            using I = decltype(index);
            const auto b = csr.block<T, I>();
            check_starts(b.starts, b.rows, b.nonzeros, where);
            const auto first = static_cast<std::size_t>(b.starts[0]);
            const auto last = static_cast<std::size_t>(b.starts[b.rows]);
            const auto check = [&] {
                check_indices(b.indices, first, last, b.components, where);
            };
            with_far(csr.model, [&](auto far) {
                manner.perform((last - first) * sizeof(T), b.rows, check,
                               [&](auto kind, Section &section) {
                                   add_rows<decltype(kind)::value, decltype(far)::value>(
                                       b, c.as<const T>(), section);
                               });
            });
        });
    });
}

template <bool far, typename T, typename I>
void check_degrees(const Block<T, I> &b, const Svm<T> &s, Row<T, I> row,
                   const std::string &where) {
    for (std::size_t k = row.begin; k < row.end; ++k) {
        if constexpr (far)
            __builtin_prefetch(s.degrees + b.indices[std::min(k + kAhead, row.end - 1)]);
        const T degree = s.degrees[b.indices[k]];
        if (!(degree > 0))
            refuse(where + ": degrees: expected a positive number for each component that a "
                           "row touches, got " +
                   std::to_string(degree) + " at position " + std::to_string(b.indices[k]));
    }
}

template <bool far, typename T, typename I>
void check_visits(const Block<T, I> &b, const Svm<T> &s, const std::string &where) {
    for (std::size_t visit = 0; visit < s.visits; ++visit) {
        const std::size_t row = s.row(visit);  // negative ones become large
        if (row >= b.rows)
            refuse(where + ": order: expected 0 to " + std::to_string(b.rows) +
                   " without the end, got " + std::to_string(static_cast<std::int64_t>(row)) +
                   " at position " + std::to_string(visit));
        if (s.labels[row] != 1 && s.labels[row] != -1)
            refuse(where + ": labels: expected 1 or -1, got " + std::to_string(s.labels[row]) +
                   " at position " + std::to_string(row));
        const Row<T, I> its(b, row);
        check_indices(b.indices, its.begin, its.end, b.components, where);
        if (s.decay != 0)
            check_degrees<far>(b, s, its, where);
    }
}

std::pair<std::size_t, double> py_svm_rows(nb::handle model, nb::handle indptr, nb::handle indices,
                                        nb::handle values, nb::handle labels,
                                        nb::handle degrees, double eta, double mu,
                                        nb::handle order, const std::string &how,
                                        nb::handle lock, const Gate *gate,
                                        std::int64_t timeout_us) {
    const Manner manner("hogwild_svm_rows", how, lock, gate, timeout_us);
    const std::string &where = manner.where();
    const Csr csr(where, model, indptr, indices, values);
    const Array y(labels, Access::read, Array::Kind::real, where + ": labels"),
        d(degrees, Access::read, Array::Kind::real, where + ": degrees");
    expect_dtype(y, csr.model, where + ": labels");
    expect_size(y, csr.rows(), where + ": labels", "there are rows");
    expect_dtype(d, csr.model, where + ": degrees");
    expect_size(d, csr.model.size(), where + ": degrees", "the model has");
    if (!std::isfinite(eta) || !std::isfinite(mu))
        refuse(where + ": eta, mu: expected finite numbers");
    std::unique_ptr<Array> visited;
    if (!order.is_none())
        visited = std::make_unique<Array>(order, Access::read, Array::Kind::index,
                                          where + ": order");
    Seen seen;
    with_real(csr.model, [&](auto real) {
        with_index(csr.indices, [&](auto index) {
            using T = decltype(real);
            using I = decltype(index);
            const auto b = csr.block<T, I>();
            check_starts(b.starts, b.rows, b.nonzeros, where);
            const Svm<T> s{y.as<const T>(),
                     d.as<const T>(),
                     visited ? integers(*visited) : Integers{},
                     visited ? visited->size() : b.rows,
                     T(eta),
                     T(eta * mu)};
            const auto nbytes = static_cast<std::size_t>(b.starts[b.rows] - b.starts[0]) *
                                sizeof(T) / (b.rows + (b.rows == 0)) * s.visits;
            with_far(csr.model, [&](auto far) {
                constexpr bool kFar = decltype(far)::value;
                manner.perform(nbytes, s.visits, [&] { check_visits<kFar>(b, s, where); },
                               [&](auto kind, Section &section) {
                                   svm_rows<decltype(kind)::value, kFar>(b, s, section, seen);
                               });
            });
        });
    });
    return {seen.active, seen.loss};
}

}  // namespace

void bind_hogwild(nb::module_ &m) {
    m.def("gate_bytes",
          [](int size) {
              if (size < 1)
                  refuse("gate_bytes: size: expected 1 or more, got " + std::to_string(size));
              return GateWords::bytes(size);
          },
          "size"_a, "Bytes that a `Gate` of so many members needs.");
    nb::class_<Gate>(m, "Gate", nb::is_final(),
                     "Member `index` of the writers of a model: lets a reader see it between "
                     "updates. Zeroed memory is an open gate.")
        .def(nb::init<nb::handle, int, int>(), "memory"_a, "index"_a, "size"_a)
        .def("enter", &Gate::enter, "timeout_us"_a = kTimeoutUs,
             "Begin to write, when no snapshot is being taken; False if one stays.")
        .def("leave", &Gate::leave, "adds"_a = 1, "End what `enter` began, of so many updates.")
        .def("snapshot", &Gate::snapshot, "model"_a, "out"_a, "timeout_us"_a = kTimeoutUs,
             "clear"_a = false,
             "Copy the model while nobody writes, and set it to zero if asked; its version, or "
             "None if somebody stays inside.")
        .def("version", [](const Gate &g) { return g.words().version(); },
             "Updates by all members so far.")
        .def("quiet_version",
             [](const Gate &g) -> std::optional<std::uint64_t> {
                 if (g.words().closed() || !g.words().inside().empty())
                     return std::nullopt;
                 return g.words().version();
             },
             "The same, or None while somebody is within an update or takes a snapshot.")
        .def("inside", [](const Gate &g) { return g.words().inside(); },
             "Members that are within an update now.")
        .def_prop_ro("closed_by", [](const Gate &g) { return g.words().closed_by(); },
                     "The member that takes a snapshot now, or -1.");
    m.def("hogwild_add", &py_add, "model"_a, "values"_a, "scale"_a = 1.0,
          "gate"_a.none() = nb::none(), "timeout_us"_a = kTimeoutUs,
          "model += scale * values, component by component.");
    m.def("hogwild_add_at", &py_add_at, "model"_a, "indices"_a, "values"_a, "scale"_a = 1.0,
          "gate"_a.none() = nb::none(), "timeout_us"_a = kTimeoutUs,
          "model[indices[k]] += scale * values[k]; an index that comes twice counts twice.");
    m.def("hogwild_add_rows", &py_add_rows, "model"_a, "indptr"_a, "indices"_a, "values"_a,
          "coefficients"_a, "how"_a = "atomic", "lock"_a.none() = nb::none(),
          "gate"_a.none() = nb::none(), "timeout_us"_a = kTimeoutUs,
          "Add each row of a CSR block, times its coefficient; each row is one update.");
    m.def("hogwild_svm_rows", &py_svm_rows, "model"_a, "indptr"_a, "indices"_a, "values"_a,
          "labels"_a, "degrees"_a, "eta"_a, "mu"_a, "order"_a.none() = nb::none(),
          "how"_a = "atomic", "lock"_a.none() = nb::none(), "gate"_a.none() = nb::none(),
          "timeout_us"_a = kTimeoutUs,
          "A step of the sparse SVM for each row: (rows within the margin, their hinge loss).");
}
