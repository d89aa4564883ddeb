#include "runtime/checkpoint/checkpoint_parts.hpp"

#include "partition/rank_layout.hpp"
#include "runtime/checkpoint/optimizer_state.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/model_state.hpp"
#include "runtime/session/rank_runtime.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/optim/optimizer.h>

#include <fmt/format.h>

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

namespace {

/// Collects what this rank writes.
class collector {
public:
  collector(const distributed_model_base& model,
            const std::vector<distributed_optimizer*>& optimizers)
    : map_(model.state().map()), rank_(session::current().internals()) {
    for (auto* x : optimizers)
      optimizers_.push_back(&x->inner());
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
    if (position(comm_group::rdp) > 0)
      return;
    auto* slice = map_.slice(i);
    add(tensor_role::parameter, x.names.front(), x.tensor, slice);
    for (size_t k = 0; k < optimizers_.size(); ++k)
      for (auto& [field, y] : state_of(*optimizers_[k], x.tensor))
        add(tensor_role::optimizer, state_name(k, field, x.names.front()), y,
            y.sizes() == x.tensor.sizes() && y.dim() > 0 ? slice : nullptr);
  }

  /// What nobody cut is the same on all that share the model.
  void add(tensor_role role, std::string name, const at::Tensor& x,
           const tensor_slice* slice) {
    if (slice ? slice->length > 0 : position(comm_group::tp) == 0)
      result_.push_back(
        {.role = role, .name = std::move(name), .value = x, .slice = slice});
  }

  const model_map& map_;
  const rank_context& rank_;
  std::vector<torch::optim::Optimizer*> optimizers_;
  std::vector<held_tensor> result_;
};

} // namespace

std::vector<held_tensor>
held_tensors(const distributed_model_base& model,
             const std::vector<distributed_optimizer*>& optimizers) {
  return collector{model, optimizers}.run();
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
        if (auto i = walked.find(p); i >= 0)
          result.push_back(
            {k, g, walked.tensors[static_cast<size_t>(i)].names.front()});
  }
  return result;
}

} // namespace smp
