// Spinning and sleeping on words in memory that other processes share.
#pragma once

#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace mpiml {

inline void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");  // `yield` is a no-op on most cores
#endif
}

inline std::int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return std::int64_t{t.tv_sec} * 1'000'000'000 + t.tv_nsec;
}

// Neither call is FUTEX_PRIVATE: the other side is another process.
inline void futex_wake_all(std::uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// The deadline is absolute, so that a spurious wake does not restart the timeout.
inline int futex_wait_until(std::uint32_t *word, std::uint32_t seen, std::int64_t deadline_ns) {
    timespec t{};
    t.tv_sec = static_cast<time_t>(deadline_ns / 1'000'000'000);
    t.tv_nsec = static_cast<long>(deadline_ns % 1'000'000'000);
    const long rc = syscall(SYS_futex, word, FUTEX_WAIT_BITSET, seen, &t, nullptr,
                            FUTEX_BITSET_MATCH_ANY);
    return rc == 0 ? 0 : errno;
}

}  // namespace mpiml
