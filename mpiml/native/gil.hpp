// Work without the GIL.
#pragma once

#include <cstddef>
#include <optional>

#include <unistd.h>

#include <nanobind/nanobind.h>

namespace mpiml {

// Every call of more bytes than this releases the GIL: below it the two
// switches of the lock cost more than the other threads could gain.
inline constexpr std::size_t kReleaseGilAbove = 64 * 1024;

// Lets other threads run Python, from its construction to its destruction.
//
// While the interpreter ends, taking the GIL ends a daemon thread by pthread_exit, which unwinds
// the stack: through nanobind's functions, which may not throw, so that the process would abort.
// Here such a thread waits for the end of the process instead, as in Python 3.14.
class Released {
public:
    Released() : thread_(PyEval_SaveThread()) {}
    ~Released() {
        try {
            PyEval_RestoreThread(thread_);
        } catch (...) {  // never left: glibc ends a process that swallows this
            for (;;)
                pause();
        }
    }
    Released(const Released &) = delete;
    Released &operator=(const Released &) = delete;

private:
    PyThreadState *thread_;
};

// Runs f, without the GIL if nbytes are worth it.
template <typename F> auto without_gil(std::size_t nbytes, F f) {
    std::optional<Released> release;
    if (nbytes > kReleaseGilAbove)
        release.emplace();
    return f();
}

}  // namespace mpiml
