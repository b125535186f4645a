// A collective operation of one member, as a short program of steps.
//
// Python writes the program once, when an operation is first used, and `Gang::run`
// goes through it each time. So every collective is a few lines of Python, and none
// pays for Python between its steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reduce.hpp"

namespace mpiml {

// Where a reduction goes to; a number of 0 or more is the segment of that member.
enum Where : int { kAll = -1, kOwn = -2, kShared = -3, kOut = -4 };

struct Step {
    enum class Kind { sync, reduce, pull, fetch, post, reduce_posted, gather } kind;
    Dtype dtype = Dtype::f32;
    Op op = Op::sum;
    double divisor = 1.0;
    std::size_t at = 0;      // bytes from the begin of a segment, of the result or of `out`
    std::size_t box = 0;     // bytes from the begin of a mailbox
    std::size_t count = 0;   // elements of a reduction, bytes of anything else
    int where = kOwn;        // of a reduction: its target; of a pull: the member
    bool external = false;   // posts from `in`, not from the own segment
    bool in_slot = false;    // what is posted travels with the phase, not in a mailbox
};

struct Plan {
    std::vector<Step> steps;
    std::size_t bytes = 0;  // moved by this member: whether giving up the GIL pays
};

}  // namespace mpiml
