// Wakes a process of the same host through shared memory: one cache line for each.
//
// The ringer counts `seq` up, then looks at `sleepers`; the waiter counts
// `sleepers` up, then looks at `seq`. All four are sequentially consistent, so at
// least one of the two sees the other: either the ringer wakes the sleeper, or the
// sleeper sees the ring and does not sleep. The kernel compares `seq` once more
// under its own lock, which covers a ring between that look and the sleep.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <string>

#include <sys/prctl.h>

#include <nanobind/nanobind.h>

#include "bytes.hpp"
#include "gil.hpp"
#include "waiting.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using mpiml::futex_wait_until;
using mpiml::futex_wake_all;
using mpiml::now_ns;
using mpiml::pause_cpu;

namespace {

constexpr std::size_t kLineBytes = 64;
constexpr std::int64_t kMicrosecond = 1000;  // in ns
// Longer waits are cut to this: the deadline must not overflow.
constexpr std::int64_t kLongestUs = std::int64_t{1} << 40;  // 12 days

struct alignas(4) Line {
    std::uint32_t seq;       // rings so far, wraps
    std::uint32_t sleepers;  // threads in or near the futex wait
    std::byte padding[kLineBytes - 8];
};
static_assert(sizeof(Line) == kLineBytes);

using Atomic = std::atomic_ref<std::uint32_t>;
static_assert(Atomic::is_always_lock_free, "a lock would not reach the other processes");

class Doorbell {
public:
    Doorbell(nb::handle memory, std::int64_t index)
        : memory_(memory, mpiml::Access::write, "Doorbell: memory") {
        const std::size_t bytes = memory_.size();
        if (bytes == 0 || bytes % kLineBytes != 0)
            throw nb::value_error(("Doorbell: expected a multiple of 64 bytes (one line for each "
                                   "process), got " + std::to_string(bytes)).c_str());
        if (reinterpret_cast<std::uintptr_t>(memory_.data()) % alignof(Line) != 0)
            throw nb::value_error("Doorbell: expected memory aligned to 4 bytes");
        lines_ = reinterpret_cast<Line *>(memory_.data());
        count_ = static_cast<std::int64_t>(bytes / kLineBytes);
        own_ = &line(index, "Doorbell");
    }

    void ring(std::int64_t i) {
        Line &l = line(i, "Doorbell.ring");
        Atomic(l.seq).fetch_add(1);
        if (Atomic(l.sleepers).load() != 0)
            futex_wake_all(&l.seq);
    }

    std::uint32_t value() const { return Atomic(own_->seq).load(); }

    // True if seq != seen, at once or within spin_us of spinning and then
    // timeout_us of sleep. False early when a signal came in: the caller goes
    // back through the interpreter, which runs its handler.
    bool wait(std::uint32_t seen, std::int64_t spin_us, std::int64_t timeout_us) {
        if (spin_us < 0 || timeout_us < 0)
            throw nb::value_error(("Doorbell.wait: expected spin_us and timeout_us >= 0, got " +
                                   std::to_string(spin_us) + " and " +
                                   std::to_string(timeout_us)).c_str());
        if (value() != seen)  // giving up the GIL would cost more than this whole call
            return true;
        if (spin_us == 0 && timeout_us == 0)
            return false;
        mpiml::Released release;
        if (spin_us > 0 && spin(seen, std::min(spin_us, kLongestUs)))
            return true;
        return timeout_us > 0 && sleep(seen, std::min(timeout_us, kLongestUs));
    }

private:
    Line &line(std::int64_t i, const char *where) const {
        if (i < 0 || i >= count_)
            throw nb::index_error((std::string(where) + ": expected a line in 0.." +
                                   std::to_string(count_ - 1) + ", got " +
                                   std::to_string(i)).c_str());
        return lines_[i];
    }

    bool spin(std::uint32_t seen, std::int64_t spin_us) const {
        const std::int64_t end = now_ns() + spin_us * kMicrosecond;
        do {
            for (int k = 0; k < 8; ++k) {  // one look at the clock costs as much as these
                if (value() != seen)
                    return true;
                pause_cpu();
            }
        } while (now_ns() < end);
        return value() != seen;
    }

    bool sleep(std::uint32_t seen, std::int64_t timeout_us) {
        const std::int64_t deadline = now_ns() + timeout_us * kMicrosecond;
        Atomic(own_->sleepers).fetch_add(1);
        int error = 0;
        // EAGAIN: seq changed before the kernel looked; 0: woken, maybe for nothing.
        while (value() == seen && (error == 0 || error == EAGAIN))
            error = futex_wait_until(&own_->seq, seen, deadline);
        Atomic(own_->sleepers).fetch_sub(1);
        return value() != seen;
    }

    mpiml::Bytes memory_;
    Line *lines_ = nullptr;
    Line *own_ = nullptr;
    std::int64_t count_ = 0;
};

void set_timer_slack(std::int64_t ns) {
    if (ns < 1)  // 0 would mean "back to the default" to the kernel
        throw nb::value_error(("set_timer_slack: expected ns >= 1, got " +
                               std::to_string(ns)).c_str());
    prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(ns), 0, 0, 0);
}

}  // namespace

void bind_doorbell(nb::module_ &m) {
    nb::class_<Doorbell>(m, "Doorbell", nb::is_final(),
                         "Line `index` of shared memory: wakes its owner from another process.")
        .def(nb::init<nb::handle, std::int64_t>(), "memory"_a, "index"_a)
        .def("ring", &Doorbell::ring, "i"_a, "Count line i up and wake all who sleep on it.")
        .def("value", &Doorbell::value, "Rings of the own line so far, modulo 2**32.")
        .def("wait", &Doorbell::wait, "seen"_a, "spin_us"_a, "timeout_us"_a,
             "Spin, then sleep, until value() != seen; False on timeout or a signal.");
    m.def("set_timer_slack", &set_timer_slack, "ns"_a,
          "How late the kernel may end a sleep of the calling thread and of its later children.");
}
