// A collective operation of one member, as a short program of steps.
//
// Python writes the program once, when an operation is first used, and `Gang::run`
// goes through it each time. So every collective is a few lines of Python, and none
// pays for Python between its steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "fused.hpp"
#include "reduce.hpp"

namespace mpiml {

// Where a reduction goes to; a number of 0 or more is the segment of that member.
enum Where : int { kAll = -1, kOwn = -2, kShared = -3, kOut = -4 };

struct Step {
    enum class Kind {
        sync, reduce, pull, fetch, put, get, post, reduce_posted, gather, update,
    } kind;
    Dtype dtype = Dtype::f32;
    Op op = Op::sum;
    double divisor = 1.0;
    std::size_t at = 0;      // bytes from the begin of a segment, of the result or of `out`
    std::size_t box = 0;     // the other place: in a mailbox, in a segment or the shared result
    std::size_t count = 0;   // elements of a reduction, bytes of anything else
    int where = kOwn;        // of a reduction: its target; of pull and get: the member;
                             // of an update: its source, kAll or where the sum is already
    bool external = false;   // posts from `in`, not from the own segment
    bool in_slot = false;    // what is posted travels with the phase, not in a mailbox
    std::size_t fused = 0;   // of an update: which of the plan's
};

struct Plan {
    std::vector<Step> steps;
    std::vector<std::shared_ptr<Fused>> fused;
    Coefficients coefficients;  // of the updates, set before each run
    std::size_t bytes = 0;  // moved by this member: whether giving up the GIL pays
};

}  // namespace mpiml
