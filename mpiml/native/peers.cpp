#include "peers.hpp"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <sys/uio.h>
#include <unistd.h>

#include "bytes.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using mpiml::Access;
using mpiml::Bytes;

namespace mpiml {

std::int64_t own_pid() { return getpid(); }

void read_peer(std::int64_t pid, const std::byte *from, std::byte *to, std::size_t nbytes) {
    while (nbytes > 0) {
        iovec local{to, nbytes}, remote{const_cast<std::byte *>(from), nbytes};
        const ssize_t got = process_vm_readv(static_cast<pid_t>(pid), &local, 1, &remote, 1, 0);
        if (got <= 0)
            throw std::runtime_error("cannot read the memory of process " + std::to_string(pid) +
                                     ": " + (got < 0 ? std::strerror(errno) : "nothing came"));
        const auto some = static_cast<std::size_t>(got);  // it may stop early
        from += some;
        to += some;
        nbytes -= some;
    }
}

}  // namespace mpiml

void bind_peers(nb::module_ &m) {
    m.def("address_of",
          [](nb::handle buffer) {
              const Bytes bytes(buffer, Access::read, "address_of: buffer");
              return std::tuple(mpiml::own_pid(), reinterpret_cast<std::uintptr_t>(bytes.data()));
          },
          "buffer"_a, "Process id and address of memory, for `read_peer` of another process.");
    m.def("read_peer",
          [](std::int64_t pid, std::uintptr_t address, nb::handle buffer) {
              const Bytes to(buffer, Access::write, "read_peer: buffer");
              mpiml::read_peer(pid, reinterpret_cast<const std::byte *>(address), to.data(),
                               to.size());
          },
          "pid"_a, "address"_a, "buffer"_a,
          "Fill a buffer from a process's memory; RuntimeError where the system refuses.");
}
