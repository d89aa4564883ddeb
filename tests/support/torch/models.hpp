#pragma once

// Any small model on virtual ranks against plain LibTorch. A model is written
// once, over how its parts are held: as `smp::submodule` for the pipeline, and
// for the reference as what they are, but that they tell of their calls. So
// that has no line of smp in it (R36).

#include "tests/support/nothing_left.hpp"
#include "tests/support/torch/random.hpp"

#include "runtime/intercept/sequential.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/step/model_state.hpp"
#include "smp/smp.hpp"

#include <torch/nn/module.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace smp::test {

using torch::Tensor;

/// Model `Impl<submodule>` for ranks, `Impl<noted>` for the reference. Has
/// `Tensor forward(Tensor x)`, whose result is the loss, a scalar.
template <template <template <class> class> class Impl,
          template <class> class Part>
using holder = torch::nn::ModuleHolder<Impl<Part>>;

struct model_options {
  uint64_t ranks = 2;
  uint64_t microbatches = 1;
  std::string pipeline = "interleaved";
  int steps = 3;
  /// Puts intercepted modules on ranks in turn, the hardest placement; or
  /// what `partition_scope` in the model says.
  bool round_robin = true;
  /// `smp.auto_partition`, after a trace.
  bool automatic = false;
  /// Around each step, on all ranks and in the reference.
  std::function<std::shared_ptr<void>()> context;
  /// Relative to the largest element (R35).
  double tolerance = 1e-5;
  double absolute = 1e-7;
  uint64_t seed = 1;
  /// `smp.fast_mode`; nothing: as by default.
  std::optional<bool> fast = false;
  /// `smp.static_mode` with one recorded step; parameters stay what they are,
  /// and what diverges from the record goes on without it.
  bool replay = false;
  /// `smp.deterministic_server`
  bool fixed_order = false;
  bool reorder = true;
  /// `smp.device`; the reference is on the host.
  std::string device = "cpu";
  std::vector<std::string> no_promises = {};
  /// What backward computes again: nothing, the outermost modules, or all, each
  /// also as a part of those around it.
  enum class again : uint8_t { none, outermost, all };
  again recompute = again::none;
  std::string strategy = "each";
  /// And keeps of it in a file.
  bool offload = false;
};

/// All of them that a model must pass; the first is without any other rank.
inline std::vector<model_options> all_placements() {
  std::vector<model_options> result;
  for (uint64_t ranks : {1, 2, 4})
    for (uint64_t microbatches : {1, 4})
      for (auto* pipeline : {"simple", "interleaved"})
        if (ranks > 1 || (microbatches > 1 && *pipeline == 'i')) {
          model_options x;
          x.ranks = ranks;
          x.microbatches = microbatches;
          x.pipeline = pipeline;
          result.push_back(x);
        }
  return result;
}

struct model_step {
  std::map<std::string, Tensor> before;    // parameters and buffers
  std::map<std::string, Tensor> gradients; // those that exist
  std::map<std::string, Tensor> after;     // before the optimizer
  std::vector<Tensor> losses;              // by microbatch
  uint64_t number = 0;
  step_stats stats;
  /// It went wrong at first: see `has_overtaken`.
  bool repeated = false;
};

/// Tells whether a step ended because a module with state would have seen its
/// microbatches in another order than in one process (R19).
inline bool has_overtaken(const error& x) {
  auto says = [&](const char* part) {
    return x.cause().text.find(part) != std::string::npos;
  };
  return (x.cause().code == error_code::unsupported
          && (says("more often than earlier steps did")
              || says("changed within the step")))
         || says("modified by an inplace operation");
}

/// Makes the model with the same numbers on each rank: the generator is the
/// process's.
template <class Holder>
Holder make_seeded() {
  static std::mutex mutex;
  std::unique_lock guard{mutex};
  torch::manual_seed(5);
  return Holder{std::make_shared<typename Holder::ContainedType>()};
}

inline void place_round_robin(model_state& st, uint64_t ranks) {
  uint32_t next = 0;
  for (auto& m : st.model().modules)
    for (auto* hook : m.hooks)
      if (!hook->pinned)
        hook->pinned = ++next % static_cast<uint32_t>(ranks);
}

inline virtual_world_options model_world(const model_options& x) {
  virtual_world_options world;
  world.config.pipeline_parallel_degree = x.ranks;
  world.config.microbatches = x.microbatches;
  world.config.pipeline = x.pipeline;
  world.config.auto_partition = x.automatic;
  world.config.threads = 1;
  world.config.device = x.device;
  world.config.fast_mode = x.fast;
  world.config.no_promises = x.no_promises;
  world.config.static_mode = x.replay;
  world.config.deterministic_server = x.fixed_order;
  if (x.replay && !x.fixed_order)
    world.config.static_steps = 1;
  if (x.recompute == model_options::again::outermost)
    world.config.activation_checkpointing = {{"*"}, x.strategy};
  if (x.offload) {
    world.config.offload_activations = true;
    world.config.activation_loading_horizon = 1;
  }
  world.reorder = x.reorder;
  world.seed = x.seed;
  return world;
}

inline std::map<std::string, Tensor> tensors_by_name(const named_tensors& xs) {
  return {xs.begin(), xs.end()};
}

template <class Model>
void drop_gradients(Model& model) {
  for (auto& p : model.local_parameters())
    p.mutable_grad() = Tensor{};
}

/// Runs a step, and again where it was overtaken: the error says what to do,
/// and its step left no trace but gradients.
/// @returns whether it ran again
template <class Model, class Run>
bool repeat_overtaken(Model& model, const model_step& r, Run run) {
  // Each module may be the reason once.
  std::set<std::string> reasons;
  for (;;) {
    try {
      run();
      return !reasons.empty();
    } catch (const error& e) {
      if (!has_overtaken(e) || !reasons.insert(e.cause().module).second)
        throw;
      for (auto& [name, t] : tensors_by_name(model.state_dict()))
        if (!torch::equal(t, r.before.at(name)))
          throw std::logic_error{"a failed step changed " + name};
      drop_gradients(model);
    }
  }
}

/// @returns the steps as pp_rank 0 saw them
template <template <template <class> class> class Impl>
std::vector<model_step> run_ranks(const model_options& x,
                                  const std::vector<Tensor>& batches) {
  std::vector<model_step> result;
  run_virtual_world(x.ranks, model_world(x), [&](session& s) {
    distributed_model model{make_seeded<holder<Impl, submodule>>()};
    if (x.round_robin || x.ranks == 1)
      place_round_robin(model.state(), x.ranks);
    if (x.recompute == model_options::again::all)
      for (auto& m : model.state().model().modules)
        if (m.intercepted)
          set_activation_checkpointing(*m.object);
    auto train_step = step([&](Tensor input) {
      auto loss = model(input);
      if (loss.requires_grad())
        model.backward(loss);
      return loss;
    });
    if (!x.automatic) // else the first step is traced
      model.partition();
    for (int i = 0; i < x.steps; ++i) {
      model_step r;
      r.before = tensors_by_name(model.state_dict());
      drop_gradients(model);
      r.repeated = repeat_overtaken(model, r, [&] {
        auto around = x.context ? x.context() : nullptr;
        r.losses = train_step(batches.at(static_cast<size_t>(i))).outputs();
      });
      r.gradients = tensors_by_name(model.gradients());
      r.after = tensors_by_name(model.state_dict());
      r.number = s.internals().drawn_step();
      r.stats = s.last_step();
      if (!x.replay) {
        torch::NoGradGuard no_grad;
        for (auto& p : model.local_parameters())
          if (p.grad().defined())
            p.sub_(p.grad(), 0.1);
      }
      check_nothing_left(s);
      if (s.rank() == 0)
        result.push_back(std::move(r));
    }
  });
  return result;
}

/// max|a - b| <= tolerance max|b| + absolute (R35).
inline bool is_close(const Tensor& a, const Tensor& b, double tolerance,
                     double absolute = 1e-7) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type())
    return false;
  if (a.numel() == 0)
    return true;
  auto x = a.detach().cpu().to(torch::kDouble);
  auto y = b.detach().cpu().to(torch::kDouble);
  return ((x - y).abs().max() <= y.abs().max() * tolerance + absolute)
    .item<bool>();
}

/// Of a model in one process: each tensor once, under its first name, as in
/// `state_dict`.
class reference_state {
public:
  explicit reference_state(torch::nn::Module& model) {
    std::set<const void*> seen;
    for (auto& p : model.named_parameters())
      if (seen.insert(p.value().unsafeGetTensorImpl()).second)
        parameters_[p.key()] = p.value();
    for (auto& b : model.named_buffers())
      if (seen.insert(b.value().unsafeGetTensorImpl()).second)
        buffers_[b.key()] = b.value();
  }

  /// Takes what the pipeline had before its step.
  void begin(const model_step& r) {
    torch::NoGradGuard no_grad;
    for (auto* xs : {&parameters_, &buffers_})
      for (auto& [name, t] : *xs)
        t.copy_(r.before.at(name));
    for (auto& [name, p] : parameters_)
      p.mutable_grad() = Tensor{};
  }

  /// Tells `say` which gradients, parameters and buffers the pipeline has
  /// otherwise.
  template <class Say>
  void compare(const model_step& r, const model_options& x, Say say) const {
    for (auto& [name, p] : parameters_) {
      auto found = r.gradients.find(name);
      if (p.grad().defined() != (found != r.gradients.end()))
        say(fmt::format("gradient of {} is {}there", name,
                        p.grad().defined() ? "not " : ""));
      else if (p.grad().defined()
               && !is_close(found->second, p.grad(), x.tolerance, x.absolute))
        say("gradient of " + name);
      // Forward may change it.
      if (!is_close(r.after.at(name), p, x.tolerance))
        say("parameter " + name);
    }
    for (auto& [name, b] : buffers_)
      if (!is_close(r.after.at(name), b, x.tolerance))
        say("buffer " + name);
  }

private:
  std::map<std::string, Tensor> parameters_, buffers_;
};

/// @returns what differs between the pipeline and plain LibTorch, which takes
/// each step from the pipeline's parameters and buffers; empty if nothing does
template <template <template <class> class> class Impl>
std::vector<std::string> differences(const model_options& x,
                                     const std::vector<Tensor>& batches,
                                     const std::vector<model_step>& steps) {
  std::vector<std::string> result;
  auto model = make_seeded<holder<Impl, noted>>();
  one_process_numbers numbers;
  numbers.name(*model);
  // Its children are erased types: only from outside can they be told.
  for (auto& m : model->modules())
    if (auto* sequential = dynamic_cast<torch::nn::SequentialImpl*>(m.get()))
      observe_children(*sequential);
  reference_state state{*model};
  if (steps.size() != static_cast<size_t>(x.steps))
    result.push_back("steps are missing");
  for (size_t i = 0; i < steps.size(); ++i) {
    auto& r = steps[i];
    auto say = [&](const std::string& what) {
      result.push_back(fmt::format("step {}: {}", i, what));
    };
    state.begin(r);
    auto around = x.context ? x.context() : nullptr;
    auto m = static_cast<int64_t>(x.microbatches);
    for (int64_t k = 0; k < m; ++k) {
      numbers.start(1, r.number, static_cast<uint64_t>(k));
      auto n = batches[i].size(0) / m;
      auto loss = model->forward(batches[i].narrow(0, k * n, n));
      if (loss.requires_grad())
        (loss / static_cast<double>(m)).backward();
      if (!is_close(r.losses.at(static_cast<size_t>(k)), loss, x.tolerance,
                    x.absolute))
        say(fmt::format("loss of microbatch {}", k));
    }
    state.compare(r, x, say);
  }
  return result;
}

template <template <template <class> class> class Impl>
std::vector<std::string> differences(const model_options& x,
                                     const std::vector<Tensor>& batches) {
  return differences<Impl>(x, batches, run_ranks<Impl>(x, batches));
}

} // namespace smp::test
