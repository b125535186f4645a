// Binds every native function; the work is in the other files of this folder.
#include <nanobind/nanobind.h>

namespace nb = nanobind;
void bind_doorbell(nb::module_ &m);
void bind_gang(nb::module_ &m);
void bind_plan(nb::module_ &m);
void bind_pool(nb::module_ &m);
void bind_hogwild(nb::module_ &m);
void bind_isa(nb::module_ &m);
void bind_mapping(nb::module_ &m);
void bind_memory(nb::module_ &m);
void bind_reduce(nb::module_ &m);
void bind_ring(nb::module_ &m);
void bind_update(nb::module_ &m);
void bind_wire(nb::module_ &m);

NB_MODULE(_native, m) {
    m.doc() = "Doorbells, memory, copies and kernels over plain buffers. Nothing here calls MPI.";
    // A job may end by os._exit, an abort or with daemon threads that still hold
    // blocks: what lives then is no leak, and the report would hide the real error.
    nb::set_leak_warnings(false);
    bind_doorbell(m);
    bind_plan(m);
    bind_gang(m);
    bind_hogwild(m);
    bind_isa(m);
    bind_pool(m);
    bind_mapping(m);
    bind_memory(m);
    bind_reduce(m);
    bind_ring(m);
    bind_update(m);
    bind_wire(m);
}
