// The memory behind a Python buffer, exported for as long as this object lives.
#pragma once

#include <cstddef>
#include <string>

#include <nanobind/nanobind.h>

namespace mpiml {

// Raises ValueError.
[[noreturn]] inline void refuse(const std::string &text) {
    throw nanobind::value_error(text.c_str());
}

enum class Access { read, write };

// Holding the export pins the owner: mmap.close() and bytearray.append() then
// raise BufferError instead of pulling the memory from under native code.
// Create and destroy with the GIL held.
class Bytes {
public:
    // `what` names the argument in errors, e.g. "copy: dst".
    Bytes(nanobind::handle owner, Access access, const char *what) {
        // No PyBUF_FORMAT: dtypes that have no format string (datetime64) pass too.
        const int flags = access == Access::write ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(owner.ptr(), &view_, flags) == 0)
            return;
        if (PyErr_ExceptionMatches(PyExc_TypeError))  // no buffer at all
            throw nanobind::python_error();
        // Exporters disagree (numpy: ValueError, bytes: BufferError): make it one type.
        const nanobind::python_error cause;
        std::string text = std::string(what) + ": ";
        if (access == Access::write && PyObject_GetBuffer(owner.ptr(), &view_, PyBUF_SIMPLE) == 0) {
            PyBuffer_Release(&view_);
            text += "expected writable memory, got read-only memory";
        } else {
            PyErr_Clear();
            text += std::string("expected C-contiguous memory: ") +
                    nanobind::str(cause.value()).c_str();
        }
        throw nanobind::buffer_error(text.c_str());
    }
    ~Bytes() { PyBuffer_Release(&view_); }
    Bytes(const Bytes &) = delete;
    Bytes &operator=(const Bytes &) = delete;

    std::byte *data() const { return static_cast<std::byte *>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_{};
};

}  // namespace mpiml
