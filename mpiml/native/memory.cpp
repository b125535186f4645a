// Copies and digests without the GIL, and the alias that sends read-only memory.
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <nanobind/nanobind.h>

#include "bytes.hpp"
#include "gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using mpiml::Access;
using mpiml::Bytes;

namespace {

#if defined(__x86_64__)
// From here on both sides miss the caches anyway, and stores past the caches save
// the read of every line before it is overwritten. Measured on Zen 4 with 32 MiB of
// L3: 22 against 14 GB/s from 32 MiB up; at 16 MiB equal, at 1 MiB half as fast.
constexpr std::size_t kStreamFrom = std::size_t{32} << 20;

// dst aligned to 32 bytes, n a multiple of 128.
__attribute__((target("avx2"))) void stream_blocks(std::byte *dst, const std::byte *src,
                                                   std::size_t n) {
    for (std::size_t i = 0; i < n; i += 128) {
        const __m256i *from = reinterpret_cast<const __m256i *>(src + i);
        __m256i *to = reinterpret_cast<__m256i *>(dst + i);
        const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1),
                      c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
        _mm256_stream_si256(to, a);
        _mm256_stream_si256(to + 1, b);
        _mm256_stream_si256(to + 2, c);
        _mm256_stream_si256(to + 3, d);
    }
    _mm_sfence();  // streamed stores are not ordered before later ones otherwise
}

bool streams(const std::byte *dst, const std::byte *src, std::size_t n) {
    const auto d = reinterpret_cast<std::uintptr_t>(dst), s = reinterpret_cast<std::uintptr_t>(src);
    return n >= kStreamFrom && (d + n <= s || s + n <= d) && __builtin_cpu_supports("avx2");
}

// memmove, not memcpy, below: two views of one array may overlap.
void move_bytes(std::byte *dst, const std::byte *src, std::size_t n) {
    if (!streams(dst, src, n)) {
        std::memmove(dst, src, n);
        return;
    }
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(dst) % 32;
    const std::size_t body = (n - head) / 128 * 128;
    std::memcpy(dst, src, head);
    stream_blocks(dst + head, src + head, body);
    std::memcpy(dst + head + body, src + head + body, n - head - body);
}
#else
void move_bytes(std::byte *dst, const std::byte *src, std::size_t n) { std::memmove(dst, src, n); }
#endif

void copy(nb::handle dst, nb::handle src) {
    const Bytes to(dst, Access::write, "copy: dst"), from(src, Access::read, "copy: src");
    if (to.size() != from.size())
        throw nb::value_error(("copy: expected equal lengths, got dst of " +
                               std::to_string(to.size()) + " bytes and src of " +
                               std::to_string(from.size()) + " bytes").c_str());
    if (to.size() == 0)
        return;
    mpiml::without_gil(to.size(), [&] { move_bytes(to.data(), from.data(), to.size()); });
}

// XXH64, as written down in the xxHash specification (xxhash_spec.md, version 0.1.1):
// four independent lanes of one multiplication each, no tables, no alignment.
constexpr std::uint64_t kP1 = 0x9E3779B185EBCA87, kP2 = 0xC2B2AE3D27D4EB4F,
                        kP3 = 0x165667B19E3779F9, kP4 = 0x85EBCA77C2B2AE63,
                        kP5 = 0x27D4EB2F165667C5;

template <typename T> T load_little(const std::byte *p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    if constexpr (std::endian::native == std::endian::big)
        x = sizeof x == 8 ? static_cast<T>(__builtin_bswap64(x))
                          : static_cast<T>(__builtin_bswap32(static_cast<std::uint32_t>(x)));
    return x;
}

std::uint64_t round64(std::uint64_t acc, std::uint64_t lane) {
    return std::rotl(acc + lane * kP2, 31) * kP1;
}

std::uint64_t merge64(std::uint64_t acc, std::uint64_t lane_acc) {
    return (acc ^ round64(0, lane_acc)) * kP1 + kP4;
}

std::uint64_t xxh64(const std::byte *p, std::size_t n, std::uint64_t seed) {
    const std::byte *const end = p + n;
    std::uint64_t h = seed + kP5;
    if (n >= 32) {
        std::uint64_t a = seed + kP1 + kP2, b = seed + kP2, c = seed, d = seed - kP1;
        for (; end - p >= 32; p += 32) {
            a = round64(a, load_little<std::uint64_t>(p));
            b = round64(b, load_little<std::uint64_t>(p + 8));
            c = round64(c, load_little<std::uint64_t>(p + 16));
            d = round64(d, load_little<std::uint64_t>(p + 24));
        }
        h = std::rotl(a, 1) + std::rotl(b, 7) + std::rotl(c, 12) + std::rotl(d, 18);
        h = merge64(merge64(merge64(merge64(h, a), b), c), d);
    }
    h += n;
    for (; end - p >= 8; p += 8)
        h = std::rotl(h ^ round64(0, load_little<std::uint64_t>(p)), 27) * kP1 + kP4;
    if (end - p >= 4) {
        h = std::rotl(h ^ (load_little<std::uint32_t>(p) * kP1), 23) * kP2 + kP3;
        p += 4;
    }
    for (; p < end; ++p)
        h = std::rotl(h ^ (std::to_integer<std::uint64_t>(*p) * kP5), 11) * kP1;
    h = (h ^ (h >> 33)) * kP2;
    h = (h ^ (h >> 29)) * kP3;
    return h ^ (h >> 32);
}

std::uint64_t checksum(nb::handle buffer, std::uint64_t seed) {
    const Bytes b(buffer, Access::read, "checksum: buffer");
    return mpiml::without_gil(b.size(), [&] { return xxh64(b.data(), b.size(), seed); });
}

// mpi4py asks for writable memory even where MPI only reads it. This object
// says "writable" for memory that is not; nobody may write through it.
class Alias {
public:
    explicit Alias(nb::handle owner) : bytes(owner, Access::read, "writable: buffer") {}
    Bytes bytes;
};

int alias_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    const Bytes &b = nb::inst_ptr<Alias>(self)->bytes;
    return PyBuffer_FillInfo(view, self, b.data(), static_cast<Py_ssize_t>(b.size()),
                             /*readonly=*/0, flags);
}

PyType_Slot alias_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void *>(alias_getbuffer)},
    {0, nullptr},
};

nb::object writable(nb::handle buffer) {
    nb::object alias = nb::inst_alloc(nb::type<Alias>());
    new (nb::inst_ptr<Alias>(alias)) Alias(buffer);
    nb::inst_mark_ready(alias);
    return nb::steal(PyMemoryView_FromObject(alias.ptr()));
}

}  // namespace

void bind_memory(nb::module_ &m) {
    nb::class_<Alias>(m, "_Alias", nb::is_final(), nb::type_slots(alias_slots));
    m.def("copy", &copy, "dst"_a, "src"_a,
          "Copy the bytes of src to dst, of equal length; large ones without the GIL.");
    m.def("checksum", &checksum, "buffer"_a, "seed"_a = 0,
          "XXH64 of the bytes, the same on every machine; chain buffers through seed.");
    m.def("writable", &writable, "buffer"_a,
          "The bytes of a read-only buffer as a writable memoryview, to send; never write to it.");
}
