#include "runtime/verify/reference.hpp"

#include "runtime/base/rank_context.hpp"
#include "runtime/checkpoint/weight_files.hpp"
#include "runtime/checkpoint/weight_names.hpp"
#include "runtime/device/moved_tensors.hpp"
#include "runtime/optimizer/gradient_norm.hpp"
#include "runtime/train/optimizers.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/verify/apart.hpp"
#include "runtime/verify/reference_numbers.hpp"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <set>
#include <unordered_map>

namespace smp {

namespace {

std::map<std::string, at::Tensor> copies_of(const named_tensors& xs) {
  std::map<std::string, at::Tensor> result;
  for (auto& [name, x] : xs)
    result.emplace(name, x.detach().clone());
  return result;
}

/// Casts a model as a run with parameters in half precision does.
void cast_to_half(const named_tensors& xs, const train_config& config) {
  if (!config.smp.bf16_params && !config.smp.fp16_params)
    return;
  at::NoGradGuard no_grad;
  for (auto& [name, x] : xs)
    if (x.is_floating_point())
      at::Tensor{x}.set_data(x.to(computed_in(config)));
}

batch on(at::Device device, batch x) {
  for (auto& tensor : x)
    tensor = tensor.to(device);
  return x;
}

/// A model with its tensors, module paths and observers.
struct known_model {
  known_model(std::unique_ptr<trainable> x, const train_config& config,
              at::Device device)
    : model(std::move(x)),
      parameters(model->named_parameters()),
      buffers(model->named_buffers()),
      numbers(model->module_paths()) {
    model->train(true);
    std::vector<at::Tensor> all;
    for (auto* xs : {&parameters, &buffers}) {
      cast_to_half(*xs, config);
      for (auto& [name, tensor] : *xs)
        all.push_back(tensor);
    }
    move_in_place(std::move(all), device);
  }

  void load(const std::map<std::string, at::Tensor>& from) {
    at::NoGradGuard no_grad;
    for (auto* xs : {&parameters, &buffers})
      for (auto& [name, x] : *xs)
        if (auto i = from.find(name); i != from.end())
          x.copy_(i->second);
  }

  void drop_gradients() {
    for (auto& [name, p] : parameters)
      p.mutable_grad() = at::Tensor{};
  }

  observed_step take_log() {
    return logger.take(
      [this](const void* object) -> std::optional<std::string> {
        auto i = paths.find(object);
        return i == paths.end() ? std::nullopt : std::optional{i->second};
      });
  }

  std::unique_ptr<trainable> model;
  named_tensors parameters;
  named_tensors buffers;
  /// Paths of its modules, if its calls can be observed.
  std::unordered_map<const void*, std::string> paths;
  call_logger logger;
  reference_numbers numbers;
};

} // namespace

struct reference_run::state {
  explicit state(const train_config& x, const train_job& job)
    : config(x), device(rank_context::current_device()) {
    apart apart_from_ranks{device};
    auto first = job.make_model();
    auto same_code = first->make_observable();
    auto& observed = (same_code ? model : witness)
                       .emplace(std::move(first), x, device);
    observed.paths = observed.model->module_paths();
    if (!same_code) {
      auto second = job.make_model();
      second->mark_calls();
      model.emplace(std::move(second), x, device);
    }
    data = job.make_data();
    for (auto& [name, p] : model->parameters)
      weights.push_back(c10::isReducedFloatingType(p.scalar_type())
                            && (x.smp.bf16_params || x.smp.fp16_params)
                          ? p.detach().to(at::kFloat).set_requires_grad(true)
                          : p);
    optimizer = make_optimizer(config.optimizer, weights);
  }

  /// Runs a microbatch. @returns its loss
  double pass(known_model& x, const batch& inputs, uint64_t microbatch,
              const moment& when) const {
    x.logger.set_microbatch(microbatch);
    x.numbers.start(
      microbatch_seed(config.smp.seed, when.drawn, when.data_rank, microbatch),
      x.paths.empty() ? nullptr : &x.logger);
    call_observer::set_current(&x.numbers);
    auto loss = x.model->loss(inputs);
    x.logger.body_done(inputs, {&loss, 1});
    check_plain(loss);
    // The mean over microbatches.
    auto n = static_cast<double>(config.smp.microbatches);
    loss.backward(at::full_like(loss, when.loss_scale / n));
    call_observer::set_current(nullptr);
    x.numbers.finish();
    return loss.item<double>();
  }

  void load(const std::map<std::string, at::Tensor>& from) {
    model->load(from);
    if (witness)
      witness->load(from);
  }

  /// `value` may have more digits than a parameter in half precision.
  void begin_with(const std::string& name, const at::Tensor& value) {
    load({{name, value}});
    at::NoGradGuard no_grad;
    for (size_t k = 0; k < weights.size(); ++k)
      if (model->parameters[k].first == name)
        weights[k].copy_(value);
  }

  const train_config& config;
  /// That of the ranks.
  at::Device device;
  std::optional<known_model> model;
  /// The same model, changed so that its calls can be observed, where those of
  /// `model` cannot: it tells in which module a difference begins, while the
  /// numbers are those of `model`.
  std::optional<known_model> witness;
  std::unique_ptr<data_source> data;
  /// What the optimizer updates: the parameters, or float32 weights of those in
  /// half precision.
  std::vector<at::Tensor> weights;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

reference_run::reference_run(const train_config& config, const train_job& job)
  : state_(std::make_unique<state>(config, job)) {
  // nop
}

reference_run::~reference_run() = default;

std::vector<std::string> reference_run::names() const {
  std::vector<std::string> result;
  for (auto* xs : {&state_->model->parameters, &state_->model->buffers})
    for (auto& [name, x] : *xs)
      result.push_back(name);
  return result;
}

void reference_run::begin_from(const std::vector<tensor_names>& names) {
  apart here{state_->device};
  std::map<std::string, std::string> first;
  std::set<std::string> known;
  for (auto& x : names)
    for (auto& name : x.all) {
      first.emplace(name, x.all.front());
      known.insert(name);
    }
  auto& from = state_->config.train;
  const weight_files files{from.init_from};
  auto found = names_in_model(files.tensors(), known, from.init_prefix,
                              from.init_from);
  for (size_t k = 0; k < found.size(); ++k)
    if (auto i = first.find(found[k]); i != first.end())
      state_->begin_with(i->second, files.read(k));
}

void reference_run::load(const std::map<std::string, at::Tensor>& from) {
  apart here{state_->device};
  state_->load(from);
}

step_evidence reference_run::run(const moment& x) {
  apart here{state_->device};
  auto& s = *state_;
  step_evidence result;
  s.model->drop_gradients();
  auto whole = s.data->training_batch(x.number - 1, {x.data_rank, x.replicas});
  const auto n = s.config.smp.microbatches;
  for (uint64_t m = 0; m < n; ++m) {
    auto inputs = on(s.device, part_of(whole, {m, n}));
    result.loss += s.pass(*s.model, inputs, m, x) / static_cast<double>(n);
    if (s.witness)
      s.pass(*s.witness, inputs, m, x);
  }
  for (auto& [name, p] : s.model->parameters)
    if (p.grad().defined())
      result.gradients.emplace(name, unscaled(p.grad(), x.loss_scale));
  result.buffers = copies_of(s.model->buffers);
  result.log = s.model->take_log();
  if (s.witness) {
    s.witness->drop_gradients();
    result.log.calls = s.witness->take_log().calls;
  }
  return result;
}

double reference_run::evaluate(const moment& x) {
  apart here{state_->device};
  at::NoGradGuard no_grad;
  auto& s = *state_;
  auto& m = *s.model;
  m.model->train(false);
  auto whole = s.data->held_out_batch(0, 1, {x.data_rank, x.replicas});
  const auto n = s.config.smp.microbatches;
  double sum = 0;
  for (uint64_t i = 0; i < n; ++i) {
    m.numbers.start(microbatch_seed(s.config.smp.seed, x.drawn, x.data_rank, i),
                    nullptr);
    call_observer::set_current(&m.numbers);
    sum += m.model->loss(on(s.device, part_of(whole, {i, n}))).item<double>();
    call_observer::set_current(nullptr);
    m.numbers.finish();
  }
  m.model->train(true);
  return sum / static_cast<double>(n);
}

void reference_run::update(const moment& x,
                           const std::map<std::string, at::Tensor>& gradients,
                           step_evidence& result) {
  apart here{state_->device};
  auto& s = *state_;
  std::vector<at::Tensor> all;
  for (auto& [name, g] : gradients)
    all.push_back(g);
  auto sums = sums_of_squares(all);
  auto squares = std::accumulate(sums.begin(), sums.end(), 0.0);
  result.gradient_norm = std::sqrt(squares);
  auto factor = std::min(1.0,
                         s.config.optimizer.clip_grad_norm.value_or(infinity)
                           / (result.gradient_norm + 1e-6));
  for (size_t k = 0; k < s.weights.size(); ++k) {
    auto& [name, p] = s.model->parameters[k];
    auto i = gradients.find(name);
    auto& g = s.weights[k].mutable_grad();
    g = at::Tensor{};
    if (i == gradients.end())
      continue;
    // Gradients are clipped in place, in the type of the parameters.
    g = i->second.mul(x.loss_scale).to(p.scalar_type());
    if (factor < 1)
      g.mul_(factor);
    g = g.to(s.weights[k].scalar_type()).div_(x.loss_scale);
  }
  set_learning_rate(
    *s.optimizer,
    learning_rate(s.config.optimizer, x.number - 1, s.config.train.steps));
  s.optimizer->step();
  at::NoGradGuard no_grad;
  for (size_t k = 0; k < s.weights.size(); ++k)
    if (auto& p = s.model->parameters[k].second; !p.is_same(s.weights[k]))
      p.copy_(s.weights[k]);
  result.parameters = copies_of(s.model->parameters);
}

} // namespace smp
