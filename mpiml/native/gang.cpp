// Runs the plans of a gang's member, and shows both to Python.
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bytes.hpp"
#include "gang.hpp"
#include "gil.hpp"
#include "waiting.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using mpiml::Access;
using mpiml::Bytes;
using mpiml::Plan;
using mpiml::refuse;
using mpiml::Slot;
using mpiml::Step;

namespace {

enum Status : int { kDone = 0, kWaiting = 1, kMismatch = 2, kLeft = 3 };

constexpr std::size_t kPage = 4096;
// Results beyond this do not fit the caches anyway, so their stores go past them.
constexpr std::size_t kStreamFrom = std::size_t{8} << 20;

std::size_t up(std::size_t n, std::size_t unit) { return (n + unit - 1) / unit * unit; }

mpiml::Layout lay_out(int size, std::size_t box, std::size_t segment, std::size_t shared) {
    mpiml::Layout l{};
    const auto n = static_cast<std::size_t>(size);
    l.box_bytes = up(box, 128);
    l.segments_at = up(n * 2 * (sizeof(Slot) + l.box_bytes), kPage);
    l.segment_bytes = up(segment, kPage);
    l.shared_at = l.segments_at + n * l.segment_bytes;
    l.shared_bytes = up(shared, kPage);
    return l;
}

class Gang {
public:
    Gang(nb::handle memory, int index, int size, std::size_t box, std::size_t segment,
         std::size_t shared, std::int64_t spin_us, std::int64_t yield_us, bool threads)
        : memory_(memory, Access::write, "Gang: memory"),
          layout_(lay_out(checked(index, size), box, segment, shared)),
          meeting_(reinterpret_cast<Slot *>(memory_.data()), index, size, spin_us * 1000,
                   yield_us * 1000),
          threads_(threads) {
        const std::size_t needed = layout_.shared_at + layout_.shared_bytes;
        if (memory_.size() < needed)
            refuse("Gang: expected " + std::to_string(needed) + " bytes of memory, got " +
                   std::to_string(memory_.size()));
        if (reinterpret_cast<std::uintptr_t>(memory_.data()) % alignof(Slot) != 0)
            refuse("Gang: expected memory aligned to 128 bytes");
        segments_.resize(static_cast<std::size_t>(size));
        for (int i = 0; i < size; ++i)
            segments_[static_cast<std::size_t>(i)] =
                memory_.data() + layout_.segments_at +
                static_cast<std::size_t>(i) * layout_.segment_bytes;
    }

    int run(const Plan &plan, std::uint64_t hash, bool compare, std::int64_t timeout_us,
            nb::handle in, nb::handle out) {
        if (busy() && running_ != &plan)
            throw std::runtime_error("Gang.run: another plan was left halfway");
        running_ = &plan;
        std::optional<Bytes> from, to;
        if (!in.is_none())
            from.emplace(in, Access::read, "Gang.run: input");
        if (!out.is_none())
            to.emplace(out, Access::write, "Gang.run: output");
        in_ = from ? from->data() : nullptr;
        out_ = to ? to->data() : nullptr;
        in_bytes_ = from ? from->size() : 0;
        out_bytes_ = to ? to->size() : 0;
        std::optional<mpiml::Released> release;
        if (threads_ || plan.bytes > mpiml::kReleaseGilAbove)
            release.emplace();
        while (pc_ < plan.steps.size()) {
            const Step &step = plan.steps[pc_];
            if (step.kind == Step::Kind::sync) {
                const int status = sync(hash, compare, timeout_us, release);
                if (status != kDone)
                    return status;
            } else {
                perform(step, plan);
            }
            ++pc_;
        }
        pc_ = 0;
        met_ = false;
        return kDone;
    }

    std::vector<int> missing() const {
        return arrived_ ? meeting_.missing() : std::vector<int>{};
    }
    std::vector<int> gone() const { return arrived_ ? meeting_.gone() : std::vector<int>{}; }
    void leave() const { meeting_.leave(); }
    bool busy() const { return pc_ != 0 || arrived_; }
    std::size_t segment_at(int member) const {
        return layout_.segments_at + static_cast<std::size_t>(member) * layout_.segment_bytes;
    }
    std::size_t shared_at() const { return layout_.shared_at; }

private:
    static int checked(int index, int size) {
        if (size < 1 || index < 0 || index >= size)
            refuse("Gang: expected an index in 0.." + std::to_string(size - 1) + ", got " +
                   std::to_string(index));
        return size;
    }

    int sync(std::uint64_t hash, bool compare, std::int64_t timeout_us,
             std::optional<mpiml::Released> &release) {
        using Seen = mpiml::Meeting::Seen;
        if (!arrived_) {
            meeting_.arrive(hash);
            arrived_ = true;
        }
        Seen seen = meeting_.look();
        if (seen != Seen::all) {
            if (!release)
                release.emplace();
            seen = meeting_.wait(mpiml::now_ns() + timeout_us * 1000);
        }
        if (seen == Seen::late)
            return kWaiting;
        if (seen == Seen::left)
            return kLeft;
        arrived_ = false;
        if (met_ || !compare)
            return kDone;
        met_ = true;  // the first point of an operation is where it is compared
        if (meeting_.all_do_the_same())
            return kDone;
        pc_ = 0;
        met_ = false;
        return kMismatch;
    }

    void perform(const Step &s, const Plan &plan) {
        switch (s.kind) {
        case Step::Kind::reduce: {
            sources_.assign(segments_.begin(), segments_.end());
            for (const void *&p : sources_)
                p = static_cast<const std::byte *>(p) + s.at;
            reduce_to(s, s.box);
            break;
        }
        case Step::Kind::reduce_posted: {
            sources_.resize(segments_.size());
            for (int i = 0; i < meeting_.size(); ++i)
                sources_[static_cast<std::size_t>(i)] = posted(i, s, true);
            reduce_to(s, s.at);
            break;
        }
        case Step::Kind::pull:
            std::memcpy(own() + s.at, segments_[static_cast<std::size_t>(s.where)] + s.at, s.count);
            break;
        case Step::Kind::fetch:
            std::memcpy(within(out_, out_bytes_, s.at, s.count), shared() + s.box, s.count);
            break;
        case Step::Kind::put:
            std::memcpy(within(own(), layout_.segment_bytes, s.box, s.count),
                        within(in_, in_bytes_, s.at, s.count), s.count);
            break;
        case Step::Kind::get:
            std::memcpy(within(out_, out_bytes_, s.at, s.count),
                        within(segments_[static_cast<std::size_t>(s.where)],
                               layout_.segment_bytes, s.box, s.count),
                        s.count);
            break;
        case Step::Kind::post: {
            const std::byte *source = s.external ? within(in_, in_bytes_, s.at, s.count) : own() + s.at;
            // the box of the point that comes next
            std::memcpy(posted(meeting_.index(), s, false), source, s.count);
            break;
        }
        case Step::Kind::gather: {
            for (int i = 0; i < meeting_.size(); ++i) {
                const std::size_t place = s.at + static_cast<std::size_t>(i) * s.count;
                std::memcpy(within(out_, out_bytes_, place, s.count),
                            posted(i, s, true), s.count);
            }
            break;
        }
        case Step::Kind::update: {
            const std::byte *one = s.where == mpiml::kShared ? shared()
                                   : s.where < 0             ? own()
                                   : segments_[static_cast<std::size_t>(s.where)];
            if (s.where == mpiml::kAll)
                plan.fused[s.fused]->run(segments_.data(), segments_.size(), plan.coefficients);
            else
                plan.fused[s.fused]->run(&one, 1, plan.coefficients);
            break;
        }
        case Step::Kind::sync:
            break;
        }
    }

    void reduce_to(const Step &s, std::size_t at) {
        targets_.clear();
        bool stream = false;
        if (s.where == mpiml::kAll) {
            for (std::byte *segment : segments_)
                targets_.push_back(segment + at);
        } else if (s.where == mpiml::kShared) {
            targets_.push_back(shared() + at);
            stream = s.count * mpiml::itemsize(s.dtype) >= kStreamFrom;
        } else if (s.where == mpiml::kOut) {
            targets_.push_back(within(out_, out_bytes_, at, s.count * mpiml::itemsize(s.dtype)));
        } else {
            const int member = s.where == mpiml::kOwn ? meeting_.index() : s.where;
            targets_.push_back(segments_[static_cast<std::size_t>(member)] + at);
        }
        mpiml::reduce(s.dtype, s.op, s.count, sources_.data(), static_cast<int>(sources_.size()),
                      s.divisor, targets_.data(), static_cast<int>(targets_.size()), stream);
    }

    std::byte *own() const { return segments_[static_cast<std::size_t>(meeting_.index())]; }
    std::byte *shared() const { return memory_.data() + layout_.shared_at; }

    // Where a member's payload lies, for the point that was met last or that comes next.
    std::byte *posted(int member, const Step &s, bool met) const {
        const std::uint32_t point = meeting_.phase() + (met ? 0 : 1);
        const auto slot = 2 * static_cast<std::size_t>(member) + (point & 1);
        if (s.in_slot)
            return reinterpret_cast<Slot *>(memory_.data())[slot].payload + s.box;
        const std::size_t slots = 2 * static_cast<std::size_t>(meeting_.size()) * sizeof(Slot);
        return memory_.data() + slots + slot * layout_.box_bytes + s.box;
    }

    template <typename T>
    static T *within(T *base, std::size_t size, std::size_t at, std::size_t count) {
        // Sizes were checked by Python, which wrote the plan; this guards its mistakes.
        if (base == nullptr || at > size || count > size - at)
            std::abort();
        return base + at;
    }

    Bytes memory_;
    mpiml::Layout layout_;
    mpiml::Meeting meeting_;
    bool threads_;
    std::vector<std::byte *> segments_;
    std::vector<const void *> sources_;
    std::vector<void *> targets_;
    std::byte *in_ = nullptr, *out_ = nullptr;
    std::size_t in_bytes_ = 0, out_bytes_ = 0;
    const Plan *running_ = nullptr;
    std::size_t pc_ = 0;      // the step that comes next
    bool arrived_ = false;    // at the point of that step
    bool met_ = false;        // past the first point of the operation
};

}  // namespace

void bind_gang(nb::module_ &m) {
    m.attr("GANG_INLINE") = mpiml::kInline;
    m.def("gang_bytes",
          [](int size, std::size_t box, std::size_t segment, std::size_t shared) {
              const mpiml::Layout l = lay_out(size, box, segment, shared);
              return l.shared_at + l.shared_bytes;
          },
          "size"_a, "box"_a, "segment"_a, "shared"_a, "Bytes that a `Gang` of these parts needs.");
    nb::class_<Gang>(m, "Gang", nb::is_final(),
                     "A member of a group that shares memory; runs its `Plan`s.")
        .def(nb::init<nb::handle, int, int, std::size_t, std::size_t, std::size_t, std::int64_t,
                      std::int64_t, bool>(),
             "memory"_a, "index"_a, "size"_a, "box"_a, "segment"_a, "shared"_a, "spin_us"_a,
             "yield_us"_a, "threads"_a)
        .def("run", &Gang::run, "plan"_a, "hash"_a, "compare"_a, "timeout_us"_a,
             "input"_a.none() = nb::none(), "output"_a.none() = nb::none(),
             "Begin or resume a plan: 0 done, 1 somebody is late, 2 they differ, 3 one has left.")
        .def("missing", &Gang::missing, "Members that this one waits for.")
        .def("gone", &Gang::gone, "Those of the missing that have left.")
        .def("leave", &Gang::leave, "Tell the others that this member will never come again.")
        .def_prop_ro("busy", &Gang::busy, "Whether a plan has been begun and not finished.")
        .def("segment_at", &Gang::segment_at, "member"_a, "Where a member's segment begins.")
        .def_prop_ro("shared_at", &Gang::shared_at, "Where the shared result begins.");
}
