#include "runtime/verify/verify.hpp"

#include "actors/order/order_book.hpp"
#include "runtime/collectives/agreement.hpp"
#include "runtime/lazy/placeholder.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/session/placement.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/step.hpp"
#include "runtime/sharing/native_modules.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/train/trainable.hpp"
#include "runtime/values/tensor_bridge.hpp"
#include "runtime/verify/reference.hpp"
#include "transport/bytes.hpp"

#include <ATen/TensorOperators.h>
#include <torch/optim/optimizer.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <set>
#include <unordered_set>
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

std::map<std::string, at::Tensor> by_name(const named_tensors& xs) {
  return {xs.begin(), xs.end()};
}

/// The parameters that `x` updates, at least in part.
std::unordered_set<const void*> updated_by(distributed_optimizer& x) {
  std::unordered_set<const void*> result;
  for (auto& group : x.inner().param_groups())
    for (auto& p : group.params())
      result.insert(x.parameter_of(p).unsafeGetTensorImpl());
  return result;
}

/// A tensor of a map, on its way to another rank.
using sent_tensor = std::pair<std::string, tensor_ref>;

/// Listens to the pipeline's run and compares it, on pp_rank 0 of each replica,
/// with what one process computes from the same data.
class verifier final : public train_listener {
public:
  verifier(session& s, const train_config& config,
           const verify_options& options, const train_job& job,
           train_listener& next, const std::atomic<bool>& interrupt)
    : rank_(s.internals()),
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

  ~verifier() override {
    rank_.observe(nullptr);
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
    summary_.shared = 0;
    each_in_shared(
      [&](uint32_t shared, uint32_t x) { summary_.shared += shared == x; });
    for (auto& t : model.state().model().tensors)
      if (!t.is_attribute)
        names_.push_back({t.names, t.is_buffer});
    check_owners(optimizer);
    before_ = by_name(model.state_dict());
    rank_.observe(&logger_);
  }

  void before_step(uint64_t step) override {
    // The first step partitions the model and calls `on_model`.
    if (model_) {
      before_ = std::move(after_);
      rank_.observe(&logger_);
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
    rank_.observe(nullptr); // of an evaluation, only the loss is compared
    auto log = gather_log();
    auto reference = run_reference(metrics);
    if (reference) {
      compare(metrics, std::move(log), std::move(*reference));
      gather_findings();
    }
    share_differences();
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
        reference_->begin_from(names_);
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
      auto group = replicas();
      auto sum = rank_.exchange().all_reduce_sum(group, "smp.verify.evaluation",
                                                 {*mine});
      auto reference = sum.front() / static_cast<double>(group.size());
      if (rank_.self() == group.front())
        compare_held_out(step, loss, reference, allowed(), summary_);
      told_ = summary_.findings.size();
    }
    share_differences();
  }

  void compare(const step_metrics& metrics, observed_step log,
               step_evidence reference) {
    step_evidence pipeline;
    pipeline.log = std::move(log);
    pipeline.gradients = gradients_;
    pipeline.loss = metrics.loss;
    for (auto& names : names_) {
      auto& name = names.all.front();
      auto updated = after_.find(name);
      if (updated != after_.end())
        (names.is_buffer ? pipeline.buffers : pipeline.parameters)
          .insert(*updated);
    }
    average_over_replicas(reference);
    if (metrics.skipped.empty()) {
      pipeline.gradient_norm = metrics.grad_norm;
      reference_->update(moment_of(metrics), gradients_, reference);
    } else {
      pipeline.parameters.clear(); // they did not change
    }
    auto earlier = summary_.differences;
    compare_step(
      {.step = metrics.step,
       .microbatches = config_.smp.microbatches,
       .root_rank = rank_.pipeline().front().value,
       .names = names_,
       .pipeline = pipeline,
       .reference = reference,
       .before = before_,
       .allowed = allowed(),
       .zeros_for_none = config_.model.type == "torchscript",
       .casts_elsewhere = config_.model.type == "torchscript"
                          && computed_in(config_) != c10::ScalarType::Float,
       .inside = inside_shared(),
       .summed_apart = summed_apart()},
      summary_);
    if (options_.on_step)
      options_.on_step(
        {metrics.step, metrics.loss, reference.loss,
         std::max(summary_.gradients.share, summary_.updates.share),
         summary_.differences - earlier});
  }

  /// Calls `f(module, below)` for each module that ranks share and each module
  /// of its subtree, itself included.
  template <class F>
  void each_in_shared(F f) const {
    auto& map = model_->state().map();
    for (uint32_t i = 0; i < map.model().modules.size(); ++i)
      if (map.is_shared(module_id{i}))
        for (auto below : map.model().subtree(i))
          f(i, below);
  }

  /// A module that ranks share computes the modules below it itself.
  std::set<std::string> inside_shared() const {
    std::set<std::string> result;
    auto& modules = model_->state().map().model().modules;
    each_in_shared([&](uint32_t shared, uint32_t x) {
      if (x != shared)
        result.insert(modules[x].names.front());
    });
    return result;
  }

  /// Parameters of layer norms that ranks share.
  std::set<std::string> summed_apart() const {
    std::set<std::string> result;
    auto& model = model_->state().map().model();
    each_in_shared([&](uint32_t, uint32_t x) {
      if (auto norm = native_of(model, x); norm && norm->type == "LayerNorm")
        for (auto t : model.modules[x].tensors)
          result.insert(model.tensors[t].names.front());
    });
    return result;
  }

  /// Computing in fewer digits leaves fewer digits equal.
  tolerance allowed() const {
    return tolerance_for(computed_in(config_));
  }

  // -- what only all replicas know --------------------------------------------

  std::vector<rank_id> replicas() const {
    return rank_.layout().members(comm_group::dp, rank_.self());
  }

  /// Replaces numbers by what one process would have for the whole batch.
  void average_over_replicas(step_evidence& evidence) {
    auto group = replicas();
    if (group.size() == 1)
      return;
    auto replicas = static_cast<double>(group.size());
    evidence.loss = rank_.exchange()
                      .all_reduce_sum(group, "smp.verify.loss", {evidence.loss})
                      .front()
                    / replicas;
    std::vector<sent_tensor> mine;
    for (auto& [name, gradient] : evidence.gradients)
      mine.emplace_back(name, to_tensor_ref(gradient, true));
    std::map<std::string, at::Tensor> sums;
    for (auto& other : rank_.exchange().all_gather(
           group, "smp.verify.gradients", to_payload(mine)))
      for (auto& [name, ref] :
           from_payload<std::vector<sent_tensor>>(other, "gradients")) {
        auto gradient = to_tensor(ref);
        auto [sum, added] = sums.emplace(name, gradient);
        if (!added)
          sum->second = sum->second + gradient;
      }
    for (auto& [name, gradient] : sums)
      gradient = gradient / replicas;
    evidence.gradients = std::move(sums);
    if (config_.smp.broadcast_buffers)
      take_first_buffers(evidence, group);
  }

  /// The buffers of the first replica count for all.
  void take_first_buffers(step_evidence& evidence,
                          const std::vector<rank_id>& group) {
    std::vector<sent_tensor> mine;
    if (rank_.self() == group.front())
      for (auto& [name, buffer] : evidence.buffers)
        mine.emplace_back(name, to_tensor_ref(buffer, true));
    auto all = rank_.exchange().all_gather(group, "smp.verify.buffers",
                                           to_payload(mine));
    for (auto& [name, ref] :
         from_payload<std::vector<sent_tensor>>(all.front(), "buffers"))
      evidence.buffers[name] = to_tensor(ref);
  }

  /// Gathers the findings of all replicas on rank 0.
  void gather_findings() {
    auto group = replicas();
    std::vector<finding> fresh{summary_.findings.begin()
                                 + static_cast<ptrdiff_t>(told_),
                               summary_.findings.end()};
    auto all = rank_.exchange().all_gather(group, "smp.verify.findings",
                                           to_payload(fresh));
    if (rank_.self() == group.front())
      for (size_t replica = 1; replica < all.size(); ++replica)
        for (auto& found :
             from_payload<std::vector<finding>>(all[replica], "findings")) {
          found.what += fmt::format(" (replica {})", replica);
          summary_.add(std::move(found));
        }
    // The cause first, whichever replica found it.
    std::stable_sort(summary_.findings.begin() + static_cast<ptrdiff_t>(told_),
                     summary_.findings.end(),
                     [](auto& a, auto& b) { return a.kind < b.kind; });
    told_ = summary_.findings.size();
  }

  // -- what only all ranks know -----------------------------------------------

  /// @returns the step of all ranks on rank 0
  observed_step gather_log() {
    auto& modules = model_->state().model();
    auto mine = logger_.take(
      [&](const void* object) -> std::optional<std::string> {
        auto index = modules.module_index.find(object);
        if (index == modules.module_index.end())
          return std::nullopt;
        return modules.modules[index->second].names.front();
      });
    auto all = rank_.exchange().all_gather(rank_.pipeline(), "smp.verify.log",
                                           to_payload(mine));
    observed_step result;
    for (size_t index = 0; index < all.size() && reference_; ++index) {
      auto from = rank_.pipeline()[index];
      auto told = from_payload<observed_step>(all[index], "numbers of a step",
                                              from);
      for (auto& call : told.calls) {
        call.rank = from.value;
        result.calls.push_back(std::move(call));
      }
      for (auto& pass : told.passes)
        result.passes.push_back(std::move(pass));
    }
    return result;
  }

  void share_differences() {
    summary_.differences = agree_everywhere(
      rank_, "smp.verify.differences", [this] { return summary_.differences; });
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
           replicas(), "smp.verify.updaters", to_payload(mine))) {
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
  const train_config& config_;
  const verify_options& options_;
  train_listener& next_;
  const std::atomic<bool>& interrupt_;
  std::atomic<bool> stop_ = false;
  std::optional<reference_run> reference_; // on rank 0
  call_logger logger_;
  distributed_model_base* model_ = nullptr;
  std::vector<tensor_names> names_;
  bool reads_weights_ = false; // in the first step
  size_t told_ = 0;            // of the findings, how many rank 0 knows
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
