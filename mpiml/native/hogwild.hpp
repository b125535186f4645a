// Many writers on one model in shared memory, without a lock: Hogwild!
//
// Niu, Recht, Ré, Wright: "HOGWILD!: A Lock-Free Approach to Parallelizing Stochastic
// Gradient Descent", NIPS 2011: every component is added to atomically, a whole update is
// not. x86 has no addition of floats in memory, so an add is a loop of compare-and-swap.
// The other ways are what the paper compares with, and what its own code does on x86.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace mpiml::hogwild {

enum class How : int {
    atomic,    // no update of a component is lost
    racy,      // load, add, store: what another writes between is lost
    spinlock,  // the whole update under one word of shared memory
    mutex,     // the same, but who waits sleeps in the kernel
};

static_assert(std::atomic_ref<float>::is_always_lock_free &&
                  std::atomic_ref<double>::is_always_lock_free,
              "a lock would not reach the other processes");

// w = f(w). The compare is of bits, so that a NaN does not loop for ever.
template <How how, typename T, typename F> inline void apply(T &w, F f) {
    const std::atomic_ref<T> at(w);
    T old = at.load(std::memory_order_relaxed);
    if constexpr (how == How::atomic) {
        while (!at.compare_exchange_weak(old, f(old), std::memory_order_relaxed)) {
        }
    } else {
        at.store(f(old), std::memory_order_relaxed);  // two plain moves
    }
}

// How long to wait, and what to do before the first wait (release the GIL).
struct Patience {
    std::int64_t timeout_ns;
    std::function<void()> blocks;
};

// Waits longer each time: spins, then yields, then sleeps if it may.
class Backoff {
public:
    Backoff(const Patience &patience, bool sleeps);
    bool wait();  // false: the time is over

private:
    const Patience &patience_;
    std::int64_t started_, deadline_;
    int rounds_ = 0;
    bool sleeps_;
};

// One word, zero when free. An owner that died keeps it: whoever comes then waits in vain,
// for a bounded time.
class Lock {
public:
    Lock(How how, std::uint32_t *word) : how_(how), word_(word) {}
    bool take(const Patience &patience) const;  // false: the time is over
    void give() const;

private:
    bool spin(const Patience &patience) const;
    bool sleep(const Patience &patience) const;

    How how_;
    std::uint32_t *word_;
};

// Two cache lines each: the prefetcher of x86 fetches them in pairs.
struct alignas(128) GateHead {
    std::uint32_t closed_by;  // member + 1 of the snapshot that is being taken, or 0
    std::byte padding[124];
};
struct alignas(128) GateMember {
    std::uint32_t inside;  // its writers that are within an update
    std::byte padding[4];
    std::uint64_t adds;  // its updates so far
    std::byte more[112];
};

// Lets a reader see the model between updates.
//
// A writer counts itself in, then looks at the gate; a snapshot closes the gate, then looks
// at the counts. All four are sequentially consistent, so at least one of the two sees the
// other: the writer goes back out, or the snapshot waits for it. Who left before the copy
// began released what it wrote; who enters after it acquires the opened gate.
class GateWords {
public:
    GateWords(std::byte *memory, int index, int size);
    static std::size_t bytes(int size);

    // Both: false: the time is over.
    bool enter(const Patience &patience) const;
    // Closes the gate and waits until nobody is inside; opens it again if somebody stays.
    bool close(const Patience &patience) const;
    void open() const;  // what this member has closed
    void leave() const;
    void count(std::uint64_t adds) const;

    bool closed() const;
    int closed_by() const;  // -1: nobody
    std::vector<int> inside() const;
    std::uint64_t version() const;  // the sum of all adds

private:
    GateHead *head_;
    GateMember *members_;
    int index_, size_;
};

// The rows of one call: each is an update of its own to locks and to snapshots.
class Section {
public:
    enum class Late { nothing, gate, lock };

    // `gate` may be null.
    Section(const GateWords *gate, Lock lock, const Patience &patience)
        : gate_(gate), lock_(lock), patience_(patience) {
        enter();
    }
    ~Section() { leave(); }
    Section(const Section &) = delete;
    Section &operator=(const Section &) = delete;

    // Before each update, done() after it. False: waited too long, late() says for what.
    bool begin() {
        if (gate_ != nullptr && gate_->closed()) {  // let the snapshot have its turn
            leave();
            enter();
        }
        if (late_ == Late::nothing && !lock_.take(patience_))
            late_ = Late::lock;
        return late_ == Late::nothing;
    }
    void done() {
        lock_.give();
        ++updates_;
        if (++fresh_ == kFlush)
            flush();
    }
    Late late() const { return late_; }
    std::size_t updates() const { return updates_; }

private:
    static constexpr std::uint64_t kFlush = 64;

    void enter() {
        if (gate_ == nullptr)
            return;
        inside_ = gate_->enter(patience_);
        if (!inside_)
            late_ = Late::gate;
    }
    void leave() {
        flush();
        if (inside_)
            gate_->leave();
        inside_ = false;
    }
    void flush() {
        if (gate_ != nullptr && fresh_ != 0)
            gate_->count(fresh_);
        fresh_ = 0;
    }

    const GateWords *gate_;
    Lock lock_;
    const Patience &patience_;
    bool inside_ = false;
    Late late_ = Late::nothing;
    std::uint64_t fresh_ = 0;
    std::size_t updates_ = 0;
};

}  // namespace mpiml::hogwild
