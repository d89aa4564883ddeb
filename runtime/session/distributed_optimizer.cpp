#include "runtime/session/distributed_optimizer.hpp"

#include "runtime/base/fault.hpp"
#include "runtime/base/print_stderr.hpp"
#include "runtime/collectives/current_rank.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/optimizer/fused_update.hpp"
#include "runtime/optimizer/gradient_norm.hpp"
#include "runtime/optimizer/half_parameters.hpp"
#include "runtime/optimizer/host_weights.hpp"
#include "runtime/optimizer/loss_scaler.hpp"
#include "runtime/optimizer/master_weights.hpp"
#include "runtime/optimizer/optimizer_check.hpp"
#include "runtime/optimizer/optimizer_shards.hpp"
#include "runtime/optimizer/weight_average.hpp"
#include "runtime/replicas/gradient_buckets.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

namespace smp {

namespace {

/// Drops placeholders and all but the first mention of tied parameters, and the
/// state that Adagrad, whose constructor allocates its sums, has for them.
void keep_owned(torch::optim::Optimizer& x) {
  std::set<const void*> seen;
  for (auto& group : x.param_groups()) {
    auto drop = [&](const at::Tensor& p) {
      if (is_placeholder(p))
        x.state().erase(p.unsafeGetTensorImpl());
      return is_placeholder(p) || !seen.insert(p.unsafeGetTensorImpl()).second;
    };
    std::erase_if(group.params(), drop);
  }
}

/// Adagrad's constructor allocates its sums: for parameters that were cut
/// since, cuts the sums as well.
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

/// Brings the sums of Adagrad to the device of the parameters, and allocates
/// those that were a single number until now (`make_optimizer`).
void unfold_sums(torch::optim::Optimizer& x) {
  for (auto& group : x.param_groups())
    for (auto& p : group.params()) {
      auto found = x.state().find(p.unsafeGetTensorImpl());
      auto* sums = found == x.state().end()
                     ? nullptr
                     : dynamic_cast<torch::optim::AdagradParamState*>(
                       found->second.get());
      if (sums == nullptr || !sums->sum().defined())
        continue;
      sums->sum(sums->sum().to(p.device()));
      if (sums->sum().storage().nbytes() < sums->sum().nbytes())
        sums->sum(sums->sum().contiguous());
    }
}

/// Tells whether gradients are sharded over replicas. All ranks must agree, so
/// it does not depend on whether this rank has a shard: perhaps no optimizer
/// has parameters of its modules.
bool shares_gradients(const rank_runtime& rank) {
  return rank.config().shard_gradients;
}

struct owned_gradient {
  uint32_t tensor; // in the walk of the model
  at::Tensor gradient;
  /// How many of the ranks asked have it: 1 for a slice.
  double copies = 1;
};

std::vector<owned_gradient> owned_gradients(const model_state& model) {
  std::vector<owned_gradient> result;
  auto& rank = session::current().internals();
  auto peers = static_cast<double>(rank.layout().size(comm_group::tp));
  auto& map = model.map();
  auto& tensors = map.model().tensors;
  auto* buckets = model.buckets();
  auto slices = shares_gradients(rank)
                  ? static_cast<double>(rank.layout().size(comm_group::rdp))
                  : 1.0;
  peers *= slices;
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    auto& x = tensors[i];
    if (!map.owned(i) || x.is_buffer)
      continue;
    // A shard is on exactly one rank of all, a whole gradient on each replica
    // of its module.
    if (auto rows = buckets ? buckets->shards().of_rows(x.tensor)
                            : at::Tensor{};
        rows.defined())
      result.push_back({i, rows, 1});
    if (x.tensor.grad().defined())
      result.push_back({i, x.tensor.grad(), map.slice(i) ? slices : peers});
  }
  return result;
}

std::vector<at::Tensor> contents(const std::vector<owned_gradient>& xs) {
  std::vector<at::Tensor> result;
  for (auto& x : xs)
    result.push_back(x.gradient);
  return result;
}

std::vector<double> sums_over(const comm_group& group, const char* what,
                              std::vector<double> xs) {
  auto& rank = session::current().internals();
  return rank.exchange().all_reduce_sum(
    rank.layout().members(group, rank.self()), what, std::move(xs));
}

double sum_over(const comm_group& group, const char* what, double x) {
  return sums_over(group, what, {x}).front();
}

/// Converts gradients to another loss scale.
void rescale_gradients(const model_state& model, double factor) {
  for (auto& x : owned_gradients(model))
    x.gradient.mul_(factor);
}

template <class F>
void each_gradient(torch::optim::Optimizer& x, F f) {
  for (auto& group : x.param_groups())
    for (auto& p : group.params())
      if (p.grad().defined())
        f(p.mutable_grad());
}

bool has_gradient(torch::optim::Optimizer& x) {
  auto result = false;
  each_gradient(x, [&](at::Tensor&) { result = true; });
  return result;
}

/// @returns whether all gradients are finite
bool unscale(torch::optim::Optimizer& x, double scale) {
  std::vector<at::Tensor> floats;
  std::vector<at::Tensor> others;
  each_gradient(x, [&](at::Tensor& gradient) {
    if (gradient.scalar_type() == at::kFloat && !gradient.is_sparse()) {
      floats.push_back(gradient);
    } else {
      gradient.div_(scale);
      others.push_back(gradient);
    }
  });
  if (floats.empty())
    return all_finite(others);
  auto there = floats.front().options(); // they may be on the host
  auto wrong = at::zeros({1}, there);
  auto inverse = at::full({1}, 1 / scale, there);
  at::_amp_foreach_non_finite_check_and_unscale_(floats, wrong, inverse);
  return all_finite(others) && wrong.item<float>() == 0;
}

/// @param model scales its loss already, if an optimizer before this one does
std::shared_ptr<loss_scaler> scaler_of(const optimizer_options& x, bool float16,
                                       const model_loss_scale& model) {
  if (x.dynamic_loss_scale && x.static_loss_scale)
    throw config_error(
      "dynamic_loss_scale cannot go with static_loss_scale; "
      "keep one of them");
  if (x.dynamic_loss_scale)
    return std::make_shared<loss_scaler>(x.dynamic_loss_args);
  if (x.static_loss_scale)
    return std::make_shared<loss_scaler>(*x.static_loss_scale);
  return float16 && !model.scaler()
           ? std::make_shared<loss_scaler>(x.dynamic_loss_args)
           : nullptr;
}

} // namespace

struct distributed_optimizer::parts {
  parts(torch::optim::Optimizer& x, const optimizer_options& options,
        const rank_runtime& rank, const model_loss_scale& scale)
    : optimizer(x),
      fused(options.fused),
      shards(current_rank()),
      scaler(scaler_of(options, rank.config().fp16_params, scale)) {
    // nop
  }

  void partitioned();
  void look_at_gradients(const rank_runtime& rank);
  void update() const;
  void follow_parameters();
  void note_values();
  known_part known(known_part x) const;

  torch::optim::Optimizer& optimizer;
  bool fused;
  // What the optimizer has in place of a parameter: its rows, of those a copy
  // on the host, of that one in float32; each of them where there is need.
  optimizer_shards shards;
  host_weights hosts;
  master_weights masters;
  std::optional<weight_average> averages;
  bool averaged = false; // parameters are averages
  uint64_t backwards_before = 0;
  bool told_scaled = false;
  bool told_none = false;
  std::shared_ptr<loss_scaler> scaler;
};

void distributed_optimizer::parts::partitioned() {
  auto& rank = session::current().internals();
  auto& map = rank.state()->map();
  keep_owned(optimizer);
  check_optimizer(rank, optimizer, map);
  cut_sums(optimizer, map);
  if (rank.config().shard_optimizer_state)
    shards.cut(optimizer, map);
  if (auto* buckets = rank.state()->buckets();
      buckets && rank.config().shard_gradients)
    buckets->share(shards.all_owners());
  if (rank.launches() != nullptr && rank.config().offload_optimizer)
    hosts.replace(optimizer, rank.launches()->make_storage_copies());
  if (parameter_type(rank.config()))
    masters.replace(optimizer);
  unfold_sums(optimizer);
  if (averages)
    averages->begin(optimizer);
}

void distributed_optimizer::parts::update() const {
  if (fused)
    update_fused(optimizer);
  else
    optimizer.step();
}

void distributed_optimizer::parts::follow_parameters() {
  hosts.follow_parameters();
  masters.follow_parameters();
}

/// Marks the end of all parameter changes of an update.
void distributed_optimizer::parts::note_values() {
  masters.note_values();
  hosts.note_values();
}

distributed_optimizer::known_part
distributed_optimizer::parts::known(known_part x) const {
  auto copy = hosts.host_of(x.values);
  auto master = masters.master_of(copy);
  x.is_master = !master.is_same(copy);
  x.values = master;
  if (averages)
    x.average = averages->of(master);
  return x;
}

distributed_optimizer::distributed_optimizer(torch::optim::Optimizer& x,
                                             const optimizer_options& options)
  : optimizer_(x) {
  auto& rank = session::current().internals();
  auto& model = rank.state();
  if (!model)
    throw error{error_code::unsupported,
                "a distributed_optimizer needs a distributed_model before it"};
  parts_ = std::make_shared<parts>(x, options, rank, model->loss_scale());
  if (parts_->scaler)
    model->loss_scale().follow(parts_->scaler);
  if (options.ema_decay)
    parts_->averages.emplace(*options.ema_decay);
  model->on_partition([mine = std::weak_ptr{parts_}] {
    if (auto y = mine.lock())
      y->partitioned();
  });
}

double distributed_optimizer::loss_scale() const {
  auto& model = session::current().internals().state();
  return model ? model->loss_scale().value() : 1.0;
}

/// Says once what a program does that trains nothing, or not what it should.
void distributed_optimizer::parts::look_at_gradients(const rank_runtime& rank) {
  auto& model = *rank.state();
  if (auto factor = model.watch().scaled(model.map());
      factor && !std::exchange(told_scaled, true))
    print_stderr(
      "smp: the gradients of rank {} were multiplied by {:.4g} between the "
      "step and optimizer.step(): torch's clip_grad_norm_ sees those of one "
      "rank only, and so scales each rank differently; "
      "smp::clip_grad_norm_(model, max_norm) sees all\n",
      rank.self().value, *factor);
  model.watch().forget();
  auto backwards = rank.counters().backwards.load();
  auto had = std::exchange(backwards_before, backwards) != backwards;
  if (!had && rank.pp_rank() == 0 && !has_gradient(optimizer)
      && !std::exchange(told_none, true))
    print_stderr(
      "smp: optimizer.step() on rank {} finds no gradient, so it "
      "changes nothing: no step called model.backward(loss) since "
      "the last one\n",
      rank.self().value);
}

bool distributed_optimizer::step() {
  auto& rank = session::current().internals();
  rank.check_alive();
  flight_activity noted{rank.board().record(), "optimizer"};
  at::NoGradGuard no_grad;
  auto model = rank.state();
  if (!model)
    throw error{error_code::unsupported,
                "optimizer.step() after the end of its distributed_model"};
  if (parts_->averaged)
    throw error{error_code::unsupported,
                "optimizer.step() while the parameters are averages; call "
                "swap_averages() once more before it"};
  auto scaler = model->loss_scale().scaler();
  auto scale = model->loss_scale().value();
  ++rank.counters().updates;
  parts_->shards.await_updates();
  parts_->shards.begin_update();
  parts_->hosts.begin_update();
  parts_->look_at_gradients(rank);
  refuse_sparse_gradients(optimizer_, [&](const at::Tensor& x) {
    auto found = model->model().find(parameter_of(x));
    return model->map().tensor_name(static_cast<uint32_t>(found));
  });
  parts_->masters.begin_update();
  auto dynamic = scaler && scaler->is_dynamic();
  auto finite = (scale == 1 && !dynamic) || unscale(optimizer_, scale);
  if (dynamic)
    finite = sum_over(comm_group::world, "smp.overflow", finite ? 0 : 1) == 0;
  auto updates = finite || !dynamic;
  if (updates) {
    at::AutoGradMode as_always{true};
    parts_->update();
  }
  // Later backwards add scaled gradients to these, unless they are copies.
  if (scale != 1 && parts_->masters.empty() && parts_->hosts.empty())
    each_gradient(optimizer_, [&](at::Tensor& x) { x.mul_(scale); });
  parts_->masters.end_update(updates);
  if (updates && parts_->averages)
    parts_->averages->update();
  parts_->hosts.end_update(updates);
  if (updates)
    parts_->shards.end_update();
  else
    parts_->shards.drop_parts();
  parts_->note_values();
  if (scaler)
    scaler->update(finite);
  if (auto now = model->loss_scale().value(); now != scale)
    rescale_gradients(*model, now / scale);
  return updates;
}

void distributed_optimizer::swap_averages() {
  if (!parts_->averages)
    throw error{error_code::unsupported,
                "swap_averages() of an optimizer without ema_decay"};
  at::NoGradGuard no_grad;
  parts_->shards.await_updates();
  if (!parts_->averaged)
    parts_->follow_parameters();
  parts_->hosts.await_sent();
  for (auto& x : parts_->averages->entries()) {
    if (!x.average.defined())
      continue;
    auto parameter = parts_->masters.parameter_of(x.weight);
    if (!parameter.is_same(x.weight)) {
      parameter.copy_(parts_->averaged ? x.weight : x.average);
    } else {
      auto before = parameter.clone();
      parameter.copy_(x.average);
      x.average.copy_(before);
    }
  }
  parts_->averaged = !parts_->averaged;
  parts_->hosts.send_all();
  parts_->shards.end_update(); // sends to the other replicas
  parts_->note_values();
}

bool distributed_optimizer::is_averaged() const noexcept {
  return parts_->averaged;
}

loss_scaler* distributed_optimizer::own_scaler() const noexcept {
  return parts_->scaler.get();
}

std::optional<distributed_optimizer::known_part>
distributed_optimizer::part_of(const at::Tensor& parameter,
                               const tensor_slice* slice) const {
  auto begins = slice == nullptr || slice->begin == 0;
  if (!parts_->shards.is_cut())
    return parts_->known({parameter, nullptr, begins, false});
  auto* part = parts_->shards.find(parameter);
  if (part == nullptr)
    return std::nullopt;
  // A scalar is not cut.
  if (parameter.dim() == 0)
    return parts_->known({part->rows, nullptr, begins, true});
  return parts_->known(
    {part->rows, &part->where, begins && part->where.begin == 0, true});
}

at::Tensor distributed_optimizer::parameter_of(const at::Tensor& x) const {
  auto y = parts_->hosts.parameter_of(parts_->masters.parameter_of(x));
  auto* part = parts_->shards.find(y);
  return part != nullptr ? part->parameter : y;
}

void distributed_optimizer::load_master(const known_part& x,
                                        const at::Tensor& value) {
  // Else the copy of the parameter would be new in the next update.
  parts_->hosts.follow_parameters();
  parts_->hosts.note_values();
  parts_->masters.load(x.values, value);
}

void distributed_optimizer::load_average(const known_part& x,
                                         const at::Tensor& average) {
  if (parts_->averages)
    parts_->averages->load(x.values, average);
}

void distributed_optimizer::zero_grad() {
  if (auto& model = session::current().internals().state())
    model->watch().forget();
  optimizer_.zero_grad();
  parts_->masters.zero_grad();
  parts_->hosts.zero_grad();
  parts_->shards.zero_grad();
}

double clip_grad_norm_(distributed_model_base& model, double max_norm) {
  at::NoGradGuard no_grad;
  auto grads = owned_gradients(model.state());
  // By tensor and not by rank: the assignment to ranks may follow from measured
  // times, and the last bit of the sum must not depend on these.
  std::vector<double> squares(model.state().model().tensors.size());
  auto sums = sums_of_squares(contents(grads));
  for (size_t i = 0; i < grads.size(); ++i)
    squares[grads[i].tensor] += sums[i] / grads[i].copies;
  auto group = shares_gradients(session::current().internals())
                 ? comm_group::world
                 : comm_group::mp;
  squares = sums_over(group, "smp.clip_grad_norm", std::move(squares));
  auto sum = std::accumulate(squares.begin(), squares.end(), 0.0);
  if (SMP_FAULT("doubled-norm"))
    sum *= 2;
  auto total = std::sqrt(sum) / model.state().loss_scale().value();
  auto factor = max_norm / (total + 1e-6);
  // As torch does: never enlarge; NaN goes through and shows.
  if (!(factor >= 1.0)) {
    model.state().watch().forget();
    for (auto& x : grads)
      x.gradient.mul_(factor);
  }
  return total;
}

bool any_nonfinite(distributed_model_base& model) {
  at::NoGradGuard no_grad;
  auto bad = !all_finite(contents(owned_gradients(model.state())));
  return sum_over(comm_group::world, "smp.any_nonfinite", bad ? 1.0 : 0.0) > 0;
}

} // namespace smp
