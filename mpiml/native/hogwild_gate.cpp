// The waits of hogwild.hpp: locks, and the gate between writers and snapshots.
#include <algorithm>
#include <cerrno>
#include <ctime>

#include <sched.h>

#include "hogwild.hpp"
#include "waiting.hpp"

namespace mpiml::hogwild {

namespace {

using Word = std::atomic_ref<std::uint32_t>;
using Count = std::atomic_ref<std::uint64_t>;
static_assert(Word::is_always_lock_free && Count::is_always_lock_free,
              "a lock would not reach the other processes");
static_assert(sizeof(GateHead) == 128 && sizeof(GateMember) == 128);

constexpr int kSpins = 64;
constexpr std::int64_t kYieldNs = 500'000;
constexpr long kSleepNs = 50'000;

// Of the mutex: Drepper, "Futexes Are Tricky", 2011, the second one.
constexpr std::uint32_t kFree = 0, kTaken = 1, kAwaited = 2;

void futex_wake_one(std::uint32_t *word) {
    syscall(SYS_futex, word, FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace

Backoff::Backoff(const Patience &patience, bool sleeps)
    : patience_(patience),
      started_(now_ns()),
      deadline_(started_ + patience.timeout_ns),
      sleeps_(sleeps) {}

bool Backoff::wait() {
    if (rounds_ == 0)
        patience_.blocks();
    if (rounds_ < kSpins) {
        ++rounds_;
        pause_cpu();
        return true;
    }
    const std::int64_t now = now_ns();
    if (now >= deadline_)
        return false;
    if (sleeps_ && now - started_ > kYieldNs) {
        timespec t{};
        t.tv_nsec = kSleepNs;
        nanosleep(&t, nullptr);
    } else {
        sched_yield();  // who holds the word may have lost this core
    }
    return true;
}

bool Lock::take(const Patience &patience) const {
    if (how_ != How::spinlock && how_ != How::mutex)
        return true;
    std::uint32_t expected = kFree;
    if (Word(*word_).compare_exchange_strong(expected, kTaken, std::memory_order_acquire,
                                             std::memory_order_relaxed))
        return true;
    return how_ == How::spinlock ? spin(patience) : sleep(patience);
}

bool Lock::spin(const Patience &patience) const {
    Backoff backoff(patience, false);
    const Word word(*word_);
    do {
        if (word.load(std::memory_order_relaxed) == kFree &&
            word.exchange(kTaken, std::memory_order_acquire) == kFree)
            return true;
    } while (backoff.wait());
    return false;
}

bool Lock::sleep(const Patience &patience) const {
    patience.blocks();
    const std::int64_t deadline = now_ns() + patience.timeout_ns;
    while (Word(*word_).exchange(kAwaited, std::memory_order_acquire) != kFree) {
        if (futex_wait_until(word_, kAwaited, deadline) == ETIMEDOUT)
            return false;
    }
    return true;
}

void Lock::give() const {
    if (how_ == How::spinlock)
        Word(*word_).store(kFree, std::memory_order_release);
    else if (how_ == How::mutex &&
             Word(*word_).exchange(kFree, std::memory_order_release) == kAwaited)
        futex_wake_one(word_);
}

GateWords::GateWords(std::byte *memory, int index, int size)
    : head_(reinterpret_cast<GateHead *>(memory)),
      members_(reinterpret_cast<GateMember *>(memory + sizeof(GateHead))),
      index_(index),
      size_(size) {}

std::size_t GateWords::bytes(int size) {
    return sizeof(GateHead) + static_cast<std::size_t>(size) * sizeof(GateMember);
}

bool GateWords::enter(const Patience &patience) const {
    const Word inside(members_[index_].inside);
    inside.fetch_add(1);
    if (Word(head_->closed_by).load() == 0)
        return true;
    leave();
    Backoff backoff(patience, true);
    while (backoff.wait()) {
        if (closed())
            continue;
        inside.fetch_add(1);
        if (Word(head_->closed_by).load() == 0)
            return true;
        leave();
    }
    return false;
}

void GateWords::leave() const {
    Word(members_[index_].inside).fetch_sub(1, std::memory_order_release);
}

bool GateWords::close(const Patience &patience) const {
    const Word gate(head_->closed_by);
    const auto own = static_cast<std::uint32_t>(index_) + 1;
    Backoff backoff(patience, true);
    std::uint32_t other = 0;
    while (!gate.compare_exchange_strong(other, own)) {  // one snapshot at a time
        if (!backoff.wait())
            return false;
        other = 0;
    }
    for (int i = 0; i < size_; ++i) {
        while (Word(members_[i].inside).load() != 0) {
            if (!backoff.wait()) {
                open();
                return false;
            }
        }
    }
    return true;
}

void GateWords::open() const {
    Word(head_->closed_by).store(0, std::memory_order_release);
}

void GateWords::count(std::uint64_t adds) const {
    Count(members_[index_].adds).fetch_add(adds, std::memory_order_relaxed);
}

bool GateWords::closed() const {
    return Word(head_->closed_by).load(std::memory_order_relaxed) != 0;
}

int GateWords::closed_by() const {
    return static_cast<int>(Word(head_->closed_by).load(std::memory_order_relaxed)) - 1;
}

std::vector<int> GateWords::inside() const {
    std::vector<int> found;
    for (int i = 0; i < size_; ++i)
        if (Word(members_[i].inside).load(std::memory_order_relaxed) != 0)
            found.push_back(i);
    return found;
}

std::uint64_t GateWords::version() const {
    std::uint64_t sum = 0;
    for (int i = 0; i < size_; ++i)
        sum += Count(members_[i].adds).load(std::memory_order_relaxed);
    return sum;
}

}  // namespace mpiml::hogwild
