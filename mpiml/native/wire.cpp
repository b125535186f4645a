// Takes frames apart and makes the most frequent kind; the layout and its meaning are in mpiml/wire.py. This does what
// wire.split does in Python, in a quarter of the time: every message passes here.
#include <cstdint>
#include <cstring>

#include <nanobind/nanobind.h>

#include "bytes.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

constexpr std::size_t kHeader = 40;

// Little endian, whatever the machine; compilers make one load of it.
template <class T>
T load(const std::byte *p) {
    T value = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i)
        value = static_cast<T>(value | (static_cast<T>(std::to_integer<std::uint8_t>(p[i])) << (8 * i)));
    return value;
}

PyObject *copied(const std::byte *start, std::size_t size) {
    return PyBytes_FromStringAndSize(reinterpret_cast<const char *>(start),
                                     static_cast<Py_ssize_t>(size));
}

// The fields of the first `size` bytes of `memory`, as the tuple that Frame is made of; None
// where they are no frame of version 1, so that Python can say what is wrong with them.
nb::object split_frame(nb::handle memory, std::size_t size) {
    const mpiml::Bytes bytes(memory, mpiml::Access::read, "split_frame: memory");
    const std::byte *p = bytes.data();
    if (size > bytes.size() || size < kHeader || load<std::uint8_t>(p) != 1)
        return nb::none();
    const std::uint64_t count = load<std::uint32_t>(p + 12), body = load<std::uint64_t>(p + 24),
                        name = load<std::uint32_t>(p + 32);
    if (body > size || kHeader + name + body + 8 * count != size)
        return nb::none();
    const std::byte *content = p + kHeader + name;
    nb::object lengths = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(count)));
    if (!lengths.is_valid())
        throw nb::python_error();
    for (std::uint64_t i = 0; i < count; ++i)
        PyTuple_SetItem(lengths.ptr(), static_cast<Py_ssize_t>(i),
                        PyLong_FromUnsignedLongLong(load<std::uint64_t>(content + body + 8 * i)));
    PyObject *fields = PyTuple_New(10);
    if (fields == nullptr)
        throw nb::python_error();
    const auto set = [fields](Py_ssize_t i, PyObject *item) { PyTuple_SetItem(fields, i, item); };
    set(0, PyLong_FromLong(load<std::uint8_t>(p + 1)));
    set(1, PyLong_FromLong(load<std::uint8_t>(p + 2)));
    set(2, PyLong_FromLong(load<std::uint8_t>(p + 3)));
    set(3, PyLong_FromUnsignedLong(load<std::uint32_t>(p + 4)));
    set(4, PyLong_FromUnsignedLong(load<std::uint32_t>(p + 8)));
    set(5, PyLong_FromUnsignedLongLong(load<std::uint64_t>(p + 16)));
    set(6, PyLong_FromUnsignedLong(load<std::uint32_t>(p + 36)));
    set(7, copied(p + kHeader, name));
    set(8, copied(content, body));
    set(9, lengths.release().ptr());
    nb::object result = nb::steal(fields);
    for (Py_ssize_t i = 0; i < 10; ++i)
        if (PyTuple_GetItem(fields, i) == nullptr)
            throw nb::python_error();
    return result;
}

// Little endian, whatever the machine.
template <class T>
std::byte *store(std::byte *p, T value) {
    for (std::size_t i = 0; i < sizeof(T); ++i)
        *p++ = static_cast<std::byte>(value >> (8 * i));
    return p;
}

bool plain(PyObject *o) {
    return o == Py_None || PyLong_CheckExact(o) || PyFloat_CheckExact(o) || PyBool_Check(o) ||
           (PyUnicode_CheckExact(o) && PyUnicode_GetLength(o) < 4096) ||
           (PyBytes_CheckExact(o) && PyBytes_Size(o) < 4096);
}

// Whether pickle alone can take `value`, nothing of it being memory that would be copied:
// a plain value, or a tuple of a few.
bool is_plain(PyObject *value) {
    if (!PyTuple_CheckExact(value))
        return plain(value);
    const Py_ssize_t n = PyTuple_Size(value);
    if (n > 32)
        return false;
    for (Py_ssize_t i = 0; i < n; ++i)
        if (!plain(PyTuple_GetItem(value, i)))
            return false;
    return true;
}

nb::handle dumps;  // _pickle.dumps, never released: there is no time to do it safely

// A whole frame around the pickle of `value`, or None where the value is not plain and
// mpiml.payload has to look at it.
nb::object join_plain(std::uint8_t kind, std::uint8_t flags, std::uint32_t source,
                      std::uint32_t target, std::uint64_t id, std::uint32_t aux, nb::bytes name,
                      nb::handle value) {
    if (!is_plain(value.ptr()))
        return nb::none();
    nb::object body = dumps(value, 5);
    const auto n = static_cast<std::size_t>(PyBytes_Size(body.ptr())), m = name.size();
    PyObject *frame = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(kHeader + m + n));
    if (frame == nullptr)
        throw nb::python_error();
    std::byte *p = reinterpret_cast<std::byte *>(PyBytes_AsString(frame));
    p = store<std::uint8_t>(p, 1);
    p = store(p, kind);
    p = store<std::uint8_t>(p, 1);  // pickle
    p = store(p, flags);
    p = store(p, source);
    p = store(p, target);
    p = store<std::uint32_t>(p, 0);
    p = store(p, id);
    p = store<std::uint64_t>(p, n);
    p = store(p, static_cast<std::uint32_t>(m));
    p = store(p, aux);
    std::memcpy(p, name.c_str(), m);
    std::memcpy(p + m, PyBytes_AsString(body.ptr()), n);
    return nb::steal(frame);
}

}  // namespace

void bind_wire(nb::module_ &m) {
    dumps = nb::object(nb::module_::import_("_pickle").attr("dumps")).release();
    m.def("join_plain", &join_plain, "kind"_a, "flags"_a, "source"_a, "target"_a, "id"_a,
          "aux"_a, "name"_a, "value"_a.none(),
          "A frame around a plain value or a tuple of plain values; None for any other.");
    m.def("split_frame", &split_frame, "memory"_a, "size"_a,
          "The ten fields of the frame in the first `size` bytes, or None; see mpiml.wire.");
}
