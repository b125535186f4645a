// Chooses the kernel of reduce.hpp by dtype and operation; checked bindings for Python.
#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <nanobind/nanobind.h>

#include "bytes.hpp"
#include "gil.hpp"
#include "isa.hpp"
#include "reduce.hpp"
#include "reduce_table.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using mpiml::Access;
using mpiml::Bytes;
using mpiml::Dtype;
using mpiml::KernelTable;
using mpiml::Op;
using mpiml::refuse;

namespace {

const KernelTable &kernels() { MPIML_DISPATCH(kernels); }

// A library may have told this thread to round otherwise or to drop subnormal numbers
// (torch.set_flush_denormal, -ffast-math): the results here must not depend on it.
class StandardArithmetic {
#if defined(__x86_64__)
public:
    StandardArithmetic() : before_(_mm_getcsr()) {
        if (before_ & kChanged)
            _mm_setcsr(before_ & ~kChanged);
    }
    ~StandardArithmetic() {
        if (before_ & kChanged)
            _mm_setcsr(before_);
    }

private:
    static constexpr unsigned kChanged = 0xe040;  // rounding control, flush to zero, DAZ
    unsigned before_;
#else
public:
    StandardArithmetic() {}
#endif
};

constexpr std::array<std::size_t, mpiml::kDtypes> kSizes = {4, 8, 2, 2, 1, 2, 4,
                                                            8, 1, 2, 4, 8, 8, 16};

int index(Dtype d) { return static_cast<int>(d); }

}  // namespace

namespace mpiml {

std::size_t itemsize(Dtype d) { return kSizes.at(static_cast<std::size_t>(d)); }

bool reduces(Dtype d, Op op) {
    const bool integer = d >= Dtype::i8 && d <= Dtype::u64, complex = d >= Dtype::c64;
    return !(op == Op::mean && integer) && !((op == Op::min || op == Op::max) && complex);
}

bool converts(Dtype to, Dtype from) { return to <= Dtype::bf16 && from <= Dtype::bf16; }

void reduce(Dtype d, Op op, std::size_t count, const void *const *src, int n, double divisor,
            void *const *dst, int m, bool stream) {
    if (count == 0 || m == 0)
        return;
    const auto kernel = kernels().reduce[index(d)][static_cast<int>(op)];
    if (kernel == nullptr)
        throw std::invalid_argument("reduce: no such operation on this dtype");
    const StandardArithmetic standard;
    kernel(count * itemsize(d), reinterpret_cast<const std::byte *const *>(src), n, divisor,
           reinterpret_cast<std::byte *const *>(dst), m, stream);
}

void convert(Dtype to, void *dst, Dtype from, const void *src, std::size_t count) {
    if (!converts(to, from))
        throw std::invalid_argument("convert: expected f32, f64, f16 or bf16");
    const StandardArithmetic standard;
    kernels().convert[index(to)][index(from)](static_cast<std::byte *>(dst),
                                              static_cast<const std::byte *>(src), count);
}

}  // namespace mpiml

namespace {

Dtype dtype_of(int code, const char *where) {
    if (code < 0 || code >= mpiml::kDtypes)
        refuse(std::string(where) + ": expected a dtype from 0 to 13, got " + std::to_string(code));
    return static_cast<Dtype>(code);
}

// The parts of complex numbers are what has to be aligned.
void check_alignment(const Bytes &b, Dtype d, const std::string &what) {
    const std::size_t size = mpiml::itemsize(d) / (d >= Dtype::c64 ? 2 : 1);
    if (reinterpret_cast<std::uintptr_t>(b.data()) % size)
        refuse(what + ": expected memory aligned to " + std::to_string(size) + " bytes");
}

using Buffers = std::vector<std::unique_ptr<Bytes>>;

Buffers buffers_of(nb::list list, Access access, const char *what) {
    Buffers all;
    for (nb::handle item : list)
        all.push_back(std::make_unique<Bytes>(item, access, what));
    if (all.empty())
        refuse(std::string(what) + ": expected at least one buffer, got none");
    return all;
}

void check_lengths(const Buffers &all, std::size_t size, Dtype d, const std::string &what) {
    for (std::size_t i = 0; i < all.size(); ++i) {
        const std::string name = what + " " + std::to_string(i);
        if (all[i]->size() != size)
            refuse(name + ": expected " + std::to_string(size) + " bytes as source 0 has, got " +
                   std::to_string(all[i]->size()));
        check_alignment(*all[i], d, name);
    }
}

// Equal or apart.
void check_overlap(const std::byte *a, const std::byte *b, std::size_t size) {
    if (a != b && a < b + size && b < a + size)
        refuse("reduce: a destination overlaps another buffer partly");
}

void py_reduce(int dtype, int op, nb::list sources, nb::list destinations, double divisor,
               bool stream) {
    const Dtype d = dtype_of(dtype, "reduce");
    if (op < 0 || op >= mpiml::kOps)
        refuse("reduce: expected an operation from 0 to 4, got " + std::to_string(op));
    if (!mpiml::reduces(d, static_cast<Op>(op)))
        refuse("reduce: no operation " + std::to_string(op) + " on dtype " + std::to_string(dtype));
    const Buffers from = buffers_of(sources, Access::read, "reduce: sources"),
                  to = buffers_of(destinations, Access::write, "reduce: destinations");
    const std::size_t size = from[0]->size();
    if (size % mpiml::itemsize(d))
        refuse("reduce: expected whole elements of " + std::to_string(mpiml::itemsize(d)) +
               " bytes, got " + std::to_string(size) + " bytes");
    check_lengths(from, size, d, "reduce: source");
    check_lengths(to, size, d, "reduce: destination");
    std::vector<const void *> src;
    std::vector<void *> dst;
    for (const auto &b : from)
        src.push_back(b->data());
    for (const auto &b : to) {
        for (const auto &other : from)
            check_overlap(b->data(), other->data(), size);
        for (const auto &other : to)
            check_overlap(b->data(), other->data(), size);
        dst.push_back(b->data());
    }
    mpiml::without_gil(size * from.size(), [&] {
        mpiml::reduce(d, static_cast<Op>(op), size / mpiml::itemsize(d), src.data(),
                      static_cast<int>(src.size()), divisor, dst.data(),
                      static_cast<int>(dst.size()), stream);
    });
}

void py_convert(int to, nb::handle dst, int from, nb::handle src) {
    const Dtype t = dtype_of(to, "convert"), f = dtype_of(from, "convert");
    if (!mpiml::converts(t, f))
        refuse("convert: expected dtypes from 0 to 3, got " + std::to_string(to) + " and " +
               std::to_string(from));
    const Bytes out(dst, Access::write, "convert: dst"), in(src, Access::read, "convert: src");
    const std::size_t count = in.size() / mpiml::itemsize(f);
    if (in.size() != count * mpiml::itemsize(f) || out.size() != count * mpiml::itemsize(t))
        refuse("convert: expected equal numbers of elements, got dst of " +
               std::to_string(out.size()) + " bytes and src of " + std::to_string(in.size()));
    const bool same = out.data() == in.data() && in.size() == out.size();
    if (!same && out.data() < in.data() + in.size() && in.data() < out.data() + out.size())
        refuse("convert: dst overlaps src partly");
    mpiml::without_gil(out.size() + in.size(),
                [&] { mpiml::convert(t, out.data(), f, in.data(), count); });
}

}  // namespace

void bind_reduce(nb::module_ &m) {
    m.def("reduce", &py_reduce, "dtype"_a, "op"_a, "sources"_a, "destinations"_a,
          "divisor"_a = 1.0, "stream"_a = false,
          "Combine the sources element by element, in their order, into every destination.");
    m.def("convert", &py_convert, "to"_a, "dst"_a, "from_"_a, "src"_a,
          "Convert between float32, float64, float16 and bfloat16, rounding once.");
}
