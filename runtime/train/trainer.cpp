#include "runtime/train/trainer.hpp"

#include "actors/order/order_book.hpp"
#include "runtime/base/fault.hpp"
#include "runtime/checkpoint/load_state_dict.hpp"
#include "runtime/checkpoint/saved_model.hpp"
#include "runtime/data/data_agreement.hpp"
#include "runtime/deferred/delay_param_initialization.hpp"
#include "runtime/device/rank_device.hpp"
#include "runtime/intercept/call_observer.hpp"
#include "runtime/launch/environment.hpp"
#include "runtime/placement/module_times.hpp"
#include "runtime/session/distributed_model.hpp"
#include "runtime/session/distributed_optimizer.hpp"
#include "runtime/session/groups.hpp"
#include "runtime/session/placement.hpp"
#include "runtime/session/rank_runtime.hpp"
#include "runtime/session/step.hpp"
#include "runtime/step/model_state.hpp"
#include "runtime/train/batch_feed.hpp"
#include "runtime/train/evaluation_error.hpp"
#include "runtime/train/half_on_cpu.hpp"
#include "runtime/train/optimizers.hpp"
#include "runtime/train/run_checkpoints.hpp"
#include "runtime/train/text_sampler.hpp"
#include "runtime/train/trainable.hpp"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <utility>

#include <sys/resource.h>

namespace smp {

namespace {

using clock = std::chrono::steady_clock;

double seconds_since(clock::time_point x) {
  return std::chrono::duration<double>(clock::now() - x).count();
}

/// Bytes; the largest resident set that this process ever had.
double peak_memory() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) * 1024;
}

std::vector<at::Tensor> tensors_of(const named_tensors& xs) {
  std::vector<at::Tensor> result;
  for (auto& [name, x] : xs)
    result.push_back(x);
  return result;
}

uint64_t count_elements(const std::vector<at::Tensor>& xs) {
  uint64_t result = 0;
  for (auto& x : xs)
    result += static_cast<uint64_t>(x.numel());
  return result;
}

/// Every rank makes the whole model with the same random numbers. Ranks that
/// are threads share one generator, so they take turns.
std::unique_ptr<trainable>
make_model(const session& s, const train_config& config, const train_job& job) {
  delay_param_initialization deferring{pp_size() > 1
                                       && defers_parameters(config, rank())};
  if (!config.threads_as_ranks)
    return job.make_model();
  std::unique_ptr<trainable> result;
  for (uint64_t turn = 0; turn < s.size(); ++turn) {
    if (turn == s.rank())
      result = job.make_model();
    barrier();
  }
  return result;
}

/// One run; `train` is its only user.
class run {
public:
  run(session& s, const train_config& config, const std::string& run_dir,
      train_listener& listener, const std::atomic<bool>& stop,
      const train_job& job)
    : session_(s),
      config_(config),
      run_dir_(run_dir),
      listener_(listener),
      stop_(stop),
      data_(job.make_data()),
      trainable_(make_model(s, config, job)),
      model_(trainable_->distribute()),
      parameters_(tensors_of(trainable_->named_parameters())),
      torch_optimizer_(make_optimizer(config.optimizer, parameters_, true)),
      optimizer_(*torch_optimizer_, options_of(config)) {
    if (s.rank() == 0)
      metrics_.emplace(run_dir + "/metrics.jsonl", restart_number() > 0);
    for (auto rank : get_group(comm_group::world))
      world_.push_back(rank_id{rank});
    require_same_data(*data_, s.internals());
    begin_run(config, *trainable_, *data_, *model_);
    if (job.place)
      job.place(*model_);
    checkpoints_.emplace(config, *data_, *model_, optimizer_,
                         [this](uint64_t step, const saved_checkpoint& x) {
                           ++summary_.checkpoints;
                           summary_.checkpoint_seconds += x.seconds;
                           summary_.last_checkpoint = x.folder;
                           listener_.on_checkpoint(step, x);
                         });
    summary_.resumed_from = checkpoints_->resumed_from();
    summary_.steps_before = checkpoints_->steps_done();
    summary_.steps = summary_.steps_before;
    // A checkpoint already has what these weights became.
    if (auto& file = config.train.init_from;
        !file.empty() && summary_.resumed_from.empty())
      load_state_dict(file, *model_, {&optimizer_}, config.train.init_prefix);
  }

  train_summary operator()() {
    start();
    // The step that a user would write.
    auto train_step = smp::step([this](const batch& x) {
      trainable_->rehearse(x);
      auto loss = trainable_->loss(x);
      if (auto* observer = call_observer::current())
        observer->body_done(x, {&loss, 1});
      model_->backward(loss);
      return loss;
    });
    if (rehearses())
      checkpoints_->rehearse(
        [&](uint64_t i) { train_step(training_batch(i)); });
    else if (summary_.steps == config_.train.steps)
      model_->partition(); // which also loads the values
    if (summary_.steps > 0)
      evaluate_in_between();
    while (summary_.steps < config_.train.steps && !summary_.interrupted) {
      try {
        do_step(train_step);
      } catch (const std::exception&) {
        explain_memory();
      }
      end_step();
    }
    checkpoints_->await();
    // First what cannot be had again.
    if (config_.train.save_model)
      save();
    if (!summary_.interrupted)
      finish();
    if (pipeline_seconds_ > 0)
      summary_.bubble_ratio = 1 - executing_seconds_ / pipeline_seconds_;
    for (auto x : allgather(peak_memory()))
      summary_.peak_memory.push_back(static_cast<uint64_t>(x));
    if (auto* launches = session_.internals().launches()) {
      auto memory = launches->look_at_memory();
      summary_.device_memory = allgather(std::pair{memory.peak, memory.total});
    }
    return std::move(summary_);
  }

private:
  void start() {
    // The partition releases what other ranks own.
    const auto parameters = count_elements(parameters_);
    parameters_.clear();
    auto& state = model_->state();
    state.on_decision([this, &state](const partition_decision& x) {
      listener_.on_decision(x, session_, state, *trainable_);
    });
    model_->register_post_partition_hook([this, parameters] {
      auto* decision = model_->state().decision();
      if (metrics_ && decision && decision->plan.options.step_seconds > 0)
        write_module_times(run_dir_ + "/times.json", decision->model);
      if (!rehearses())
        checkpoints_->load();
      if (auto* device = session_.internals().launches();
          device != nullptr && session_.pp_rank() == 0)
        feed_.send_ahead(device->make_storage_copies());
      auto places = places_of_ranks(session_);
      devices_ = {session_, places};
      listener_.on_start(
        {.partition = model_->partition_text(true),
         .parameters = parameters,
         .owned = count_elements(model_->local_parameters()),
         .batch_size = data_->batch_size(),
         .tokens_per_sample = config_.data.sequence_length,
         .warnings = decision != nullptr ? decision->plan.warnings
                                         : std::vector<std::string>{},
         .resumed_from = summary_.resumed_from,
         .steps_done = summary_.steps_before,
         .changes = checkpoints_->changes(),
         .needs = needs(),
         .precision = remark_on_half_precision(computed_in(config_)),
         .places = std::move(places)});
      listener_.on_model(*model_, optimizer_);
    });
  }

  /// @returns the memory that the rank needs to train its part of the model
  memory_need need_of_rank(rank_id rank) const {
    auto& st = model_->state();
    auto held = [&](uint32_t i) -> held_part {
      if (st.map().tensor_owner(i) != rank)
        return {};
      return {st.model().tensors[i].tensor.nbytes(),
              st.map().slice(i) != nullptr};
    };
    return need_of(st.model(), config_, held,
                   session_.internals().launches() != nullptr);
  }

  /// By pp_rank. Collective.
  std::vector<memory_need> needs() const {
    auto& layout = session_.internals().layout();
    auto all = allgather(need_of_rank(session_.internals().self()));
    std::vector<memory_need> result(pp_size());
    for (auto i = all.size(); i-- > 0;)
      result.at(layout.rank(comm_group::pp, rank_id{i})) = all[i];
    return result;
  }

  // -- going on (R51) ---------------------------------------------------------

  bool rehearses() const {
    return config_.smp.deterministic_server && !summary_.resumed_from.empty();
  }

  /// Saves before the evaluation, which a resumed run repeats. An interrupted
  /// run has to end in time and does not evaluate.
  void end_step() {
    checkpoints_->save_if_due(summary_.steps, summary_.interrupted);
    if (summary_.interrupted)
      return;
    evaluate_in_between();
    checkpoints_->save_if_due(summary_.steps, summary_.interrupted);
  }

  // -- steps ------------------------------------------------------------------

  /// Only pp_rank 0 uses its batch (R5).
  batch training_batch(uint64_t step) const {
    return session_.pp_rank() == 0 ? data_->training_batch(step, own_part())
                                   : batch{};
  }

  template <class Step>
  void do_step(Step& train_step) {
    auto x = feed_.take(summary_.steps,
                        summary_.steps + 1 == config_.train.steps);
    step_metrics result{.step = summary_.steps + 1};
    result.checkpoint_seconds = checkpoints_->take_seconds();
    result.lr = learning_rate(config_.optimizer, summary_.steps,
                              config_.train.steps);
    set_learning_rate(*torch_optimizer_, result.lr);
    listener_.before_step(result.step);
    session_.internals().steps().number_step(result.step);
    auto begin = clock::now();
    result.loss = mean_of_replicas(
      train_step(x).reduce_mean().template item<double>());
    if (auto& steps = config_.train.dump_gradients;
        std::find(steps.begin(), steps.end(), result.step) != steps.end())
      dump_gradients(result.step);
    listener_.on_gradients(result.step);
    // Without a bound this only computes the norm.
    result.grad_norm = clip_grad_norm_(
      *model_, config_.optimizer.clip_grad_norm.value_or(
                 std::numeric_limits<double>::infinity()));
    result.loss_scale = optimizer_.loss_scale();
    result.skipped = not_finite(result);
    const bool stops = !result.skipped.empty()
                       && config_.train.on_nonfinite == "stop";
    if (result.skipped.empty() && !optimizer_.step())
      result.skipped = fmt::format(
        "gradients are not finite with a loss scale of {}", result.loss_scale);
    // Now: steps that evaluate or sample would copy them (R42).
    optimizer_.zero_grad();
    result.step_seconds = seconds_since(begin);
    account(result);
    if (stops)
      throw error{
        error_code::numbers,
        fmt::format("step {}: {}; a smaller optimizer.lr or "
                    "optimizer.clip_grad_norm may help, train.on_nonfinite = "
                    "\"skip\" goes on without such steps",
                    result.step, result.skipped)};
  }

  /// What is wrong with a step's numbers on any rank, the same on all; empty if
  /// nothing is, or if a dynamic loss scale takes care of it.
  std::string not_finite(const step_metrics& x) const {
    auto scaler = model_->state().loss_scale().scaler();
    auto scales = scaler && scaler->is_dynamic();
    auto found = session_.internals().exchange().all_reduce_sum(
      world_, "smp.train.not_finite",
      {std::isfinite(x.loss) ? 0.0 : 1.0,
       scales || std::isfinite(x.grad_norm) ? 0.0 : 1.0});
    if (found[0] > 0)
      return std::isfinite(x.loss)
               ? "the loss of another rank is not finite"
               : fmt::format("the loss is {}", std::abs(x.loss));
    return found[1] > 0 ? "the gradient is not finite" : "";
  }

  batch_part own_part() const {
    return {SMP_FAULT("shared-batch") ? 0 : data_rank(), data_size()};
  }

  /// Collective over the data-parallel group. @returns the same on all ranks
  double mean_of_replicas(double x) const {
    if (dp_size() == 1)
      return x;
    std::vector<rank_id> group;
    for (auto rank : get_group(comm_group::dp))
      group.push_back(rank_id{rank});
    auto sum = session_.internals().exchange().all_reduce_sum(
      group, "smp.train.mean", {x});
    return sum.front() / static_cast<double>(group.size());
  }

  /// Adds to an out-of-memory error how much the rank needs in any case.
  /// @pre inside of a handler
  [[noreturn]] void explain_memory() {
    auto found = lack_of_memory();
    if (!found)
      throw;
    if (found->rank == no_rank)
      found->rank = session_.internals().self();
    explain_need(*found, need_of_rank(found->rank), config_.optimizer);
    throw error{std::move(*found)};
  }

  /// Adds the numbers that need all ranks, and reports.
  void account(step_metrics& x) {
    auto stats = session_.last_step();
    std::vector<double> summands{stats.executing_seconds,
                                 stats.seconds,
                                 static_cast<double>(stats.requests),
                                 static_cast<double>(stats.bytes_sent),
                                 stop_.load() ? 1.0 : 0.0,
                                 stats.fell_back ? 1.0 : 0.0,
                                 static_cast<double>(stats.offloaded_bytes),
                                 stats.offload_wait_seconds,
                                 stats.replayed ? 1.0 : 0.0,
                                 listener_.wants_checkpoint() ? 1.0 : 0.0,
                                 checkpoints_->written() ? 1.0 : 0.0};
    devices_.add_to(summands);
    auto sums = session_.internals().exchange().all_reduce_sum(
      world_, "smp.train.step", std::move(summands));
    x.devices = devices_.read(sums);
    x.samples_per_second = static_cast<double>(data_->batch_size())
                           / x.step_seconds;
    x.bubble_ratio = 1 - sums[0] / sums[1];
    x.requests = static_cast<uint64_t>(sums[2]);
    x.bytes_sent = static_cast<uint64_t>(sums[3]);
    if (config_.smp.offload_activations) {
      x.offloaded_bytes = static_cast<uint64_t>(sums[6]);
      x.offload_wait_seconds = sums[7];
    }
    executing_seconds_ += sums[0];
    pipeline_seconds_ += sums[1];
    if (summary_.steps == summary_.steps_before)
      summary_.first_loss = x.loss;
    summary_.last_loss = x.loss;
    summary_.steps = x.step;
    summary_.seconds += x.step_seconds;
    summary_.requests += x.requests;
    summary_.bytes_sent += x.bytes_sent;
    summary_.interrupted = sums[4] > 0;
    checkpoints_->want(sums[9] > 0);
    if (session_.internals().records().active())
      // Pipelines that share nothing may replay from other steps on.
      x.static_mode = sums[5] > 0 ? "fallback"
                      : sums[8] == static_cast<double>(world_.size())
                        ? "replay"
                        : "record";
    summary_.replayed += x.static_mode == "replay";
    summary_.fell_back += sums[5] > 0;
    x.ran_again = stats.ran_again;
    summary_.ran_again += !x.ran_again.empty();
    summary_.skipped += !x.skipped.empty();
    if (evaluation_follows())
      x.held_out_loss = std::numeric_limits<double>::quiet_NaN();
    if (metrics_)
      metrics_->write(x);
    listener_.on_step(x);
    if (sums[10] > 0)
      checkpoints_->await();
  }

  void evaluate_in_between() {
    if (summary_.steps < config_.train.steps && evaluation_follows())
      report_evaluation();
  }

  bool evaluates() const {
    return config_.train.eval_steps > 0 && data_->has_held_out();
  }

  /// Whether the step that is done is one after which the run evaluates, in
  /// between or at its end.
  bool evaluation_follows() const {
    if (!evaluates() || summary_.interrupted)
      return false;
    if (summary_.steps == config_.train.steps)
      return true;
    auto interval = config_.train.eval_interval;
    return interval > 0 && summary_.steps % interval == 0;
  }

  /// @returns the loss; nothing if the run is interrupted before its end
  std::optional<double> report_evaluation() {
    auto loss = evaluate();
    if (!loss)
      return loss;
    if (metrics_)
      metrics_->add_held_out_loss(*loss);
    listener_.on_evaluation(summary_.steps, *loss);
    return loss;
  }

  /// @returns the mean loss of the held-out batches, without backward; nothing
  /// if the run is interrupted before the last one
  std::optional<double> evaluate() {
    auto& drawn = session_.internals().counters().drawn_step;
    const auto before = drawn.load();
    swap_averages();
    model_->eval();
    auto eval_step = smp::step([this](const batch& x) {
      at::NoGradGuard no_grad;
      return trainable_->loss(x);
    });
    double sum = 0;
    const auto n = config_.train.eval_steps;
    uint64_t i = 0;
    for (; i < n && !is_stopped(); ++i) {
      auto x = session_.pp_rank() == 0 ? data_->held_out_batch(i, n, own_part())
                                       : batch{};
      sum += eval_step(x).reduce_mean().template item<double>();
    }
    model_->train();
    swap_averages();
    summary_.interrupted = i < n;
    if (summary_.interrupted) {
      drawn = before; // a resumed run repeats all of it
      return std::nullopt;
    }
    return mean_of_replicas(sum / static_cast<double>(n));
  }

  /// Whether the run is to end, on any rank. Collective over the world.
  bool is_stopped() const {
    auto sum = session_.internals().exchange().all_reduce_sum(
      world_, "smp.train.stop", {stop_.load() ? 1.0 : 0.0});
    return sum.front() > 0;
  }

  /// Continues the held-out part with bytes drawn from the model, the same on
  /// all ranks.
  void sample(const token_sequences& text) {
    constexpr uint64_t prompt_size = 48;
    summary_.prompt = text.prompt(prompt_size);
    swap_averages();
    model_->eval();
    auto predict = smp::step(
      [this](at::Tensor x) {
        at::NoGradGuard no_grad;
        return trainable_->logits(x).select(1, -1);
      },
      {.microbatches = 1});
    text_sampler sampler{
      summary_.prompt,
      {.context = config_.data.sequence_length, .seed = config_.smp.seed}};
    for (uint64_t i = 0; i < config_.train.sample; ++i)
      sampler.add(predict(sampler.input()).concat()[0]);
    model_->train();
    swap_averages();
    summary_.sample = sampler.text();
  }

  void finish() {
    if (evaluates()) {
      try {
        summary_.held_out_loss = report_evaluation();
      } catch (const error& e) {
        throw error{failed_evaluation(e.cause(), summary_.model_file)};
      }
      if (!summary_.held_out_loss)
        return; // interrupted
    }
    if (auto* text = dynamic_cast<token_sequences*>(data_.get());
        text != nullptr && text->is_text()) {
      summary_.unigram_entropy = text->unigram_entropy();
      if (config_.train.sample > 0 && trainable_->continues_text())
        sample(*text);
    }
  }

  /// The whole gradient as it is now: the mean over microbatches.
  void dump_gradients(uint64_t step) {
    save_gradients(fmt::format("{}/gradients-{}.safetensors", run_dir_, step),
                   *model_);
  }

  void save() {
    summary_.model_file = run_dir_ + "/model.safetensors";
    save_state(summary_.model_file, *model_);
    if (!config_.optimizer.ema_decay)
      return;
    swap_averages();
    save_state(run_dir_ + "/model-ema.safetensors", *model_);
    swap_averages();
  }

  /// Swaps parameters and their averages, if there are any; the second call
  /// swaps them back.
  void swap_averages() {
    if (config_.optimizer.ema_decay)
      optimizer_.swap_averages();
  }

  session& session_;
  const train_config& config_;
  const std::string& run_dir_;
  train_listener& listener_;
  const std::atomic<bool>& stop_;
  std::unique_ptr<data_source> data_;
  std::unique_ptr<trainable> trainable_;
  std::unique_ptr<distributed_model_base> model_;
  std::vector<at::Tensor> parameters_; // of the whole; empty once it is cut
  std::unique_ptr<torch::optim::Optimizer> torch_optimizer_;
  distributed_optimizer optimizer_;
  batch_feed feed_{[this](uint64_t step) { return training_batch(step); }};
  std::optional<run_checkpoints> checkpoints_;
  std::optional<metrics_file> metrics_; // on rank 0
  std::vector<rank_id> world_;
  device_memory_sum devices_; // from the partition on
  train_summary summary_;
  double executing_seconds_ = 0, pipeline_seconds_ = 0; // of ranks and steps
};

} // namespace

train_listener::~train_listener() = default;

void train_listener::on_decision(const partition_decision&, session&,
                                 model_state&, trainable&) {
  // nop
}

void train_listener::on_model(distributed_model_base&, distributed_optimizer&) {
  // nop
}

void train_listener::before_step(uint64_t) {
  // nop
}

void train_listener::on_gradients(uint64_t) {
  // nop
}

void train_listener::on_checkpoint(uint64_t, const saved_checkpoint&) {
  // nop
}

train_job complete(train_job x, const train_config& config, uint64_t replicas) {
  if (!x.make_model)
    x.make_model = [&config] { return make_trainable(config); };
  if (!x.make_data)
    x.make_data = [&config, replicas] { return make_data(config, replicas); };
  return x;
}

void begin_run(const train_config& config, const trainable& whole,
               const data_source& data, const distributed_model_base& model) {
  whole.check_inputs(data.training_batch(0, {0, data.batch_size()}).size());
  place_by_name(model, config.manual_partition);
}

train_summary train(session& s, const train_config& config,
                    const std::string& run_dir, train_listener& listener,
                    const std::atomic<bool>& stop, const train_job& job) {
  return run{s,        config, run_dir,
             listener, stop,   complete(job, config, data_size())}();
}

} // namespace smp
