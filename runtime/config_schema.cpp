#include "runtime/config_schema.hpp"

#include <algorithm>

namespace smp {

namespace {

constexpr number_range at_least(double low) {
  return {.low = low};
}

constexpr number_range more_than(double low) {
  return {.low = low, .above_low = true};
}

constexpr number_range between(double low, double high) {
  return {.low = low, .high = high};
}

constexpr number_range degree = between(1, 65536);
constexpr number_range below_one = {.high = 1, .below_high = true};

#define SLOT(member) [](train_config& x) -> config_slot { return &x.member; }

// In the order of docs/config.md. Keys without a slot are part of the finished
// system and refused as not built yet.
const std::vector<config_key> keys = {
  // -- [smp] ------------------------------------------------------------------
  {.name = "smp.pipeline_parallel_degree",
   .slot = SLOT(smp.pipeline_parallel_degree),
   .meaning = "ranks among which the model is divided",
   .range = degree,
   .aliases = {"smp.partitions"},
   .elsewhere = {"pipeline_parallel_size", "pipeline_model_parallel_size",
                 "pp_size", "pp", "pp_degree", "num_stages", "stages"}},
  {.name = "smp.microbatches",
   .slot = SLOT(smp.microbatches),
   .meaning = "microbatches per step; must divide `data.batch_size`",
   .range = degree,
   .elsewhere = {"num_microbatches", "gradient_accumulation_steps", "chunks",
                 "micro_batches"}},
  {.name = "smp.pipeline",
   .slot = SLOT(smp.pipeline),
   .meaning = "schedule: `simple` runs all forward phases before the first "
              "backward phase; `interleaved` prefers backward phases; `1f1b` "
              "turns microbatches around in their order; `interleaved_1f1b` "
              "is for several `smp.chunks`; `list` does what `smp.schedule.list` "
              "says, `actor` what a plug-in decides (docs/schedules.md)",
   .choices = {"simple", "interleaved", "1f1b", "interleaved_1f1b", "list",
               "actor"},
   .elsewhere = {"pipeline_schedule", "schedule"}},
  {.name = "smp.active_microbatches",
   .slot = SLOT(smp.active_microbatches),
   .meaning = "bound on microbatches between forward and backward; with "
              "`simple` and `list` not less than `smp.microbatches`",
   .fallback = "degree + 3; `interleaved_1f1b`: 2 degree + 2; `simple`, "
               "`list`: all",
   .range = degree,
   .elsewhere = {"max_inflight", "inflight_microbatches"}},
  {.name = "smp.chunks",
   .slot = SLOT(smp.chunks),
   .meaning = "parts of the model per rank, each between parts of other ranks: "
              "a smaller bubble for more messages",
   .range = between(1, 4096),
   .elsewhere = {"virtual_pipeline_model_parallel_size", "num_model_chunks",
                 "virtual_pipeline_degree", "vpp"}},
  {.name = "smp.auto_partition",
   .slot = SLOT(smp.auto_partition),
   .meaning = "place modules by cost; `false`: only as the code says"},
  {.name = "smp.default_partition",
   .slot = SLOT(smp.default_partition),
   .meaning = "where modules go that nobody placed, without "
              "`smp.auto_partition`",
   .range = between(0, 65535)},
  {.name = "smp.strategy",
   .slot = SLOT(smp.strategy),
   .meaning = "`paper`: exactly the paper's decision; `balanced`: may only "
              "improve on it",
   .choices = {"balanced", "paper"}},
  {.name = "smp.optimize",
   .slot = SLOT(smp.optimize),
   .meaning = "what the partition is to balance",
   .choices = {"memory", "speed"}},
  {.name = "smp.memory_weight",
   .slot = SLOT(smp.memory_weight),
   .meaning = "weight of memory against time in a module's cost",
   .fallback = "0.8; `speed`: 0.2",
   .range = between(0, 1),
   .elsewhere = {"alpha"}},
  {.name = "smp.trace_device",
   .slot = SLOT(smp.trace_device),
   .meaning = "where the first step measures modules before the partition; "
              "`none`: costs are guessed from sizes",
   .choices = {"cpu", "gpu", "none"}},
  {.name = "smp.trace_execution_times",
   .slot = SLOT(smp.trace_execution_times),
   .meaning = "time of a module as measured; else each counts the same"},
  {.name = "smp.trace_memory_usage",
   .slot = SLOT(smp.trace_memory_usage),
   .meaning = "memory of a module with activations as measured; else its "
              "parameters alone"},
  {.name = "smp.placement_strategy",
   .slot = SLOT(smp.placement_strategy),
   .meaning = "which ranks are neighbours: `cluster` = `DPT`, `spread` = "
              "`TPD`, or another permutation; right-most letter first",
   .choices = {"cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"}},
  {.name = "smp.seed",
   .slot = SLOT(smp.seed),
   .meaning = "seed of initial parameters and of dropout",
   .elsewhere = {"random_seed", "manual_seed"}},
  {.name = "smp.threads",
   .slot = SLOT(smp.threads),
   .meaning = "threads per rank for tensor operations; 0: cores / ranks on "
              "this machine",
   .range = between(0, 4096),
   .elsewhere = {"num_threads", "omp_num_threads"},
   .local = true},
  {.name = "smp.tensor_parallel_degree",
   .meaning = "ranks that share one module",
   .elsewhere = {"tensor_parallel_size", "tensor_model_parallel_size",
                 "tp_size", "tp", "tp_degree"}},
  {.name = "smp.ddp",
   .meaning = "data parallelism over the remaining ranks",
   .elsewhere = {"data_parallel", "dp", "data_parallel_size"}},
  {.name = "smp.static_mode", .meaning = "replay a recorded step"},
  {.name = "smp.static_steps", .meaning = "steps to record"},
  {.name = "smp.static_fallback", .meaning = "when the flow departs from it"},
  {.name = "smp.fast_mode", .meaning = "remote calls return at once"},
  {.name = "smp.no_promises", .meaning = "modules whose calls must not"},
  {.name = "smp.deterministic_server", .meaning = "replay the service order"},
  {.name = "smp.shard_optimizer_state", .meaning = "over replicas"},
  {.name = "smp.offload_activations", .meaning = "to host memory"},
  {.name = "smp.activation_loading_horizon", .meaning = "load ahead"},
  {.name = "smp.fp16_params", .meaning = "parameters in half precision"},
  {.name = "smp.prescaled_batch", .meaning = "batch is divided already"},
  // -- [smp.schedule] ---------------------------------------------------------
  {.name = "smp.schedule.list",
   .slot = SLOT(smp.schedule.list),
   .meaning = "every microbatch and phase once, e.g. `[[0, \"forward\"], [0, "
              "\"backward\"]]`; steps of another number of microbatches "
              "(evaluation) repeat it or run a part of it",
   .required = true,
   .only = {{"smp.pipeline", {"list"}}}},
  {.name = "smp.schedule.plugin",
   .slot = SLOT(smp.schedule.plugin),
   .meaning = "shared library with schedules, relative to the configuration's "
              "directory",
   .required = true,
   .only = {{"smp.pipeline", {"actor"}}}},
  {.name = "smp.schedule.name",
   .slot = SLOT(smp.schedule.name),
   .meaning = "a schedule that the library registers",
   .required = true,
   .only = {{"smp.pipeline", {"actor"}}}},
  {.name = "smp.schedule.options",
   .slot = SLOT(smp.schedule.options),
   .meaning = "what that schedule gets to read",
   .only = {{"smp.pipeline", {"actor"}}}},
  {.name = "smp.schedule.timeout",
   .slot = SLOT(smp.schedule.timeout),
   .meaning = "seconds that an answer may take",
   .range = more_than(0),
   .only = {{"smp.pipeline", {"actor"}}}},
  // -- [model] ----------------------------------------------------------------
  {.name = "model.type",
   .slot = SLOT(model.type),
   .meaning = "what is trained",
   .required = true,
   .choices = {"gpt"},
   .planned_choices = {"bert", "roberta", "t5", "ncf", "moe", "mlp",
                       "torchscript", "plugin"},
   .elsewhere = {"model_type", "architecture", "arch"}},
  {.name = "model.layers",
   .slot = SLOT(model.layers),
   .meaning = "transformer blocks",
   .range = between(1, 65536),
   .elsewhere = {"num_layers", "n_layer", "n_layers", "num_hidden_layers",
                 "depth"},
   .only = {{"model.type", {"gpt"}}}},
  {.name = "model.heads",
   .slot = SLOT(model.heads),
   .meaning = "attention heads; must divide `model.width`",
   .range = between(1, 65536),
   .elsewhere = {"num_heads", "n_head", "n_heads", "num_attention_heads"},
   .only = {{"model.type", {"gpt"}}}},
  {.name = "model.width",
   .slot = SLOT(model.width),
   .meaning = "size of the vector of one token",
   .range = between(1, 1 << 24),
   .elsewhere = {"hidden_size", "d_model", "n_embd", "embed_dim", "dim",
                 "embedding_size"},
   .only = {{"model.type", {"gpt"}}}},
  {.name = "model.sequence_length",
   .slot = SLOT(model.sequence_length),
   .meaning = "longest sequence, in tokens",
   .fallback = "`data.sequence_length`",
   .range = between(1, 1 << 24),
   .elsewhere = {"context", "block_size", "n_positions", "n_ctx",
                 "max_position_embeddings", "context_length"},
   .only = {{"model.type", {"gpt"}}}},
  {.name = "model.vocabulary",
   .slot = SLOT(model.vocabulary),
   .meaning = "different tokens; a text has 256, one per byte",
   .fallback = "256",
   .range = between(1, 1 << 24),
   .elsewhere = {"vocab_size", "n_vocab", "vocab"},
   .only = {{"model.type", {"gpt"}}}},
  {.name = "model.dropout",
   .slot = SLOT(model.dropout),
   .meaning = "probability with which an activation is dropped in training",
   .range = below_one,
   .elsewhere = {"dropout_prob", "hidden_dropout_prob", "dropout_p"},
   .only = {{"model.type", {"gpt"}}}},
  {.name = "model.tied",
   .slot = SLOT(model.tied),
   .meaning = "the last layer uses the embedding's weight",
   .elsewhere = {"tie_word_embeddings", "tie_weights", "tied_weights"},
   .only = {{"model.type", {"gpt"}}}},
  {.name = "model.path", .meaning = "TorchScript file"},
  {.name = "model.library", .meaning = "library with a model"},
  {.name = "model.name", .meaning = "model in that library"},
  // -- [data] -----------------------------------------------------------------
  {.name = "data.type",
   .slot = SLOT(data.type),
   .meaning = "`text`: bytes of a file; `synthetic`: tokens without a file",
   .required = true,
   .choices = {"text", "synthetic"},
   .planned_choices = {"tokens", "safetensors"},
   .elsewhere = {"dataset", "dataset_type"}},
  {.name = "data.path",
   .slot = SLOT(data.path),
   .meaning = "the file, relative to the configuration's directory",
   .required = true,
   .elsewhere = {"file", "filename", "data_path", "dataset_path", "data_dir"},
   .only = {{"data.type", {"text"}}}},
  {.name = "data.sequence_length",
   .slot = SLOT(data.sequence_length),
   .meaning = "tokens per sequence",
   .required = true,
   .range = between(1, 1 << 24),
   .elsewhere = {"seq_len", "seq_length", "max_length", "max_seq_len"}},
  {.name = "data.batch_size",
   .slot = SLOT(data.batch_size),
   .meaning = "sequences per step and data-parallel rank",
   .required = true,
   .range = between(1, 1 << 24),
   .elsewhere = {"batch", "train_batch_size", "global_batch_size",
                 "per_device_train_batch_size"}},
  {.name = "data.shuffle_seed",
   .slot = SLOT(data.shuffle_seed),
   .meaning = "seed of the order of sequences"},
  {.name = "data.held_out",
   .slot = SLOT(data.held_out),
   .meaning = "part at the end of the file that is kept for evaluation",
   .range = {.low = 0, .high = 1, .above_low = true, .below_high = true},
   .elsewhere = {"holdout", "validation_split", "val_split", "test_size"},
   .only = {{"data.type", {"text"}}}},
  // -- [optimizer] ------------------------------------------------------------
  {.name = "optimizer.type",
   .slot = SLOT(optimizer.type),
   .meaning = "LibTorch's optimizer of this name",
   .choices = {"adamw", "adam", "sgd", "adagrad"},
   .elsewhere = {"optim", "optimizer_name"}},
  {.name = "optimizer.lr",
   .slot = SLOT(optimizer.lr),
   .meaning = "learning rate",
   .range = at_least(0),
   .elsewhere = {"learning_rate", "base_lr", "max_lr"}},
  {.name = "optimizer.betas",
   .slot = SLOT(optimizer.betas),
   .meaning = "decay of the two running means",
   .range = below_one,
   .elsewhere = {"beta1", "beta2", "beta", "adam_beta1", "adam_beta2"},
   .only = {{"optimizer.type", {"adamw", "adam"}}}},
  {.name = "optimizer.eps",
   .slot = SLOT(optimizer.eps),
   .meaning = "added to the denominator",
   .fallback = "1e-8; `adagrad`: 1e-10",
   .range = more_than(0),
   .elsewhere = {"epsilon", "adam_epsilon"},
   .only = {{"optimizer.type", {"adamw", "adam", "adagrad"}}}},
  {.name = "optimizer.weight_decay",
   .slot = SLOT(optimizer.weight_decay),
   .meaning = "decay of the parameters, or L2 penalty",
   .fallback = "`adamw`: 0.01; else 0",
   .range = at_least(0),
   .elsewhere = {"wd", "l2", "decay"}},
  {.name = "optimizer.momentum",
   .slot = SLOT(optimizer.momentum),
   .meaning = "momentum",
   .range = at_least(0),
   .only = {{"optimizer.type", {"sgd"}}}},
  {.name = "optimizer.clip_grad_norm",
   .slot = SLOT(optimizer.clip_grad_norm),
   .meaning = "bound on the norm of the whole gradient, over all ranks",
   .fallback = "no clipping",
   .range = more_than(0),
   .elsewhere = {"grad_clip", "max_grad_norm", "gradient_clipping", "clip_grad",
                 "clip"}},
  {.name = "optimizer.loss_scale", .meaning = "static or dynamic"},
  {.name = "optimizer.schedule.type",
   .slot = SLOT(optimizer.schedule.type),
   .meaning = "learning rate after the warm-up: stays, or falls to `final_lr` "
              "in a line or a cosine",
   .choices = {"constant", "linear", "cosine"},
   .elsewhere = {"lr_scheduler", "lr_scheduler_type", "scheduler",
                 "lr_schedule"}},
  {.name = "optimizer.schedule.warmup_steps",
   .slot = SLOT(optimizer.schedule.warmup_steps),
   .meaning = "steps in which the rate first rises from 0 in a line",
   .elsewhere = {"warmup", "num_warmup_steps", "warmup_iters"}},
  {.name = "optimizer.schedule.final_lr",
   .slot = SLOT(optimizer.schedule.final_lr),
   .meaning = "rate in the last step",
   .range = at_least(0),
   .elsewhere = {"min_lr", "eta_min", "lr_end"},
   .only = {{"optimizer.schedule.type", {"linear", "cosine"}}}},
  // -- [train] ----------------------------------------------------------------
  {.name = "train.steps",
   .slot = SLOT(train.steps),
   .meaning = "training steps",
   .required = true,
   .range = at_least(1),
   .elsewhere = {"max_steps", "num_steps", "iterations", "max_iters", "epochs",
                 "num_train_epochs", "train_iters"}},
  {.name = "train.log_interval",
   .slot = SLOT(train.log_interval),
   .meaning = "steps between two progress lines that stay",
   .range = at_least(1),
   .elsewhere = {"logging_steps", "log_every", "log_steps"}},
  {.name = "train.eval_interval",
   .slot = SLOT(train.eval_interval),
   .meaning = "steps between two evaluations; 0: only after the last step",
   .elsewhere = {"eval_every", "evaluation_interval"}},
  {.name = "train.eval_steps",
   .slot = SLOT(train.eval_steps),
   .meaning = "batches per evaluation; 0: no evaluation",
   .elsewhere = {"eval_iters", "eval_batches"}},
  {.name = "train.sample",
   .slot = SLOT(train.sample),
   .meaning = "characters to generate at the end",
   .elsewhere = {"sample_length", "generate"},
   .only = {{"data.type", {"text"}}}},
  {.name = "train.dtype",
   .slot = SLOT(train.dtype),
   .meaning = "type in which activations are computed (autocast); parameters "
              "and gradients stay float32. `float16` has no loss scaling: "
              "small gradients vanish",
   .choices = {"float32", "bfloat16", "float16"},
   .elsewhere = {"precision", "bf16", "fp16", "mixed_precision"}},
  {.name = "train.save_model",
   .slot = SLOT(train.save_model),
   .meaning = "write `RUN_DIR/model.safetensors` at the end",
   .elsewhere = {"save", "save_final", "output_dir"}},
  {.name = "train.on_nonfinite",
   .slot = SLOT(train.on_nonfinite),
   .meaning = "what a loss that is not finite does; `stop`: exit code 5",
   .choices = {"stop"},
   .planned_choices = {"skip"}},
  {.name = "train.dump_gradients", .meaning = "steps whose gradient to write"},
  {.name = "train.max_restarts", .meaning = "after a rank failed"},
  // -- [checkpoint] -----------------------------------------------------------
  {.name = "checkpoint.dir", .meaning = "where checkpoints go"},
  {.name = "checkpoint.interval", .meaning = "steps between checkpoints"},
  {.name = "checkpoint.keep", .meaning = "checkpoints to keep"},
  {.name = "checkpoint.resume", .meaning = "where to go on"},
  // -- [transport] ------------------------------------------------------------
  {.name = "transport.type",
   .slot = SLOT(transport.type),
   .meaning = "`ucx`: ranks are processes; `loopback`: ranks are threads of "
              "one process",
   .choices = {"ucx", "loopback"},
   .elsewhere = {"backend"}},
  {.name = "transport.trusted_network",
   .slot = SLOT(smp.trusted_network),
   .meaning = "allow addresses other than loopback, although UCX over tcp "
              "has no authentication",
   .local = true},
  // -- [monitor] --------------------------------------------------------------
  {.name = "monitor.address", .meaning = "where `smp-top` connects"},
  {.name = "monitor.prometheus", .meaning = "metrics page"},
  {.name = "monitor.web", .meaning = "web page"},
  {.name = "monitor.trace", .meaning = "steps to trace"},
  {.name = "monitor.stall_timeout", .meaning = "seconds before a report"},
  {.name = "monitor.on_stall", .meaning = "report or end"},
};

#undef SLOT

} // namespace

std::span<const config_key> config_keys() {
  return keys;
}

const config_key* find_config_key(std::string_view name) {
  for (auto& key : keys)
    if (key.name == name
        || std::find(key.aliases.begin(), key.aliases.end(), name)
             != key.aliases.end())
      return &key;
  return nullptr;
}

bool is_config_table(std::string_view name) {
  if (name == "caf")
    return true;
  return std::any_of(keys.begin(), keys.end(), [&](const config_key& key) {
    return key.name.size() > name.size() && key.name.starts_with(name)
        && key.name[name.size()] == '.';
  });
}

} // namespace smp
