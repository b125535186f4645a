// The members of a collective on one host: where they meet, and the memory they share.
//
// Each member owns two slots, used in turn by the points at which all meet. To arrive
// at point k a member writes what it does (a hash) and perhaps a small payload into
// slot k % 2 and then k into the slot's `phase`; it is past the point when every slot
// k % 2 shows k. A slot is written again for k + 2, and whoever does that has seen all
// others arrive at k + 1, so all have read what stood there for k: a fast member
// cannot lap a slow one, and equality is an exact test.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan.hpp"

namespace mpiml {

// Payload that travels with the phase; up to 48 bytes within the same cache line.
inline constexpr std::size_t kInline = 104;

// Two cache lines: the prefetcher of x86 fetches them in pairs.
struct alignas(128) Slot {
    std::uint32_t phase;     // the point its owner has arrived at
    std::uint32_t sleepers;  // who sleeps until it changes
    std::uint64_t hash;      // what the owner does there
    std::byte payload[kInline];
    std::uint32_t gone;      // the owner has left for good (first slot only)
    std::byte padding[4];
};
static_assert(sizeof(Slot) == 128);

struct Layout {
    std::size_t box_bytes, segments_at, segment_bytes, shared_at, shared_bytes;
};

class Meeting {
public:
    enum class Seen { all, late, left };

    Meeting(Slot *slots, int index, int size, std::int64_t spin_ns, std::int64_t yield_ns)
        : slots_(slots), index_(index), size_(size), spin_ns_(spin_ns), yield_ns_(yield_ns) {}

    // The slot this member writes for the point it comes to next.
    Slot &next() const { return slot(index_, phase_ + 1); }

    void arrive(std::uint64_t hash);
    // Whether all have arrived, after a short look only.
    Seen look() const;
    // Spins, yields, then sleeps until all have, or until the deadline.
    Seen wait(std::int64_t deadline_ns) const;
    bool all_do_the_same() const;
    std::vector<int> missing() const;
    std::vector<int> gone() const;  // those of the missing that have left
    void leave() const;

    Slot &at_point(int member) const { return slot(member, phase_); }
    std::uint32_t phase() const { return phase_; }
    int index() const { return index_; }
    int size() const { return size_; }

private:
    Slot &slot(int member, std::uint32_t phase) const {
        return slots_[2 * static_cast<std::size_t>(member) + (phase & 1)];
    }
    bool arrived(int member) const;
    bool left(int member) const;
    Seen wait_for(int member, std::int64_t started, std::int64_t deadline_ns) const;
    Seen sleep_on(int member, std::int64_t deadline_ns) const;

    Slot *slots_;
    int index_, size_;
    std::int64_t spin_ns_, yield_ns_;
    std::uint32_t phase_ = 0;
};

}  // namespace mpiml
