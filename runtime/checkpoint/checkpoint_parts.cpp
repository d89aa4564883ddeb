#include "runtime/checkpoint/checkpoint_parts.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/optimizer/optimizer_state.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"
#include "tp/distributed_module.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/optim/optimizer.h>

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <mutex>

namespace smp {

std::string state_name(size_t optimizer, const std::string& field,
                       const std::string& parameter) {
  return fmt::format("optimizer{}/{}/{}", optimizer, field, parameter);
}

std::string random_name(uint64_t rank) {
  return fmt::format("random/{}", rank);
}

at::Tensor random_state() {
  auto generator = at::detail::getDefaultCPUGenerator();
  std::unique_lock guard{generator.mutex()};
  return generator.get_state();
}

void set_random_state(const at::Tensor& x) {
  auto generator = at::detail::getDefaultCPUGenerator();
  std::unique_lock guard{generator.mutex()};
  generator.set_state(x);
}

std::vector<tensor_box> boxes_of(at::IntArrayRef sizes,
                                 const tensor_slice* slice,
                                 const tensor_slice* rows) {
  tensor_box all{std::vector<int64_t>(sizes.size(), 0), sizes.vec()};
  if (rows)
    all.begin.at(0) = rows->begin;
  if (!slice)
    return {all};
  std::vector<tensor_box> result;
  auto dim = static_cast<size_t>(slice->dim);
  auto begin = all.begin.at(dim); // in the concatenated ranges
  auto end = begin + all.sizes.at(dim);
  int64_t before = 0;
  for (auto& range : slice->ranges()) {
    auto from = std::max(before, begin);
    auto to = std::min(before + range.length, end);
    if (from < to) {
      auto& x = result.emplace_back(all);
      x.begin[dim] = range.begin + from - before;
      x.sizes[dim] = to - from;
    }
    before += range.length;
  }
  return result;
}

void with_weights(const std::vector<distributed_optimizer*>& optimizers,
                  const std::function<void()>& f) {
  std::vector<distributed_optimizer*> averaged;
  for (auto* x : optimizers)
    if (x->is_averaged())
      averaged.push_back(x);
  auto swap = [&] {
    for (auto* x : averaged)
      x->swap_averages();
  };
  swap();
  try {
    f();
  } catch (const std::exception&) {
    swap();
    throw;
  }
  swap();
}

named_tensors fields_of(const distributed_optimizer& x,
                        const distributed_optimizer::known_part& part) {
  auto result = state_of(x.inner(), part.values);
  if (part.is_master)
    result.emplace_back(master_field, part.values);
  if (part.average.defined())
    result.emplace_back(average_field, part.average);
  return result;
}

void set_fields(distributed_optimizer& x,
                const distributed_optimizer::known_part& part,
                const std::function<at::Tensor(const std::string&)>& field) {
  named_tensors state;
  for (auto& known : state_fields(x.inner()))
    if (auto y = field(known.name); y.defined())
      state.emplace_back(known.name, y);
  set_state(x.inner(), part.values, state);
  // Without master weights, the run updated the parameters themselves.
  if (auto y = part.is_master ? field(master_field) : at::Tensor{}; y.defined())
    x.load_master(part, y);
  x.load_average(part, field(average_field));
}

namespace {

/// Collects what this rank writes.
class collector {
public:
  collector(const model_map& map,
            std::vector<const distributed_optimizer*> optimizers)
    : map_(map),
      rank_(session::current().internals()),
      optimizers_(std::move(optimizers)) {
    // nop
  }

  std::vector<held_tensor> states() {
    for (uint32_t i = 0; i < map_.model().tensors.size(); ++i)
      add_states(i);
    return std::move(result_);
  }

  std::vector<held_tensor> run() {
    auto& tensors = map_.model().tensors;
    for (uint32_t i = 0; i < tensors.size(); ++i)
      if (auto& x = tensors[i];
          map_.owned(i) && !x.is_attribute && x.tensor.defined())
        add(i);
    result_.push_back({.role = tensor_role::random,
                       .name = random_name(rank_.self().value),
                       .value = random_state()});
    return std::move(result_);
  }

private:
  uint64_t position(comm_group x) const {
    return rank_.layout().rank(x, rank_.self());
  }

  void add(uint32_t i) {
    auto& x = map_.model().tensors[i];
    if (x.is_buffer) {
      result_.push_back({.role = tensor_role::buffer,
                         .name = x.names.front(),
                         .value = x.tensor,
                         .replica = position(comm_group::dp)});
      return;
    }
    auto* slice = map_.slice(i);
    // A tensor that is not sliced is the same on all ranks that share it.
    if (position(comm_group::rdp) == 0
        && (slice ? slice->length > 0 : position(comm_group::tp) == 0))
      result_.push_back({.role = tensor_role::parameter,
                         .name = x.names.front(),
                         .value = x.tensor,
                         .slice = slice});
    add_states(i);
  }

  void add_states(uint32_t i) {
    auto& x = map_.model().tensors[i];
    if (!map_.owned(i) || x.is_buffer || x.is_attribute || !x.tensor.defined())
      return;
    for (size_t k = 0; k < optimizers_.size(); ++k)
      add_state(k, i, map_.slice(i));
  }

  void add_state(size_t number, uint32_t i, const tensor_slice* slice) {
    auto& x = map_.model().tensors[i];
    auto& optimizer = *optimizers_[number];
    auto part = optimizer.part_of(x.tensor, slice);
    if (!part || (!part->alone && position(comm_group::rdp) > 0))
      return;
    auto* held = part->where != nullptr ? part->where : slice;
    // For counts, which are not sliced.
    auto is_peer = slice != nullptr || !part->alone;
    auto only_one = part->first && (!is_peer || position(comm_group::tp) == 0);
    for (auto& [field, y] : fields_of(optimizer, *part)) {
      auto of_part = held && y.dim() > 0 && y.sizes() == part->values.sizes();
      if (of_part ? held->length > 0 : only_one)
        result_.push_back({.role = tensor_role::optimizer,
                           .name = state_name(number, field, x.names.front()),
                           .value = y,
                           .slice = of_part ? slice : nullptr,
                           .rows = of_part ? part->where : nullptr,
                           .state_of = {i, field}});
    }
  }

  const model_map& map_;
  const rank_context& rank_;
  const std::vector<const distributed_optimizer*> optimizers_;
  std::vector<held_tensor> result_;
};

} // namespace

std::vector<held_tensor>
held_tensors(const distributed_model_base& model,
             const std::vector<distributed_optimizer*>& optimizers) {
  return collector{model.state().map(), {optimizers.begin(), optimizers.end()}}
    .run();
}

std::vector<held_tensor> held_states(const model_map& map,
                                     const distributed_optimizer& optimizer) {
  return collector{map, {&optimizer}}.states();
}

std::vector<group_member>
group_members(const distributed_model_base& model,
              const std::vector<distributed_optimizer*>& optimizers) {
  auto& walked = model.state().model();
  std::vector<group_member> result;
  for (uint32_t k = 0; k < optimizers.size(); ++k) {
    auto& groups = optimizers[k]->inner().param_groups();
    for (uint32_t g = 0; g < groups.size(); ++g)
      for (auto& p : groups[g].params())
        if (auto i = walked.find(optimizers[k]->parameter_of(p)); i >= 0)
          result.push_back(
            {k, g, walked.tensors[static_cast<size_t>(i)].names.front()});
  }
  return result;
}

} // namespace smp
