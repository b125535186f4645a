// Writes the plans of a gang's member; Python does so, once for an operation.
#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>

#include "bytes.hpp"
#include "plan.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using mpiml::Access;
using mpiml::Bytes;
using mpiml::Dtype;
using mpiml::Op;
using mpiml::Plan;
using mpiml::refuse;
using mpiml::Step;

namespace {

void add(Plan &plan, Step step) {
    const bool reduces = step.kind == Step::Kind::reduce || step.kind == Step::Kind::reduce_posted;
    plan.bytes += step.count * (reduces ? mpiml::itemsize(step.dtype) : 1);
    plan.steps.push_back(step);
}

Dtype dtype_of(int code) {
    if (code < 0 || code > static_cast<int>(Dtype::c128))
        refuse("Plan: no dtype has the code " + std::to_string(code));
    return static_cast<Dtype>(code);
}

Op op_of(int code) {
    if (code < 0 || code > static_cast<int>(Op::prod))
        refuse("Plan: no operation has the code " + std::to_string(code));
    return static_cast<Op>(code);
}

void add_update(Plan &plan, int dtype, int op, double divisor, std::size_t at, std::size_t count,
                int where, int rule, bool wide, nb::handle param, const nb::tuple &states) {
    auto target = std::make_unique<Bytes>(param, Access::write, "Plan.update: param");
    std::vector<std::unique_ptr<Bytes>> kept;
    for (const nb::handle state : states)
        kept.push_back(std::make_unique<Bytes>(state, Access::write, "Plan.update: state"));
    auto fused = std::make_shared<mpiml::Fused>(
        dtype_of(dtype), op_of(op), divisor, at, count, static_cast<mpiml::Rule>(rule), wide,
        std::move(target), std::move(kept));
    Step step{Step::Kind::update};
    step.where = where;
    step.fused = plan.fused.size();
    plan.bytes += fused->bytes();
    plan.fused.push_back(std::move(fused));
    plan.steps.push_back(step);
}

}  // namespace

void bind_plan(nb::module_ &m) {
    nb::class_<Plan>(m, "Plan", nb::is_final(), "The steps of one operation of a `Gang`'s member.")
        .def(nb::init<>())
        .def("sync", [](Plan &p) { add(p, {Step::Kind::sync}); },
             "Meet all members; the first meeting compares what they do.")
        .def("reduce",
             [](Plan &p, int dtype, int op, double divisor, std::size_t at, std::size_t count,
                int where, std::optional<std::size_t> to) {
                 add(p, {Step::Kind::reduce, dtype_of(dtype), op_of(op), divisor, at,
                         to.value_or(at), count, where});
             },
             "dtype"_a, "op"_a, "divisor"_a, "at"_a, "count"_a, "where"_a, "to"_a = nb::none(),
             "Combine `count` elements at byte `at` of all segments, in the order of members; "
             "to byte `to` of what `where` says, the same by default.")
        .def("pull",
             [](Plan &p, int member, std::size_t at, std::size_t nbytes) {
                 add(p, {Step::Kind::pull, Dtype::u8, Op::sum, 1.0, at, 0, nbytes, member});
             },
             "member"_a, "at"_a, "nbytes"_a, "Copy from a member's segment to the own one.")
        .def("fetch",
             [](Plan &p, std::size_t shared, std::size_t at, std::size_t nbytes) {
                 add(p, {Step::Kind::fetch, Dtype::u8, Op::sum, 1.0, at, shared, nbytes});
             },
             "shared"_a, "at"_a, "nbytes"_a, "Copy from the shared result to `output`.")
        .def("put",
             [](Plan &p, std::size_t at, std::size_t nbytes, std::size_t to) {
                 add(p, {Step::Kind::put, Dtype::u8, Op::sum, 1.0, at, to, nbytes});
             },
             "at"_a, "nbytes"_a, "to"_a, "Copy bytes of `in` to the own segment.")
        .def("get",
             [](Plan &p, int member, std::size_t from, std::size_t at, std::size_t nbytes) {
                 add(p, {Step::Kind::get, Dtype::u8, Op::sum, 1.0, at, from, nbytes, member});
             },
             "member"_a, "from_"_a, "at"_a, "nbytes"_a,
             "Copy bytes of a member's segment to `output`.")
        .def("post",
             [](Plan &p, std::size_t at, std::size_t nbytes, std::size_t box, bool external,
                bool in_slot) {
                 add(p, {Step::Kind::post, Dtype::u8, Op::sum, 1.0, at, box, nbytes,
                         mpiml::kOwn, external, in_slot});
             },
             "at"_a, "nbytes"_a, "box"_a = 0, "external"_a = false, "in_slot"_a = false,
             "Copy bytes of the own segment, or of `in`, to the mailbox of the next meeting.")
        .def("reduce_posted",
             [](Plan &p, int dtype, int op, double divisor, std::size_t box, std::size_t at,
                std::size_t count, int where, bool in_slot) {
                 add(p, {Step::Kind::reduce_posted, dtype_of(dtype), op_of(op), divisor, at, box,
                         count, where, false, in_slot});
             },
             "dtype"_a, "op"_a, "divisor"_a, "box"_a, "at"_a, "count"_a, "where"_a,
             "in_slot"_a = false,
             "Combine what all posted for the last meeting.")
        .def("gather",
             [](Plan &p, std::size_t at, std::size_t nbytes, bool in_slot) {
                 add(p, {Step::Kind::gather, Dtype::u8, Op::sum, 1.0, at, 0, nbytes,
                         mpiml::kOwn, false, in_slot});
             },
             "at"_a, "nbytes"_a, "in_slot"_a = false,
             "Copy what each has posted to `output`, in the order of members.")
        .def("update", &add_update, "dtype"_a, "op"_a, "divisor"_a, "at"_a, "count"_a,
             "where"_a, "rule"_a, "wide"_a, "param"_a, "states"_a,
             "Combine gradients as `reduce` does, and do an optimizer step with them.")
        .def("set_coefficients",
             [](Plan &p, const std::array<double, mpiml::kCoefficients> &c) {
                 p.coefficients = mpiml::coefficients(c.data());
             },
             "coefficients"_a, "The numbers of the next step of an optimizer.")
        .def("__len__", [](const Plan &p) { return p.steps.size(); });
}
