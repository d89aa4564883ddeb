#include "runtime/verify/pipeline_evidence.hpp"

#include "runtime/collectives/agreement.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/sharing/native_modules.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "transport/bytes.hpp"

#include <ATen/TensorOperators.h>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

namespace smp {

// -- messages -----------------------------------------------------------------

template <class Inspector>
bool inspect(Inspector& f, mismatch& x) {
  return f.object(x).fields(
    f.field("place", x.place), f.field("pipeline", x.pipeline),
    f.field("reference", x.reference), f.field("difference", x.difference),
    f.field("bound", x.bound));
}

template <class Inspector>
bool inspect(Inspector& f, finding& x) {
  return f.object(x).fields(
    f.field("kind", x.kind), f.field("step", x.step),
    f.field("module", x.module), f.field("tensor", x.tensor),
    f.field("microbatch", x.microbatch), f.field("call", x.call),
    f.field("rank", x.rank), f.field("what", x.what),
    f.field("values", x.values));
}

namespace {

/// A tensor of a map, on its way to another rank.
using sent_tensor = std::pair<std::string, tensor_ref>;

/// @returns the first kind of the part of a step in which a finding belongs
finding_kind part_of_step(finding_kind x) {
  switch (x) {
    case finding_kind::argument:
    case finding_kind::result:
      return finding_kind::calls;
    case finding_kind::gradient:
      return finding_kind::result_gradient;
    default:
      return x;
  }
}

} // namespace

pipeline_evidence::pipeline_evidence(rank_runtime& x) : rank_(x) {
  // nop
}

pipeline_evidence::~pipeline_evidence() {
  // Another one may observe by now, or the rank be gone.
  if (observes_)
    rank_.observe(nullptr);
}

void pipeline_evidence::begin(const distributed_model_base& x) {
  model_ = &x;
  names_.clear();
  for (auto& t : x.state().model().tensors)
    if (!t.is_attribute)
      names_.push_back({t.names, t.is_buffer});
}

void pipeline_evidence::observe(bool on) {
  observes_ = on;
  rank_.observe(on ? &logger_ : nullptr);
}

observed_step pipeline_evidence::gather_log() {
  auto& modules = model_->state().model();
  auto mine = logger_.take(
    [&](const void* object) -> std::optional<std::string> {
      auto index = modules.module_index.find(object);
      if (index == modules.module_index.end())
        return std::nullopt;
      return modules.modules[index->second].names.front();
    });
  auto& ranks = rank_.pipeline();
  auto all = rank_.exchange().all_gather(ranks, "smp.verify.log",
                                         to_payload(mine));
  observed_step result;
  for (size_t index = 0; index < all.size() && rank_.pp_rank() == 0; ++index) {
    auto told = from_payload<observed_step>(all[index], "numbers of a step",
                                            ranks[index]);
    for (auto& call : told.calls) {
      call.rank = ranks[index].value;
      result.calls.push_back(std::move(call));
    }
    for (auto& pass : told.passes)
      result.passes.push_back(std::move(pass));
  }
  return result;
}

void pipeline_evidence::take_state(
  const std::map<std::string, at::Tensor>& state, step_evidence& result) const {
  for (auto& names : names_) {
    auto found = state.find(names.all.front());
    if (found != state.end())
      (names.is_buffer ? result.buffers : result.parameters).insert(*found);
  }
}

// -- of the replicas' pp_rank 0 -----------------------------------------------

std::vector<rank_id> pipeline_evidence::replicas() const {
  return rank_.layout().members(comm_group::dp, rank_.self());
}

void pipeline_evidence::average_over_replicas(step_evidence& x,
                                              bool first_buffers) const {
  auto group = replicas();
  if (group.size() == 1)
    return;
  auto replicas = static_cast<double>(group.size());
  x.loss = rank_.exchange()
             .all_reduce_sum(group, "smp.verify.loss", {x.loss})
             .front()
           / replicas;
  std::vector<sent_tensor> mine;
  for (auto& [name, gradient] : x.gradients)
    mine.emplace_back(name, to_tensor_ref(gradient, true));
  std::map<std::string, at::Tensor> sums;
  for (auto& other : rank_.exchange().all_gather(group, "smp.verify.gradients",
                                                 to_payload(mine)))
    for (auto& [name, ref] :
         from_payload<std::vector<sent_tensor>>(other, "gradients")) {
      auto gradient = to_tensor(ref);
      auto [sum, added] = sums.emplace(name, gradient);
      if (!added)
        sum->second = sum->second + gradient;
    }
  for (auto& [name, gradient] : sums)
    gradient = gradient / replicas;
  x.gradients = std::move(sums);
  if (first_buffers)
    take_first_buffers(x, group);
}

/// The buffers of the first replica count for all.
void pipeline_evidence::take_first_buffers(
  step_evidence& x, const std::vector<rank_id>& group) const {
  std::vector<sent_tensor> mine;
  if (rank_.self() == group.front())
    for (auto& [name, buffer] : x.buffers)
      mine.emplace_back(name, to_tensor_ref(buffer, true));
  auto all = rank_.exchange().all_gather(group, "smp.verify.buffers",
                                         to_payload(mine));
  for (auto& [name, ref] :
       from_payload<std::vector<sent_tensor>>(all.front(), "buffers"))
    x.buffers[name] = to_tensor(ref);
}

/// Calls `f(module, below)` for each module that ranks share and each module of
/// its subtree, itself included.
template <class F>
void pipeline_evidence::each_in_shared(F f) const {
  auto& map = model_->state().map();
  for (uint32_t i = 0; i < map.model().modules.size(); ++i)
    if (map.is_shared(module_id{i}))
      for (auto below : map.model().subtree(i))
        f(i, below);
}

void pipeline_evidence::compare(step_comparison_input x,
                                verify_summary& result) const {
  auto& model = model_->state().map().model();
  result.shared = 0;
  each_in_shared([&](uint32_t shared, uint32_t i) {
    result.shared += shared == i;
    // It computes the modules below it itself.
    if (i != shared)
      x.inside.insert(model.modules[i].names.front());
    if (auto norm = native_of(model, i); norm && norm->type == "LayerNorm")
      for (auto t : model.modules[i].tensors)
        x.summed_apart.insert(model.tensors[t].names.front());
  });
  x.root_rank = rank_.pipeline().front().value;
  compare_step(x, result);
}

void pipeline_evidence::gather_findings(verify_summary& result) {
  auto group = replicas();
  auto& found = result.findings;
  std::vector<finding> fresh{found.begin() + static_cast<ptrdiff_t>(told_),
                             found.end()};
  auto all = rank_.exchange().all_gather(group, "smp.verify.findings",
                                         to_payload(fresh));
  if (rank_.self() == group.front())
    for (size_t replica = 1; replica < all.size(); ++replica)
      for (auto& x :
           from_payload<std::vector<finding>>(all[replica], "findings")) {
        x.what += fmt::format(" (replica {})", replica);
        result.add(std::move(x));
      }
  // The cause first, whichever replica found it. Each replica's findings of a
  // part are in the order of the step already.
  std::stable_sort(found.begin() + static_cast<ptrdiff_t>(told_), found.end(),
                   [](auto& a, auto& b) {
                     return part_of_step(a.kind) < part_of_step(b.kind);
                   });
  mark_told(result);
}

// -- of all ranks -------------------------------------------------------------

void pipeline_evidence::share_differences(verify_summary& result) const {
  result.differences = agree_everywhere(rank_, "smp.verify.differences",
                                        [&] { return result.differences; });
}

} // namespace smp
