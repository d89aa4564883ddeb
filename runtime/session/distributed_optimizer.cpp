#include "runtime/session/distributed_optimizer.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/session/current_rank.hpp"
#include "runtime/session/fused_update.hpp"
#include "runtime/session/gradient_buckets.hpp"
#include "runtime/session/model_state.hpp"
#include "runtime/session/rank_runtime.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/isfinite.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <set>

namespace smp {

namespace {

/// Drops placeholders and all but the first mention of tied ones.
void keep_owned(torch::optim::Optimizer& x) {
  std::set<const void*> seen;
  for (auto& group : x.param_groups()) {
    auto drop = [&seen](const at::Tensor& p) {
      return is_placeholder(p) || !seen.insert(p.unsafeGetTensorImpl()).second;
    };
    std::erase_if(group.params(), drop);
  }
}

/// Adagrad makes its sums when it is made: of what was cut since, they are cut
/// as well.
void cut_sums(torch::optim::Optimizer& x, const model_map& map) {
  auto& tensors = map.model().tensors;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    auto* slice = map.slice(i);
    auto found = slice ? x.state().find(tensors[i].tensor.unsafeGetTensorImpl())
                       : x.state().end();
    if (found == x.state().end())
      continue;
    auto* sums = dynamic_cast<torch::optim::AdagradParamState*>(
      found->second.get());
    if (sums && sums->sum().defined())
      sums->sum(slice->of(sums->sum()).clone());
  }
}

/// @returns the gradients of which each replica has a part; null: there are
/// none
const gradient_shards* shards_of(const distributed_model_base& model) {
  auto* buckets = model.state().buckets();
  return buckets == nullptr || buckets->shards().empty() ? nullptr
                                                         : &buckets->shards();
}

struct owned_gradient {
  at::Tensor gradient;
  /// How many ranks that are asked have it: 1 for a slice.
  double copies = 1;
};

std::vector<owned_gradient> owned_gradients(distributed_model_base& model) {
  std::vector<owned_gradient> result;
  auto& rank = session::current().internals();
  auto peers = static_cast<double>(rank.layout().size(comm_group::tp));
  auto& map = model.state().map();
  auto& tensors = map.model().tensors;
  // Parts are what one rank of all has, whole gradients what each replica has.
  auto* shards = shards_of(model);
  if (shards != nullptr)
    for (auto& x : shards->gradients())
      result.push_back({x, 1});
  auto slices = shards == nullptr
                  ? 1.0
                  : static_cast<double>(rank.layout().size(comm_group::rdp));
  peers *= slices;
  for (uint32_t i = 0; i < tensors.size(); ++i)
    if (auto& x = tensors[i];
        map.owned(i) && !x.is_buffer && x.tensor.grad().defined())
      result.push_back({x.tensor.grad(), map.slice(i) ? slices : peers});
  return result;
}

/// Over the ranks that hold the gradients together: those of a replica, or all.
double sum_over_model(const distributed_model_base& model, const char* what,
                      double x) {
  auto& rank = session::current().internals();
  auto over = shards_of(model) == nullptr ? comm_group::mp : comm_group::world;
  return rank.exchange()
    .all_reduce_sum(rank.layout().members(over, rank.self()), what, {x})
    .front();
}

} // namespace

distributed_optimizer::distributed_optimizer(torch::optim::Optimizer& x)
  : optimizer_(x),
    shards_(current_rank()),
    alive_(std::make_shared<bool>(true)) {
  auto& model = session::current().internals().state();
  if (!model)
    throw error{error_code::unsupported,
                "a distributed_optimizer needs a distributed_model before it"};
  model->on_partition([this, alive = std::weak_ptr{alive_}] {
    if (!alive.lock())
      return;
    keep_owned(optimizer_);
    auto& rank = session::current().internals();
    cut_sums(optimizer_, rank.state()->map());
    if (rank.config().shard_optimizer_state)
      shards_.cut(optimizer_, rank.state()->map());
    if (auto* buckets = rank.state()->buckets();
        buckets && rank.config().shard_gradients)
      buckets->share(shards_.all_owners());
  });
}

void distributed_optimizer::step() {
  session::current().internals().check_alive();
  if (!shards_.is_cut()) {
    update(optimizer_);
    return;
  }
  shards_.begin_update();
  update(optimizer_);
  shards_.end_update();
}

std::optional<distributed_optimizer::known_part>
distributed_optimizer::part_of(const at::Tensor& parameter,
                               const tensor_slice* slice) const {
  auto begins = slice == nullptr || slice->begin == 0;
  if (!shards_.is_cut())
    return known_part{parameter, slice, begins, false};
  auto* part = shards_.find(parameter);
  if (part == nullptr)
    return std::nullopt;
  // A slice is not cut again, nor is what has no axis.
  if (slice != nullptr || parameter.dim() == 0)
    return known_part{part->rows, slice, begins, true};
  return known_part{part->rows, &part->where, part->where.begin == 0, true};
}

at::Tensor distributed_optimizer::parameter_of(const at::Tensor& x) const {
  auto* part = shards_.find(x);
  return part != nullptr ? part->parameter : x;
}

void distributed_optimizer::zero_grad() {
  optimizer_.zero_grad();
  shards_.zero_grad();
}

double clip_grad_norm_(distributed_model_base& model, double max_norm) {
  at::NoGradGuard no_grad;
  auto grads = owned_gradients(model);
  auto squares = 0.0;
  for (auto& [g, copies] : grads) {
    auto norm = g.norm().item<double>();
    squares += norm * norm / copies;
  }
  if (SMP_FAULT("doubled-norm"))
    squares *= 2;
  auto total = std::sqrt(sum_over_model(model, "smp.clip_grad_norm", squares));
  auto factor = max_norm / (total + 1e-6);
  // As torch does: never enlarge; NaN goes through and shows.
  if (!(factor >= 1.0))
    for (auto& x : grads)
      x.gradient.mul_(factor);
  return total;
}

bool any_nonfinite(distributed_model_base& model) {
  at::NoGradGuard no_grad;
  auto grads = owned_gradients(model);
  auto bad = std::any_of(grads.begin(), grads.end(), [](const auto& x) {
    return !at::isfinite(x.gradient).all().template item<bool>();
  });
  return sum_over_model(model, "smp.any_nonfinite", bad ? 1.0 : 0.0) > 0;
}

} // namespace smp
