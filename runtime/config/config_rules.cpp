#include "runtime/config/config_schema.hpp"

#include "runtime/base/name_pattern.hpp"
#include "transport/error.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace smp {

namespace {

/// @returns "smp.microbatches = 8", as the user would write it.
std::string setting(std::string_view name, const train_config& x) {
  return fmt::format("{} = {}", name, value_text(*find_config_key(name), x));
}

class rule_book {
public:
  explicit rule_book(const train_config& x)
    : x_(effective(x)),
      has_head_size_(x.model.type == "t5" && x.model.head_size),
      has_memory_weight_(x.smp.memory_weight) {
    // nop
  }

  /// Adds a conflict between two keys: "KEY = VALUE why OTHER = VALUE; hint".
  void add(const char* key, const char* why, const char* other,
           const std::string& hint) {
    add({key, other}, fmt::format("{} {} {}; {}", setting(key, x_), why,
                                  setting(other, x_), hint));
  }

  void add(std::vector<std::string> keys, std::string text) {
    found_.push_back({std::move(keys), std::move(text)});
  }

  void check_schedule() {
    auto& x = x_.smp;
    // R2: all microbatches may be alive at once.
    if ((x.pipeline == "simple" || x.pipeline == "list")
        && *x.active_microbatches < x.microbatches)
      add({"smp.active_microbatches", "smp.microbatches", "smp.pipeline"},
          fmt::format("smp.active_microbatches = {} is less than "
                      "smp.microbatches = {}, so smp.pipeline = \"{}\" "
                      "would wait for ever; write at least {}, or "
                      "smp.pipeline = \"interleaved\"",
                      *x.active_microbatches, x.microbatches, x.pipeline,
                      x.microbatches));
    if (x.pipeline == "list")
      try {
        list_schedule{x.microbatches, x.schedule.list};
      } catch (const error& e) {
        add({"smp.schedule.list", "smp.microbatches"}, e.cause().text);
      }
    if (x.pipeline == "interleaved_1f1b" && x.chunks == 1)
      add({"smp.pipeline", "smp.chunks"},
          "smp.pipeline = \"interleaved_1f1b\" has nothing to interleave with "
          "smp.chunks = 1; write smp.chunks = 2 or more, or smp.pipeline = "
          "\"1f1b\"");
  }

  void check_partition() {
    auto& x = x_.smp;
    if (x.chunks > 1 && x.strategy == "paper")
      add({"smp.chunks", "smp.strategy"},
          fmt::format("smp.chunks = {} cannot go with smp.strategy = "
                      "\"paper\", which gives each rank one part; write "
                      "smp.strategy = \"balanced\"",
                      x.chunks));
    if (has_memory_weight_ && x.optimize != "memory"
        && x.tensor_parallel_degree == 1)
      add("smp.optimize", "has no effect with", "smp.memory_weight",
          "it stands for a weight; keep one of them");
    if (!x.auto_partition && x.optimize != "memory"
        && x.tensor_parallel_degree == 1)
      add("smp.optimize", "has no effect with", "smp.auto_partition",
          "nothing is balanced, and no layers are shared; leave it out");
    if (!x.auto_partition && x.trace_device == "gpu")
      add("smp.trace_device", "has no effect with", "smp.auto_partition",
          "nothing is measured; leave it out");
    if (x.auto_partition && x.default_partition != 0)
      add({"smp.default_partition", "smp.auto_partition"},
          fmt::format("smp.default_partition = {} has no effect with "
                      "smp.auto_partition = true; write smp.auto_partition = "
                      "false, or leave it out",
                      x.default_partition));
    if (x.default_partition >= x.pipeline_parallel_degree)
      add({"smp.default_partition", "smp.pipeline_parallel_degree"},
          fmt::format("smp.default_partition = {} does not exist with "
                      "smp.pipeline_parallel_degree = {}; allowed: 0 to {}",
                      x.default_partition, x.pipeline_parallel_degree,
                      x.pipeline_parallel_degree - 1));
  }

  void check_batch() {
    // If unset, the file gives the batch, and is checked when it is read.
    auto batch = x_.data.batch_size.value_or(0);
    auto parts = x_.smp.microbatches;
    if (batch % parts != 0)
      add("data.batch_size", "cannot be divided into", "smp.microbatches",
          fmt::format("write a multiple, e.g. data.batch_size = {}",
                      (batch / parts + 1) * parts));
  }

  void check_model() {
    if (uses("model.heads") && !has_head_size_
        && x_.model.width % x_.model.heads != 0)
      add("model.width", "cannot be divided among", "model.heads",
          fmt::format("write a multiple, e.g. model.width = {}",
                      (x_.model.width / x_.model.heads + 1) * x_.model.heads));
    if (uses("model.sequence_length") && uses("data.sequence_length")
        && *x_.model.sequence_length < x_.data.sequence_length)
      add("model.sequence_length", "is less than", "data.sequence_length",
          fmt::format("write at least {}, or leave it out",
                      x_.data.sequence_length));
    if (uses("model.relative_buckets")
        && x_.model.relative_distance <= x_.model.relative_buckets / 2)
      add("model.relative_distance", "is too small for",
          "model.relative_buckets", "write more than half of them");
  }

  void check_data() {
    const auto& data = x_.data.type;
    const auto& model = x_.model.type;
    const bool text = data == "text" || data == "tokens";
    if (text && model != "gpt" && model != "moe" && model != "torchscript"
        && model != "plugin")
      add("data.type", "has no tensors for", "model.type",
          "write data.type = \"synthetic\" or \"safetensors\"");
    if (data == "text" && uses("model.vocabulary")
        && *x_.model.vocabulary < 256)
      add("model.vocabulary", "is too small for the bytes of", "data.type",
          "write at least 256, or leave it out");
    if (data == "synthetic" && (model == "torchscript" || model == "plugin"))
      add("data.type", "is not made for", "model.type",
          "write data.type = \"safetensors\" and its data.path");
    if (data == "synthetic" && uses("model.inputs")
        && x_.model.inputs < x_.model.outputs)
      add("model.inputs", "is less than", "model.outputs",
          "synthetic data needs at least as many");
    if (x_.train.sample > 0 && model != "gpt" && model != "moe")
      add("train.sample", "is not possible with", "model.type",
          "leave it out; only \"gpt\" and \"moe\" continue a text");
  }

  /// If each step takes all rows, there is nothing to shuffle or hold out.
  void check_fixed_batch() {
    if (x_.data.type != "safetensors" || x_.data.batch_size)
      return;
    const train_config none{};
    auto idle = [&](const char* key, bool given) {
      if (given)
        add({key, "data.batch_size"},
            setting(key, x_)
              + " has no effect without data.batch_size, as each step takes "
                "the whole file; write how many samples a step takes, or leave "
                "it out");
    };
    idle("data.shuffle_seed", x_.data.shuffle_seed != none.data.shuffle_seed);
    idle("data.held_out", x_.data.held_out != none.data.held_out);
    idle("train.eval_interval",
         x_.train.eval_interval != none.train.eval_interval);
    idle("train.eval_steps", x_.train.eval_steps != none.train.eval_steps);
  }

  void check_trace() {
    auto& trace = x_.smp.trace;
    auto steps = parse_traced_steps(trace);
    if (!steps)
      add({"monitor.trace"},
          fmt::format("monitor.trace = \"{}\" names no steps; write such as "
                      "\"10\" or \"10-12\", from 1",
                      trace));
    else if (x_.train.steps > 0 && steps->second > x_.train.steps)
      add("monitor.trace", "goes beyond", "train.steps",
          "name steps of the run");
  }

  void check_steps() {
    if (!x_.train.init_prefix.empty() && x_.train.init_from.empty())
      add("train.init_prefix", "has no effect without", "train.init_from",
          "write the file, or leave the prefix out");
    auto& dumps = x_.train.dump_gradients;
    if (auto last = std::max_element(dumps.begin(), dumps.end());
        last != dumps.end() && *last > x_.train.steps)
      add("train.dump_gradients", "goes beyond", "train.steps",
          "steps count from 1");
    if (x_.train.eval_interval > 0 && x_.train.eval_steps == 0)
      add("train.eval_interval", "has no effect with", "train.eval_steps",
          "write at least train.eval_steps = 1, or leave the interval out");
    check_beyond_last_step();
    if (x_.optimizer.schedule.final_lr > x_.optimizer.lr)
      add("optimizer.schedule.final_lr", "is more than", "optimizer.lr",
          "the learning rate falls after the warm-up");
  }

  /// A short trial of a long run has such keys, so these are warnings.
  void check_beyond_last_step() {
    auto warn = [&](const char* key, const char* effect) {
      found_.push_back({{key, "train.steps"},
                        fmt::format("{} and {}: {}", setting(key, x_),
                                    setting("train.steps", x_), effect),
                        true});
    };
    auto steps = x_.train.steps;
    if (x_.optimizer.schedule.warmup_steps > steps)
      warn("optimizer.schedule.warmup_steps",
           "the learning rate never reaches optimizer.lr");
    if (x_.train.eval_interval > steps)
      warn("train.eval_interval", "only the end of the run is evaluated");
    auto& smp = x_.smp;
    if (smp.static_mode && !smp.deterministic_server
        && smp.static_steps >= steps)
      warn("smp.static_steps", "all steps are recorded and none is replayed");
  }

  void check_averages() {
    auto& data = x_.data;
    const bool holds_out = data.type == "text" || data.type == "synthetic"
                           || (data.held_out > 0
                               && (data.type == "tokens" || data.batch_size));
    const bool evaluates = x_.train.eval_steps > 0 && holds_out;
    if (x_.optimizer.ema_decay && !evaluates && !x_.train.save_model
        && x_.train.sample == 0 && x_.checkpoint.dir.empty())
      add({"optimizer.ema_decay", "train.save_model"},
          fmt::format("{} has no effect, as nothing uses the averages: no "
                      "evaluation, no saved model; write train.save_model = "
                      "true, or leave it out",
                      setting("optimizer.ema_decay", x_)));
  }

  void check_precision() {
    auto& smp = x_.smp;
    if (smp.bf16_params && smp.fp16_params)
      add("smp.bf16_params", "cannot go with", "smp.fp16_params",
          "keep one of them");
    else if ((smp.bf16_params && x_.train.dtype == "float16")
             || (smp.fp16_params && x_.train.dtype == "bfloat16"))
      add("train.dtype", "is not the type of the parameters,",
          smp.bf16_params ? "smp.bf16_params" : "smp.fp16_params",
          "leave train.dtype out");
    auto& args = x_.optimizer.dynamic_loss_args;
    const dynamic_loss_config none;
    auto dynamic = x_.optimizer.loss_scale->dynamic;
    auto idle = [&](const char* key, bool given) {
      if (given && !dynamic)
        add(key, "has no effect with", "optimizer.loss_scale",
            "write optimizer.loss_scale = \"dynamic\", or leave it out");
    };
    idle("optimizer.dynamic_loss_args.init_scale",
         args.init_scale != none.init_scale);
    idle("optimizer.dynamic_loss_args.scale_factor",
         args.scale_factor != none.scale_factor);
    idle("optimizer.dynamic_loss_args.scale_window",
         args.scale_window != none.scale_window);
    idle("optimizer.dynamic_loss_args.min_scale",
         args.min_scale != none.min_scale);
    if (dynamic && args.min_scale > args.init_scale)
      add("optimizer.dynamic_loss_args.min_scale", "is more than",
          "optimizer.dynamic_loss_args.init_scale",
          "the scale only falls below its first value");
  }

  void check_checkpoints() {
    if (x_.train.elastic && x_.train.max_restarts == 0)
      add("train.elastic", "has no effect with", "train.max_restarts",
          "write more than 0, or leave it out");
    if (!x_.checkpoint.dir.empty())
      return;
    if (x_.train.max_restarts > 0)
      found_.push_back({{"train.max_restarts", "checkpoint.dir"},
                        setting("train.max_restarts", x_)
                          + " without checkpoint.dir: a run that is started "
                            "again begins anew",
                        true});
    const checkpoint_config none;
    auto idle = [&](const char* key, bool given) {
      if (given)
        add({key, "checkpoint.dir"},
            setting(key, x_)
              + " has no effect without checkpoint.dir; write where "
                "checkpoints go, or leave it out");
    };
    auto& x = x_.checkpoint;
    idle("checkpoint.interval", x.interval != none.interval);
    idle("checkpoint.keep", x.keep != none.keep);
    idle("checkpoint.resume", x.resume == "none");
    idle("checkpoint.on_interrupt", x.on_interrupt != none.on_interrupt);
    idle("checkpoint.signal", x.signal == "SIGUSR2");
    idle("train.elastic", x_.train.elastic);
  }

  void check_replicas() {
    auto& x = x_.smp;
    auto parts = x.pipeline_parallel_degree * x.tensor_parallel_degree;
    if (x_.ranks && *x_.ranks % parts != 0)
      add({"smp.ranks", "smp.pipeline_parallel_degree",
           "smp.tensor_parallel_degree"},
          fmt::format("smp.ranks = {} cannot be divided among "
                      "smp.pipeline_parallel_degree = {}{}; write a multiple, "
                      "e.g. smp.ranks = {}",
                      *x_.ranks, x.pipeline_parallel_degree,
                      x.tensor_parallel_degree > 1
                        ? fmt::format(" times smp.tensor_parallel_degree = {}",
                                      x.tensor_parallel_degree)
                        : "",
                      (*x_.ranks / parts + 1) * parts));
    if (x.shard_gradients && !x_.train.dump_gradients.empty())
      add("train.dump_gradients", "is not possible with", "smp.shard_gradients",
          "no replica has whole gradients; leave one of them out");
    for (auto [key, list] :
         {std::pair{"tensor_parallel.modules", &x.tensor_parallel_modules},
          {"tensor_parallel.register", &x.tensor_parallel_register}})
      if (!list->empty() && x.tensor_parallel_degree == 1)
        add(key, "has no effect with", "smp.tensor_parallel_degree",
            "write smp.tensor_parallel_degree = 2 or more, or leave it out");
    for (auto& entry : x.tensor_parallel_register)
      if (!class_and_type(entry))
        add({"tensor_parallel.register"},
            fmt::format("tensor_parallel.register has \"{}\"; write the class "
                        "in Python and the module that it is shared as: "
                        "\"my_package.layers.MyLinear as Linear\"",
                        entry));
  }

  void check_lone_replica() {
    auto& x = x_.smp;
    // An elastic run may have one replica for a while.
    if (!x.ddp || x.tensor_parallel_degree != 1
        || ranks_of(x_) != x.pipeline_parallel_degree || x_.train.elastic)
      return;
    const session_config none;
    auto idle = [&](const char* key, bool given) {
      if (given)
        add({key, "smp.ranks", "smp.pipeline_parallel_degree"},
            fmt::format("{} has no effect with smp.ranks = {}, which hold one "
                        "replica of the model; write smp.ranks = {} or more, "
                        "or leave it out",
                        setting(key, x_), ranks_of(x_), 2 * ranks_of(x_)));
    };
    idle("smp.placement_strategy",
         x.placement_strategy != none.placement_strategy);
    idle("smp.shard_optimizer_state", x.shard_optimizer_state);
    idle("smp.shard_gradients", x.shard_gradients);
    idle("smp.bucket_cap_mb", x.bucket_cap_mb != none.bucket_cap_mb);
    idle("smp.overlapping_allreduce", !x.overlapping_allreduce);
    idle("smp.broadcast_buffers", x.broadcast_buffers);
  }

  /// Ranks that differ along only one axis have only one order,
  /// whichever axis it is.
  void check_rank_order() {
    auto& x = x_.smp;
    const session_config none;
    auto parts = x.pipeline_parallel_degree * x.tensor_parallel_degree;
    auto replicas = ranks_of(x_) / parts; // that share no modules
    auto axes = (x.pipeline_parallel_degree > 1)
                + (x.tensor_parallel_degree > 1) + (replicas > 1);
    const bool one_replica = x.tensor_parallel_degree == 1 && replicas == 1;
    if (!x.ddp || one_replica || axes > 1
        || x.placement_strategy == none.placement_strategy)
      return;
    add({"smp.placement_strategy", "smp.pipeline_parallel_degree",
         "smp.tensor_parallel_degree"},
        fmt::format("{} has no effect with {} and {}, which leave one order of "
                    "the ranks; leave it out",
                    setting("smp.placement_strategy", x_),
                    setting("smp.pipeline_parallel_degree", x_),
                    setting("smp.tensor_parallel_degree", x_)));
  }

  void check_same_samples() {
    auto& x = x_.smp;
    if (x.prescaled_batch && x.tensor_parallel_degree == 1)
      add("smp.prescaled_batch", "has no effect with",
          "smp.tensor_parallel_degree",
          "write smp.tensor_parallel_degree = 2 or more, or leave it out");
  }

  void check_checkpointing() {
    auto& x = x_.smp.activation_checkpointing;
    auto alone = [&](const char* key) {
      add(key, "has no effect with", "activation_checkpointing.modules",
          "name modules, or leave it out");
    };
    if (!checkpointed_together(x.strategy))
      add({"activation_checkpointing.strategy"},
          fmt::format("activation_checkpointing.strategy = \"{}\" is unknown; "
                      "allowed: \"each\", \"contiguous\", \"group_2\", "
                      "\"group_3\", ...",
                      x.strategy));
    else if (x.modules.empty() && x.strategy != "each")
      alone("activation_checkpointing.strategy");
    if (x.modules.empty() && !x.preserve_rng_state)
      alone("activation_checkpointing.preserve_rng_state");
    // The code of a plug-in may name modules.
    if (x_.smp.offload_activations && x.modules.empty()
        && x_.model.type != "plugin")
      add({"smp.offload_activations", "activation_checkpointing.modules"},
          "smp.offload_activations = true has no effect without "
          "activation_checkpointing.modules, whose arguments it takes out of "
          "memory; name modules, or leave it out");
  }

  /// The first entry of a list of modules has nothing to exclude.
  void check_module_lists() {
    auto check = [&](const char* key, const std::vector<std::string>& x) {
      if (!x.empty() && takes_away(x.front()))
        add({key}, fmt::format("{} begins with \"{}\", but names nothing "
                               "before it that it could take away; write e.g. "
                               "[\"*\", \"{}\"]",
                               key, x.front(), x.front()));
    };
    auto& x = x_.smp;
    check("tensor_parallel.modules", x.tensor_parallel_modules);
    check("activation_checkpointing.modules",
          x.activation_checkpointing.modules);
    check("smp.no_promises", x.no_promises);
  }

  void check_placement() {
    for (auto& [name, device] : x_.manual_partition)
      if (device >= x_.smp.pipeline_parallel_degree) {
        add(
          "smp.manual_partition", "has a device beyond",
          "smp.pipeline_parallel_degree",
          fmt::format("they are 0 to {}", x_.smp.pipeline_parallel_degree - 1));
        return;
      }
  }

  bool uses(std::string_view key) const {
    return applies(*find_config_key(key), x_);
  }

  std::vector<config_conflict> take() {
    return std::move(found_);
  }

private:
  train_config x_;
  // Whether the user set them: `effective` fills them in.
  bool has_head_size_;
  bool has_memory_weight_;
  std::vector<config_conflict> found_;
};

} // namespace

std::vector<config_conflict> conflicts(const train_config& x) {
  rule_book rules{x};
  rules.check_schedule();
  rules.check_partition();
  rules.check_batch();
  rules.check_placement();
  rules.check_replicas();
  rules.check_lone_replica();
  rules.check_rank_order();
  rules.check_same_samples();
  rules.check_checkpointing();
  rules.check_module_lists();
  rules.check_model();
  rules.check_data();
  rules.check_fixed_batch();
  rules.check_steps();
  rules.check_trace();
  rules.check_averages();
  rules.check_precision();
  rules.check_checkpoints();
  return rules.take();
}

namespace {

bool is_of_session(std::string_view key) {
  constexpr std::string_view tables[] = {"smp.", "tensor_parallel.",
                                         "activation_checkpointing.",
                                         "transport.", "monitor."};
  return std::ranges::any_of(tables,
                             [key](auto x) { return key.starts_with(x); });
}

bool has_default(const config_key& key, const train_config& x) {
  return value_text(key, x) == value_text(key, train_config{});
}

/// @returns what is wrong with a key that is set, as its value differs from the
/// default, but has no effect
std::optional<std::string> check_effect(const config_key& key,
                                        const train_config& x) {
  auto* broken = broken_condition(key, x);
  if (broken == nullptr || has_default(key, x))
    return std::nullopt;
  auto& other = *find_config_key(broken->key);
  return no_effect_text(key, *broken, x,
                        has_default(other, x) ? "the default" : "");
}

/// @returns what is wrong with options that are not keys, one line each
std::vector<std::string> check_other_options(const session_config& x) {
  std::vector<std::string> result;
  if (x.schedule_actor && x.pipeline != "actor")
    result.push_back(
      fmt::format("session_config::schedule_actor has no effect with "
                  "smp.pipeline = \"{}\"; write smp.pipeline = \"actor\", or "
                  "leave it out",
                  x.pipeline));
  const auto passes = x.backward_passes_per_step;
  if (passes == 0)
    result.emplace_back(
      "session_config::backward_passes_per_step = 0 is out "
      "of range; allowed: 1 or more");
  else if (passes > 1 && !x.ddp)
    result.push_back(
      fmt::format("session_config::backward_passes_per_step = {} has no effect "
                  "with smp.ddp = false; it belongs to smp.ddp = true",
                  passes));
  return result;
}

} // namespace

session_config without_idle_keys(session_config x) {
  train_config whole;
  train_config defaults;
  whole.smp = std::move(x);
  for (auto& key : config_keys())
    if (is_of_session(key.name) && !applies(key, whole))
      std::visit(
        [&](auto* to) { *to = *std::get<decltype(to)>(key.slot(defaults)); },
        key.slot(whole));
  // See `check_partition`.
  auto& smp = whole.smp;
  if (smp.tensor_parallel_degree == 1
      && (smp.memory_weight || !smp.auto_partition))
    smp.optimize = defaults.smp.optimize;
  return std::move(whole.smp);
}

void validate(const session_config& x) {
  train_config whole;
  whole.smp = x;
  std::string errors;
  auto add = [&](const std::string& line) {
    if (!errors.empty())
      errors += '\n';
    errors += line;
  };
  auto add_wrong = [&](auto& check) {
    for (auto& key : config_keys())
      if (is_of_session(key.name))
        if (auto wrong = check(key, whole))
          add(*wrong);
  };
  add_wrong(check_value);
  // Rules between keys mean little while one of the keys is wrong by itself.
  // Keys of other tables are not set, so they cannot conflict.
  if (errors.empty()) {
    add_wrong(check_effect);
    for (auto& line : check_other_options(x))
      add(line);
    // The number of replicas is not known here, and code may name modules that
    // backward recomputes.
    whole.ranks = 2 * x.pipeline_parallel_degree * x.tensor_parallel_degree;
    whole.model.type = "plugin";
    for (auto& conflict : conflicts(whole))
      if (!conflict.can_be_meant
          && std::ranges::all_of(conflict.keys, is_of_session))
        add(conflict.text);
  }
  if (!errors.empty())
    throw error{error_code::config, errors};
}

} // namespace smp
