// How the members of a gang wait for each other; see gang.hpp.
#include <algorithm>
#include <cerrno>

#include <sched.h>

#include "gang.hpp"
#include "waiting.hpp"

namespace mpiml {

namespace {
using Word = std::atomic_ref<std::uint32_t>;
static_assert(Word::is_always_lock_free, "a lock would not reach the other processes");
}  // namespace

void Meeting::arrive(std::uint64_t hash) {
    Slot &own = next();
    own.hash = hash;
    ++phase_;
    // Sequentially consistent, as are the sleeper's two steps: see doorbell.cpp.
    Word(own.phase).store(phase_);
    if (Word(own.sleepers).load() != 0)
        futex_wake_all(&own.phase);
}

bool Meeting::arrived(int member) const {
    return Word(at_point(member).phase).load(std::memory_order_acquire) == phase_;
}

bool Meeting::left(int member) const {
    return Word(slot(member, 0).gone).load(std::memory_order_acquire) != 0;
}

Meeting::Seen Meeting::look() const {
    for (int k = 0; k < 16; ++k) {
        int i = 0;
        while (i < size_ && (i == index_ || arrived(i)))
            ++i;
        if (i == size_)
            return Seen::all;
        if (spin_ns_ == 0)
            break;
        pause_cpu();
    }
    return Seen::late;
}

Meeting::Seen Meeting::wait(std::int64_t deadline_ns) const {
    const std::int64_t started = now_ns();
    for (int i = 0; i < size_; ++i) {
        if (i == index_ || arrived(i))
            continue;
        const Seen seen = wait_for(i, started, deadline_ns);
        if (seen != Seen::all)
            return seen;
    }
    return Seen::all;
}

Meeting::Seen Meeting::wait_for(int member, std::int64_t started, std::int64_t deadline_ns) const {
    std::int64_t now = started;
    while (now - started < spin_ns_) {
        for (int k = 0; k < 16; ++k) {  // one look at the clock costs as much as these
            if (arrived(member))
                return Seen::all;
            pause_cpu();
        }
        now = now_ns();
    }
    while (now - started < yield_ns_ && now < deadline_ns) {
        if (arrived(member))
            return Seen::all;
        sched_yield();
        now = now_ns();
    }
    return sleep_on(member, deadline_ns);
}

Meeting::Seen Meeting::sleep_on(int member, std::int64_t deadline_ns) const {
    Slot &other = at_point(member);
    Word(other.sleepers).fetch_add(1);
    Seen seen = Seen::late;
    int error = 0;
    for (;;) {
        const std::uint32_t before = Word(other.phase).load();
        if (before == phase_)
            seen = Seen::all;
        else if (left(member))  // it may have arrived, and then left, since the look before
            seen = arrived(member) ? Seen::all : Seen::left;
        // EAGAIN: the phase changed before the kernel looked; 0: woken, maybe for nothing.
        // Anything else ends this wait: the time is over, or a signal has to be handled.
        if (seen != Seen::late || (error != 0 && error != EAGAIN))
            break;
        error = futex_wait_until(&other.phase, before, deadline_ns);
    }
    Word(other.sleepers).fetch_sub(1);
    return seen;
}

bool Meeting::all_do_the_same() const {
    const std::uint64_t first = at_point(0).hash;
    for (int i = 1; i < size_; ++i)
        if (at_point(i).hash != first)
            return false;
    return true;
}

std::vector<int> Meeting::gone() const {
    std::vector<int> found;
    for (int i = 0; i < size_; ++i)
        if (i != index_ && !arrived(i) && left(i))
            found.push_back(i);
    return found;
}

std::vector<int> Meeting::missing() const {
    std::vector<int> found;
    for (int i = 0; i < size_; ++i)
        if (i != index_ && !arrived(i))
            found.push_back(i);
    return found;
}

void Meeting::leave() const {
    Word(slot(index_, 0).gone).store(1);
    for (std::uint32_t k = 0; k < 2; ++k)
        futex_wake_all(&slot(index_, k).phase);
}

}  // namespace mpiml
