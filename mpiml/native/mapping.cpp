// A file mapped into memory, shared with all who map it, without keeping it open.
//
// Python's mmap duplicates the descriptor and holds it: one for every bucket, of the
// 1024 that a process usually may have.
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include <sys/mman.h>

#include <nanobind/nanobind.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace {

class Mapping {
public:
    Mapping(int fd, std::int64_t nbytes) : nbytes_(static_cast<std::size_t>(nbytes)) {
        if (nbytes < 1)
            throw nb::value_error(("Mapping: expected nbytes >= 1, got " +
                                   std::to_string(nbytes)).c_str());
        data_ = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (data_ == MAP_FAILED) {
            PyErr_SetFromErrno(PyExc_OSError);
            throw nb::python_error();
        }
    }
    ~Mapping() {
        if (data_ != MAP_FAILED)
            munmap(data_, nbytes_);
    }
    Mapping(const Mapping &) = delete;
    Mapping &operator=(const Mapping &) = delete;

    void *data() const { return data_; }
    std::size_t nbytes() const { return nbytes_; }

private:
    void *data_ = MAP_FAILED;
    std::size_t nbytes_;
};

// A view holds a reference to the object, so the memory stays as long as the last one.
int mapping_getbuffer(PyObject *self, Py_buffer *view, int flags) {
    const Mapping *mapping = nb::inst_ptr<Mapping>(nb::handle(self));
    return PyBuffer_FillInfo(view, self, mapping->data(),
                             static_cast<Py_ssize_t>(mapping->nbytes()), 0, flags);
}

Py_ssize_t mapping_length(PyObject *self) {
    return static_cast<Py_ssize_t>(nb::inst_ptr<Mapping>(nb::handle(self))->nbytes());
}

PyType_Slot mapping_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void *>(mapping_getbuffer)},
    {Py_sq_length, reinterpret_cast<void *>(mapping_length)},
    {0, nullptr},
};

}  // namespace

void bind_mapping(nb::module_ &m) {
    nb::class_<Mapping>(m, "Mapping", nb::is_final(), nb::type_slots(mapping_slots),
                        "The first bytes of a file as memory; the file may be closed at once.")
        .def(nb::init<int, std::int64_t>(), "fd"_a, "nbytes"_a);
}
