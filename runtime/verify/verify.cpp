#include "runtime/verify/verify.hpp"

#include "actors/order/order_book.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/session/placement.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/step.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/verify/pipeline_evidence.hpp"
#include "runtime/verify/reference.hpp"
#include "transport/bytes.hpp"

#include <torch/optim/optimizer.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <unordered_set>
#include <utility>

namespace smp {

namespace {

/// The parameters that `x` updates, at least in part.
std::unordered_set<const void*> updated_by(distributed_optimizer& x) {
  std::unordered_set<const void*> result;
  for (auto& group : x.inner().param_groups())
    for (auto& p : group.params())
      result.insert(x.parameter_of(p).unsafeGetTensorImpl());
  return result;
}

/// Listens to the pipeline's run and compares it, on pp_rank 0 of each replica,
/// with what one process computes from the same data.
class verifier final : public train_listener {
public:
  verifier(session& s, const train_config& config,
           const verify_options& options, const train_job& job,
           train_listener& next, const std::atomic<bool>& interrupt)
    : rank_(s.internals()),
      pipeline_(rank_),
      config_(config),
      options_(options),
      next_(next),
      interrupt_(interrupt) {
    // Ranks that are threads share the generator: they make their models in
    // turns, after the ones made here.
    for (uint64_t turn = 0; turn < dp_size(); ++turn) {
      if (s.pp_rank() == 0 && turn == dp_rank())
        reference_.emplace(config, job);
      barrier();
    }
    summary_.ranks = s.size();
    summary_.replicas = dp_size();
    summary_.microbatches = config.smp.microbatches;
  }

  const std::atomic<bool>& stop() const noexcept {
    return stop_;
  }

  verify_summary take() {
    return std::move(summary_);
  }

  // -- train_listener ---------------------------------------------------------

  void on_start(const train_start& x) override {
    reads_weights_ = x.resumed_from.empty() && !config_.train.init_from.empty();
    next_.on_start(x);
  }

  void on_model(distributed_model_base& model,
                distributed_optimizer& optimizer) override {
    model_ = &model;
    pipeline_.begin(model);
    check_owners(optimizer);
    before_ = by_name(model.state_dict());
    pipeline_.observe(true);
  }

  void before_step(uint64_t step) override {
    // The first step partitions the model and calls `on_model`.
    if (model_) {
      before_ = std::move(after_);
      pipeline_.observe(true);
    }
    // A run that replays once keeps replaying.
    auto replays = summary_.replayed + summary_.fell_back;
    summary_.complete = step == options_.steps
                        || (options_.replays && replays > 0
                            && replays + 1 >= *options_.replays);
    // Seen at the end of this step.
    stop_ = interrupt_ || summary_.complete;
  }

  void on_gradients(uint64_t) override {
    gradients_ = by_name(model_->gradients());
  }

  void on_step(const step_metrics& metrics) override {
    after_ = by_name(model_->state_dict());
    pipeline_.observe(false); // of an evaluation, only the loss is compared
    auto log = pipeline_.gather_log();
    auto reference = run_reference(metrics);
    if (reference) {
      compare(metrics, std::move(log), std::move(*reference));
      pipeline_.gather_findings(summary_);
    }
    pipeline_.share_differences(summary_);
    summary_.steps = metrics.step;
    summary_.recorded += metrics.static_mode == "record";
    summary_.replayed += metrics.static_mode == "replay";
    summary_.fell_back += metrics.static_mode == "fallback";
    summary_.requests += metrics.requests;
    next_.on_step(metrics);
  }

  void on_evaluation(uint64_t step, double loss) override {
    // The averages, with which the pipeline evaluated, are not kept here.
    if (!config_.optimizer.ema_decay)
      compare_evaluation(step, loss);
    next_.on_evaluation(step, loss);
  }

private:
  reference_run::moment moment_of(const step_metrics& x) const {
    return {x.step, rank_.drawn_step(), data_rank(), data_size(), x.loss_scale};
  }

  /// Ranks that are threads share the generator, and take turns.
  /// @returns the result of `f` where there is a reference
  template <class F>
  auto run_apart(F f) {
    std::optional<decltype(f())> result;
    auto threads = config_.threads_as_ranks;
    for (uint64_t turn = 0; turn < (threads ? dp_size() : 1); ++turn) {
      if (reference_ && (!threads || turn == dp_rank()))
        result = f();
      if (threads)
        barrier();
    }
    return result;
  }

  std::optional<step_evidence> run_reference(const step_metrics& x) {
    return run_apart([&] {
      // The weights that ranks read from the file are compared, too.
      if (std::exchange(reads_weights_, false))
        reference_->begin_from(pipeline_.names());
      else
        reference_->load(before_);
      return reference_->run(moment_of(x));
    });
  }

  /// Evaluation mode is code of its own, such as the fast path of torch.nn's
  /// encoder.
  void compare_evaluation(uint64_t step, double loss) {
    auto mine = run_apart([&] {
      reference_->load(after_);
      return reference_->evaluate(moment_of({.step = step}));
    });
    if (mine) {
      auto group = pipeline_.replicas();
      auto sum = rank_.exchange().all_reduce_sum(group, "smp.verify.evaluation",
                                                 {*mine});
      auto reference = sum.front() / static_cast<double>(group.size());
      if (rank_.self() == group.front())
        compare_held_out(step, loss, reference, allowed(), summary_);
      pipeline_.mark_told(summary_);
    }
    pipeline_.share_differences(summary_);
  }

  void compare(const step_metrics& metrics, observed_step log,
               step_evidence reference) {
    step_evidence pipeline;
    pipeline.log = std::move(log);
    pipeline.gradients = gradients_;
    pipeline.loss = metrics.loss;
    pipeline_.take_state(after_, pipeline);
    pipeline_.average_over_replicas(reference, config_.smp.broadcast_buffers);
    if (metrics.skipped.empty()) {
      pipeline.gradient_norm = metrics.grad_norm;
      reference_->update(moment_of(metrics), gradients_, reference);
    } else {
      pipeline.parameters.clear(); // they did not change
    }
    auto earlier = summary_.differences;
    pipeline_.compare(
      {.step = metrics.step,
       .microbatches = config_.smp.microbatches,
       .names = pipeline_.names(),
       .pipeline = pipeline,
       .reference = reference,
       .before = before_,
       .allowed = allowed(),
       .zeros_for_none = config_.model.type == "torchscript",
       .casts_elsewhere = config_.model.type == "torchscript"
                          && computed_in(config_) != c10::ScalarType::Float},
      summary_);
    if (options_.on_step)
      options_.on_step(
        {metrics.step, metrics.loss, reference.loss,
         std::max(summary_.gradients.share, summary_.updates.share),
         summary_.differences - earlier});
  }

  /// Computing in fewer digits leaves fewer digits equal.
  tolerance allowed() const {
    return tolerance_for(computed_in(config_));
  }

  /// Checks that each tensor is held by one rank, and updated by the optimizer
  /// of that rank or of one in another replica.
  void check_owners(distributed_optimizer& optimizer) {
    auto& state = model_->state();
    auto& tensors = state.model().tensors;
    auto updated = updated_by(optimizer);
    using roles = std::vector<std::pair<bool, bool>>; // holds, updates
    roles mine;
    for (uint32_t index = 0; index < tensors.size(); ++index) {
      auto& tensor = tensors[index].tensor;
      mine.emplace_back(state.map().owned(index) && !is_placeholder(tensor),
                        updated.contains(tensor.unsafeGetTensorImpl()));
    }
    for (auto& other : rank_.exchange().all_gather(
           pipeline_.replicas(), "smp.verify.updaters", to_payload(mine))) {
      auto theirs = from_payload<roles>(other, "owners");
      for (size_t index = 0; index < mine.size(); ++index)
        mine[index].second = mine[index].second || theirs.at(index).second;
    }
    auto all = rank_.exchange().all_gather(
      rank_.pipeline(), "smp.verify.owners", to_payload(mine));
    if (!reference_)
      return;
    std::vector<std::vector<uint64_t>> holders(tensors.size());
    std::vector<std::vector<uint64_t>> updaters(tensors.size());
    for (size_t rank = 0; rank < all.size(); ++rank) {
      auto theirs = from_payload<roles>(all[rank], "owners");
      for (uint32_t index = 0; index < tensors.size(); ++index) {
        if (theirs.at(index).first)
          holders[index].push_back(rank_.pipeline()[rank].value);
        if (theirs.at(index).second)
          updaters[index].push_back(rank_.pipeline()[rank].value);
      }
    }
    auto ranks = [](const std::vector<uint64_t>& owners) {
      return owners.empty() ? "none"
                            : fmt::format("{}", fmt::join(owners, ", "));
    };
    auto expected = reference_->names();
    std::unordered_set<std::string> open{expected.begin(), expected.end()};
    for (uint32_t index = 0; index < tensors.size(); ++index) {
      auto& name = tensors[index].names.front();
      if (tensors[index].is_attribute)
        continue; // not part of the state that others know
      if (open.erase(name) == 0)
        add_owner(name, fmt::format("'{}' is a tensor of its own", name), "yes",
                  "no, it is tied");
      else if (holders[index].size() != 1)
        add_owner(name, fmt::format("ranks that own '{}'", name),
                  ranks(holders[index]), "exactly one");
      else if (!tensors[index].is_buffer && updaters[index] != holders[index]
               && !config_.smp.shard_optimizer_state) // rows have owners
        add_owner(name, fmt::format("ranks that update '{}'", name),
                  ranks(updaters[index]), ranks(holders[index]));
      else
        ++summary_.owned;
    }
    for (auto& name : expected)
      if (open.contains(name))
        add_owner(name, fmt::format("ranks that own '{}'", name), "none",
                  "exactly one");
  }

  void add_owner(const std::string& tensor, std::string what,
                 std::string pipeline, std::string reference) {
    finding found;
    found.kind = finding_kind::owner;
    auto dot = tensor.rfind('.');
    found.module = dot == std::string::npos ? "" : tensor.substr(0, dot);
    found.tensor = tensor;
    found.what = std::move(what);
    found.values = {"", std::move(pipeline), std::move(reference),
                    std::numeric_limits<double>::infinity(), 0};
    summary_.add(std::move(found));
  }

  rank_runtime& rank_;
  pipeline_evidence pipeline_;
  const train_config& config_;
  const verify_options& options_;
  train_listener& next_;
  const std::atomic<bool>& interrupt_;
  std::atomic<bool> stop_ = false;
  std::optional<reference_run> reference_; // on rank 0
  distributed_model_base* model_ = nullptr;
  bool reads_weights_ = false; // in the first step
  std::map<std::string, at::Tensor> before_, gradients_, after_;
  verify_summary summary_;
};

} // namespace

uint64_t steps_to_verify(const train_config& config) {
  auto& x = config.smp;
  if (!x.static_mode && !x.deterministic_server)
    return enough_steps;
  // Modules are released from their order in a step that does not count.
  constexpr uint64_t released = 1;
  auto recorded = x.deterministic_server ? 1 : x.static_steps;
  return released + order_book::max_learnt + recorded + enough_steps;
}

verify_summary verify(session& s, const train_config& config,
                      const std::string& run_dir, train_listener& listener,
                      const std::atomic<bool>& stop,
                      const verify_options& options, const train_job& job) {
  auto changed = config;
  changed.train.steps = std::max(config.train.steps, options.steps);
  // The last step ends the run without an evaluation.
  changed.train.eval_interval = std::clamp<uint64_t>(options.steps - 1, 1, 2);
  changed.train.eval_steps = std::min<uint64_t>(config.train.eval_steps, 1);
  changed.train.save_model = false;
  auto full_job = complete(job, changed, data_size());
  if (options.split)
    full_job.place = place_in_turn;
  verifier x{s, changed, options, full_job, listener, stop};
  try {
    train(s, changed, run_dir, x, x.stop(), full_job);
  } catch (const error& e) {
    auto result = x.take();
    if (e.code() == error_code::numbers && !result.equal())
      return result; // only the pipeline's loss is not finite
    throw;
  }
  return x.take();
}

} // namespace smp
