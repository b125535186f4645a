// Memory of other processes of this host, read without their help (cross-memory attach).
//
// A copy by the kernel from one process's array straight into another's: half of the
// copies of a mailbox, and no cache line that both write. It asks for permission to trace
// the other process, which containers and Yama may refuse, so it has to be tried first.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mpiml {

// What a member lets the others read.
struct Offer {
    std::int64_t pid;
    const std::byte *in, *out;
};

std::int64_t own_pid();

// Throws std::runtime_error, with the system's reason, where not all can be read. Memory
// that is gone in between is such an error, also if the process is this one.
void read_peer(std::int64_t pid, const std::byte *from, std::byte *to, std::size_t nbytes);

}  // namespace mpiml
