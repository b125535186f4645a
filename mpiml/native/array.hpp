// An array behind a Python buffer: its dtype looked at, exported for as long as this lives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include <nanobind/nanobind.h>

#include "bytes.hpp"

namespace mpiml {

// A C-contiguous array of floats or of signed integers of 4 or 8 bytes, any shape.
class Array {
public:
    enum class Kind { real, index };

    Array(nanobind::handle owner, Access access, Kind kind, const std::string &what) {
        const int writable = access == Access::write ? PyBUF_WRITABLE : 0;
        if (PyObject_GetBuffer(owner.ptr(), &view_,
                               PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | writable) != 0) {
            PyErr_Clear();
            const Bytes says_why(owner, access, what.c_str());
            refuse(what + ": expected C-contiguous memory of a known dtype");
        }
        try {
            check(kind, what);
        } catch (...) {
            PyBuffer_Release(&view_);
            throw;
        }
    }
    ~Array() { PyBuffer_Release(&view_); }
    Array(const Array &) = delete;
    Array &operator=(const Array &) = delete;

    template <typename T> T *as() const { return static_cast<T *>(view_.buf); }
    std::size_t itemsize() const { return static_cast<std::size_t>(view_.itemsize); }
    std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }
    std::size_t size() const { return nbytes() / itemsize(); }
    bool wide() const { return view_.itemsize == 8; }

private:
    void check(Kind kind, const std::string &what) const {
        const std::string format = view_.format == nullptr ? "B" : view_.format;
        const bool prefixed = format.size() == 2 && std::strchr("@=<^", format[0]) != nullptr;
        const char code = format.size() == 1 || prefixed ? format.back() : '?';
        const bool good = std::strchr(kind == Kind::real ? "fd" : "ilq", code) != nullptr &&
                          (view_.itemsize == 4 || view_.itemsize == 8);
        if (!good)
            refuse(what + ": expected " +
                   (kind == Kind::real ? "float32 or float64" : "int32 or int64") +
                   ", got format '" + format + "' of " + std::to_string(view_.itemsize) +
                   " bytes");
        if (size() != 0 && reinterpret_cast<std::uintptr_t>(view_.buf) % itemsize() != 0)
            refuse(what + ": expected memory aligned to " + std::to_string(itemsize()) +
                   " bytes");
    }

    Py_buffer view_{};
};

// `as`, in messages: what has the right size or dtype, e.g. "the model has".
inline void expect_size(const Array &array, std::size_t size, const std::string &what,
                        const char *as) {
    if (array.size() != size)
        refuse(what + ": expected " + std::to_string(size) + " elements as " + as + ", got " +
               std::to_string(array.size()));
}

inline void expect_dtype(const Array &array, const Array &model, const std::string &what,
                         const char *as = "the model has") {
    if (array.itemsize() != model.itemsize())
        refuse(what + ": expected float" + std::to_string(8 * model.itemsize()) + " as " + as +
               ", got float" + std::to_string(8 * array.itemsize()));
}

}  // namespace mpiml
